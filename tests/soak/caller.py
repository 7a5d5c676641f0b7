"""One process of clients for the soak test: `python -m tests.soak.caller JSON`.

Each client sends one request after the other, each with unique values, and compares every element
of the answer. Some requests are malformed and must be refused, some clients disconnect in the
middle of a request. The outcomes are printed as one JSON object.
"""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.raw_clients import HttpConnection, open_channel, post_bytes, procedure

_PATH = "/v2/models/simple/infer"
_SIZE = "Inference-Header-Content-Length"
_WIDTH = 16
_MAX_ROWS = 8
Values = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one process: requests `first` to `first + count - 1`, over one protocol."""

    over: str
    address: str
    callers: int
    first: int
    count: int
    malformed: float  # share of all requests
    disconnects: float


@dataclass(slots=True)
class Report:
    """Outcomes; the first unexpected one of each kind is kept as text."""

    answered: int = 0
    answered_rows: int = 0
    refused: int = 0
    left: int = 0
    left_rows: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def surprise(self, number: int, text: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(f"request {number}: {text}")


def values(number: int) -> tuple[Values, Values]:
    """The inputs of a request: numbers that no other request has."""
    rows = 1 + random.Random(number).randrange(_MAX_ROWS)
    start = number * _WIDTH * _MAX_ROWS
    first = np.arange(start, start + rows * _WIDTH, dtype=np.int32).reshape(rows, _WIDTH)
    return first, np.full_like(first, number % 1009)


# --- HTTP


def http_request(number: int, as_json: bool) -> bytes:
    arrays = values(number)
    items: list[dict[str, Any]] = [
        {"name": name, "datatype": "INT32", "shape": array.shape}
        for name, array in zip(("INPUT0", "INPUT1"), arrays, strict=True)
    ]
    document: dict[str, Any] = {"id": str(number), "inputs": items}
    if as_json:
        for item, array in zip(items, arrays, strict=True):
            item["data"] = array
        return post_bytes(_PATH, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))
    for item, array in zip(items, arrays, strict=True):
        item["parameters"] = {"binary_data_size": array.nbytes}
    document["parameters"] = {"binary_data_output": True}
    head = orjson.dumps(document)
    body = head + b"".join(array.tobytes() for array in arrays)
    return post_bytes(_PATH, body, {_SIZE: str(len(head))})


def malformed_http(number: int, dice: random.Random) -> bytes:
    """A request that must be refused with 400."""
    whole = http_request(number, as_json=False)
    head, _, body = whole.partition(b"\r\n\r\n")
    match dice.randrange(6):
        case 0:
            body = body[:-4]  # data missing
        case 1:
            body += b"\0\0"  # data left over
        case 2:
            body = body.replace(b'"INT32"', b'"INT33"', 1)
        case 3:
            body = body.replace(b'"INPUT1"', b'"INPUT7"', 1)
        case 4:
            body = b"{" + body[1:].replace(b'"', b"'", 1)  # no JSON
        case _:
            body = dice.randbytes(len(body))
    lines = (line.partition(b": ") for line in head.split(b"\r\n"))
    size = next(value.decode() for name, _, value in lines if name.decode() == _SIZE)
    return post_bytes(_PATH, body, {_SIZE: size})


def check_http(number: int, headers: dict[str, str], body: bytes) -> str:
    """Error in an answer, or ""."""
    size = int(headers.get("inference-header-content-length", len(body)))
    document = orjson.loads(body[:size])
    if document["id"] != str(number):
        return f"got the answer of request {document['id']}"
    outputs: dict[str, Values] = {}
    position = size
    for item in document["outputs"]:
        if "data" in item:
            flat = np.array(item["data"], np.int32)
        else:
            end = position + item["parameters"]["binary_data_size"]
            flat = np.frombuffer(body[position:end], np.int32)
            position = end
        outputs[item["name"]] = flat.reshape(item["shape"])
    return compare(number, outputs)


def compare(number: int, outputs: dict[str, Values]) -> str:
    first, second = values(number)
    if not np.array_equal(outputs["OUTPUT0"], first + second):
        return f"wrong sums: {outputs['OUTPUT0'].tolist()}"
    if not np.array_equal(outputs["OUTPUT1"], first - second):
        return f"wrong differences: {outputs['OUTPUT1'].tolist()}"
    return ""


class HttpCaller:
    """A client with a persistent connection."""

    def __init__(self, plan: Plan, report: Report) -> None:
        self._plan = plan
        self._report = report
        self._connection: HttpConnection | None = None

    async def ask(self, number: int, dice: random.Random) -> None:
        connection = await self._connect()
        await connection.send(http_request(number, as_json=dice.random() < 0.25))
        answer = await connection.receive()
        if answer.status != 200:
            self._report.surprise(number, f"{answer.status} {answer.body[:300]!r}")
        elif wrong := check_http(number, dict(answer.headers), answer.body):
            self._report.surprise(number, wrong)
        else:
            self._report.answered += 1
            self._report.answered_rows += len(values(number)[0])

    async def ask_malformed(self, number: int, dice: random.Random) -> None:
        connection = await self._connect()
        await connection.send(malformed_http(number, dice))
        answer = await connection.receive()
        if answer.status == 400 and "error" in orjson.loads(answer.body):
            self._report.refused += 1
        else:
            self._report.surprise(number, f"malformed, but {answer.status} {answer.body[:300]!r}")

    async def leave(self, number: int, dice: random.Random) -> None:
        """Disconnect in a request, after it, or in the middle of the answer."""
        whole = http_request(number, as_json=dice.random() < 0.25)
        connection = await self._connect()
        self._connection = None
        cut = len(whole) if dice.random() < 0.5 else dice.randrange(1, len(whole))
        await connection.send(whole[:cut])
        if cut == len(whole) and dice.random() < 0.5:
            await connection.ended()  # reads one byte of the answer
        if dice.random() < 0.5:
            connection.reset()
        else:
            await connection.close()
        self._report.left += 1
        self._report.left_rows += len(values(number)[0])

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _connect(self) -> HttpConnection:
        if self._connection is None:
            self._connection = await HttpConnection.open(self._plan.address)
        return self._connection


# --- gRPC


def grpc_request(number: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="simple", id=str(number))
    for name, array in zip(("INPUT0", "INPUT1"), values(number), strict=True):
        message.inputs.add(name=name, datatype="INT32", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def malformed_grpc(number: int, dice: random.Random) -> bytes:
    """A request that must be refused with INVALID_ARGUMENT."""
    message = grpc_request(number)
    match dice.randrange(6):
        case 0:
            message.raw_input_contents[0] = message.raw_input_contents[0][:-4]
        case 1:
            del message.raw_input_contents[1]
        case 2:
            message.inputs[0].datatype = "INT33"
        case 3:
            message.inputs[1].name = "INPUT7"
        case 4:
            message.inputs[0].shape[1] = 15
        case _:
            return b"\xff" + dice.randbytes(200)
    return message.SerializeToString()


def check_grpc(number: int, data: bytes) -> str:
    """Error in an answer, or ""."""
    message = pb.ModelInferResponse.FromString(data)
    if message.id != str(number):
        return f"got the answer of request {message.id}"
    outputs = {
        tensor.name: np.frombuffer(raw, np.int32).reshape(tuple(tensor.shape))
        for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    return compare(number, outputs)


class GrpcCaller:
    """A client on a shared channel, or on one of its own for disconnecting."""

    def __init__(self, plan: Plan, report: Report, channel: grpc.aio.Channel) -> None:
        self._plan = plan
        self._report = report
        self._channel = channel
        self._infer = procedure(channel, "ModelInfer")

    async def ask(self, number: int, dice: random.Random) -> None:
        try:
            data = await self._infer(grpc_request(number).SerializeToString())
        except grpc.aio.AioRpcError as error:
            self._report.surprise(number, f"{error.code()} {error.details()}")
            return
        if wrong := check_grpc(number, data):
            self._report.surprise(number, wrong)
        else:
            self._report.answered += 1
            self._report.answered_rows += len(values(number)[0])

    async def ask_malformed(self, number: int, dice: random.Random) -> None:
        try:
            await self._infer(malformed_grpc(number, dice))
            self._report.surprise(number, "malformed, but answered")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._report.refused += 1
            else:
                self._report.surprise(number, f"malformed, but {error.code()} {error.details()}")

    async def leave(self, number: int, dice: random.Random) -> None:
        """Cancel a request, let it time out, or close its connection."""
        message = grpc_request(number).SerializeToString()
        way = dice.randrange(3)
        own = open_channel(self._plan.address) if way == 0 else None
        infer = procedure(own, "ModelInfer") if own else self._infer
        started = infer(message, timeout=0.002 if way == 1 else None)
        waiting = asyncio.ensure_future(_end_of(started))
        if own is not None:
            await started.wait_for_connection()
            await own.close()
        elif way == 2:
            await started.wait_for_connection()
            started.cancel()
        await waiting
        self._report.left += 1
        self._report.left_rows += len(values(number)[0])

    async def close(self) -> None:
        """The channel is not its own."""


async def _end_of(started: "grpc.aio.UnaryUnaryCall[bytes, bytes]") -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):  # as it was meant
        await started


# --- the process


async def main(plan: Plan) -> Report:
    report = Report()
    numbers = iter(range(plan.first, plan.first + plan.count))
    channels = [open_channel(plan.address) for _ in range(4)] if plan.over == "grpc" else []
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def work(index: int) -> None:
        caller: HttpCaller | GrpcCaller
        if channels:
            caller = GrpcCaller(plan, report, channels[index % len(channels)])
        else:
            caller = HttpCaller(plan, report)
        for number in numbers:
            dice = random.Random(-number - 1)
            fate = dice.random()
            step: Callable[[int, random.Random], Awaitable[None]] = caller.ask
            if fate < plan.malformed:
                step = caller.ask_malformed
            elif fate < plan.malformed + plan.disconnects:
                step = caller.leave
            try:
                await step(number, dice)
            except (OSError, asyncio.IncompleteReadError) as error:
                report.surprise(number, f"{step.__name__}: lost: {error!r}")
                return
        await caller.close()

    await asyncio.gather(*(work(index) for index in range(plan.callers)))
    for channel in channels:
        await channel.close()
    report.seconds = loop.time() - begun
    return report


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(main(Plan(**json.loads(sys.argv[1])))))))
