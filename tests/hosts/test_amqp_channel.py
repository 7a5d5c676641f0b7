"""Frames of AMQP that go past the library, beside its own codec."""

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header

from headrace.plugins.inboxes.amqp_channel import (
    AmqpLink,
    ChannelFrames,
    decode_properties,
    encode_properties,
)
from headrace.plugins.inboxes.broker import RecordRefused

OURS, THEIRS = 3, 4  # channels
TEXT = st.text(st.characters(codec="utf-8"), max_size=60)
HEADERS = st.dictionaries(st.text("abc-", min_size=1, max_size=8), TEXT, max_size=3)


def encoded(frames: Iterable[Any], channel: int = OURS) -> bytes:
    return b"".join(frame.marshal(each, channel) for each in frames)


def content(tag: int, text: bytes, parts: int = 1, **properties: Any) -> list[Any]:
    """The frames of a delivery."""
    size = max(-(-len(text) // parts), 1)
    return [
        commands.Basic.Deliver("consumer", tag, False, "", "queue"),
        header.ContentHeader(0, len(text), commands.Basic.Properties(**properties)),
        *(body.ContentBody(text[at : at + size]) for at in range(0, len(text), size)),
    ]


class Connection:
    """A connection's protocol, with one channel whose frames go past the library."""

    def __init__(self) -> None:
        self.library = asyncio.StreamReader()
        self.link = AmqpLink(self.library)
        self.frames = self.link.channels[OURS] = ChannelFrames()

    def receive(self, data: bytes, seed: int | None = None) -> None:
        """Receive bytes, in parts that the seed decides."""
        parts = random.Random(seed)
        while data:
            size = len(data) if seed is None else parts.randint(1, 20)
            self.link.data_received(data[:size])
            data = data[size:]

    async def left(self) -> bytes:
        """Bytes that the library gets."""
        self.library.feed_eof()
        return await self.library.read()


@given(TEXT.filter(bool), HEADERS, TEXT.filter(bool))
def test_properties_are_those_of_the_library(kind: str, headers: dict[str, str], name: str) -> None:
    found = header.ContentHeader()
    ours = encode_properties(kind.encode(), headers, name)
    found.unmarshal(header.ContentHeader(0, 7).marshal()[:12] + ours)
    properties = found.properties
    assert (properties.content_type, properties.headers) == (kind, headers)
    assert (properties.message_id, properties.delivery_mode) == (name, 2)
    theirs = commands.Basic.Properties(
        content_type=kind, content_encoding="gzip", headers=headers, priority=3, app_id="a"
    )
    assert decode_properties(theirs.marshal()) == (kind.encode(), headers)
    assert decode_properties(commands.Basic.Properties(app_id="a").marshal()) == (b"", {})


def test_a_long_name_is_known_by_its_end() -> None:
    found = header.ContentHeader()
    ours = encode_properties(b"", {}, "ü" * 300 + ":7")
    found.unmarshal(header.ContentHeader().marshal()[:12] + ours)
    assert found.properties.message_id == "ü" * 126 + ":7"
    with pytest.raises(RecordRefused, match="256 bytes"):
        encode_properties(b"x" * 256, {}, "")


@pytest.mark.parametrize("seed", [None, *range(10)])
async def test_contents_arrive_and_the_library_gets_all_else(seed: int | None) -> None:
    connection = Connection()
    others = [
        encoded([commands.Channel.OpenOk()], OURS),
        encoded(content(1, b"theirs"), THEIRS),
        encoded([commands.Basic.ConsumeOk("consumer")], OURS),
    ]
    connection.receive(
        others[0]
        + encoded(content(1, b"one"))
        + encoded(content(2, b"", content_type="text/plain")[:1])
        + others[1]  # between the frames of one
        + encoded(content(2, b"", content_type="text/plain")[1:])
        + encoded(content(3, b"three" * 100, parts=4))
        + others[2],
        seed,
    )
    await connection.frames.some_arrived()
    arrived = [(tag, text) for tag, _, text in connection.frames.arrived]
    assert arrived == [(1, b"one"), (2, b""), (3, b"three" * 100)]
    assert decode_properties(connection.frames.arrived[1][1]) == (b"text/plain", {})
    heartbeat = b"\x08\0\0\0\0\0\0\xce"  # which the library needs, since it does not see contents
    assert (await connection.left()).replace(heartbeat, b"") == b"".join(others)


async def test_confirmations_count_in_any_order() -> None:
    connection = Connection()
    counts = []
    for tag, multiple in ((1, False), (3, False), (4, False), (2, False), (7, True), (8, False)):
        connection.receive(encoded([commands.Basic.Ack(tag, multiple)]))
        counts.append(await connection.frames.confirmed_beyond(0))
    assert counts == [1, 1, 1, 4, 7, 8]


@pytest.mark.parametrize(
    "problem",
    [
        [commands.Basic.Nack(2)],
        [
            commands.Basic.Return(312, "NO_ROUTE", "", "queue"),
            *content(0, b"answer")[1:],
            commands.Basic.Ack(2),
        ],
    ],
    ids=["not kept", "returned"],
)
async def test_a_record_that_is_not_kept_is_not_confirmed(problem: list[Any]) -> None:
    connection = Connection()
    connection.receive(encoded([commands.Basic.Ack(1), *problem]))
    assert await connection.frames.confirmed_beyond(0) == 1
    with pytest.raises(ConnectionError):
        await connection.frames.confirmed_beyond(1)
    assert not connection.frames.arrived


async def test_bytes_that_are_no_frame_are_the_library_s() -> None:
    connection = Connection()
    connection.receive(b"AMQP\0\0\x09\x01")
    assert await connection.left() == b"AMQP\0\0\x09\x01"
