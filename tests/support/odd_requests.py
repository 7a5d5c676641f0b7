"""Infer requests with one value at or beyond a limit: of each field, by the messages' descriptors.

All are for identities of `INPUT0` named as their datatype, of two variable dimensions.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from google.protobuf.message import Message

from headrace.core.datatypes import Datatype
from headrace.protocol.pb import grpc_service_pb2 as pb

NUMBERS = (
    0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**59, 2**59 + 1, 2**60, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**400, 0.5, 1e300,
)  # fmt: skip
TEXTS = ("", "\0", " ", "a b\n", "é", "x" * 5_000, "1e400", "%ED%A0%80")
TIMES = [f"{number}{unit}" for number in ("0", "99999999", "100000000") for unit in "HMSmun"]
DATATYPES = (Datatype.UINT8, Datatype.FP64, Datatype.BYTES)
_PATH = f"/v2/models/{Datatype.UINT8}"
_RESERVED = ("priority", "timeout", "sequence_id", "sequence_start", "any", "headrace_deadline")
_OF_TENSORS = (
    "binary_data_size", "classification", "shared_memory_offset", "shared_memory_byte_size",
)  # fmt: skip
_REGION = "shared_memory_region"
_MAX_RANK_TRIED = 40
Http = tuple[str, bytes, dict[str, str]]  # path, body, headers


def _document(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [1, 1], "data": [7]}
    return {"inputs": [tensor | changes]}


def infer_documents() -> Iterator[dict[str, Any]]:
    """Requests in JSON."""
    for number in NUMBERS:
        for shape in ([number], [0, number], [number, 0], [number, number], [number, 0, number]):
            for datatype in DATATYPES:
                yield _document(datatype=datatype.value, shape=shape, data=[])
        yield _document(data=[number])
        yield _document(shape=[1] * min(int(abs(number)), _MAX_RANK_TRIED), data=[1])
        for name in _RESERVED:
            yield _document() | {"parameters": {name: number}}
        for name in _OF_TENSORS:
            given: dict[str, Any] = {_REGION: "any"} if name.startswith("shared") else {}
            yield _document(parameters={**given, name: number})
            output = {"name": "OUTPUT0", "parameters": {**given, name: number}}
            yield _document() | {"outputs": [output]}
    for text in TEXTS:
        yield _document() | {"id": text}
        yield _document(name=text)
        yield _document(datatype=text)
        yield _document() | {"outputs": [{"name": text}]}
        yield _document() | {"parameters": {text: text}}
        yield _document() | {"parameters": {"sequence_id": text}}


def infer_bodies() -> Iterator[bytes]:
    """The same as text, and texts that Python's writer would not write."""
    for document in infer_documents():
        yield json.dumps(document).encode()
    text = json.dumps(_document())[:-1]
    for odd in ('"\\ud800"', '"\\udfff x"', '"\\u0000"'):
        for given in (f'"id":{odd}', f'"parameters":{{"a":{odd}}}', f'"parameters":{{{odd}:1}}'):
            yield f"{text},{given}}}".encode()


def http_requests() -> Iterator[Http]:
    """Requests over HTTP: their bodies, paths and headers."""
    for body in infer_bodies():
        yield f"{_PATH}/infer", body, {}
        yield f"{_PATH}/generate", body, {}
    body = json.dumps(_document()).encode()
    for text in ("%00", "%ED%A0%80", "%FF", "%20", quote("é"), "x" * 5_000, "%2F", "%0A"):
        yield f"/v2/models/{text}/infer", body, {}
        yield f"/v2/models/{text}/generate", body, {}
        yield f"{_PATH}/versions/{text}/infer", body, {}
        yield f"/v2/models/{text}/trace/setting", b"{}", {}
    for time in TIMES:
        yield f"{_PATH}/infer", body, {"grpc-timeout": time}
    for number in NUMBERS:
        value = str(number)[:100]
        yield f"{_PATH}/infer", body, {"x-envoy-expected-rq-timeout-ms": value}
        yield f"{_PATH}/infer", body, {"Inference-Header-Content-Length": value}


def infer_messages() -> list[bytes]:
    """Requests in protobuf."""
    found: dict[bytes, None] = {}
    for datatype in DATATYPES:
        request = pb.ModelInferRequest(model_name=datatype.value)
        request.inputs.add(name="INPUT0", datatype=datatype.value, shape=[0, 1])
        request.outputs.add(name="OUTPUT0")
        found |= dict.fromkeys(_changed(request, request))
        request.raw_input_contents.append(b"")
        found |= dict.fromkeys(_changed(request.inputs[0], request))
    return list(found)


def _changed(message: Message, root: Message) -> Iterator[bytes]:
    """`root` as bytes, once for each odd value of each field of `message`, a part of it."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            yield from _with_values(message, field, root)
        elif field.message_type.GetOptions().map_entry:
            yield from _with_entries(value, root, message is root)
        elif not field.is_repeated:
            yield from _changed(value, root)
            message.ClearField(field.name)
        elif value:
            yield from _changed(value[0], root)


def _with_values(message: Message, field: Any, root: Message) -> Iterator[bytes]:
    before = type(message)()
    before.CopyFrom(message)
    odd: Iterable[Any] = (*NUMBERS, True, *TEXTS, *map(str.encode, TEXTS))
    for value in odd:
        for values in ([value], [0, value], [value, value])[: 3 if field.is_repeated else 1]:
            try:
                if field.is_repeated:
                    getattr(message, field.name)[:] = values
                else:
                    setattr(message, field.name, value)
            except (TypeError, ValueError, OverflowError):
                continue  # not of this field's type
            yield root.SerializeToString(deterministic=True)
            message.CopyFrom(before)


def _with_entries(entries: Any, root: Message, whole: bool) -> Iterator[bytes]:
    for name in _RESERVED if whole else _OF_TENSORS:
        if name.startswith("shared"):
            entries[_REGION].string_param = "any"
        yield from _changed(entries[name], root)
        entries.clear()
    for text in TEXTS:
        entries[text].int64_param = 1
        yield root.SerializeToString(deterministic=True)
        entries.clear()
