"""What is in which file, and when."""

import json
import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.engine.tracing import Item, TraceThread
from headrace.observability.trace_settings import Sampler, TraceSettings
from headrace.observability.traces import Trace
from headrace.plugins.traces.files import TraceFiles

FOREVER = TraceSettings(timestamps=True)
THREE = TraceSettings(timestamps=True, count=3)
EVERY_TWO = TraceSettings(timestamps=True, log_frequency=2)


def traces(sampler: Sampler, *numbers: int, last: int = 0) -> list[Item]:
    return [
        Trace(n, 0, sampler, "HTTP", "m", "", 0, last=n == last) for n in numbers
    ]  # fmt: skip


def found(folder: Path) -> dict[str, list[int]]:
    """The numbers of the traces in each file, which must be JSON."""
    return {
        path.name: [entry["id"] for entry in json.loads(path.read_text())]
        for path in sorted(folder.iterdir())
    }


def test_the_one_file_is_complete_whenever_it_is_looked_at(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(FOREVER)
    (tmp_path / "t").write_text("what was there before, and longer than what comes")
    files.write(traces(sampler, 1, 2))
    assert found(tmp_path) == {"t": [1, 2]}
    files.write(traces(sampler, 3))
    assert found(tmp_path) == {"t": [1, 2, 3]}
    files.close()
    assert found(tmp_path) == {"t": [1, 2, 3]}


def test_a_numbered_file_for_every_so_many(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(EVERY_TWO)
    files.write(traces(sampler, 1))
    assert found(tmp_path) == {}
    files.write(traces(sampler, 2, 3, 4, 5))
    assert found(tmp_path) == {"t.0": [1, 2], "t.1": [3, 4]}
    files.write([sampler])
    assert found(tmp_path) == {"t.0": [1, 2], "t.1": [3, 4], "t.2": [5]}


def test_a_numbered_file_when_a_count_is_reached(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(THREE)
    files.write(traces(sampler, 1, 2))
    assert found(tmp_path) == {}
    files.write(traces(sampler, 3, last=3))
    assert found(tmp_path) == {"t.0": [1, 2, 3]}


def test_the_one_file_for_a_count_that_is_not_reached(tmp_path: Path) -> None:
    files, counted, others = TraceFiles(tmp_path / "t"), Sampler(THREE), Sampler(FOREVER)
    files.write([*traces(counted, 1, 2), *traces(others, 3)])
    assert found(tmp_path) == {"t": [3]}
    files.write([counted])
    assert found(tmp_path) == {"t": [3, 1, 2]}


def test_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    files, counted, often = TraceFiles(tmp_path / "t"), Sampler(THREE), Sampler(EVERY_TWO)
    files.write([*traces(counted, 1), *traces(often, 2)])
    files.close()
    assert found(tmp_path) == {"t": [1], "t.0": [2]}


def test_what_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, sampler = TraceFiles(tmp_path / "later" / "t"), Sampler(FOREVER)
    with caplog.at_level(logging.ERROR):
        files.write(traces(sampler, 1))
        files.write(traces(sampler, 2))
    [record] = caplog.records
    assert "cannot write traces to" in record.getMessage()
    assert "No such file or directory" in record.getMessage()
    (tmp_path / "later").mkdir()
    files.write(traces(sampler, 3))
    assert found(tmp_path / "later") == {"t": [3]}


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """What is written beyond `size` bytes of a file fails, after what fits, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, room: int) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(FOREVER)
    files.write(traces(sampler, 1))
    with files_at_most((tmp_path / "t").stat().st_size + room):
        files.write(traces(sampler, *range(100, 200)))
        assert found(tmp_path) == {"t": [1]}
    files.write(traces(sampler, 2))
    assert found(tmp_path) == {"t": [1, 2]}


def test_a_full_disk_leaves_no_part_of_a_numbered_file(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(EVERY_TWO)
    with files_at_most(20):
        files.write(traces(sampler, 1, 2))
    files.write(traces(sampler, 3, 4))
    assert found(tmp_path) == {"t.1": [3, 4]}


def test_what_waits_for_its_numbered_file_is_written_before_it_is_too_much(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path / "t", held_bytes=500)
    sampler = Sampler(TraceSettings(timestamps=True, log_frequency=2**32 - 1))
    for number in range(100):
        files.write(traces(sampler, number))
    kept = [number for numbers in found(tmp_path).values() for number in numbers]
    assert set(kept) >= set(range(80))
    files.close()
    assert sorted(n for numbers in found(tmp_path).values() for n in numbers) == list(range(100))


class Slow:
    """A writer that waits until it may go on, and remembers what it got."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.written: list[Item] = []
        self.closed = False

    def write(self, items: object) -> None:
        assert isinstance(items, list)
        self.begun.set()
        self.go.wait(30)
        self.written += items

    def close(self) -> None:
        self.closed = True


def test_the_thread_writes_all_before_it_ends() -> None:
    writer = Slow()
    writer.go.set()
    thread = TraceThread(writer)
    made = traces(Sampler(FOREVER), *range(100))
    for item in made:
        thread.put(item)
    thread.close(30)
    assert writer.written == made
    assert writer.closed


def test_what_is_too_much_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    writer = Slow()
    thread = TraceThread(writer, most=2)
    sampler = Sampler(FOREVER)
    made = traces(sampler, *range(9))
    thread.put(made[0])
    assert writer.begun.wait(30)
    for item in [*made[1:], sampler]:  # the end of a sampler is never dropped
        thread.put(item)
    writer.go.set()
    thread.close(30)
    assert writer.written == [*made[:3], sampler]
    assert "6 traces so far were dropped" in caplog.text


def test_a_thread_that_had_nothing_to_do_was_never_there() -> None:
    before = threading.active_count()
    thread = TraceThread(Slow())
    assert threading.active_count() == before
    thread.close(0)


class Faulty(Slow):
    """A writer with a bug."""

    def write(self, items: object) -> None:
        super().write(items)
        raise MemoryError


def test_a_fault_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    writer = Faulty()
    writer.go.set()
    thread = TraceThread(writer)
    made = traces(Sampler(FOREVER), 1, 2)
    thread.put(made[0])
    assert writer.begun.wait(30)
    thread.put(made[1])
    thread.close(30)
    assert writer.written == made
    assert writer.closed
    assert "bug while writing traces" in caplog.text
