// A call of the playground as a command and as programs, which do the same when they are run.

import { ofModel } from "./api.js";

const LOCAL = new Set(["0.0.0.0", "[::]", "127.0.0.1", "[::1]", "localhost"]);

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const quote = (text) => JSON.stringify(text).replaceAll("\u007f", "\\u007f");
const base = () => new URL(".", location.href).href.replace(/\/$/, "");
const value = (each) => (each === "true" ? "True" : each === "false" ? "False" : each);

// The body of an infer request. Numbers are written as they were typed.
export function body(call) {
  const inputs = call.tensors.map(({ name, shape, datatype, data, file }) =>
    `{"name":${JSON.stringify(name)},"shape":${JSON.stringify(shape)},"datatype":"${datatype}",${
      file ? `"parameters":{"binary_data_size":${file.bytes.length + 4}}` : `"data":[${data.join(",")}]`}}`);
  const more = Object.keys(call.parameters).length ? `,"parameters":${JSON.stringify(call.parameters)}` : "";
  return `{"inputs":[${inputs.join(",")}]${more}}`;
}

// The same with the bytes of files behind the JSON, each after its length.
export function binary(call) {
  const head = new TextEncoder().encode(body(call));
  const files = call.tensors.flatMap(({ file }) => (file ? [new Uint8Array(Uint32Array.of(file.bytes.length).buffer), file.bytes] : []));
  return {
    content: new Blob([head, ...files]),
    headers: { "content-type": "application/octet-stream", "inference-header-content-length": String(head.length) },
  };
}

// The same as flat JSON, as streams take it.
export function flat(call) {
  if (call.tensors.some(({ file }) => file)) throw new Error("flat JSON has no form for files: choose text");
  const members = call.tensors.map(({ name, data }) => `${JSON.stringify(name)}:${data.length === 1 ? data[0] : `[${data.join(",")}]`}`);
  members.push(...Object.entries(call.parameters).map(([name, value]) => `${JSON.stringify(name)}:${JSON.stringify(value)}`));
  return `{${members.join(",")}}`;
}

// An array of numpy with a tensor's values.
function array({ datatype, shape, data, file }) {
  if (file) return `np.array([open(${quote(file.name)}, "rb").read()], object).reshape(${shape.join(", ")})`;
  const flatText = `[${data.map(datatype === "BOOL" ? value : (each) => each).join(", ")}]`;
  const type = datatype === "BYTES" ? "object" : `np.${datatype.toLowerCase().replace("fp", "float")}`;
  return `np.array(${flatText}, ${type}).reshape(${shape.join(", ") || "()"})`;
}

const python = (found) => (typeof found === "string" ? quote(found) : found === true ? "True" : found === false ? "False" : found === null ? "None"
  : Array.isArray(found) ? `[${found.map(python).join(", ")}]` : typeof found === "object" ? mapping(found) : String(found));
const mapping = (found) => `{${Object.entries(found).map(([name, each]) => `${quote(name)}: ${python(each)}`).join(", ")}}`;

function curl(call, server, headers) {
  if (call.tensors.some(({ file }) => file)) throw new Error("A file is sent in binary, behind the JSON: the programs show how.");
  const url = `${base()}/${ofModel(call.name, call.version, call.decoupled ? "/generate_stream" : "/infer")}`;
  const shown = Object.entries(headers).map(([name, text]) => ` \\\n  -H ${shell(`${name}: ${text}`)}`).join("");
  const content = shell(call.decoupled ? flat(call) : body(call));
  return `curl -s${call.decoupled ? "N" : ""} ${shell(url)}${shown} \\\n  -H 'content-type: application/json' \\\n  -d ${content}`;
}

function overHttp(call, server, headers) {
  const client = [quote(base()), ...(Object.keys(headers).length ? [`headers=${mapping(headers)}`] : [])].join(", ");
  const inputs = call.tensors.map((tensor) => `        ${quote(tensor.name)}: ${array(tensor)},`).join("\n");
  const more = Object.keys(call.parameters).length ? `, parameters=${mapping(call.parameters)}` : "";
  const version = call.version ? `, version=${quote(call.version)}` : "";
  const lead = `import headrace\nimport numpy as np\n\nwith headrace.Client(${client}) as client:\n    inputs = {\n${inputs}\n    }\n`;
  return call.decoupled
    ? `${lead}    for result in client.stream(${quote(call.name)}, inputs${version}${more}):\n        print(dict(result))\n`
    : `${lead}    print(dict(client.infer(${quote(call.name)}, inputs${version}${more})))\n`;
}

function overGrpc(call, server, headers) {
  const given = server.addresses.grpc;
  if (!given) throw new Error("this server has no door for gRPC");
  if (/^(grpc\+)?unix:/.test(given)) throw new Error("gRPC is on a Unix socket alone, which other machines do not reach");
  const [, secure, host, port] = /^(grpcs:\/\/)?(.*):(\d+)$/.exec(given) ?? [];
  const at = `${LOCAL.has(host) ? location.hostname : host}:${port}`;
  const named = Object.fromEntries(Object.entries(headers).map(([name, text]) => [name.toLowerCase(), text]));
  const further = [
    ...(call.version ? [`model_version=${quote(call.version)}`] : []),
    ...(Object.keys(named).length && !call.decoupled ? [`headers=${mapping(named)}`] : []),
    ...(Object.keys(call.parameters).length ? [`parameters=${mapping(call.parameters)}`] : []),
  ].map((text) => `, ${text}`).join("");
  const inputs = call.tensors.map((tensor) => {
    const type = tensor.datatype;
    const made = `tensor = triton.InferInput(${quote(tensor.name)}, [${tensor.shape.join(", ")}], ${quote(type)})`;
    return `${made}\ntensor.set_data_from_numpy(${array(tensor)})\ninputs.append(tensor)`;
  }).join("\n");
  const lead = "import numpy as np\nimport tritonclient.grpc as triton\n";
  const client = `client = triton.InferenceServerClient(${quote(at)}${secure ? ", ssl=True" : ""})\ninputs = []\n${inputs}\n`;
  const shown = "names = [output.name for output in result.get_response().outputs]\nprint({name: result.as_numpy(name) for name in names})\n";
  if (!call.decoupled) return `${lead}\n${client}result = client.infer(${quote(call.name)}, inputs${further})\n${shown}`;
  const stream = Object.keys(named).length ? `, headers=${mapping(named)}` : "";
  return `import queue\n\n${lead}\n${client}answers = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error))${stream})
client.async_stream_infer(${quote(call.name)}, inputs${further}, enable_empty_final_response=True)
while True:
    result, error = answers.get()
    if error:
        raise error
    response = result.get_response()
    if response.outputs:
        print({each.name: result.as_numpy(each.name) for each in response.outputs})
    if response.parameters["triton_final_response"].bool_param:
        break
client.stop_stream()
`;
}

export const programs = { curl, Python: overHttp, gRPC: overGrpc };
