"""Mutated client frames: no exception, bounded memory, a reason for every end.

HEADRACE_FUZZ_FRAMES sets the number of frames of the slow test, HEADRACE_FUZZ_SEED the first
seed. Of the branches that 200 000 frames reach, the last are reached after 150 000.
"""

import gc
import os
import random
import sys
from time import process_time

import pytest
from hpack import Encoder

from headrace.protocol.http2.protocol import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Limits,
)
from tests.protocol.http2.peer import REQUEST, Server, build, padded, parse, settings

FRAMES = int(os.environ.get("HEADRACE_FUZZ_FRAMES", "200000"))
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "1"))
LIMITS = Limits(
    streams=20, stream_window=20_000, connection_window=80_000, frame=16_384, header_block=2_000,
    header_list=4_000,
)  # fmt: skip
_HELD = 200_000  # bytes of a connection with all referenced objects
_PIECE_SECS = 1.0


class Client:
    """Writes mostly valid frames, and mutates some."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.encoder = Encoder()
        self.next = 1

    def frame(self) -> bytes:
        """One or two frames."""
        dice = self.dice
        recent = max(1, self.next - 2 * dice.randrange(1, 6))
        if self.next == 1:
            return self.headers()
        kind = dice.choices(range(10), (30, 30, 2, 4, 3, 0.02, 3, 0.5, 8, 0.02))[0]
        if kind == HEADERS:
            return self.headers()
        if kind == DATA:
            data = bytes(dice.choice((0, 1, 5, 100, 3000)))
            ends = dice.choice((0, 0, END_STREAM))
            if dice.random() < 0.2:
                return padded(DATA, ends, recent, data, dice.randrange(256))
            return build(DATA, ends, recent, data)
        if kind == SETTINGS:
            values = {1: (0, 50, 4096), 2: (0, 1), 4: (0, 100, 65_535), 5: (16_384, 1 << 20)}
            name = dice.choice((1, 2, 3, 4, 4, 5, 6, 9))
            return settings((name, dice.choice(values.get(name, (0, 77)))))
        payloads = {
            PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4, GOAWAY: 12,
        }  # fmt: skip
        stream = 0 if kind in (PING, GOAWAY) else recent
        return build(kind, 0, stream, bytes(payloads.get(kind, 10) - 1) + b"\x40")

    def headers(self) -> bytes:
        """HEADERS of a request."""
        dice = self.dice
        number, self.next = self.next, self.next + 2
        fields = [*REQUEST, ("x", dice.choice("abcdef") * dice.randrange(50))]
        block = self.encoder.encode(dice.sample(REQUEST, 4) if dice.random() < 0.03 else fields)
        ends = dice.choice((0, END_STREAM))
        if dice.random() < 0.1:
            cut = dice.randrange(len(block) + 1)
            head = build(HEADERS, ends, number, block[:cut])
            return head + build(CONTINUATION, END_HEADERS, number, block[cut:])
        if dice.random() < 0.1:
            return padded(HEADERS, END_HEADERS | ends, number, block, dice.randrange(40))
        return build(HEADERS, END_HEADERS | ends, number, block)

    def mutated(self) -> bytes:
        """A mutated frame."""
        dice = self.dice
        frame = bytearray(self.frame())
        what = dice.randrange(6)
        if what == 0:  # a byte of its head
            frame[dice.randrange(9)] = dice.randrange(256)
        elif what == 1 and len(frame) > 9:  # a byte of its payload
            frame[dice.randrange(9, len(frame))] ^= 1 << dice.randrange(8)
        elif what == 2:  # a piece of it is missing
            start = dice.randrange(len(frame))
            del frame[start : start + dice.randrange(1, 9)]
        elif what == 3:  # flags, or the type
            frame[dice.choice((3, 4))] ^= 1 << dice.randrange(8)
        elif what == 4:  # twice
            frame *= 2
        else:  # noise in between
            start = dice.randrange(len(frame) + 1)
            frame[start:start] = dice.randbytes(dice.randrange(1, 20))
        return bytes(frame)


def fuzz(frames: int, seed: int) -> dict[str, int]:
    """Feed `count` mutated frames; counts of the outcomes."""
    dice = random.Random(seed)
    counts = {"mutated": 0, "connections": 0, "answered": 0, "goaway": 0}
    while counts["mutated"] < frames:
        counts["connections"] += 1
        client, server = Client(dice), Server(LIMITS, echo=True, greet=False)
        server.feed(PREFACE, settings())
        rate = dice.choice((0.1, 0.3, 0.7))
        for _ in range(200):
            if dice.random() < rate:
                counts["mutated"] += 1
                data = client.mutated()
            else:
                data = client.frame()
            begun = process_time()
            server.now += 0.01
            cut = dice.randrange(len(data) + 1) if dice.random() < 0.3 else len(data)
            server.feed(data[:cut])
            server.feed(data[cut:])
            assert process_time() - begun < _PIECE_SECS
            sent = parse(server.output(1 + dice.randrange(50_000)))
            counts["answered"] += sum(frame.ends for frame in sent)
            counts["goaway"] += sum(frame.kind == GOAWAY for frame in sent)
            if server.connection.closing:
                break
            check_bounds(server)
        server.connection.lost()
        assert server.connection.streams.open == {}
        assert server.connection.sender.queued == 0
    return counts


def check_bounds(server: Server) -> None:
    """Assert the limits of what the connection holds."""
    connection = server.connection
    assert len(connection.streams.open) <= LIMITS.streams
    assert 0 <= connection.data.window <= LIMITS.connection_window
    assert server.rest <= LIMITS.frame + 9
    assert connection.sender.out == []
    queued = sum(stream.queued for stream in connection.streams.open.values())
    assert connection.sender.queued == queued
    # The echo of a stream is limited by its window and the updates for it.
    assert queued <= sum(len(stream.data) for stream in server.streams.values())


def test_some_mutated_frames() -> None:
    counts = fuzz(8_000, SEED)
    assert counts["answered"] > 50
    assert counts["goaway"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.whole)])
def test_many_mutated_frames(times: int) -> None:
    before = blocks()
    counts = fuzz(FRAMES * times, SEED + times)
    print(counts)
    assert counts["goaway"] > FRAMES * times // 100
    assert blocks() - before < _HELD


def blocks() -> int:
    """Allocated blocks, after a collection: in a large process garbage is collected late."""
    gc.collect()
    return sys.getallocatedblocks()
