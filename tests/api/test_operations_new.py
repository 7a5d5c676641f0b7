"""A new operation needs an entry in the table and a handler, and is then available everywhere."""

import asyncio
import runpy
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.api.gate import Gate
from headrace.api.handlers import HANDLERS, BareCall, Handler, unary_handlers
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import OPERATIONS, Category, Operation, Route, handed_on
from headrace.client import ConnectionFailed
from headrace.client.address import Address
from headrace.client.grpc import GrpcTransport
from headrace.client.http import HttpTransport
from headrace.core.errors import InvalidRequest, Restricted
from headrace.core.identity import NO_PEER, Permission
from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.services import restricted
from headrace.doors.http.app import create_app
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.plugins.openapi.document import document
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.doors.http.asgi import ask
from tests.engine.worlds import LOAD_OPTIONS

ECHO = Operation(
    "Echo",
    Category.METADATA,
    Permission.READ,
    [Route("POST", "/v2/echo/{name}", "Say a name", [400], body=True)],
    request="ModelReadyRequest",
    response="ModelMetadataRequest",
)
PATH = "/inference.GRPCInferenceService/Echo"
RULES = Gate(HeaderRules(restricted=["metadata:x-key=right"]))


def echo(engine: Engine, asked: pb.ModelReadyRequest) -> pb.ModelMetadataRequest:
    return pb.ModelMetadataRequest(name=asked.name, version=asked.version or "none")


TABLE = (*OPERATIONS, ECHO)
ANSWERING: Mapping[str, Handler] = {**HANDLERS, "Echo": Handler(echo)}


@pytest.fixture
def engine() -> Engine:
    return Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))


def test_over_http(engine: Engine) -> None:
    app = create_app(engine, 1 << 20, RULES, TABLE, ANSWERING)
    key = (b"x-key", b"right")
    evil = (b"origin", b"http://evil.example")
    assert asyncio.run(ask(app, "POST", "/v2/echo/a", key)) == 200
    assert asyncio.run(ask(app, "POST", "/v2/echo/a")) == 403
    assert asyncio.run(ask(app, "POST", "/v2/echo/a", key, evil)) == 403
    assert asyncio.run(ask(app, "GET", "/v2/echo/a", key)) == 405


def test_over_grpc(engine: Engine) -> None:
    unary = unary_handlers(engine, 1 << 20, TABLE, ANSWERING)
    answer = asyncio.run(
        unary[PATH](pb.ModelReadyRequest(name="a").SerializeToString(), BareCall())
    )
    assert pb.ModelMetadataRequest.FromString(answer) == echo(
        engine, pb.ModelReadyRequest(name="a")
    )
    with pytest.raises(InvalidRequest, match="not a valid ModelReadyRequest message"):
        asyncio.run(unary[PATH](b"\xff", BareCall()))
    handlers = Handlers({}, unary, {})
    guarded = restricted(handlers, RULES, TABLE)
    with pytest.raises(Restricted, match="expecting header 'x-key'"):
        guarded.enter(PATH, {}, NO_PEER)
    assert guarded.counted(PATH) == "metadata"


def test_an_operation_without_a_handler_is_not_served(engine: Engine) -> None:
    with pytest.raises(KeyError, match="Echo"):
        unary_handlers(engine, 1 << 20, TABLE)
    with pytest.raises(KeyError, match="Echo"):
        create_app(engine, 1 << 20, RULES, TABLE)


def test_operations_and_handlers_match() -> None:
    assert {found.name for found in OPERATIONS if not found.in_door} == HANDLERS.keys()


def test_a_front_end_forwards_the_operation() -> None:
    assert PATH in handed_on(TABLE)


def test_the_operation_is_in_the_openapi_document() -> None:
    described: Any = document((), TABLE)
    found = described["paths"]["/v2/echo/{name}"]["post"]
    assert found["tags"] == ["metadata"]
    for named in ("ModelReadyRequest", "ModelMetadataRequest"):
        assert described["components"]["schemas"][named]["properties"].keys() == {"name", "version"}


@pytest.mark.parametrize(("scheme", "transport"), [
    ("http", HttpTransport), ("grpc", GrpcTransport),
])  # fmt: skip
def test_the_client_has_the_operation(
    scheme: str, transport: type[HttpTransport | GrpcTransport]
) -> None:
    async def ask(url: str) -> object:
        client = transport(Address.parse(url), {}, None)
        return await client.ask(ECHO, {"version": "1"}, {"name": "a/b"}, 0.5)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        asked = pool.submit(asyncio.run, ask(url))
        connection, _ = listener.accept()
        with connection:
            assert (b"POST /v2/echo/a%2Fb " if scheme == "http" else b"PRI ") in (
                connection.recv(4096)
            )
        with pytest.raises(ConnectionFailed):
            asked.result()


def test_the_protocol_page_lists_the_operation() -> None:
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "protocol_docs"))
    page = (root / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert script["render"](page) == page
    row = (
        "| `Echo` | `POST /v2/echo/NAME` | `inference.GRPCInferenceService` | metadata | read |"
        " yes | - |"
    )
    assert row in script["render"](page, TABLE)
