"""Header blocks: HPACK in both directions, a cache for repeated blocks, and field validation.

After a few calls a peer's blocks consist of references into the dynamic table, the same bytes for
every call; their meaning is cached until the table changes. Outgoing blocks are encoded by hand:
gRPC has few, and they repeat.
"""

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from headrace.protocol.http2.protocol import (
    DEFAULT_TABLE,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
)

H = TypeVar("H")
Headers = Sequence[tuple[bytes, bytes]]

_REMEMBERED = 64  # cached blocks
_REMEMBERED_SIZE = 1024  # bytes of each


class _WatchedTable(HeaderTable):
    """An HPACK table that counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    # Overrides a property of the base class whose setter evicts entries.
    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changes += 1
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class BlockReader(Generic[H]):
    """Decodes the blocks of one connection, in order, and caches the results of `interpret`."""

    def __init__(
        self, interpret: Callable[[Headers], H], max_list: int, passed_over: bytes = b""
    ) -> None:
        """`passed_over` is the start, up to its length, of a field that varies and that `interpret`
        ignores: a literal that changes no table.
        """
        self._interpret = interpret
        self._passed_over = passed_over
        self._decoder = Decoder(max_list)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._seen = self._table.changes
        # Meanings of repeated blocks; for a block found here, `read` need not be called.
        self.known: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """Interpret a block, or return the cached meaning of an equal one.

        Raises `ConnectionFailure` if the block cannot be decoded, since both sides' tables differ
        from then on; `StreamFailure` if `interpret` does.
        """
        if self._passed_over and (cut := block.find(self._passed_over)) > 0:
            start = cut + len(self._passed_over)
            # The ignored field is the last one.
            if start < len(block) == start + 1 + (block[start] & 0x7F):
                block = block[:cut]
        known = self.known.get(block)
        if known is not None:
            return known
        headers = self._decode(block)
        same = self._table.changes == self._seen
        self._forget_if_changed()
        head = self._interpret(headers)
        if same and len(block) <= _REMEMBERED_SIZE:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            self.known[block] = head
        return head

    def decode(self, block: bytes) -> Headers:
        """Decode a block without caching; raises `ConnectionFailure`."""
        fields = self._decode(block)
        self._forget_if_changed()
        return fields

    def _decode(self, block: bytes) -> Headers:
        _check_size_updates(block)
        try:
            fields: Headers = self._decoder.decode(block, raw=True)  # type: ignore[assignment]
        except OversizedHeaderListError as error:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        except (HPACKError, IndexError, ValueError) as error:
            raise ConnectionFailure(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        return fields

    def _forget_if_changed(self) -> None:
        if self._table.changes != self._seen:
            self._seen = self._table.changes
            self.known.clear()


def _check_size_updates(block: bytes) -> None:
    """Refuse more than two table size updates at the start of a block (RFC 7541, section 4.2)."""
    position = updates = 0
    size = len(block)
    while position < size and block[position] & 0xE0 == 0x20:
        updates += 1
        if updates > 2:
            raise ConnectionFailure(ErrorCode.COMPRESSION_ERROR, "too many table size updates")
        extended = block[position] & 0x1F == 0x1F
        position += 1
        while extended and position < size:
            extended = block[position] & 0x80 != 0
            position += 1


_REQUIRED = {b":method", b":scheme", b":path"}
_PSEUDO = _REQUIRED | {b":authority"}
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_bad_name = re.compile(rb"[\x00-\x20A-Z\x7f-\xff:]").search
_bad_value = re.compile(rb"[\x00\r\n]").search
_BLANKS = b" \t"


def checked_request(headers: Headers) -> Headers:
    """Validate a request's fields by sections 8.2 and 8.3; raises `StreamFailure`.

    Blanks around a value are removed, though section 8.2.1 forbids them: gRPC clients send metadata
    as applications provide it, and other servers accept it.
    """
    blanks = False
    pseudo: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                raise _malformed(f"misplaced pseudo-header {name!r}")
            if value != value.strip(_BLANKS):
                raise _malformed(f"bad value of {name!r}")
            pseudo.add(name)
        else:
            regular = True
            check_field(name, value)
            blanks = blanks or value != value.strip(_BLANKS)
        if _bad_value(value):
            raise _malformed(f"bad value of {name!r}")
    if not pseudo >= _REQUIRED:
        raise _malformed("a pseudo-header is missing")
    return [(name, value.strip(_BLANKS)) for name, value in headers] if blanks else headers


def check_trailers(headers: Headers) -> None:
    """Validate trailing fields by section 8.1; raises `StreamFailure`."""
    for name, value in headers:
        check_field(name, value)
        if _bad_value(value):
            raise _malformed(f"bad value of {name!r}")


def check_field(name: bytes, value: bytes) -> None:
    """Validate a field's name by section 8.2; raises `StreamFailure`."""
    if not name or _bad_name(name):
        raise _malformed(f"bad field name {name!r}")
    if name in _HOP_BY_HOP or (name == b"te" and value.lower() != b"trailers"):
        raise _malformed(f"connection-specific field {name!r}")


