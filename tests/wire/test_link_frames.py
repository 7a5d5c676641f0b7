"""Frames between a front end and the engine: what is written is read, whatever else comes is told.

Any bytes at all give frames or `BrokenLink`, and nothing else.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.link_frames import (
    HEADER_SIZE,
    INLINE,
    MAX_SIZE,
    BrokenLink,
    Flag,
    Frame,
    FrameReader,
    Kind,
    frame,
    header,
)
from tests.wire.strategies import PROPERTY

frames = st.tuples(
    st.sampled_from(Kind),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=20),
    st.binary(max_size=40),
    st.integers(0, 127).map(lambda flags: flags & ~Flag.SHARED),
)


def read(pieces: Iterator[bytes]) -> list[Frame]:
    """All frames of what comes piece by piece."""
    reader = FrameReader()
    return [found for piece in pieces for found in reader.feed(piece)]


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """`data` in pieces of these sizes over and over."""
    position = turn = 0
    while position < len(data):
        size = sizes[turn % len(sizes)]
        yield data[position : position + size]
        position += size
        turn += 1


@PROPERTY
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_what_is_written_is_read(given: list[Any], sizes: list[int]) -> None:
    data = b"".join(frame(*one) for one in given)
    found = [
        (f.kind, f.number, f.meta, f.buffer[f.start : f.stop], f.flags)
        for f in read(cut(data, sizes))
    ]
    assert found == given


@PROPERTY
@given(st.lists(frames, max_size=4), st.data())
def test_a_frame_comes_when_it_is_whole(given: list[Any], data: st.DataObject) -> None:
    written = [frame(*one) for one in given]
    whole = b"".join(written)
    end = data.draw(st.integers(0, len(whole)))
    complete = sum(1 for n in range(len(written)) if sum(map(len, written[: n + 1])) <= end)
    assert len(FrameReader().feed(whole[:end])) == complete


@PROPERTY
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_give_frames_or_a_broken_link(pieces: list[bytes]) -> None:
    reader = FrameReader()
    try:
        for piece in pieces:
            for found in reader.feed(piece):
                assert found.shared or found.start <= found.stop <= len(found.buffer)
    except BrokenLink:
        pass


def test_a_long_frame_has_its_parts_elsewhere() -> None:
    head = header(Kind.INFER, Flag.SHARED, 7, 30, 1 << 20)
    assert len(head) == HEADER_SIZE
    assert FrameReader().feed(head) == [
        Frame(Kind.INFER, Flag.SHARED, 7, b"", b"", 30, 30 + (1 << 20), True)
    ]


@pytest.mark.parametrize(
    "data",
    [
        header(0, 0, 1, 0, 0),
        header(250, 0, 1, 0, 0),
        header(Kind.INFER, 0, 1, 0, INLINE + 1),
        header(Kind.INFER, 0, 1, INLINE, 1),
        header(Kind.INFER, Flag.SHARED, 1, 1, MAX_SIZE),
    ],
    ids=["kind 0", "kind 250", "long rest", "long together", "long file"],
)
def test_nonsense(data: bytes) -> None:
    with pytest.raises(BrokenLink):
        FrameReader().feed(data)
