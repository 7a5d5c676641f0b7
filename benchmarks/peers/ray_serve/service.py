"""A Ray Serve deployment around ONNX Runtime, with the V2 protocol's JSON.

Usage: service.py MODEL PORT
"""

# It runs in the peer's own environment, whose packages the type checker does not have.
# mypy: ignore-errors

import logging
import signal
import sys

import numpy as np
import onnxruntime
import ray
from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class Mlp:
    """One session, with one thread: the server has one core."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    async def __call__(self, request: Request) -> dict:
        """Answer one request."""
        tensor = (await request.json())["inputs"][0]
        array = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        (result,) = self._session.run(["output"], {"input": array})
        output = {
            "name": "output",
            "datatype": "FP32",
            "shape": list(result.shape),
            "data": result.ravel().tolist(),
        }
        return {"model_name": "mlp", "model_version": "1", "outputs": [output]}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 << 20,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.run(Mlp.bind(sys.argv[1]), route_prefix="/v2/models/mlp/infer", logging_config=quiet)
    signal.pause()
