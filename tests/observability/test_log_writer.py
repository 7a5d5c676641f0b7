"""Log lines whose reader stands still, and what cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.observability.logs import LogWriter

LINE = b"x" * 99 + b"\n"


def note(count: int) -> bytes:
    return b"%d missing\n" % count


def unexpected(error: OSError) -> None:
    raise AssertionError(error)


@contextmanager
def opened(path: str, flags: int = os.O_WRONLY) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_pipe_whose_reader_stands_still() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, note, unexpected)
    lines = [b"line %06d %s\n" % (number, b"y" * 80) for number in range(100_000)]
    for line in lines:
        writer.put(line)
    assert 50_000 < writer.dropped < len(lines)
    data = b""
    while not data.endswith(b" missing\n"):
        data += os.read(reading, 1 << 16)
    writer.put(b"again\n")
    assert os.read(reading, 100) == b"again\n"
    *written, told = data.splitlines(keepends=True)
    assert written == lines[: len(lines) - writer.dropped]
    assert told == note(writer.dropped)
    writer.flush()


def test_a_line_larger_than_the_queue() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, note, unexpected)
    writer.put(b"z" * (8 << 20))
    read = 0
    while read < 8 << 20:
        read += len(os.read(reading, 1 << 20))
    assert writer.dropped == 0


def test_a_flush_waits_for_the_reader() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, note, unexpected)
    for _ in range(100):
        writer.put(LINE)
    writer.flush()
    assert os.read(reading, 1 << 16) == LINE * 100


def test_somebody_has_made_the_pipe_not_block() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = LogWriter(writing, note, unexpected)
    for _ in range(2000):
        writer.put(LINE)
    read = 0
    while read < 2000 * len(LINE):
        read += len(os.read(reading, 1 << 16))
    assert writer.dropped == 0


def test_a_full_device() -> None:
    errors: list[OSError] = []
    with opened("/dev/full") as descriptor:
        writer = LogWriter(descriptor, note, errors.append)
        for _ in range(1000):
            writer.put(LINE)
        writer.flush()
        assert writer.dropped == 1000
        assert [error.strerror for error in errors] == ["No space left on device"]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with opened(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        writer = LogWriter(descriptor, note, unexpected)
        writer.put(LINE)
        writer.flush()
        assert path.read_bytes() == LINE
