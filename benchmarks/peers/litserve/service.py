"""A LitServe API around ONNX Runtime, with the V2 protocol's JSON.

Usage: service.py MODEL PORT
"""

# It runs in the peer's own environment, whose packages the type checker does not have.
# mypy: ignore-errors

import sys

import litserve
import numpy as np
import onnxruntime


class OnnxApi(litserve.LitAPI):
    """One session, with one thread: the server has one core."""

    def setup(self, device: str) -> None:
        """Open the model's file, in the worker."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            sys.argv[1], options, providers=["CPUExecutionProvider"]
        )

    def decode_request(self, request):
        """From the request's JSON to an array."""
        tensor = request["inputs"][0]
        return np.array(tensor["data"], np.float32).reshape(tensor["shape"])

    def predict(self, x):
        """Run the model."""
        return self._session.run(["output"], {"input": x})[0]

    def encode_response(self, output):
        """From an array to the answer's JSON."""
        return {
            "model_name": "mlp",
            "model_version": "1",
            "outputs": [
                {
                    "name": "output",
                    "datatype": "FP32",
                    "shape": list(output.shape),
                    "data": output.ravel().tolist(),
                }
            ],
        }


if __name__ == "__main__":
    api = OnnxApi(api_path="/v2/models/mlp/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
    )
