"""Requests with values at and beyond their limits get the same answers from a front end.

A front end passes on the numbers of clients in structs and JSON of its own.
"""

import asyncio
from collections.abc import Iterator

import grpc.aio
import psutil
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.onnx_graphs import identity, write_model
from tests.support.http2_socket import REQUEST, Http2Socket
from tests.support.odd_requests import DATATYPES, TIMES, http_requests, infer_messages
from tests.support.raw_clients import HttpConnection, call, open_channel
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow
Servers = tuple[ServerProcess, ServerProcess]
_BROKEN = ("INTERNAL", "UNAVAILABLE", "UNKNOWN")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One without front ends, and one whose only front end lives as long as it does."""
    root = tmp_path_factory.mktemp("odd")
    for datatype in DATATYPES:
        write_model(root, datatype.value, identity(datatype, ["n", "m"]), "max_batch_size: 0")
    options = ["--allow-client-shm"]
    with (
        ServerProcess(root, options=options) as direct,
        ServerProcess(root, options=[*options, "--frontends=1"]) as fronted,
    ):
        [front_end] = psutil.Process(fronted.pid).children()
        yield direct, fronted
        assert psutil.Process(fronted.pid).children() == [front_end]
        for server in (direct, fronted):
            assert server.stop() == 0
            assert "bug " not in server.log, server.log
            assert "Traceback" not in server.log, server.log


async def test_every_field_over_http(servers: Servers) -> None:
    async def answers(server: ServerProcess) -> list[tuple[int, bytes]]:
        found = []
        connection = await HttpConnection.open(server.http)
        for path, body, headers in http_requests():
            answer = await connection.post(path, body, headers)
            found.append((answer.status, answer.body))
            if answer.headers.get("connection") == "close":
                await connection.close()
                connection = await HttpConnection.open(server.http)
        await connection.close()
        return found

    direct, fronted = await asyncio.gather(*map(answers, servers))
    for request, one, other in zip(http_requests(), direct, fronted, strict=True):
        assert one == other, request
        assert one[0] < 500 or one[0] == 504, (request, one)


async def test_every_field_over_grpc(servers: Servers) -> None:
    messages = infer_messages()

    async def answers(server: ServerProcess) -> list[tuple[str, str | bytes | None]]:
        found: list[tuple[str, str | bytes | None]] = []
        async with open_channel(server.grpc) as channel:
            for message in messages:
                try:
                    found.append(("OK", await call(channel, "ModelInfer", message)))
                except grpc.aio.AioRpcError as error:
                    found.append((error.code().name, error.details()))
        return found

    direct, fronted = await asyncio.gather(*map(answers, servers))
    for message, one, other in zip(messages, direct, fronted, strict=True):
        assert one == other, message
        assert one[0] not in _BROKEN, (message, one)


def test_every_timeout_over_grpc(servers: Servers) -> None:
    message = pb.ModelInferRequest(model_name="UINT8")
    message.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, 1])
    message.raw_input_contents.append(b"\7")
    data = message.SerializeToString()
    framed = b"\0" + len(data).to_bytes(4) + data
    for server in servers:
        with Http2Socket(server.grpc) as client:
            for time in TIMES:
                answer = client.call([*REQUEST, ("grpc-timeout", time)], framed)
                status = answer.trailers.get("grpc-status") or answer.headers["grpc-status"]
                if time.startswith("0"):
                    assert status == "4", time  # DEADLINE_EXCEEDED
                else:
                    # Nine digits are malformed, for which other servers answer INTERNAL, too.
                    assert status == ("13" if len(time) > 9 else "0"), time
