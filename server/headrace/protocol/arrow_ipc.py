"""Arrow IPC streams, of HTTP bodies and of Flight: sans-I/O, and careful with what clients send.

pyarrow reads them, which is C++ in this process. What it would allocate is known, bounded and
charged before it sees a message: `_outline` reads the sizes of decompressed buffers and the lengths
of columns from the message's head, a flatbuffer. What it has read is validated as a whole
(`validate(full=True)`: offsets, indices, UTF-8) before any value is used.

A message is a head, padded to 8 bytes, and a body; in a stream two numbers of 32 bits precede it,
-1 and the size of the head. Pure, for any thread; a reader for one thread at a time.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

import numpy as np

from headrace.core.call import Call, CallOptions, InferResponse
from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer, Tensor, concatenated
from headrace.core.texts import bounded
from headrace.protocol.arrow import NULLS, batch_of, pyarrow, tensors_of
from headrace.protocol.compression import too_large

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages
_PREFIX = Struct("<iI")
_CONTINUATION = -1
_u8, _u16, _u32, _i32, _i64 = (Struct(f"<{code}").unpack_from for code in "BHIiq")
_pair = Struct("<qq").unpack_from
_WITHOUT_ARRAYS = ("month_interval", "day_time_interval")  # types that pyarrow only names
_VALUES = 8  # of a byte: booleans have one bit
_V5 = 4  # since Arrow 1.0: earlier ones say elsewhere that they are compressed


class MessageHead(NamedTuple):
    """A message's kind, the bytes of its body, and those of the body once decompressed."""

    kind: int
    body: int
    size: int


def outline(head: Buffer, body: Buffer | None = None) -> MessageHead:
    """Read a message's head, with its body if the decompressed size is wanted.

    Raises `InvalidRequest` for a head that is none, and for more values than the bytes can have.
    """
    try:
        return _outline(head, body)
    except (StructError, IndexError):
        raise InvalidRequest("a message of the Arrow stream has no valid head") from None


def _outline(head: Buffer, body: Buffer | None) -> MessageHead:
    message = _u32(head, 0)[0]
    version = _u16(head, _field(head, message, 0))[0] if _field(head, message, 0) else 0
    if version != _V5:
        raise InvalidRequest(f"expected an Arrow stream of version V5, got V{version + 1}")
    kind = _u8(head, _field(head, message, 1))[0] if _field(head, message, 1) else 0
    at = _field(head, message, 3)
    size = _i64(head, at)[0] if at else 0
    if size < 0:
        raise InvalidRequest(f"a message of the Arrow stream has a body of {size} bytes")
    if body is None or kind not in (DICTIONARY, BATCH):
        return MessageHead(kind, size, size)
    if len(body) != size:
        raise InvalidRequest(
            f"a message of the Arrow stream announces a body of {size} bytes, and has {len(body)}"
        )
    batch = _table(head, message, 2)
    if kind == DICTIONARY:
        batch = _table(head, batch, 1)
    total = size
    if _field(head, batch, 3):  # compressed
        total = 0
        for offset, length in _pairs(head, batch, 2):
            if length:
                [claimed] = _i64(body, offset)
                total += length if claimed == -1 else claimed
                if claimed < -1:
                    raise InvalidRequest(f"a compressed buffer has a size of {claimed} bytes")
    at = _field(head, batch, 0)
    rows = _i64(head, at)[0] if at else 0
    most = max([rows, *(length for length, _ in _pairs(head, batch, 1))])
    if most > total * _VALUES:
        raise InvalidRequest(f"a batch of {total} bytes cannot have {most} values")
    return MessageHead(kind, size, total)


def _field(data: Buffer, table: int, number: int) -> int:
    """The position of a field of a flatbuffer's table; 0 if it is not there."""
    layout = table - _i32(data, table)[0]
    slot = 4 + 2 * number
    offset: int = _u16(data, layout + slot)[0] if slot < _u16(data, layout)[0] else 0
    return table + offset if offset else 0


