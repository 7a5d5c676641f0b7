"""Requests over both protocols to models that can be kept busy."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from struct import pack, unpack

import grpc.aio
import orjson

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.conftest import Busy
from tests.support.busy_model import busy_json
from tests.support.held import Gates
from tests.support.raw_clients import HttpConnection, call, post, post_bytes
from tests.support.server_process import ServerProcess
from tests.support.watching import admitted, until

INFER = {name: f"/v2/models/{name}/infer" for name in (
    "busy", "busy_alone", "held", "held_alone", "simple"
)}  # fmt: skip
_NUMBERS = count(1000)  # of gates


def busy_message(model: str, value: int, cost: int = 0) -> bytes:
    message = pb.ModelInferRequest(model_name=model, id=str(value))
    for name, number in (("VALUE", value), ("COST", cost)):
        message.inputs.add(name=name, datatype="INT64", shape=[1, 1])
        message.raw_input_contents.append(pack("<q", number))
    return message.SerializeToString()


async def infer(server: ServerProcess, model: str, value: int, cost: int = 0) -> int:
    answer = await post(server.http, INFER[model], busy_json(value, cost))
    assert answer.status == 200, answer
    result: int = orjson.loads(answer.body)["outputs"][0]["data"][0]
    return result


async def infer_grpc(channel: grpc.aio.Channel, model: str, value: int, cost: int = 0) -> int:
    data = await call(channel, "ModelInfer", busy_message(model, value, cost))
    result: int = unpack("<q", pb.ModelInferResponse.FromString(data).raw_output_contents[0])[0]
    return result


@asynccontextmanager
async def holding(busy: Busy, model: str) -> AsyncIterator[None]:
    """Keep the `held` model's only instance busy, so that requests within are queued.

    On exit, the request that keeps it busy has been answered.
    """
    async with await HttpConnection.open(busy.server.http) as connection:
        before, _ = await admitted(busy.server)
        with closed_gate(busy.gates) as number:
            await connection.send(post_bytes(INFER[model], busy_json(number)))
            await until(lambda: admitted(busy.server), lambda found: found[0] == before + 1)
            yield
        assert (await connection.receive()).status == 200


@contextmanager
def closed_gate(gates: Gates) -> Iterator[int]:
    """The VALUE of a request at which a `held` model waits until the exit."""
    number = next(_NUMBERS)
    gates.close(number)
    try:
        yield number
    finally:
        gates.open()
