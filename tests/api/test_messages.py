"""Every operation of the table has limits of size and of elements, checked before decoding."""

import asyncio
import gzip
import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from headrace.api.handlers import HANDLERS, BareCall, unary_handlers
from headrace.api.messages import read_message, request_class
from headrace.api.operations import NAMED, OPERATIONS, Operation
from headrace.core.errors import InvalidRequest, PayloadTooLarge, Unavailable
from headrace.doors.grpc.services import all_handlers
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.protocol.load_json import read_load
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.protobuf_contents import MAX_TEXT
from tests.engine.worlds import LOAD_OPTIONS

LIMIT = 1 << 20
UNARY = [operation for operation in OPERATIONS if operation.procedure and not operation.in_door]
LONG = [operation for operation in OPERATIONS if not operation.max_bytes]


@pytest.fixture
def engine() -> Engine:
    return Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))


def handle(engine: Engine, operation: Operation, message: bytes) -> bytes:
    return asyncio.run(unary_handlers(engine, LIMIT)[operation.procedure](message, BareCall()))


def field(number: int, content: bytes) -> bytes:
    size = len(content)
    assert size < 1 << 14
    return bytes([number << 3 | 2, size & 127 | 128, size >> 7]) + content


def deepest(kind: Any, elements: int) -> Iterator[bytes]:
    """Messages with more empty fields than `elements`: one for each message within `kind`."""
    yield field(15, b"") * elements
    for inner in kind.fields:
        if inner.type == FieldDescriptor.TYPE_MESSAGE:
            for found in deepest(inner.message_type, elements):
                yield field(inner.number, found) if len(found) < 1 << 14 else found


def test_only_loads_and_inference_are_as_long_as_the_largest_request() -> None:
    assert {operation.name for operation in LONG} == {
        "ModelInfer", "ModelStreamInfer", "Generate", "GenerateStream", "RepositoryModelLoad",
    }  # fmt: skip


@pytest.mark.parametrize("operation", UNARY, ids=lambda operation: operation.name)
def test_a_message_that_is_too_large(engine: Engine, operation: Operation) -> None:
    limit = operation.max_bytes or LIMIT
    with pytest.raises((PayloadTooLarge, Unavailable)) as refused:
        handle(engine, operation, bytes(limit + 1))
    if operation.name not in ("RepositoryModelLoad", "RepositoryModelUnload"):
        assert f"{limit} bytes" in str(refused.value)


@pytest.mark.parametrize("operation", UNARY, ids=lambda operation: operation.name)
def test_a_message_with_too_many_elements(engine: Engine, operation: Operation) -> None:
    kind = request_class(operation).DESCRIPTOR
    for message in deepest(kind, operation.max_elements + 1):
        with pytest.raises((InvalidRequest, Unavailable)) as refused:
            handle(engine, operation, message)
        if operation.name not in ("RepositoryModelLoad", "RepositoryModelUnload"):
            assert f"at most {operation.max_elements} elements" in str(refused.value)


def test_a_load_with_too_much_text() -> None:
    """Protobuf checks its characters in one call that holds the interpreter lock."""
    operation = NAMED["RepositoryModelLoad"]
    asked = pb.RepositoryModelLoadRequest(model_name="m")
    asked.parameters["file:1/model.onnx"].bytes_param = bytes(MAX_TEXT + 1)
    assert read_message(operation, asked.SerializeToString(), 1 << 26) == asked
    for name in "ab":
        asked.parameters[name].string_param = "x" * (MAX_TEXT // 2)
    with pytest.raises(InvalidRequest, match=f"may have {MAX_TEXT} bytes of text, got more"):
        read_message(operation, asked.SerializeToString(), 1 << 26)


@pytest.mark.parametrize("name", ["RepositoryModelLoad", "RepositoryModelUnload"])
def test_models_that_clients_may_not_control_are_refused_before_decoding(
    engine: Engine, name: str
) -> None:
    with pytest.raises(Unavailable, match="not allowed"):
        handle(engine, NAMED[name], b"\xff")


def test_every_procedure_of_the_doors_has_a_limit(engine: Engine) -> None:
    unary = unary_handlers(engine, LIMIT)
    from headrace.api.gate import Gate

    handlers = all_handlers(engine, engine, unary, engine.readiness, LIMIT, Gate())
    assert handlers.limits.keys() == set(handlers.paths())
    assert handlers.limits[NAMED["ModelInfer"].procedure] == LIMIT
    assert handlers.limits[NAMED["TraceSetting"].procedure] == NAMED["TraceSetting"].max_bytes


# --- JSON over HTTP


@pytest.mark.parametrize("name", [name for name in HANDLERS if name != "RepositoryModelLoad"])
def test_json_with_too_many_elements(name: str) -> None:
    operation, handler = NAMED[name], HANDLERS[name]
    text = b'{"x":[' + b"[]," * operation.max_elements + b"[]]}"
    with pytest.raises(InvalidRequest, match=f"at most {operation.max_elements} elements"):
        handler.read(operation, text)


def test_commas_and_brackets_in_texts_are_no_elements() -> None:
    operation = NAMED["LogSettings"]
    text = json.dumps({"x": '[,{"' * operation.max_elements}).encode()
    assert HANDLERS["LogSettings"].read(operation, text) == json.loads(text)


def load(text: bytes) -> object:
    return HANDLERS["RepositoryModelLoad"].read(NAMED["RepositoryModelLoad"], bytearray(text))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"parameter": {"config": "{}"}}, "parameter"),
        ({"Parameters": {}}, "Parameters"),
        ({"config": "{}"}, "config"),
        ({"parameters": {}, "x" * 200: 1}, "x" * 60),
    ],
)
def test_unknown_members_of_a_load_are_refused_by_name(body: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown member '{named}") as refused:
        load(json.dumps(body).encode())
    assert "parameters" in str(refused.value)


@pytest.mark.parametrize(
    "body", [b"", b"  \n", b"{}", b'{"parameters":null}', b'{"parameters":{}}']
)
def test_loads_without_parameters(body: bytes) -> None:
    assert not load(body)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4095, 4096, 4097, 1_000_000, 3_145_728])
