// Calls a headrace server over gRPC, by stubs that proto-loader generates from `protos/`.
//
//   npm install && node grpc.js [host:port]

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const server = process.argv[2] ?? "127.0.0.1:8001";
const protos = fileURLToPath(new URL("../../../protos", import.meta.url));
const loaded = loader.loadSync("grpc_service.proto", {
  includeDirs: [protos],
  keepCase: true, // names of fields as in the .proto files
  longs: Number,
  defaults: true,
  oneofs: true,
});
const { GRPCInferenceService } = grpc.loadPackageDefinition(loaded).inference;
const client = new GRPCInferenceService(server, grpc.credentials.createInsecure());

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

const deadline = () => new Date(Date.now() + 10_000);

/** Call a method with one response, as a promise. */
function call(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: deadline() }, (error, response) => {
      if (error) reject(error);
      else resolve(response);
    });
  });
}

function described(tensors) {
  return tensors.map((t) => `${t.name} ${t.datatype} [${t.shape}]`).join(" and ");
}

async function metadata() {
  const { name, version } = await call("ServerMetadata", {});
  console.log(`server: ${name} ${version}`);
  const model = await call("ModelMetadata", { name: "digits" });
  console.log(`digits: ${described(model.inputs)} -> ${described(model.outputs)}`);
}

/** Tensors as numbers in messages; responses are always raw. */
async function contents() {
  const tensor = (name, numbers) => ({
    name, datatype: "INT32", shape: [1, 16], contents: { int_contents: numbers },
  });
  const numbers = Array.from({ length: 16 }, (_, index) => index);
  const response = await call("ModelInfer", {
    model_name: "simple",
    id: "sums",
    inputs: [tensor("INPUT0", numbers), tensor("INPUT1", Array(16).fill(1))],
  });
  const data = Object.fromEntries(response.outputs.map((output, index) => {
    const raw = response.raw_output_contents[index];
    return [output.name, Array.from({ length: 16 }, (_, item) => raw.readInt32LE(4 * item))];
  }));
  console.log(`plain: sums ${data.OUTPUT0}, differences ${data.OUTPUT1}`);
}

/** Tensors as little-endian bytes, which neither side converts. */
async function raw() {
  const response = await call("ModelInfer", {
    model_name: "digits",
    inputs: [{ name: "image", datatype: "FP32", shape: [1, 8, 8] }],
    raw_input_contents: [Buffer.from(ZERO.buffer)],
  });
  const bytes = Object.fromEntries(
    response.outputs.map((output, index) => [output.name, response.raw_output_contents[index]]),
  );
  const label = Number(bytes.label.readBigInt64LE());
  const probability = bytes.probabilities.readFloatLE(4 * label);
  console.log(`binary: a ${label}, probability ${probability.toFixed(3)}`);
}

/** Many responses to one request. Texts are bytes, each after its length in 4 bytes. */
async function stream() {
  const messages = client.ModelStreamInfer({ deadline: deadline() });
  messages.write({
    model_name: "storyteller",
    inputs: [
      {
        name: "text_input", datatype: "BYTES", shape: [1],
        contents: { bytes_contents: [Buffer.from("The miller")] },
      },
      { name: "max_tokens", datatype: "INT64", shape: [1], contents: { int64_contents: [5] } },
    ],
  });
  messages.end();
  let story = "The miller";
  for await (const message of messages) {
    if (message.error_message) throw new Error(message.error_message);
    for (const bytes of message.infer_response.raw_output_contents) {
      story += bytes.subarray(4, 4 + bytes.readUInt32LE()).toString("utf8");
    }
  }
  console.log(`stream: ${story}`);
}

async function refused() {
  try {
    await call("ModelInfer", { model_name: "nosuch" });
  } catch (error) {
    if (error.code !== grpc.status.NOT_FOUND) throw error;
    console.log(`refused: ${grpc.status[error.code]} ${error.details}`);
  }
}

try {
  await metadata();
  await contents();
  await raw();
  await stream();
  await refused();
} catch (error) {
  const status = grpc.status[error.code];
  console.error(status ? `${status} ${error.details}` : `${server}: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
