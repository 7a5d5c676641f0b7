"""Requests to TorchServe, and the meaning of its answers."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pytest

from headrace.core.datatypes import BY_NUMPY, Datatype
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    RemoteUnavailable,
    Unavailable,
)
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.placement.upstream.connection import CallFailed, RemoteRequest
from headrace.placement.upstream.http_client import HttpAsk
from headrace.placement.upstream.options import RemoteOptions
from headrace.plugins.dialects.torchserve import TorchServeRest
from headrace.protocol.http1 import HttpRequest, HttpResponse
from headrace.protocol.status import Fate
from headrace.protocol.v2_protobuf import RemoteInput

T = TypeVar("T")


def rest(*outputs: TensorSpec, **parameters: str) -> TorchServeRest:
    given = {"endpoints": "http://127.0.0.1", "protocol": "torchserve", **parameters}
    options = RemoteOptions.of(given, "m", 0, Path("/"))
    return TorchServeRest(options, "m", Signature("m", 0, (), outputs))


def result(
    query: Callable[[HttpAsk], Coroutine[Any, Any, T]], *answers: tuple[int, bytes]
) -> tuple[list[str], T]:
    """The requests of a query, and its result."""
    asked: list[str] = []
    left = list(answers)

    async def ask(request: HttpRequest) -> HttpResponse:
        asked.append(f"{request.method} {request.path}")
        return response(*left.pop(0))

    found = asyncio.run(query(ask))
    assert not left
    return asked, found


def response(status: int, body: bytes) -> HttpResponse:
    return HttpResponse(status, {}, body, True)


def request_of(asked: TorchServeRest, *arrays: Array, **named: Array) -> HttpRequest:
    every = {**{f"in{n}": array for n, array in enumerate(arrays)}, **named}
    inputs = [RemoteInput(n, BY_NUMPY[a.dtype], a.shape, [a]) for n, a in every.items()]
    return asked.request(RemoteRequest(inputs, [], {}))


NUMBERS = np.array([1, 2], np.int32)
TEXT = np.array([b"\xff"], object)


@pytest.mark.parametrize(
    ("body", "inputs", "kind", "sent"),
    [
        ("", {"x": NUMBERS}, "application/json", b"[1,2]"),
        ("", {"x": TEXT}, "application/octet-stream", b"\xff"),
        ("", {"x": NUMBERS, "y": NUMBERS}, "application/json", b'{"x":[1,2],"y":[1,2]}'),
        ("object", {"x": NUMBERS}, "application/json", b'{"x":[1,2]}'),
        ("raw", {"x": NUMBERS}, "application/octet-stream", NUMBERS.tobytes()),
        ("array", {"x": np.array([b"a"], object)}, "application/json", b'["a"]'),
    ],
)
def test_bodies(body: str, inputs: dict[str, Array], kind: str, sent: bytes) -> None:
    asked = rest(request_body=body, remote_label="1.0")
    request = request_of(asked, **inputs)
    assert request.path == "/predictions/m/1.0"
    assert request.headers["content-type"] == kind
    assert b"".join(request.body) == sent


@pytest.mark.parametrize(
    ("body", "inputs", "text"),
    [
        ("raw", {"x": np.array([b"a", b"b"], object)}, "holds 2 elements"),
        ("raw", {"x": NUMBERS, "y": NUMBERS}, "'raw' is for one input, not 2"),
        ("array", {"x": NUMBERS, "y": NUMBERS}, "'array' is for one input, not 2"),
    ],
)
def test_requests_without_a_body(body: str, inputs: dict[str, Array], text: str) -> None:
    with pytest.raises(CallFailed, match=text) as failed:
        request_of(rest(request_body=body), **inputs)
    assert isinstance(failed.value.failure.error, InvalidRequest)


NUMBER = TensorSpec("y", Datatype.FP32, (1,))
VECTOR = TensorSpec("y", Datatype.FP32, (-1,))
NAME = TensorSpec("name", Datatype.BYTES, (1,))


@pytest.mark.parametrize(
    ("outputs", "body", "expected"),
    [
        ([VECTOR], b"[1, 2.5]", {"y": [1, 2.5]}),
        ([VECTOR], b'{"y": [1], "more": 2}', {"y": [1]}),
        ([NUMBER], b"1.5", {"y": [1.5]}),
        ([VECTOR, NAME], b'{"y": [1], "name": "a"}', {"y": [1], "name": [b"a"]}),
        ([NAME], b'{"tabby": 0.9}', {"name": [b'{"tabby": 0.9}']}),
        ([NAME], b"\xff", {"name": [b"\xff"]}),
    ],
)
def test_answers(outputs: list[TensorSpec], body: bytes, expected: dict[str, object]) -> None:
    answer = rest(*outputs).answer(response(200, body))
    assert {name: array.tolist() for name, array in answer.outputs.items()} == expected


@pytest.mark.parametrize("body", [b"", b"[", b'["a"]', b"[[1], [2, 3]]", b'{"x": 1}'])
def test_invalid_answers(body: bytes) -> None:
    with pytest.raises(CallFailed, match="invalid response"):
        rest(VECTOR).answer(response(200, body))


@pytest.mark.parametrize(
    ("status", "kind", "fate", "error"),
    [
        (503, "InternalServerException", Fate.ANSWERED, ExecutionFailed),
        (503, "ServiceUnavailableException", Fate.REFUSED, Unavailable),
        (503, "OtherException", Fate.LATE, RemoteUnavailable),
        (404, "ModelNotFoundException", Fate.ANSWERED, NotFound),
        (400, "BadRequestException", Fate.ANSWERED, InvalidRequest),
    ],
)
def test_errors(status: int, kind: str, fate: Fate, error: type[Exception]) -> None:
    body = orjson.dumps({"code": status, "type": kind, "message": "why"})
    with pytest.raises(CallFailed) as failed:
        rest(VECTOR).answer(response(status, body))
    assert failed.value.failure.fate is fate
    assert type(failed.value.failure.error) is error
    assert str(failed.value.failure.error) == "why"


def test_a_proxy_s_page() -> None:
    with pytest.raises(CallFailed) as failed:
        rest(VECTOR).answer(response(503, b"<html>"))
    assert failed.value.failure.fate is Fate.LATE


def test_readiness() -> None:
    asked, ready = result(rest().ready, (200, b""), (200, b"{}"))
    assert (asked, ready) == (["GET /ping", "OPTIONS /predictions/m"], True)
    assert not result(rest().ready, (200, b""), (404, b"{}"))[1]
    assert not result(rest().ready, (500, b""))[1]


def test_descriptions() -> None:
    asked, said = result(rest().describe, (200, b"{}"))
    assert asked == ["OPTIONS /predictions/m"]
    assert (list(said.metadata.inputs), said.config) == ([], None)
    with pytest.raises(CallFailed):
        result(rest().describe, (404, b"{}"))
