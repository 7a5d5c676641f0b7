import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import (
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    Unsupported,
)
from headrace.protocol.compression import (
    choose_encoding,
    compress,
    decompress,
    decompress_small,
    too_large,
)
from tests.protocol.strategies import PROPERTY, memory_within, mutations, outcome

LIMIT = 1 << 24
MIB = 1 << 20
encodings = st.sampled_from(["gzip", "deflate"])


@PROPERTY
@given(st.binary(max_size=200), encodings)
def test_compression_round_trip(body: bytes, encoding: str) -> None:
    assert decompress(compress(body, encoding), encoding, LIMIT) == body


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 3 * MIB])
def test_large_bodies_round_trip(encoding: str, size: int) -> None:
    assert decompress(compress(bytes(size), encoding), encoding, LIMIT) == bytes(size)


@pytest.mark.parametrize(("body", "encoding"), [
    (b"hello", ""), (b"hello", "identity"), (gzip.compress(b"hello", mtime=0), "gzip"),
    (gzip.compress(b"hello", mtime=0), " GZip "), (zlib.compress(b"hello"), "deflate"),
    (zlib.compress(b"hello", 0), "deflate"),
    (gzip.compress(b"hello", mtime=0), "deflate"),  # clients confuse the two
    (zlib.compress(b"hello"), "gzip"),
])  # fmt: skip
def test_content_encodings(body: bytes, encoding: str) -> None:
    assert decompress(body, encoding, LIMIT) == b"hello"


def test_unknown_encodings_are_unsupported() -> None:
    for encoding in ("br", "zstd", "gzip, deflate", "x"):
        with pytest.raises(Unsupported, match="Unsupported compression type"):
            decompress(b"hello", encoding, LIMIT)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_ends_where_its_marker_says(encoding: str) -> None:
    whole = compress(b"some tensor data, some tensor data", encoding)
    for size in range(len(whole)):
        with pytest.raises(InvalidRequest):
            decompress(whole[:size], encoding, LIMIT)
    # A second gzip member would otherwise be dropped silently.
    with pytest.raises(InvalidRequest, match="after its end marker"):
        decompress(whole + whole, encoding, LIMIT)


@PROPERTY
@given(st.data(), encodings)
def test_a_damaged_body_is_refused_or_harmless(data: st.DataObject, encoding: str) -> None:
    body = data.draw(mutations(compress(b"some tensor data, some tensor data", encoding)))
    assert isinstance(outcome(decompress, body, encoding, LIMIT), memoryview | InvalidRequest)


@PROPERTY
@given(st.binary(), encodings)
def test_random_bytes_are_refused(body: bytes, encoding: str) -> None:
    assert isinstance(outcome(decompress, body, encoding, LIMIT), bytes | ServerError)


def test_a_preset_dictionary_is_refused() -> None:
    packer = zlib.compressobj(zdict=b"hello")
    with pytest.raises(InvalidRequest, match="not valid deflate"):
        decompress(packer.compress(b"hello") + packer.flush(), "deflate", LIMIT)


def test_a_bomb_stops_at_the_limit() -> None:
    packer = zlib.compressobj(1)
    pieces = [packer.compress(bytes(MIB)) for _ in range(64)]
    bomb = b"".join([*pieces, packer.flush()])
    largest = f"maximum allowed value of {2 * MIB} bytes"
    with memory_within(6 * MIB), pytest.raises(PayloadTooLarge, match=largest):
        decompress(bomb, "deflate", 2 * MIB)


def test_a_bomb_for_a_small_message_is_unpacked_no_further_than_its_limit() -> None:
    bomb = compress(bytes(8 * MIB), "gzip")
    with memory_within(MIB // 4), pytest.raises(PayloadTooLarge):
        decompress(bomb, "gzip", 64 << 10, fixed=True)


def test_the_limit_is_exact() -> None:
    for size in (99, 100, 101):
        result = outcome(decompress, compress(bytes(size), "gzip"), "gzip", 100)
        assert result == bytes(size) if size <= 100 else isinstance(result, PayloadTooLarge)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_any_compression_ratio_is_allowed(encoding: str) -> None:
    """A tensor of one value; the limit is on the decompressed size."""
    body = compress(bytes(MIB) * 12, encoding, 9)
    assert len(body) * 900 < 12 * MIB
    assert decompress(body, encoding, LIMIT) == bytes(12 * MIB)


def test_each_piece_is_charged_before_the_next_is_decompressed() -> None:
    counted: list[int] = []

    def charge(nbytes: int) -> None:
        counted.append(nbytes)
        if sum(counted) > 3 * MIB:
            raise Overloaded("as asked")

    assert len(decompress(compress(bytes(2 * MIB), "gzip"), "gzip", LIMIT, charge=charge)) == sum(
        counted
    )
    counted.clear()
    bomb = compress(bytes(64 * MIB), "deflate")
    with memory_within(7 * MIB), pytest.raises(Overloaded):
        decompress(bomb, "deflate", 64 * MIB, charge=charge)
    assert max(counted) <= MIB


@pytest.mark.parametrize("encoding", ["gzip", "deflate", " GZIP "])
@pytest.mark.parametrize(("size", "small"), [(0, True), (64 << 10, True), ((64 << 10) + 1, False)])
def test_small_bodies(encoding: str, size: int, small: bool) -> None:
    packed = compress(bytes(size), encoding.strip().lower())
    assert decompress_small(packed, encoding) == (bytes(size) if small else None)
    assert decompress_small(packed[:-1], encoding) is None
    assert decompress_small(packed + b"x", encoding) is None
    assert decompress_small(b"nonsense", encoding) is None
    assert decompress_small(packed, "br") is None


def test_size_errors_name_limit_size_and_setting() -> None:
    assert "the request body (7 bytes) exceeds" in too_large("request body", 5, 7)
    assert "maximum allowed value of 5 bytes" in too_large("request body", 5)
    assert "--max-request-bytes" in too_large("request body", 5)


@pytest.mark.parametrize(("accept", "chosen"), [
    ("", "identity"), ("gzip", "gzip"), ("deflate", "deflate"), ("GZIP", "gzip"),
    ("gzip, deflate", "gzip"),  # the first of equals
    ("deflate, gzip", "deflate"), ("gzip;q=0.5, deflate;q=0.8", "deflate"),  # the highest weight
    ("gzip;q=0.5, identity", "identity"), ("identity;q=0.5, gzip;q=0.5", "identity"),
    ("br, zstd;q=1, gzip;q=0.1", "gzip"),  # unknown ones are skipped
    ("br", "identity"), ("*", "identity"), ("gzip;q=0", "identity"),
    ("gzip;q=nonsense", "identity"), ("gzip;q=nan", "identity"),
    ("gzip ; level=9 ; Q=0.5 , deflate ; q=0.4", "gzip"), (",,;;=,gzip", "gzip"),
])  # fmt: skip
def test_choose_encoding(accept: str, chosen: str) -> None:
    assert choose_encoding(accept) == chosen


@PROPERTY
@given(st.text() | st.text("gzip, deflate;q=0.19*", max_size=30))
def test_any_accept_encoding_header_is_handled(accept: str) -> None:
    assert choose_encoding(accept) in ("gzip", "deflate", "identity")
