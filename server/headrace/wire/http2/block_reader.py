"""Header blocks that are received: decoding, with memory for those that repeat.

A peer's blocks soon consist of references into the dynamic table alone, the same bytes for every
call. What they meant is remembered until the table changes.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from headrace.wire.http2.protocol import ConnectionFailure, ErrorCode

H = TypeVar("H")
Headers = Sequence[tuple[bytes, bytes]]

_REMEMBERED = 64  # blocks
_REMEMBERED_SIZE = 1024  # bytes of each


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


class BlockReader(Generic[H]):
    """Turns the blocks of one connection, in order, into what `interpret` makes of them."""

    def __init__(
        self, interpret: Callable[[Headers], H], max_list: int, passed_over: bytes = b""
    ) -> None:
        """`passed_over` is how a field begins, before its length, that `interpret` has no use for
        and that differs from block to block: a literal that changes no table.
        """
        self._interpret = interpret
        self._passed_over = passed_over
        self._decoder = Decoder(max_list)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._seen = self._table.changes
        # What blocks that repeat mean; who finds a block here need not `read` it.
        self.known: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """What a block means.

        Raises `ConnectionFailure` where the block cannot be decoded, since the tables of the two
        sides differ from then on; `StreamFailure` where `interpret` does.
        """
        if self._passed_over and (cut := block.find(self._passed_over)) > 0:
            start = cut + len(self._passed_over)
            if start < len(block) == start + 1 + (block[start] & 0x7F):  # it is the last field
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
        """The fields of a block, for once; raises `ConnectionFailure`."""
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
