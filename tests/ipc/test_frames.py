"""Frames between server and worker: round trip, and invalid frames."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ipc.frames import (
    ALIGNMENT,
    HEADER_SIZE,
    IN_FILE,
    INLINE,
    MAX_SLOTS,
    BrokenFrame,
    FrameKind,
    FrameReader,
    batch_struct,
    frame,
    lay_out,
    offsets,
    pack_header,
    pack_ids,
    pack_numbers,
    pack_places,
    result_struct,
    unpack_batch,
    unpack_layout,
    unpack_numbers,
    unpack_places,
    unpack_sizes,
    unpack_times,
)


def pack_batch(
    first: int,
    form: int,
    rows: Sequence[int],
    sizes: Sequence[int],
    ids: Sequence[str] = (),
    extras: bytes = b"",
) -> bytes:
    """The meta of EXECUTE, as the server writes it."""
    names = pack_ids(ids) if ids else b""
    fixed = first, len(names), len(extras), form, len(rows)
    return batch_struct(len(rows), len(sizes)).pack(*fixed, *rows, *sizes) + names + extras


requests = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=20)), min_size=1)


@given(st.integers(0, 2**32 - 1), requests, st.binary(), st.lists(st.integers(0, 2**64 - 1)))
def test_a_batch(form: int, given: list[tuple[int, str]], extras: bytes, sizes: list[int]) -> None:
    rows, ids = [row for row, _ in given], [id for _, id in given]
    given_ids = ids if any(ids) else []
    first, layout, found_ids, found_extras = unpack_batch(
        pack_batch(2**40, form, rows, sizes, given_ids, extras)
    )
    assert (first, found_ids, found_extras) == (2**40, given_ids, extras)
    found_form, found_rows, found_sizes = unpack_layout(layout)
    assert (found_form, list(found_rows), list(found_sizes)) == (form, rows, sizes)


def test_a_layout_is_reused_with_other_metadata() -> None:
    plain = unpack_batch(pack_batch(1, 5, [1, 2], [12]))
    special = unpack_batch(pack_batch(2, 5, [1, 2], [12], ["", "id"], b"{}"))
    assert plain.layout == special.layout
    with pytest.raises(BrokenFrame, match="10 bytes for blocks of 9"):
        offsets([9], 10)


@given(st.binary(max_size=200))
def test_invalid_batches(data: bytes) -> None:
    with suppress(BrokenFrame):
        unpack_batch(data)
    with suppress(BrokenFrame):
        unpack_layout(data)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**64 - 1)))
def test_a_result(form: int, sizes: list[int]) -> None:
    meta = result_struct(len(sizes)).pack(5, 2**63, form, *sizes)
    assert unpack_times(meta) == (5, 2**63)
    assert unpack_sizes(meta) == (form, sizes)


@pytest.mark.parametrize("data", [b"", b"x" * 15, b"x" * 19, b"x" * 27])
def test_invalid_results(data: bytes) -> None:
    with pytest.raises(BrokenFrame):
        unpack_sizes(data)


places = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)))


@given(places, st.binary(), st.integers(0, 2**64 - 1), st.binary())
def test_places(given: list[tuple[int, int]], beside: bytes, size: int, rest: bytes) -> None:
    meta = pack_places(given, beside, size) + rest
    assert unpack_places(meta) == (given, beside, size, rest)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_numbers(given: list[int]) -> None:
    assert list(unpack_numbers(pack_numbers(given))) == given


def test_invalid_numbers() -> None:
    with pytest.raises(BrokenFrame):
        unpack_numbers(b"12345")


@given(st.lists(st.lists(st.binary(max_size=200))))
def test_blocks(blocks: list[list[bytes]]) -> None:
    sizes, pieces, total = lay_out(blocks)
    data = b"".join(bytes(piece) for piece in pieces)
    assert len(data) == total
    starts = offsets(sizes, total)
    assert all(start % ALIGNMENT == 0 for start in starts)
    found = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert found == [b"".join(block) for block in blocks]


@given(st.lists(st.binary(max_size=300), min_size=1), st.lists(st.integers(1, 50)))
def test_frames_in_pieces(metas: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(FrameKind.LOG, meta, slot % 2) for slot, meta in enumerate(metas))
    reader = FrameReader(FrameKind)
    found = []
    position = 0
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[position : position + cut])
        position += cut
    wanted = [(slot % 2, meta) for slot, meta in enumerate(metas)]
    assert [(header.number, meta) for header, meta, _ in found] == wanted


@given(st.binary(max_size=200))
def test_invalid_frames(data: bytes) -> None:
    with suppress(BrokenFrame):
        FrameReader(FrameKind).feed(data)


def test_frames_that_a_worker_may_not_send() -> None:
    with pytest.raises(BrokenFrame):
        FrameReader(FrameKind, 100).feed(frame(FrameKind.LOG, bytes(101)))
    with pytest.raises(BrokenFrame):
        FrameReader(FrameKind, most_number=MAX_SLOTS).feed(
            frame(FrameKind.LOG, b"", number=MAX_SLOTS)
        )
    with pytest.raises(BrokenFrame):
        FrameReader(FrameKind).feed(pack_header(FrameKind.RESULT, 0, 0, 0, INLINE + 1))
    [(header, meta, data)] = FrameReader(FrameKind).feed(
        pack_header(FrameKind.RESULT, IN_FILE, 1, 0, 1 << 40)
    )
    assert (header.data, meta, data) == (1 << 40, b"", b"")
    assert HEADER_SIZE < 64
