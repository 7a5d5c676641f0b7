"""Mutated server frames: no exception, one end per call, bounded memory."""

import random

import pytest

from headrace.protocol.http2.protocol import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Limits,
    Setting,
)
from tests.protocol.http2.peer import build, padded, settings
from tests.protocol.http2.server_peer import GOOD, OK, Client, KeptCall, message_of

LIMITS = Limits(stream_window=20_000, connection_window=80_000, frame=16_384)
_ROUNDS = 300


class Server:
    """Writes mostly valid frames, and mutates some."""

    def __init__(self, dice: random.Random, client: Client) -> None:
        self.dice = dice
        self.client = client

    def frames(self) -> bytes:
        dice, client = self.dice, self.client
        number = max(1, client.connection.streams.last - 2 * dice.randrange(4))
        message = message_of(bytes(dice.choice((0, 1, 100, 5000))), dice.random() < 0.05)
        what = dice.randrange(13)
        if what < 5:
            return client.response(number, message[5:])
        if what == 5:
            return client.headers(number, dice.choice((GOOD, OK)), dice.random() < 0.5)
        if what == 6:
            return padded(DATA, dice.choice((0, END_STREAM)), number, message, 10)
        if what == 7:
            cut = dice.randrange(len(message))
            head = client.headers(number, GOOD) + build(DATA, 0, number, message[:cut])
            return head + build(DATA, 0, number, message[cut:])
        if what == 8:
            name = dice.choice(list(Setting))
            return settings((name, dice.choice((0, 1, 100, 16_384, 65_535))))
        if what == 9:
            return build(RST_STREAM, 0, number, bytes((0, 0, 0, dice.randrange(16))))
        if what == 10:
            return build(WINDOW_UPDATE, 0, dice.choice((0, number)), b"\0\0\4\0")
        if what == 11:
            return build(PING, dice.choice((0, 1)), 0, bytes(8))
        if dice.random() < 0.2:
            return build(GOAWAY, 0, 0, number.to_bytes(4) + bytes(4) + b"bye")
        block = client.encoder.encode(GOOD)
        head = build(HEADERS, 0, number, block[:1])
        return head + build(CONTINUATION, END_HEADERS, number, block[1:])

    def mutated(self) -> bytes:
        """A mutated frame."""
        dice, frames = self.dice, bytearray(self.frames())
        what = dice.randrange(5)
        if what == 0:
            frames[dice.randrange(len(frames))] = dice.randrange(256)
        elif what == 1:
            del frames[dice.randrange(len(frames))]
        elif what == 2:
            frames *= 2
        elif what == 3:
            start = dice.randrange(len(frames) + 1)
            frames[start:start] = dice.randbytes(dice.randrange(1, 20))
        else:
            frames[3] = dice.choice((DATA, HEADERS, SETTINGS, PUSH_PROMISE, 77))
        return bytes(frames)


@pytest.mark.parametrize("seed", range(4))
def test_frames_with_mistakes(seed: int) -> None:
    dice = random.Random(seed)
    ended = 0
    for _ in range(_ROUNDS):
        client = Client(LIMITS)
        server = Server(dice, client)
        calls: list[KeptCall] = []
        for _ in range(60):
            streams = client.connection.streams
            if streams.room > 0 and len(streams.open) < 5:
                calls.append(client.call(bytes(dice.choice((0, 10, 40_000)))))
            client.output(dice.choice((100, 100_000)))
            data = server.mutated() if dice.random() < 0.15 else server.frames()
            cut = dice.randrange(len(data) + 1)
            client.feed(data[:cut])
            if calls and dice.random() < 0.05:
                dice.choice(calls).cancel()
            client.feed(data[cut:])
            client.now += 0.01
            if client.connection.closing:
                break
        client.connection.lost()
        assert all(call.finished for call in calls)
        assert all(len(call.ends) <= 1 for call in calls)
        assert client.connection.sender.queued == 0
        ended += client.connection.failure != ""
    assert ended