@pytest.mark.parametrize("escaped", [False, True])
def test_files_of_any_size(size: int, escaped: bool) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    text = b64encode(content[:size]).decode()
    config = json.dumps({"name": "ünï", "parameters": {"\U0001d518": "x" * 10_000, "\\": '"'}})
    body = json.dumps({"parameters": {"config": config, "file:1/model.py": text}})
    if escaped:
        body = body.replace("/", "\\/")
    found = read_load(bytearray(body.encode()), 5_000)
    assert found.config == config
    assert bytes(found.files["1/model.py"]) == content[:size]


@pytest.mark.parametrize(
    "text",
    ["A" * 9_999, "A" * 9_996 + "=AAA", "A" * 9_995 + "é", "A" * 1_048_574 + "==" + "A" * 16,
     "A" * 9_996 + " AAA", "\\u00e9" * 4_000],
)  # fmt: skip
def test_files_that_are_no_base64(text: str) -> None:
    body = f'{{"parameters":{{"config":"{{}}","file:x":"{text}"}}}}'
    with pytest.raises(InvalidRequest, match="'file:x', expected base64"):
        read_load(bytearray(body.encode()), 5_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"parameters":{"config":"%b"}}' % (b"x" * (9 << 20)), "config"),
        (b'{"parameters":{"config":"%b"}}' % (b'\\"' * (9 << 20)), "config"),
        (b'{"%b":1}' % (b"x" * 100_000), "unknown member"),
        (b'{"parameters":{"%b":"x"}}' % (b"x" * 100_000), "unrecognized load parameter"),
        (b'{"parameters":"%b"}' % (b"x" * 100_000), "expected an object"),
        (b'"%b"' % (b"x" * 100_000), "must be a JSON object"),
        (b'{"parameters":{"config":"%b' % (b"x" * 100_000), "failed to parse"),
        (b'{"parameters":{"file:x":"%b\\"' % (b"x" * 100_000), "failed to parse"),
        (b'{"parameters":{"file:x":"\n%b"}}' % (b"x" * 100_000), "expected base64"),
        (b" " * (17 << 20) + b"{}", "besides its files"),
        (b'{"parameters":{"a":[' + b"[]," * 6_000 + b"[]]}}", "at most 5000 elements"),
        (b'{"parameters":' + b"[" * 6_000, "at most 5000 elements"),
    ],
    ids=range(12),
)
def test_loads_that_are_refused(text: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_load(bytearray(text), 5_000)


def test_a_model_called_like_a_mark_is_no_mark() -> None:
    body = {"parameters": {"config": "0", "file:a": "", "file:b": b64encode(bytes(9_999)).decode()}}
    found = read_load(bytearray(json.dumps(body).encode()), 5_000)
    assert (found.config, {name: len(data) for name, data in found.files.items()}) == (
        "0", {"a": 0, "b": 9_999},
    )  # fmt: skip


def test_large_messages_of_the_library_transport_are_small_when_compressed() -> None:
    message = pb.TraceSettingRequest(model_name="x" * (NAMED["TraceSetting"].max_bytes + 1))
    assert len(gzip.compress(message.SerializeToString())) < 1024
