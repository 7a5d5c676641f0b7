"""Requests composed from the table of operations and the descriptors of their messages.

A field that is added to `protos/`, or an operation to the table, is searched without a change
here. Over gRPC a message is written field by field, so that a field can be repeated or be of
another type; over HTTP the same names make the JSON, by the protocol's rules: a message with one
value of several kinds (a parameter) is that value, contents of a tensor are its `data`, and a map
of settings is the document itself.

Kinds of changes:

- `repeat`: the field `amount` times, `entries`: so many entries of a map or members of an object,
- `text`: `content` times `amount` as a string, `number`: `content` as a number,
- `nest`: lists or groups, `amount` deep, `spaces`: so much white space before the value,
- `lists`: `amount` empty lists in a list, `unknown`: a member or field that does not exist, with
  `content` times `amount`,
- `absent`: without the field, `null`, `wrong`: a value of another type,
- for the field `head`: `header`: `amount` headers, or metadata, named `content`; `long`: one such
  of `amount` bytes; `value`: one header, `content` as `name: value`.
"""

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from benchmarks.hostile.case import ABORT, CUT, GRPC, HALF, HTTP, WHOLE, Case, Change
from benchmarks.hostile.models import ECHO, PYTHON, TEXT
from benchmarks.hostile.models import WHOLE as WHOLE_NUMBERS
from benchmarks.hostile.wire import bytes_field, varint
from benchmarks.models import MLP
from headrace.api.operations import OPERATIONS, Operation
from headrace.protocol.pb import POOL

Tree = Mapping[str, Any]
Headers = list[tuple[str, str]]

MOST_BYTES = 62_000_000  # of a message or body before compression; the server takes 64 MiB
MOST_SENT = 160_000_000  # of a case, as sent
_MOST_ENTRIES = 8_000_000
_DEPTH = 4
_KINDS_OF_TEXT = (
    "a",
    "\\",
    '"',
    "\x00",
    "\x7f",
    "é",
    "\ud800",
    "[",
    "0",
    "NaN",
    "\\u0000",
    "/",
    " ",
)
_NUMBERS = (
    "-1", "0", "1e400", "NaN", "Infinity", "2147483648", "4294967296", "9223372036854775807",
    "-9223372036854775808", "18446744073709551616", "1152921504606846976", "1e-400", "0.1",
    "1" + "0" * 400, "true", "99999999999999999999999999999",
)  # fmt: skip
_MODELS = {MLP: ("FP32", [1, 64], "fp32_contents"), ECHO: ("FP32", [4], "fp32_contents"),
           TEXT: ("BYTES", [2], "bytes_contents"), PYTHON: ("BYTES", [2], "bytes_contents"),
           WHOLE_NUMBERS: ("INT64", [4], "int64_contents")}  # fmt: skip
_CONTROL = {"RepositoryModelLoad", "RepositoryModelUnload"}
_HEADERS = (
    "grpc-timeout: 99999999H", "grpc-timeout: 1n", "grpc-timeout: 00000001S", "timeout: -1",
    "grpc-encoding: deflate", "content-type: application/octet-stream", "expect: 100-continue",
    "inference-header-content-length: 99999999999999999999", "inference-header-content-length: 1",
    "inference-header-content-length: -1", "accept-encoding: gzip", "accept-encoding: deflate",
    "content-encoding: identity", "content-encoding: br", "transfer-encoding: gzip, chunked",
    "connection: upgrade", "upgrade: websocket", "upgrade: h2c", "traceparent: 00-x",
    "range: bytes=0-",
    "x-request-id: " + "1" * 4000, "grpc-accept-encoding: gzip", "te: gzip", "priority: u=9",
)  # fmt: skip
_NAMES = ("x-a", "cookie", "content-type", "accept", "traceparent", "grpc-trace-bin")
_PATHS = {"name", "model_name", "version", "model_version", "region", "repository_name"}
_SIZES = (1, 16, 256, 4_096, 65_536, 1_000_000, 8_000_000, MOST_BYTES)


def operations(door: str) -> list[Operation]:
    """The operations that a door has."""
    return [each for each in OPERATIONS if (each.procedure if door == GRPC else each.routes)]


def named(name: str) -> Operation:
    """The first operation of this name; raises `StopIteration`."""
    return next(each for each in OPERATIONS if each.name == name)


def paths(case: Case) -> list[str]:
    """The fields that can be changed, and the head."""
    descriptor = _descriptor(named(case.operation))
    found = ["head"]
    if descriptor is not None:
        found += _paths(descriptor, "", 0)
    else:
        found += ["input", "id", "parameters"]
    return found


