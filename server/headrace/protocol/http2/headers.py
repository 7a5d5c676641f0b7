"""Header blocks: HPACK in both directions, a cache for repeated blocks, and field validation.

After a few calls a peer's blocks consist of references into the dynamic table, the same bytes for
every call; their meaning is cached until the table changes. Outgoing blocks use no dynamic table:
gRPC has few, so that they are encoded once for all connections.
"""

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from headrace.protocol.http2.protocol import ConnectionFailure, ErrorCode, StreamFailure

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


_STATIC = {
    (b":method", b"POST"): b"\x83",
    (b":scheme", b"http"): b"\x86",
    (b":scheme", b"https"): b"\x87",
    (b":status", b"200"): b"\x88",
}
NO_TABLE = b"\x20"  # begins a block: the dynamic table has no more room (RFC 7541, section 6.3)


def _length(value: int) -> bytes:
    """Encode a length in HPACK's form (RFC 7541, section 5.1)."""
    if value < 127:
        return bytes((value,))
    out = [127]
    value -= 127
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a field that no table has, nor gets."""
    return b"".join((b"\x00", _length(len(name)), name, _length(len(value)), value))


def header_block(fields: Headers) -> bytes:
    """Encode a block, or a part of one, for any connection: no dynamic table is used."""
    return b"".join([_STATIC.get(field) or literal(*field) for field in fields])