def _malformed(text: str) -> StreamFailure:
    return StreamFailure(ErrorCode.PROTOCOL_ERROR, text)


_FIRST_INDEX = 62  # newest entry of HPACK's dynamic table (RFC 7541, section 2.3.3)
_OVERHEAD = 32  # bytes per entry, besides its name and value
_STATIC = {
    (b":method", b"POST"): b"\x83",
    (b":scheme", b"http"): b"\x86",
    (b":scheme", b"https"): b"\x87",
    (b":status", b"200"): b"\x88",
}


def integer(value: int, prefix_bits: int, first: int) -> bytes:
    """Encode an integer in HPACK's form (RFC 7541, section 5.1); `first` has the leading bits."""
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes((first | value,))
    out = [first | limit]
    value -= limit
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def literal(name: bytes, value: bytes, enter: bool = False) -> bytes:
    """Encode a field with a literal name; `enter` adds it to the peer's dynamic table."""
    first = b"\x40" if enter else b"\x00"
    return b"".join((first, integer(len(name), 7, 0), name, integer(len(value), 7, 0), value))


class RepeatedFields:
    """Fields common to many blocks; compared by identity."""

    __slots__ = ("fields",)

    def __init__(self, fields: Headers) -> None:
        self.fields = tuple(fields)


class BlockWriter:
    """Encodes the blocks of one connection, in the order in which they are sent.

    Repeated fields are entered into the peer's table when first sent, as long as there is room;
    from then on each is one or two bytes. Entries are never evicted. Fields of a single request
    never enter the table, so that their lengths reveal nothing about other requests.
    """

    __slots__ = ("_entered", "_known", "_limit", "_size", "_told", "short")

    def __init__(self) -> None:
        self._known: dict[RepeatedFields, bytes] = {}
        self.short: dict[RepeatedFields, bytes] = {}  # blocks with one byte per field
        self._entered: dict[tuple[bytes, bytes], int] = {}  # the number of earlier entries
        self._size = 0
        self._limit = DEFAULT_TABLE
        self._told = True

    def limit_table(self, size: int) -> None:
        """Limit the peer's table to `size` bytes from now on."""
        size = min(size, DEFAULT_TABLE)
        if size != self._limit:
            self._limit = size
            self._told = False
            self._forget()
            self._entered.clear()
            self._size = 0

    def block(self, repeated: RepeatedFields) -> bytes:
        """Encode repeated fields; fields of one request may follow."""
        return self._known.get(repeated) or self._write(repeated)

    def literals(self, fields: Headers) -> bytes:
        """Encode fields of one request, as a block or as the rest of one."""
        return self._update() + b"".join(
            [_STATIC.get(field) or literal(*field) for field in fields]
        )

    def _write(self, repeated: RepeatedFields) -> bytes:
        start = self._update()
        before = len(self._entered)
        block = start + b"".join([self._field(field) for field in repeated.fields])
        if len(self._entered) != before:
            self._forget()  # earlier entries have other indices now
        elif not start:
            self._known[repeated] = block
            if len(block) == len(repeated.fields):
                self.short[repeated] = block
        return block

    def _update(self) -> bytes:
        """The table size update that must begin the next block (section 4.2)."""
        if self._told:
            return b""
        self._told = True  # via 0, which empties the table; at most two updates are allowed
        return integer(0, 5, 0x20) + (integer(self._limit, 5, 0x20) if self._limit else b"")

    def _forget(self) -> None:
        self._known.clear()
        self.short.clear()

    def _field(self, field: tuple[bytes, bytes]) -> bytes:
        if (static := _STATIC.get(field)) is not None:
            return static
        if (number := self._entered.get(field)) is not None:
            return integer(_FIRST_INDEX + len(self._entered) - 1 - number, 7, 0x80)
        name, value = field
        size = len(name) + len(value) + _OVERHEAD
        enter = self._size + size <= self._limit
        if enter:
            self._entered[field] = len(self._entered)
            self._size += size
        return literal(name, value, enter)