def singles(random: Random) -> Iterator[Case]:
    """Every operation over every door, with every field changed in some ways, shuffled."""
    every = []
    for door in (HTTP, GRPC):
        for operation in operations(door):
            for route in range(len(operation.routes) if door == HTTP else 1):
                base = Case(door, operation.name, route=route)
                for path in paths(base):
                    several = random.sample(_changes(path, random), 5)
                    every += [replace(base, changes=(each,)) for each in several]
                every += [_framed(base, random) for _ in range(8)]
    random.shuffle(every)
    for case in every:
        varied = replace(case, model=random.choice(list(_MODELS)))
        if case.operation in _CONTROL:  # of a model that no innocent client asks for
            varied = replace(case, model=WHOLE_NUMBERS, explicit=random.random() < 0.5)
        yield _bounded(_framed(varied, random) if random.random() < 0.3 else varied)


def mutated(case: Case, random: Random) -> Case:
    """The case with another change, another amount or other framing."""
    dice = random.random()
    if dice < 0.3 and case.changes:
        index = random.randrange(len(case.changes))
        change = case.changes[index]
        factor = random.choice((0.1, 0.3, 0.5, 2, 4, 16))
        grown = replace(change, amount=max(int(change.amount * factor), 1))
        changes = (*case.changes[:index], grown, *case.changes[index + 1 :])
        return _bounded(replace(case, changes=changes))
    if dice < 0.5 and len(case.changes) < 3:
        path = random.choice(paths(case))
        more = random.choice(_changes(path, random))
        return _bounded(replace(case, changes=(*case.changes, more)))
    if dice < 0.6 and case.operation not in _CONTROL:
        return _bounded(replace(case, model=random.choice(list(_MODELS))))
    return _bounded(_framed(case, random))


def _changes(path: str, random: Random) -> list[Change]:
    """One change of each kind, of random content and amount."""
    if path == "head":
        return [
            Change(path, "header", random.choice(_NAMES), random.choice((1, 20, 60, 500, 5_000))),
            Change(
                path, "long", random.choice(_NAMES), random.choice((256, 7_000, 15_000, 500_000))
            ),
            *(Change(path, "value", text) for text in random.sample(_HEADERS, 4)),
        ]

    def size() -> int:
        return random.choice(_SIZES if random.random() < 0.5 else _SIZES[-3:])

    return [
        Change(path, "repeat", amount=min(size(), _MOST_ENTRIES)),
        Change(path, "entries", amount=min(size(), _MOST_ENTRIES)),
        *(Change(path, "text", text, size()) for text in random.sample(_KINDS_OF_TEXT, 2)),
        *(Change(path, "number", text) for text in random.sample(_NUMBERS, 3)),
        Change(path, "nest", amount=random.choice((50, 500, 5_000, 1_000_000, 20_000_000))),
        Change(path, "lists", amount=min(size(), _MOST_ENTRIES * 2)),
        Change(path, "spaces", amount=size()),
        Change(path, "unknown", random.choice(("a", '",', "0,", "{}")), size()),
        Change(path, random.choice(("absent", "null", "wrong"))),
    ]


def _framed(case: Case, random: Random) -> Case:
    """The case in other frames, in other numbers, or with another end."""
    streaming = case.operation in ("ModelStreamInfer", "ServerReflectionInfo", "Watch")
    return replace(
        case,
        connections=random.choice((1, 1, 1, 2, 8, 32, 500)),
        requests=random.choice((1, 1, 1, 4, 64, 1_000, 10_000)),
        messages=random.choice((1, 10, 1_000, 20_000)) if streaming else 1,
        compression=random.choice(("", "", "", "gzip", "deflate")),
        write=random.choice((0, 0, 0, 1, 100, 16_384)),
        pause=random.choice((0.0, 0.0, 0.0, 0.001, 0.1)),
        frame=random.choice((0, 0, 0, 0, 1, 64, 1_024, 16_384)),
        ending=random.choice((WHOLE, WHOLE, WHOLE, WHOLE, CUT, HALF, ABORT)),
        unread=random.random() < 0.15,
    )


