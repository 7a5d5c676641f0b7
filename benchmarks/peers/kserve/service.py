"""A KServe model around ONNX Runtime.

Usage: service.py MODEL [KServe's own options]
"""

# It runs in the peer's own environment, whose packages the type checker does not have.
# mypy: ignore-errors

import argparse
import logging

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.model_server import parser as server_options
from kserve.utils.utils import generate_uuid


class OnnxModel(Model):
    """One session, with one thread: the server has one core."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None):
        """Answer one request."""
        array = payload.inputs[0].as_numpy()
        (result,) = self._session.run(["output"], {"input": array})
        output = InferOutput("output", list(result.shape), "FP32")
        # Raw bytes over gRPC, numbers over REST, as the client asked.
        output.set_data_from_numpy(result, binary_data=payload.from_grpc)
        return InferResponse(payload.id or generate_uuid(), self.name, [output])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[server_options])
    parser.add_argument("model")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)  # one line per request otherwise
    ModelServer(access_log_format=None).start([OnnxModel("mlp", arguments.model)])
