"""Header blocks of responses, written by hand: a server of gRPC has two that matter."""

from collections.abc import Sequence

from headrace.wire.http2.protocol import DEFAULT_TABLE

Headers = Sequence[tuple[bytes, bytes]]
_FIRST_INDEX = 62  # of HPACK's dynamic table: what was entered last (RFC 7541, section 2.3.3)
_STATUS_200 = b"\x88"  # in the static table


def integer(value: int, prefix_bits: int, first: int) -> bytes:
    """An integer in HPACK's form (RFC 7541, section 5.1); `first` holds the bits before it."""
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
    """A field with its name spelled out; `enter` puts it into the peer's dynamic table."""
    first = b"\x40" if enter else b"\x00"
    return b"".join((first, integer(len(name), 7, 0), name, integer(len(value), 7, 0), value))


class ResponseBlocks:
    """The blocks of one connection's responses, in the order in which they are sent.

    The first good head and the first good trailers enter their fields into the peer's table; from
    then on each of these fields is one byte. All others are literals that leave the table alone.
    """

    __slots__ = ("_entered", "_fields", "_limit", "_size", "_smallest", "head", "trailers")

    def __init__(self, head: Headers, trailers: Headers) -> None:
        """`head` follows `:status: 200`."""
        self._fields = (head, trailers)
        self._size = sum(32 + len(name) + len(value) for name, value in [*head, *trailers])
        self._entered: list[int] = []
        self._limit = DEFAULT_TABLE
        self._smallest: int | None = None  # to be told to the peer when the next block begins
        # The good blocks while they are nothing but references and nothing has to be told first.
        self.head: bytes | None = None
        self.trailers: bytes | None = None

    def limit_table(self, size: int) -> None:
        """The peer keeps a table of `size` bytes at most, from now on."""
        size = min(size, DEFAULT_TABLE)
        if size == self._limit:
            return
        self._smallest = size if self._smallest is None else min(size, self._smallest)
        self._limit = size
        if size < self._size:
            self._entered.clear()
        self.head = self.trailers = None

    def good_head(self) -> bytes:
        """`:status: 200` and the fixed fields."""
        return self.head or self._next(0)

    def good_trailers(self) -> bytes:
        """The fixed trailers."""
        return self.trailers or self._next(1)

    def other(self, fields: Headers, status: int = 0) -> bytes:
        """A block of these fields; `status` is HTTP's, before them, 0 for none."""
        start = self._told()
        if status:
            start += _STATUS_200 if status == 200 else literal(b":status", b"%d" % status)
        return start + b"".join([literal(name, value) for name, value in fields])

    def _next(self, which: int) -> bytes:
        told = self._told()
        fields = self._fields[which]
        start = told + (_STATUS_200 if which == 0 else b"")
        if which in self._entered:
            self._refer()
            return told + (self.head or b"" if which == 0 else self.trailers or b"")
        enter = self._limit >= self._size
        if enter:
            self._entered.append(which)
            self._refer()
        return start + b"".join([literal(name, value, enter) for name, value in fields])

    def _told(self) -> bytes:
        """The changes of the table's size that a block has to begin with (section 4.2)."""
        smallest, self._smallest = self._smallest, None
        if smallest is None:
            return b""
        sizes = [smallest] if smallest == self._limit else [smallest, self._limit]
        return b"".join([integer(size, 5, 0x20) for size in sizes])

    def _refer(self) -> None:
        index = _FIRST_INDEX
        for which in reversed(self._entered):
            count = len(self._fields[which])
            last = index + count - 1
            block = b"".join([integer(last - n, 7, 0x80) for n in range(count)])
            if which == 0:
                self.head = _STATUS_200 + block
            else:
                self.trailers = block
            index += count
