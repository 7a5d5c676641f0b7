"""HTTP/2 header blocks that repeat: encoded once, decoded once."""

from collections.abc import Sequence

from hpack import Decoder, Encoder, HPACKError

from benchmarks.wire import ProtocolError

Fields = dict[bytes, bytes]

_MAX_REMEMBERED = 256
_TIMING = b"\x00\x0dserver-timing"  # the name of a literal that changes no table


class RequestBlocks:
    """The same headers for every request.

    The first block fills the server's table; from then on a block has indexed fields alone.
    """

    def __init__(self, headers: Sequence[tuple[str, str]]) -> None:
        self._headers = headers
        self._encoder = Encoder()
        self._repeated = b""

    def limit_table(self, size: int) -> None:
        """The server keeps a table of at most `size`; only before the first block."""
        self._encoder.header_table_size = min(size, 4096)

    def next(self) -> bytes:
        """The block of the next request."""
        if self._repeated:
            return self._repeated
        first = self._encoder.encode(self._headers)
        self._repeated = self._encoder.encode(self._headers)
        return first


class AnswerBlocks:
    """Decodes blocks, and remembers them while the table that they refer to stays the same."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._remembered: dict[bytes, Fields] = {}

    def fields(self, block: bytes) -> Fields:
        """The fields of a block, but for `server-timing` in the end; raises `ProtocolError`."""
        cut = block.find(_TIMING)
        start = cut + len(_TIMING)
        if cut > 0 and start < len(block) == start + 1 + (block[start] & 0x7F):
            block = block[:cut]
        known = self._remembered.get(block)
        if known is not None:
            return known
        changes = changes_table(block)
        if changes or len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        try:
            fields = dict(self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise ProtocolError(f"bad header block: {error}") from None
        if not changes:
            self._remembered[block] = fields
        return fields


def changes_table(block: bytes) -> bool:
    """True if decoding this block changes the table that later blocks refer to."""
    position = 0
    while position < len(block):
        first = block[position]
        if first & 0x80:  # indexed
            _, position = _integer(block, position, 7)
        elif first & 0x60:  # a literal that is added to the table, or a new size of the table
            return True
        else:  # a literal that is not added: its name as an index or in full, then its value
            index, position = _integer(block, position, 4)
            for _ in range(1 if index else 2):
                length, position = _integer(block, position, 7)
                position += length
    return False


def _integer(block: bytes, position: int, bits: int) -> tuple[int, int]:
    """A number with a prefix of so many bits, and the position behind it (RFC 7541, 5.1)."""
    try:
        limit = (1 << bits) - 1
        value = block[position] & limit
        position += 1
        if value < limit:
            return value, position
        shift = 0
        while True:
            byte = block[position]
            position += 1
            value += (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value, position
    except IndexError:
        raise ProtocolError("a header block ends within a number") from None
