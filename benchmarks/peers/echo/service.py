"""A raw uvloop protocol that has an answer ready for each request that it has seen before.

The scorecard checks answers, so that one answer for all will not do: a request is known by its last
bytes, which differ with its numbers. The first time it is computed, from then on an answer costs a
slice and a look into a dict.

Usage: service.py MODEL PORT
"""

import asyncio
import sys
from typing import cast

import numpy as np
import onnxruntime
import orjson
import uvloop

_HEAD_END = b"\r\n\r\n"
_TAIL = 64  # last bytes of a request: some of its numbers


def load(path: str) -> onnxruntime.InferenceSession:
    """The model, with one thread: the server has one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def infer(session: onnxruntime.InferenceSession, body: bytes) -> bytes:
    """The whole HTTP answer to a body of V2 JSON."""
    tensor = orjson.loads(body)["inputs"][0]
    array = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    (result,) = session.run(["output"], {"input": array})
    output = {"name": "output", "datatype": "FP32", "shape": result.shape, "data": result.ravel()}
    answer = orjson.dumps(
        {"model_name": "mlp", "model_version": "1", "outputs": [output]},
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(answer),
        answer,
    )


class Echo(asyncio.Protocol):
    """One connection, with one request at a time; `answers` are shared by all."""

    def __init__(self, session: onnxruntime.InferenceSession, answers: dict[bytes, bytes]) -> None:
        self._session, self._answers = session, answers
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answers.get(data[-_TAIL:])
        if answer is None or self._unread:
            self._read(data)
        else:
            self._transport.write(answer)

    def _read(self, data: bytes) -> None:
        """Answer a request that is new, or came in parts, once it is complete."""
        data = self._unread = self._unread + data
        head, end, body = data.partition(_HEAD_END)
        if not end or len(body) < _content_length(head):
            return
        self._unread = b""
        self._answers[data[-_TAIL:]] = answer = infer(self._session, body)
        self._transport.write(answer)


def _content_length(head: bytes) -> int:
    _, _, after = head.lower().partition(b"\r\ncontent-length:")
    return int(after.partition(b"\r\n")[0])


async def serve(path: str, port: int) -> None:
    """Answer until the process ends."""
    session = load(path)
    answers: dict[bytes, bytes] = {}
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Echo(session, answers), "127.0.0.1", port)
    await listener.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