def _table(data: Buffer, table: int, number: int) -> int:
    """The position of the table, or vector, that a field refers to."""
    at = _field(data, table, number)
    if not at:
        raise IndexError(number)
    found: int = at + _u32(data, at)[0]
    return found


def _pairs(data: Buffer, table: int, number: int) -> Iterator[tuple[int, int]]:
    """The elements of a vector of structs with two numbers."""
    if not _field(data, table, number):
        return
    at = _table(data, table, number)
    for index in range(_u32(data, at)[0]):
        yield _pair(data, at + 4 + 16 * index)


class BatchReader:
    """The record batches of one stream, from its messages in order."""

    def __init__(self) -> None:
        self.kept = 0  # bytes of dictionaries, which every batch is validated with
        self._source = _Source()
        self._reader: Any = None

    def read(self, head: Buffer, body: Buffer, charge: Charge = uncharged) -> Any:
        """The batch of a message, None of other messages.

        `charge` is called with what decompression allocates, first. Raises `InvalidRequest`.
        """
        arrow = pyarrow()
        kind, _, size = outline(head, body)
        charge(size - len(body) if size > len(body) else 0)
        if (kind == SCHEMA) is (self._reader is not None) or kind not in (
            SCHEMA,
            DICTIONARY,
            BATCH,
        ):
            raise InvalidRequest(
                "an Arrow stream is a schema, followed by dictionaries and record batches; got a"
                f" message of kind {kind} {'after' if self._reader else 'before'} the schema"
            )
        self._source.add(head, body)
        if kind == DICTIONARY:
            self.kept += size
            return None
        try:
            if kind == SCHEMA:
                file = arrow.PythonFile(self._source, mode="r")
                self._reader = arrow.ipc.open_stream(file)
                _ = self._reader.schema.names  # raises for names that are not UTF-8
                for field in self._reader.schema:
                    _check_type(field)
                return None
            batch = self._reader.read_next_batch()
            batch.validate(full=True)
            self._source.check()
        except (arrow.ArrowException, ValueError, OSError, StopIteration) as error:
            text = bounded(str(error) or "it ends too early")
            raise InvalidRequest(f"the Arrow stream is not valid: {text}") from None
        return batch


def _check_type(field: Any) -> None:
    """Raise `InvalidRequest` for a column that pyarrow has no arrays for: intervals of one unit."""
    kind = field.type
    while kind is not None:
        if str(kind) in _WITHOUT_ARRAYS:
            name = bounded(field.name)
            raise InvalidRequest(f"column '{name}' has the type {kind}, which no tensor has")
        kind = getattr(kind, "storage_type", None) or getattr(kind, "value_type", None)


