"""Header blocks that repeat are interpreted once, whatever their last field says."""

from hpack import Encoder

from headrace.protocol.http2.headers import BlockReader, Headers, literal
from headrace.protocol.http2.protocol import TIMING_FIELD

LIMIT = 1 << 16


class Reading:
    """A reader, and all that it has interpreted."""

    def __init__(self) -> None:
        self.seen: list[Headers] = []
        self.reader = BlockReader(self._interpret, LIMIT, TIMING_FIELD)

    def _interpret(self, headers: Headers) -> Headers:
        self.seen.append(headers)
        return headers


def test_a_timing_in_the_end_is_passed_over() -> None:
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


def test_what_stands_elsewhere_is_read() -> None:
    reading = Reading()
    timing, status = literal(b"server-timing", b"x"), literal(b"grpc-status", b"0")
    for block in (timing + status, status + timing + status, timing):
        assert (b"server-timing", b"x") in [tuple(field) for field in reading.reader.read(block)]
