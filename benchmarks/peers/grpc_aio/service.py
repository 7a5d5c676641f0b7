"""ModelInfer on `grpc.aio`: generated messages, ONNX Runtime inline, uvloop; no batching.

Usage: service.py MODEL PORT
"""

import sys

import grpc
import numpy as np
import onnxruntime
import uvloop

from headrace.protocol.pb import grpc_service_pb2 as pb


def load(path: str) -> onnxruntime.InferenceSession:
    """The model, with one thread: the server has one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


async def serve(path: str, port: int) -> None:
    """Answer until the process ends."""
    session = load(path)

    async def infer(
        request: pb.ModelInferRequest,
        context: grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelInferResponse],
    ) -> pb.ModelInferResponse:
        raw = request.raw_input_contents[0]
        array = np.frombuffer(raw, np.float32).reshape(tuple(request.inputs[0].shape))
        (result,) = session.run(["output"], {"input": array})
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1")
        response.outputs.add(name="output", datatype="FP32", shape=result.shape)
        response.raw_output_contents.append(result.tobytes())
        return response

    handler = grpc.unary_unary_rpc_method_handler(
        infer,
        request_deserializer=pb.ModelInferRequest.FromString,
        response_serializer=pb.ModelInferResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": handler}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
