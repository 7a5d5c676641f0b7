"""Header blocks: repeated ones are decoded once; written ones are decoded by the peer."""

from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.http2.headers import (
    BlockReader,
    BlockWriter,
    Headers,
    RepeatedFields,
    literal,
)
from headrace.protocol.http2.protocol import TIMING_FIELD

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
HEADS = st.lists(st.lists(FIELDS, max_size=6).map(RepeatedFields), min_size=1, max_size=5)


@given(HEADS, st.data())
def test_any_order_of_headers_and_limits(heads: list[RepeatedFields], data: st.DataObject) -> None:
    blocks, decoder = BlockWriter(), Decoder()
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.integers(0, 4)) == 0:
            size = data.draw(st.sampled_from([0, 50, 300, 4096, 10_000]))
            blocks.limit_table(size)
            decoder.max_allowed_table_size = size
        if data.draw(st.booleans()):
            found = decoder.decode(blocks.literals([(b":status", b"200"), (b"b", b"2")]), raw=True)
            assert [tuple(field) for field in found] == [(b":status", b"200"), (b"b", b"2")]
        head = data.draw(st.sampled_from(heads))
        own = literal(b"grpc-timeout", b"1S")
        block = blocks.block(head)
        found = decoder.decode(block + own, raw=True)
        assert [tuple(field) for field in found] == [*head.fields, (b"grpc-timeout", b"1S")]
        assert decoder.header_table_size <= 4096
        if head in blocks.short:
            assert blocks.short[head] == block
            assert len(block) == len(head.fields)