class _Source:
    """A file for pyarrow, with the messages that were added."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def add(self, head: Buffer, body: Buffer) -> None:
        padding = -len(head) % 8
        prefix = _PREFIX.pack(_CONTINUATION, len(head) + padding) + bytes(head) + bytes(padding)
        self._pieces += [memoryview(piece) for piece in (prefix, body) if len(piece)]

    def check(self) -> None:
        """Raise `ValueError` unless pyarrow has read everything."""
        if self._pieces:
            raise ValueError("a message has parts that belong to none")

    def read(self, size: int = -1) -> Buffer:
        """The next `size` bytes, less at the end; without a copy if they are of one piece."""
        pieces = self._pieces
        if not pieces or size == 0:
            return b""
        if 0 < size < len(pieces[0]):
            found, pieces[0] = pieces[0][:size], pieces[0][size:]
            return found
        first = pieces.pop(0)
        if size == len(first) or not pieces:
            return first
        return bytes(first) + bytes(self.read(size - len(first) if size > 0 else -1))

    def close(self) -> None:
        """Do nothing: pyarrow closes its files."""


def messages(body: Buffer) -> Iterator[tuple[Buffer, Buffer]]:
    """Split a whole stream into the heads and bodies of its messages; raises `InvalidRequest`."""
    view, position = memoryview(body), 0
    while position < len(view):
        if len(view) - position < _PREFIX.size:
            raise _truncated(position)
        mark, size = _PREFIX.unpack_from(view, position)
        if mark != _CONTINUATION:
            raise InvalidRequest(
                f"no Arrow stream: expected a message at byte {position}, which begins with -1,"
                f" got {mark}"
            )
        position += _PREFIX.size
        if not size:  # the end
            if position < len(view):
                raise InvalidRequest(f"{len(view) - position} bytes follow the Arrow stream's end")
            return
        head = view[position : position + size]
        position += size
        if position > len(view):
            raise _truncated(position)
        length = outline(head).body
        position += length
        if position > len(view):
            raise _truncated(position)
        yield head, view[position - length : position]


def _truncated(position: int) -> InvalidRequest:
    return InvalidRequest(f"the Arrow stream is cut off: it ends before byte {position}")


def check_stream(body: Buffer, limit: int) -> None:
    """Check the size of a stream once it is decompressed.

    Raises `InvalidRequest` for one that is none, and `PayloadTooLarge`.
    """
    total = 0
    for head, inner in messages(body):
        total += outline(head, inner).size
        if total > limit:
            raise PayloadTooLarge(too_large("decompressed Arrow stream", limit))


def decode_stream(
    signature: Signature, model: str, version: str, body: Buffer, charge: Charge = uncharged
) -> Call:
    """The call for a whole stream, whose batches are one table of any number of rows.

    Raises `InvalidRequest`, and whatever `charge` raises.
    """
    reader = BatchReader()
    parts: list[dict[str, Tensor]] = []
    for head, inner in messages(body):
        batch = reader.read(head, inner, charge)
        if batch is not None:
            parts.append(tensors_of(batch, signature, charge))
    if not parts:
        raise InvalidRequest("the Arrow stream has no record batch")
    inputs = parts[0] if len(parts) == 1 else _joined(parts, charge)
    return Call(model, version, "", inputs, options=CallOptions(table=True), nbytes=len(body))


def _joined(parts: Sequence[dict[str, Tensor]], charge: Charge) -> dict[str, Tensor]:
    charge(sum(tensor.array.nbytes for part in parts for tensor in part.values()))
    found: dict[str, Tensor] = {}
    for name, tensor in {name: tensor for part in parts for name, tensor in part.items()}.items():
        arrays = [
            # Only batches with nulls have marks of them.
            part[name].array if name in part
            else np.zeros(part[name.removesuffix(NULLS)].array.shape, np.bool_)
            for part in parts
        ]  # fmt: skip
        if len({array.shape[1:] for array in arrays}) > 1:
            raise InvalidRequest(
                f"column '{name}' has lists of one length in a batch, and of another in the next"
            )
        found[name] = Tensor(name, tensor.datatype, concatenated(arrays))
    return found


def limited(charge: Charge, most: int) -> Charge:
    """`charge`, with a limit of all together: few bytes of a dictionary stand for many.

    It raises `InvalidRequest` beyond `most` bytes, 0: no limit.
    """
    total = 0

    def count(nbytes: int) -> None:
        nonlocal total
        total += nbytes
        if total > most > 0:
            raise InvalidRequest(
                f"the columns of the table take {total} bytes or more once they are converted, at"
                f" most {most} are allowed (--max-object-bytes)"
            )
        charge(nbytes)

    return count


def encode_response(response: InferResponse) -> list[Buffer]:
    """A stream with the outputs of a response, whose model, version and id are in the schema."""
    about = {"model_name": response.model_name, "model_version": response.model_version}
    about |= {"id": response.id} if response.id else {}
    return encode_stream(batch_of(response.outputs).replace_schema_metadata(about))


def encode_stream(batch: Any) -> list[Buffer]:
    """A stream with one batch."""
    pieces = (batch.schema.serialize(), batch.serialize())
    return [*[memoryview(piece) for piece in pieces], _PREFIX.pack(_CONTINUATION, 0)]


def parts_of(message: Any) -> tuple[memoryview, memoryview]:
    """Head and body of a message that pyarrow has written (`serialize`)."""
    view = memoryview(message)
    size = _PREFIX.size + _PREFIX.unpack_from(view)[1]
    return view[_PREFIX.size : size], view[size:]
