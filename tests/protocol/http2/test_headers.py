"""Header blocks: repeated ones are decoded once; written ones are decoded by the peer."""

from collections import deque

from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.grpc import TIMING_FIELD
from headrace.protocol.http2.headers import (
    BlockReader,
    Headers,
    header_block,
    literal,
)

LIMIT = 1 << 16


class Reading:
    """A reader and every block it has decoded."""

    def __init__(self) -> None:
        self.seen: list[Headers] = []
        self.reader = BlockReader(self._interpret, LIMIT, TIMING_FIELD)

    def _interpret(self, headers: Headers) -> Headers:
        self.seen.append(headers)
        return headers


def test_a_trailing_timing_header_is_ignored() -> None:
    reading, encoder = Reading(), Encoder()
    first = encoder.encode([("grpc-status", "0")])
    again = encoder.encode([("grpc-status", "0")])
    for status in (first, again, again):
        for value in (b"queue;dur=1e-6", b"queue;dur=200e-6", b""):
            block = status + literal(b"server-timing", value)
            [field] = reading.reader.read(block)
            assert tuple(field) == (b"grpc-status", b"0")
            status = again  # the first one has entered it into the table
    assert len(reading.seen) == 2


def test_a_timing_header_in_another_place_is_read() -> None:
    reading = Reading()
    timing, status = literal(b"server-timing", b"x"), literal(b"grpc-status", b"0")
    for block in (timing + status, status + timing + status, timing):
        assert (b"server-timing", b"x") in [tuple(field) for field in reading.reader.read(block)]


# --- writing


FIELDS = st.tuples(
    st.sampled_from([b":path", b"a", b"authorization", b"x-long"]),
    st.sampled_from([b"", b"1", b"/a/b", b"y" * 200, b"z" * 3000]),
)


@given(st.lists(FIELDS | st.sampled_from([(b":status", b"200"), (b":method", b"POST")])))
def test_any_headers(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = Decoder()
    found = decoder.decode(header_block(fields) + literal(b"a", b"b"), raw=True)
    assert [tuple(field) for field in found] == [*fields, (b"a", b"b")]
    assert decoder.header_table.dynamic_entries == deque()
