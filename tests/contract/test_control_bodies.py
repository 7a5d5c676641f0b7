"""Bodies of control requests: early refusal, and clients that disconnect."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract import graphs
from tests.contract.conftest import CARRIERS
from tests.models.onnx_graphs import write_model
from tests.support.raw_clients import HttpConnection
from tests.support.server_process import ServerProcess, clean_server
from tests.support.watching import admitted, metrics, until

CONTROL = [
    "/v2/logging", "/v2/trace/setting", "/v2/models/m/trace/setting", "/v2/models/m/traffic",
    "/v2/repository/index", "/v2/repository/models/m/load", "/v2/repository/models/m/unload",
    "/v2/systemsharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/register",
]  # fmt: skip
KEY = {"x-key": "secret"}
LARGE = 2_000_000
SLOWLY = [pytest.param("reference", marks=pytest.mark.slow)]
CARRIED = ["default", "frontends", *SLOWLY]


def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bodies")
    write_model(root, "m", graphs.add_constant(1), "max_batch_size: 4")
    return root


@pytest.fixture(scope="module", params=CARRIED)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server controlled by clients with the key."""
    options = (
        *CARRIERS[request.param], "--model-control-mode=explicit", "--load-model=m",
        "--allow-client-shm=true", "--log-verbose=1",
        "--http-restricted-api=model-repository,logging,trace,shared-memory:x-key=secret",
    )  # fmt: skip
    root = repository(tmp_path_factory)
    with clean_server(root, options=options, tracebacks=False) as process:
        yield process
    assert " ERROR " not in process.output


@pytest.fixture(scope="module", params=CARRIED)
def uncontrolled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with clean_server(repository(tmp_path_factory), options=CARRIERS[request.param]) as process:
        yield process


def head(path: str, length: int, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("path", CONTROL)
def test_a_client_that_disconnects_in_its_body_is_no_bug(
    server: ServerProcess, path: str, ending: str
) -> None:
    async def scenario() -> None:
        connection = await HttpConnection.open(server.http)
        await connection.send(head(path, LARGE, KEY) + b" " * 50_000)
        await until(lambda: admitted(server), lambda found: found[1] >= 50_000)
        if ending == "close":
            await connection.close()
        else:
            connection.reset()
        await until(lambda: admitted(server), lambda found: found == (0, 0))

    before = len(server.log)
    asyncio.run(scenario())
    written = server.log[before:]
    assert "Traceback" not in written
    assert "bug" not in written
    assert " ERROR " not in written
    assert " WARNING " not in written


@pytest.mark.parametrize("path", [path for path in CONTROL if "traffic" not in path])
def test_without_the_key_no_body_is_awaited(server: ServerProcess, path: str) -> None:
    _refused_for_its_head(server, path, {}, 403, "expecting header 'x-key'")


def test_pages_of_other_sites_are_refused_before_their_body(server: ServerProcess) -> None:
    headers = KEY | {"origin": "http://evil.example"}
    path = "/v2/repository/models/m/load"
    _refused_for_its_head(server, path, headers, 403, "pages of other sites")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_without_model_control_no_body_is_awaited(uncontrolled: ServerProcess, action: str) -> None:
    path = f"/v2/repository/models/m/{action}"
    _refused_for_its_head(uncontrolled, path, {}, 503, "not allowed")


def test_an_unknown_route_awaits_no_body(uncontrolled: ServerProcess) -> None:
    _refused_for_its_head(uncontrolled, "/v2/repository/x/y/z/load", {}, 404, "Not Found")


async def test_a_body_is_counted_as_it_is_received(server: ServerProcess) -> None:
    path = "/v2/repository/models/m/load"
    async with await HttpConnection.open(server.http) as connection:
        await connection.send(head(path, LARGE, KEY))
        assert await admitted(server) == (0, 0)  # announced bytes are not charged
        await connection.send(b" " * (LARGE // 2))
        await until(lambda: admitted(server), lambda found: found[1] >= LARGE // 2)
        await connection.send(b" " * (LARGE - LARGE // 2))
        assert (await connection.receive()).status == 200
    await until(lambda: admitted(server), lambda found: found == (0, 0))


async def test_a_body_in_chunks(server: ServerProcess) -> None:
    async with await HttpConnection.open(server.http) as connection:
        lines = ["POST /v2/logging HTTP/1.1", "Host: x", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in KEY.items()]
        await connection.send("\r\n".join([*lines, "", ""]).encode())
        for piece in (b'{"log_in', b'fo": true', b"}"):
            await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await connection.send(b"0\r\n\r\n")
        assert (await connection.receive()).status == 200


def _refused_for_its_head(
    server: ServerProcess, path: str, headers: dict[str, str], status: int, text: str
) -> None:
    async def scenario() -> None:
        async with await HttpConnection.open(server.http) as connection:
            await connection.send(head(path, LARGE, headers))
            answer = await connection.receive()
            assert (answer.status, text in answer.body.decode()) == (status, True), answer.body
        assert (await metrics(server))["headrace_admitted_bytes"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize(
    ("procedure", "message"),
    [
        ("inference.GRPCInferenceService/TraceSetting",
         pb.TraceSettingRequest(model_name="x" * LARGE)),
        ("inference.GRPCInferenceService/LogSettings",
         pb.LogSettingsRequest(
             settings={"log_file": pb.LogSettingsRequest.SettingValue(string_param="x" * LARGE)})),
        ("grpc.health.v1.Health/Check", pb.ModelReadyRequest(name="x" * LARGE)),
    ],
    ids=["trace", "log", "health"],
)  # fmt: skip
def test_large_control_messages_over_grpc_are_refused(
    server: ServerProcess,
    procedure: str,
    message: pb.TraceSettingRequest,
    compression: grpc.Compression,
) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{procedure}")
        with pytest.raises(grpc.RpcError) as refused:
            call(message.SerializeToString(), timeout=60, compression=compression)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "exceeds the maximum of 65536 bytes" in str(refused.value.details())


def test_misspelt_members_are_refused_by_name(server: ServerProcess) -> None:
    body = b'{"parameter": {"config": "{}"}}'

    async def scenario() -> None:
        async with await HttpConnection.open(server.http) as connection:
            path = "/v2/repository/models/m/load"
            await connection.send(head(path, len(body), KEY) + body)
            answer = await connection.receive()
            assert answer.status == 400
            assert b"unknown member 'parameter'; did you mean 'parameters'?" in answer.body

    asyncio.run(scenario())