def _bounded(case: Case) -> Case:
    """The case with no more connections, requests and bytes than a search can afford."""
    left, changes = MOST_BYTES, []
    for each in case.changes:
        one = _weight(replace(each, amount=1))
        changes.append(replace(each, amount=max(min(each.amount, left // one), 1)))
        left -= min(_weight(changes[-1]), left)
    case = replace(case, changes=tuple(changes))
    about = 400 + sum(_weight(each) for each in changes)
    if case.compression:
        about = about // 100 + 400
    most = max(MOST_SENT // about, 1)
    connections = min(case.connections, most)
    requests = min(case.requests, max(most // connections, 1))
    messages = min(case.messages, max(most // (connections * requests), 1))
    writes = about * requests * messages // case.write if case.write else 0
    pause = case.pause if not writes or case.pause * writes < 5 else 0.0
    write = case.write if writes < 500_000 else 0
    frame = case.frame
    if frame and about * connections * requests * messages // frame > 2_000_000:
        frame = 0
    return replace(
        case, connections=connections, requests=requests, messages=messages, write=write,
        pause=pause, frame=frame,
    )  # fmt: skip


def _weight(change: Change) -> int:
    each = {"repeat": 4, "entries": 14, "lists": 3, "nest": 2, "header": 20}.get(change.kind)
    return (each or _length(change.content)) * change.amount


def _length(content: str) -> int:
    return max(len(content.encode(errors="surrogatepass")), 1)


# --- HTTP


def http_target(case: Case) -> tuple[str, str]:
    """Method and path of the case's route, with its model, region or version."""
    operation = named(case.operation)
    route = operation.routes[case.route]
    form = route.forms[0] if "{" in route.forms[0] or len(route.forms) < 2 else route.forms[-1]
    parts = {"name": case.model, "version": "1", "region": "r", "repository": "x"}
    changed = {each.field: each for each in case.changes if each.field in _PATHS}
    for part, value in parts.items():
        given = changed.get(part) or changed.get(f"model_{part}") or changed.get(f"{part}_name")
        if given is not None:
            value = (given.content or "x") * min(given.amount, 60_000)
            value = "".join(c if c.isalnum() else f"%{ord(c) & 0xFF:02X}" for c in value)
        form = form.replace(f"{{{part}}}", value).replace(f"{{{part}:path}}", value)
    return route.method, form


def http_body(case: Case) -> bytes:
    """The body of the case, before compression; empty for a route without one."""
    operation = named(case.operation)
    if operation.routes[case.route].method == "GET" and not case.changes:
        return b""
    descriptor = _descriptor(operation)
    if descriptor is None:
        tree: Tree = {"id": "1", "input": _values(case.model), "parameters": {}}
        return _object(
            [(name, "", _plain(value, _of(case, name))) for name, value in tree.items()], case, ""
        )
    return _json_message(descriptor, _base(case, operation), case, "")


def http_headers(case: Case) -> Headers:
    """Headers of the case beside the host, the length and the encoding."""
    return _headers(case)


def _json_message(descriptor: Descriptor, tree: Tree, case: Case, prefix: str) -> bytes:
    """A message as JSON; with more than one value of a oneof, the first."""
    if descriptor.oneofs and len(descriptor.oneofs[0].fields) == len(descriptor.fields):
        for field in descriptor.fields:
            if field.name in tree or _of(case, prefix + field.name):
                return _json_field(field, tree.get(field.name), case, prefix)
        return b"1"
    if descriptor.name == "SettingValue":
        return _json_field(descriptor.fields[0], tree.get(descriptor.fields[0].name), case, prefix)
    if descriptor.name == "InferTensorContents":
        for field in descriptor.fields:
            if field.name in tree or _of(case, prefix + field.name):
                return _json_field(field, tree.get(field.name), case, prefix)
        return b"[]"
    members = []
    for field in descriptor.fields:
        given = _of(case, prefix + field.name) or _deeper(case, prefix + field.name)
        if (field.name not in tree and not given) or (not prefix and field.name in _PATHS):
            continue
        if any(each.kind == "absent" for each in _of(case, prefix + field.name)):
            continue
        text = _json_field(field, tree.get(field.name), case, prefix)
        if field.name == "settings" and text.startswith(b"{") and len(text) > 2:
            members.append(("", "", text[1:-1]))
        else:
            members.append(({"contents": "data"}.get(field.name, field.name), "", text))
    return _object(members, case, prefix)


def _json_field(field: FieldDescriptor, value: Any, case: Case, prefix: str) -> bytes:
    path = prefix + field.name
    changes = _of(case, path)
    if _is_map(field):
        of_value = _inner(field).fields_by_name["value"]
        entries = value or {"x": None}
        written = [
            (name, "", _json_one(of_value, item, case, path + "."))
            for name, item in entries.items()
        ]
        plain = _object(written, case, path)
    elif field.is_repeated:
        items = value if value is not None else [None]
        plain = b"[%s]" % b",".join(_json_one(field, item, case, path + ".") for item in items)
    else:
        plain = _json_one(field, value, case, path + ".")
    return _changed_json(plain, changes)


def _json_one(field: FieldDescriptor, value: Any, case: Case, prefix: str) -> bytes:
    if field.message_type is not None:
        return _json_message(field.message_type, value or {}, case, prefix)
    return _plain(_default(field) if value is None else value, ())


def _plain(value: Any, changes: Sequence[Change]) -> bytes:
    if isinstance(value, bool):
        text = b"true" if value else b"false"
    elif isinstance(value, int | float):
        text = repr(value).encode()
    elif isinstance(value, str):
        text = b'"%s"' % value.encode()
    elif isinstance(value, bytes):
        text = b'"%s"' % base64.b64encode(value)
    elif isinstance(value, Mapping):
        text = b"{%s}" % b",".join(
            b'"%s":%s' % (k.encode(), _plain(v, ())) for k, v in value.items()
        )
    else:
        text = b"[%s]" % b",".join(_plain(each, ()) for each in value)
    return _changed_json(text, changes)


def _changed_json(text: bytes, changes: Sequence[Change]) -> bytes:
    for change in changes:
        count, content = change.amount, change.content.encode(errors="surrogatepass")
        match change.kind:
            case "repeat":
                inner = text[1:-1] if text[:1] == b"[" and len(text) > 2 else text
                count = max(min(count, MOST_BYTES // (len(inner) + 1)), 1)
                text = b"[%s%s]" % ((inner + b",") * (count - 1), inner)
            case "entries":
                text = b"{%s}" % b",".join(
                    b'"%x":1' % n for n in range(min(count, MOST_BYTES // 12))
                )
            case "text":
                text = b'"%s"' % (content * count)
            case "number":
                text = content
            case "nest":
                text = b"[" * count + text + (b"]" * count if count < MOST_BYTES // 2 else b"")
            case "lists":
                text = b"[%s[]]" % (b"[]," * count)
            case "spaces":
                text = b" " * count + text
            case "null":
                text = b"null"
            case "wrong":
                text = b'{"a":[]}' if text[:1] != b"{" else b"7"
    return text


def _object(members: Sequence[tuple[str, str, bytes]], case: Case, prefix: str) -> bytes:
    written = [
        text if not name else b'"%s":%s' % (name.encode(), text) for name, _, text in members
    ]
    for change in _of(case, prefix.rstrip(".")) if prefix else case.changes:
        if change.kind == "unknown" and (prefix or "." not in change.field):
            fill = change.content.encode() * change.amount
            written.append(b'"unheard_of":"%s"' % fill.replace(b'"', b"'"))
    return b"{%s}" % b",".join(written)


# --- protobuf


def grpc_message(case: Case) -> bytes:
    """The message of the case, before compression."""
    operation = named(case.operation)
    descriptor = _descriptor(operation)
    assert descriptor is not None
    return _message(descriptor, _base(case, operation), case, "")


def grpc_metadata(case: Case) -> Headers:
    """Metadata of the case beside those that gRPC needs."""
    return _headers(case)


def _message(descriptor: Descriptor, tree: Tree, case: Case, prefix: str) -> bytes:
    pieces = []
    for field in descriptor.fields:
        path = prefix + field.name
        changes = _of(case, path)
        if field.name not in tree and not changes and not _deeper(case, path):
            continue
        pieces.append(_field(field, tree.get(field.name), case, path, changes))
    return b"".join(pieces)


def _field(
    field: FieldDescriptor, value: Any, case: Case, path: str, changes: Sequence[Change]
) -> bytes:
    if _is_map(field):
        of_value = _inner(field).fields_by_name["value"]
        plain = b"".join(
            bytes_field(
                field.number, bytes_field(1, name.encode()) + _one(of_value, item, case, path + ".")
            )
            for name, item in (value or {"x": None}).items()
        )
    elif field.is_repeated and field.is_packed and value is not None:
        plain = bytes_field(field.number, b"".join(_number(field, each) for each in value))
    elif field.is_repeated:
        plain = b"".join(
            _one(field, item, case, path + ".") for item in (value if value is not None else [None])
        )
    else:
        plain = _one(field, value, case, path + ".")
    for change in changes:
        plain = _changed_field(field, plain, change)
    return plain


def _one(field: FieldDescriptor, value: Any, case: Case, prefix: str) -> bytes:
    if field.message_type is not None:
        return bytes_field(field.number, _message(field.message_type, value or {}, case, prefix))
    value = _default(field) if value is None else value
    if isinstance(value, str | bytes):
        return bytes_field(field.number, value.encode() if isinstance(value, str) else value)
    kinds = {FieldDescriptor.TYPE_FLOAT: 5, FieldDescriptor.TYPE_DOUBLE: 1}
    return varint(field.number << 3 | kinds.get(field.type, 0)) + _number(field, value)


def _number(field: FieldDescriptor, value: float) -> bytes:
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return struct.pack("<f", value)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return struct.pack("<d", value)
    return varint(int(value) & (1 << 64) - 1)


def _changed_field(field: FieldDescriptor, plain: bytes, change: Change) -> bytes:
    number, count = field.number, change.amount
    content = change.content.encode(errors="surrogatepass")
    match change.kind:
        case "repeat":
            return plain * max(min(count, MOST_BYTES // max(len(plain), 1)), 1)
        case "entries":
            each = bytes_field(number, b"")
            if _is_map(field):
                return b"".join(
                    bytes_field(number, bytes_field(1, b"%x" % n))
                    for n in range(min(count, MOST_BYTES // 12))
                )
            return each * min(count, MOST_BYTES // len(each))
        case "text":
            return bytes_field(number, content * count)
        case "number":
            digits = change.content
            value = int(digits) if digits.lstrip("-").isdigit() else 2**63
            return varint(number << 3) + varint(value & (1 << 64) - 1)
        case "nest":
            deep = min(count, MOST_BYTES // 4)
            return varint(number << 3 | 3) * deep + varint(number << 3 | 4) * deep
        case "lists":  # packed numbers of a byte each, or messages without a field
            return bytes_field(number, b"\1" * min(count, MOST_BYTES))
        case "spaces":  # fields that replace each other
            return plain * max(min(count, MOST_BYTES // max(len(plain), 1)) // 8, 1)
        case "unknown":
            return plain + bytes_field(1_000, content * count)
        case "absent":
            return b""
        case "wrong":
            return varint(number << 3 | 1) + bytes(8)
    return plain


# --- both


def _descriptor(operation: Operation) -> Descriptor | None:
    """The message that requests of the operation are; None over HTTP only."""
    if not operation.service:
        return None
    return POOL.FindMessageTypeByName(f"{operation.package}.{operation.request}")


def _paths(descriptor: Descriptor, prefix: str, depth: int) -> list[str]:
    found = []
    for field in descriptor.fields:
        path = prefix + field.name
        found.append(path)
        inner = field.message_type
        if _is_map(field):
            inner = _inner(field).fields_by_name["value"].message_type
        if inner is not None and depth < _DEPTH:
            found += _paths(inner, path + ".", depth + 1)
    return found


def _base(case: Case, operation: Operation) -> Tree:
    """A valid request of the operation."""
    model = case.model
    datatype, shape, contents = _MODELS.get(model, _MODELS[MLP])
    known: dict[str, Tree] = {
        "ModelInferRequest": {
            "model_name": model,
            "id": "1",
            "inputs": [
                {"name": "input", "datatype": datatype, "shape": shape,
                 "contents": {contents: _values(model)}}
            ],
        },
        "RepositoryModelLoadRequest": {"model_name": model},
        "RepositoryModelUnloadRequest": {"model_name": model},
        "TraceSettingRequest": {"settings": {"trace_rate": {"value": ["1000"]}}},
        "LogSettingsRequest": {"settings": {"log_verbose_level": {"uint32_param": 0}}},
        "ServerReflectionRequest": {"list_services": "x"},
    }  # fmt: skip
    found = known.get(operation.request)
    if found is not None:
        return found
    descriptor = _descriptor(operation)
    names = {} if descriptor is None else descriptor.fields_by_name
    return {name: model for name in ("name", "model_name") if name in names}


def _values(model: str) -> list[Any]:
    datatype, shape, _ = _MODELS.get(model, _MODELS[MLP])
    count = 1
    for size in shape:
        count *= size
    return ["text"] * count if datatype == "BYTES" else [1] * count


def _default(field: FieldDescriptor) -> Any:
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return "x"
    return field.type == FieldDescriptor.TYPE_BOOL or 1


def _inner(field: FieldDescriptor) -> Descriptor:
    assert field.message_type is not None
    return field.message_type


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _of(case: Case, path: str) -> list[Change]:
    return [each for each in case.changes if each.field == path]


def _deeper(case: Case, path: str) -> bool:
    return any(each.field.startswith(path + ".") for each in case.changes)


def _headers(case: Case) -> Headers:
    found: Headers = []
    for change in _of(case, "head"):
        if change.kind == "header":
            found += [(f"{change.content}", "1")] * change.amount
        elif change.kind == "long":
            found.append((change.content, "a" * change.amount))
        else:
            name, _, value = change.content.partition(": ")
            found.append((name, value))
    return found
