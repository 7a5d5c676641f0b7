"""The messages of Arrow Flight that the door needs: sans-I/O.

Written by hand: protobuf would copy the bodies, of which a message nearly consists.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import Message
from headrace.protocol.arrow_ipc import parts_of
from headrace.protocol.protobuf_contents import fields, varint

SERVICE = "/arrow.flight.protocol.FlightService/"
_BYTES = 2  # wire type: length-delimited
_MOST_FIELDS = 64
_TEXT = 512  # bytes of a model's name or version
_PATH, _CMD = 1, 2  # types of a descriptor
_BODY = 1000  # field number


class FlightData(NamedTuple):
    """One message of a stream: a descriptor, mostly empty, and an Arrow message."""

    descriptor: Buffer
    head: Buffer
    body: Buffer


def read_data(message: Buffer) -> FlightData:
    """Read a FlightData without copies; raises `InvalidRequest`."""
    found = dict(_contents(message, "FlightData"))
    return FlightData(*(found.get(number, b"") for number in (1, 2, _BODY)))


def read_descriptor(message: Buffer) -> tuple[str, str]:
    """The model and version, or "", of a FlightDescriptor; raises `InvalidRequest`.

    Either a path of one or two parts, or a command, `NAME` or `NAME/VERSION`.
    """
    path: list[str] = []
    for number, content in _contents(message, "FlightDescriptor"):
        try:
            text = str(content[:_TEXT], "utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest("a descriptor's path has to be text") from None
        path = text.split("/") if number == _CMD else [*path, text]
    if not 1 <= len(path) <= 2:
        raise InvalidRequest(
            f"expected a descriptor with the path NAME or NAME, VERSION, or such a command, got"
            f" {path[:3]}"
        )
    return path[0], path[1] if len(path) > 1 else ""


def read_ticket(message: Buffer) -> bytes:
    """The content of a Ticket; raises `InvalidRequest`."""
    return bytes(dict(_contents(message, "Ticket")).get(1, b""))


def data_of(arrow_message: Any) -> Message:
    """A FlightData with a message that pyarrow has written, in pieces."""
    head, body = parts_of(arrow_message)
    return [*_field(2, head), *_field(_BODY, body)]


def put_result(ticket: bytes) -> Message:
    """A PutResult with a ticket as its metadata."""
    return _field(1, ticket)


def schema_result(schema: Any) -> bytes:
    """A SchemaResult."""
    return b"".join(_field(1, memoryview(schema.serialize())))


def flight_info(name: str, version: str, schema: Any) -> bytes:
    """A FlightInfo about a model, without endpoints: its answers need a table first."""
    path = [part.encode() for part in (name, version) if part]
    descriptor = b"\x08" + varint(_PATH) + b"".join(b"".join(_field(3, part)) for part in path)
    unknown = b"\x20" + varint(2**64 - 1) + b"\x28" + varint(2**64 - 1)  # records and bytes: -1
    return schema_result(schema) + b"".join(_field(2, descriptor)) + unknown


def _field(number: int, content: Buffer) -> list[Buffer]:
    return [varint(number << 3 | _BYTES) + varint(len(content)), content]


def _contents(message: Buffer, kind: str) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each field that has a length."""
    view, most = memoryview(message), f"a {kind} may have {_MOST_FIELDS} fields, got more"
    for number, _, begin, stop in fields(view, 0, len(view), [_MOST_FIELDS], most, kind):
        if begin:
            yield number, view[begin:stop]
