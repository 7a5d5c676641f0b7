// Calls a headrace server over plain HTTP, with nothing but Node's own `fetch`.
//
//   node http.js [host:port]

const server = process.argv[2] ?? "127.0.0.1:8000";

// A handwritten zero of 8 x 8 pixels, between 0 and 16.
const ZERO = Float32Array.of(
  0, 0, 5, 13, 9, 1, 0, 0,
  0, 0, 13, 15, 10, 15, 5, 0,
  0, 3, 15, 2, 0, 11, 8, 0,
  0, 4, 12, 0, 0, 8, 8, 0,
  0, 5, 8, 0, 0, 9, 8, 0,
  0, 4, 11, 0, 1, 12, 7, 0,
  0, 2, 14, 5, 10, 12, 0, 0,
  0, 0, 6, 13, 10, 0, 0, 0,
);

/** The server refused a request. */
class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Send a request; throws `Refused` unless it is answered with 200. */
async function send(path, options = {}) {
  const signal = AbortSignal.timeout(10_000);
  const response = await fetch(`http://${server}${path}`, { signal, ...options });
  if (response.ok) return response;
  const text = await response.text();
  let reason = text;
  try {
    reason = JSON.parse(text).error ?? text;
  } catch {
    // not the server's own: a proxy's page, for example
  }
  throw new Refused(response.status, reason);
}

const post = (path, document) => send(path, { method: "POST", body: JSON.stringify(document) });

function described(tensors) {
  return tensors.map((t) => `${t.name} ${t.datatype} [${t.shape}]`).join(" and ");
}

async function metadata() {
  const { name, version } = await (await send("/v2")).json();
  console.log(`server: ${name} ${version}`);
  const model = await (await send("/v2/models/digits")).json();
  console.log(`digits: ${described(model.inputs)} -> ${described(model.outputs)}`);
}

/** Tensors as JSON: sums and differences of 16 integers. */
async function json() {
  const tensor = (name, data) => ({ name, datatype: "INT32", shape: [1, 16], data });
  const numbers = Array.from({ length: 16 }, (_, index) => index);
  const response = await post("/v2/models/simple/infer", {
    id: "sums",
    inputs: [tensor("INPUT0", numbers), tensor("INPUT1", Array(16).fill(1))],
  });
  const { outputs } = await response.json();
  const data = Object.fromEntries(outputs.map((output) => [output.name, output.data]));
  console.log(`plain: sums ${data.OUTPUT0}, differences ${data.OUTPUT1}`);
}

/** Tensors as little-endian bytes behind the JSON, in both directions. */
async function binary() {
  const header = Buffer.from(JSON.stringify({
    inputs: [{
      name: "image", datatype: "FP32", shape: [1, 8, 8],
      parameters: { binary_data_size: ZERO.byteLength },
    }],
    parameters: { binary_data_output: true },
  }));
  const response = await send("/v2/models/digits/infer", {
    method: "POST",
    headers: {
      "content-type": "application/octet-stream",
      "inference-header-content-length": String(header.length),
    },
    body: Buffer.concat([header, Buffer.from(ZERO.buffer)]),
  });
  const body = Buffer.from(await response.arrayBuffer());
  let offset = Number(response.headers.get("inference-header-content-length"));
  const bytes = {};
  for (const output of JSON.parse(body.subarray(0, offset)).outputs) {
    const size = output.parameters.binary_data_size;
    bytes[output.name] = body.subarray(offset, offset + size);
    offset += size;
  }
  const label = Number(bytes.label.readBigInt64LE());
  const probability = bytes.probabilities.readFloatLE(4 * label);
  console.log(`binary: a ${label}, probability ${probability.toFixed(3)}`);
}

/** One server-sent event for each response of a stream. */
async function stream() {
  const response = await post("/v2/models/storyteller/generate_stream", {
    text_input: "The miller", max_tokens: 5,
  });
  let story = "The miller";
  let rest = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop(); // an event that has not arrived whole
    for (const event of events) {
      const document = JSON.parse(event.slice("data:".length));
      if (document.error) throw new Error(document.error);
      story += document.text_output;
    }
  }
  console.log(`stream: ${story}`);
}

async function refused() {
  try {
    await post("/v2/models/nosuch/infer", { inputs: [] });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    console.log(`refused: ${error.status} ${error.message}`);
  }
}

try {
  await metadata();
  await json();
  await binary();
  await stream();
  await refused();
} catch (error) {
  const reason = error.cause?.message ?? error.message;
  console.error(error instanceof Refused ? `${error.status} ${reason}` : `${server}: ${reason}`);
  process.exitCode = 1;
}
