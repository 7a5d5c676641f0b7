"""Header blocks of requests, written by hand: a client of gRPC has few, which repeat."""

from collections.abc import Sequence

from headrace.wire.http2.protocol import DEFAULT_TABLE
from headrace.wire.http2.response_headers import integer, literal

Headers = Sequence[tuple[bytes, bytes]]
_FIRST_INDEX = 62  # of HPACK's dynamic table: what was entered last (RFC 7541, section 2.3.3)
_STATIC = {
    (b":method", b"POST"): b"\x83",
    (b":scheme", b"http"): b"\x86",
    (b":scheme", b"https"): b"\x87",
}
_OVERHEAD = 32  # bytes of an entry, besides its name and value


class RequestHead:
    """The fields that all requests of one kind have; compared by identity."""

    __slots__ = ("fields",)

    def __init__(self, fields: Headers) -> None:
        self.fields = tuple(fields)


class RequestBlocks:
    """The blocks of one connection's requests, in the order in which they are sent.

    A head's fields are entered into the peer's table when it is first sent, as long as there is
    room; from then on each of them is a byte or two. Nothing is ever evicted. What belongs to one
    request alone never gets there, so that nobody can find out by lengths what others have sent.
    """

    __slots__ = ("_entered", "_known", "_limit", "_size", "_told")

    def __init__(self) -> None:
        self._known: dict[RequestHead, bytes] = {}
        self._entered: dict[tuple[bytes, bytes], int] = {}  # the number of those before
        self._size = 0
        self._limit = DEFAULT_TABLE
        self._told = True

    def limit_table(self, size: int) -> None:
        """The peer keeps a table of `size` bytes at most, from now on."""
        size = min(size, DEFAULT_TABLE)
        if size != self._limit:
            self._limit = size
            self._told = False
            self._known.clear()
            self._entered.clear()
            self._size = 0

    def block(self, head: RequestHead) -> bytes:
        """The fields of a head; those of one request alone may follow."""
        return self._known.get(head) or self._write(head)

    def _write(self, head: RequestHead) -> bytes:
        start = b""
        if not self._told:
            # Through 0, which empties it; at most two may begin a block (section 4.2).
            self._told = True
            start = integer(0, 5, 0x20) + (integer(self._limit, 5, 0x20) if self._limit else b"")
        before = len(self._entered)
        block = start + b"".join([self._field(field) for field in head.fields])
        if len(self._entered) != before:
            self._known.clear()  # what was entered before has another index now
        elif not start:
            self._known[head] = block
        return block

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
