"""A FastAPI application with pydantic models, ONNX Runtime inline.

Usage: service.py MODEL PORT
"""

import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Tensor(BaseModel):
    """A tensor, its elements in one flat list."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class InferRequest(BaseModel):
    """Body of a request."""

    inputs: list[Tensor]


class InferResponse(BaseModel):
    """Body of an answer."""

    name: str
    version: str
    outputs: list[Tensor]


def load(path: str) -> onnxruntime.InferenceSession:
    """The model, with one thread: the server has one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def create_app(path: str) -> FastAPI:
    """The application."""
    session = load(path)
    app = FastAPI()

    @app.post("/v2/models/mlp/infer")
    async def infer(request: InferRequest) -> InferResponse:
        tensor = request.inputs[0]
        array = np.array(tensor.data, np.float32).reshape(tensor.shape)
        (result,) = session.run(["output"], {"input": array})
        output = Tensor(
            name="output", datatype="FP32", shape=list(result.shape), data=result.ravel().tolist()
        )
        return InferResponse(name="mlp", version="1", outputs=[output])

    return app


if __name__ == "__main__":
    uvicorn.run(
        create_app(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        http="httptools",
        loop="uvloop",
        log_level="warning",
        access_log=False,
    )
