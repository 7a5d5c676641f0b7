"""A bare ASGI application: orjson in, ONNX Runtime inline, orjson out; no routing, no batching.

Usage: service.py MODEL PORT
"""

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np
import onnxruntime
import orjson
import uvicorn

Message = MutableMapping[str, Any]


def load(path: str) -> onnxruntime.InferenceSession:
    """The model, with one thread: the server has one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Service:
    """The application."""

    def __init__(self, path: str) -> None:
        self._session = load(path)

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        answer = self._infer(body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _infer(self, body: bytes) -> bytes:
        tensor = orjson.loads(body)["inputs"][0]
        array = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        (result,) = self._session.run(["output"], {"input": array})
        output = {
            "name": "output",
            "datatype": "FP32",
            "shape": result.shape,
            "data": result.ravel(),
        }
        return orjson.dumps(
            {"model_name": "mlp", "model_version": "1", "outputs": [output]},
            option=orjson.OPT_SERIALIZE_NUMPY,
        )


if __name__ == "__main__":
    uvicorn.run(
        Service(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
