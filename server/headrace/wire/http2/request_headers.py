"""Header blocks of requests: decoding, with memory for those that repeat, and the rules they obey.

A client's blocks soon consist of references into the dynamic table alone, the same bytes for every
call. What they meant is remembered until the table changes.
"""

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from headrace.wire.http2.protocol import ConnectionFailure, ErrorCode, StreamFailure

H = TypeVar("H")
Headers = Sequence[tuple[bytes, bytes]]

_REMEMBERED = 64  # blocks
_REMEMBERED_SIZE = 1024  # bytes of each
_REQUIRED = {b":method", b":scheme", b":path"}
_PSEUDO = _REQUIRED | {b":authority"}
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_bad_name = re.compile(rb"[\x00-\x20A-Z\x7f-\xff:]").search
_bad_value = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]\Z").search


class _WatchedTable(HeaderTable):
    """Counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    # A property of the base class; its setter evicts.
    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changes += 1
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class RequestBlocks(Generic[H]):
    """Turns the blocks of one connection, in order, into what `interpret` makes of them."""

    def __init__(self, interpret: Callable[[Headers], H], max_list: int) -> None:
        self._interpret = interpret
        self._decoder = Decoder(max_list)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._seen = self._table.changes
        self._known: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """The head of a request.

        Raises `ConnectionFailure` where the block cannot be decoded, since the tables of the two
        sides differ from then on; `StreamFailure` for a request that section 8.1.1 calls malformed.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        headers = self._decode(block)
        same = self._table.changes == self._seen
        self._forget_if_changed()
        check_request(headers)
        head = self._interpret(headers)
        if same and len(block) <= _REMEMBERED_SIZE:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[block] = head
        return head

    def decode_trailers(self, block: bytes) -> Headers:
        """The fields of a block that ends a request, unchecked; raises `ConnectionFailure`."""
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
            self._known.clear()


def _check_size_updates(block: bytes) -> None:
    """At most two changes of the table's size begin a block (RFC 7541, section 4.2)."""
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


def check_request(headers: Headers) -> None:
    """Hold a request's fields against sections 8.2 and 8.3; raises `StreamFailure`."""
    pseudo: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                raise _malformed(f"misplaced pseudo-header {name!r}")
            pseudo.add(name)
        else:
            regular = True
            check_field(name, value)
        if _bad_value(value):
            raise _malformed(f"bad value of {name!r}")
    if not pseudo >= _REQUIRED:
        raise _malformed("a pseudo-header is missing")


def check_trailers(headers: Headers) -> None:
    """Hold trailing fields against section 8.1; raises `StreamFailure`."""
    for name, value in headers:
        check_field(name, value)
        if _bad_value(value):
            raise _malformed(f"bad value of {name!r}")


def check_field(name: bytes, value: bytes) -> None:
    """Hold a field's name against section 8.2; raises `StreamFailure`."""
    if not name or _bad_name(name):
        raise _malformed(f"bad field name {name!r}")
    if name in _HOP_BY_HOP or (name == b"te" and value.lower() != b"trailers"):
        raise _malformed(f"connection-specific field {name!r}")


def _malformed(text: str) -> StreamFailure:
    return StreamFailure(ErrorCode.PROTOCOL_ERROR, text)
