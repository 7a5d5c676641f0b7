"""The thread that writes items: order, limits, and faults of writers."""

import threading

import pytest

from headrace.engine.tracing import Item
from headrace.observability.trace_settings import Sampler, TraceSettings
from headrace.observability.traces import Trace
from headrace.observability.writing import WritingThread

SAMPLER = Sampler(TraceSettings(timestamps=True))


def traces(count: int) -> list[Item]:
    return [Trace(number, 0, SAMPLER, "HTTP", "m", "", 0) for number in range(count)]


def traces_thread(writer: "Slow", most: int = 100) -> WritingThread[Item]:
    def size(item: Item) -> int | None:
        return item.nbytes if isinstance(item, Trace) else None

    return WritingThread(writer, "traces", size, most)


class Slow:
    """A writer that waits until released, and records its traces."""

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


def test_the_thread_writes_everything_before_it_ends() -> None:
    writer = Slow()
    writer.go.set()
    thread = traces_thread(writer)
    made = traces(100)
    for item in made:
        thread.put(item)
    thread.close(30)
    assert writer.written == made
    assert writer.closed


def test_excess_traces_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    writer = Slow()
    thread = traces_thread(writer, 2)
    made = traces(9)
    thread.put(made[0])
    assert writer.begun.wait(30)
    for item in [*made[1:], SAMPLER]:  # the end of a sampler is never dropped
        thread.put(item)
    writer.go.set()
    thread.close(30)
    assert writer.written == [*made[:3], SAMPLER]
    assert "6 traces so far were dropped" in caplog.text


def test_without_traces_no_thread_starts() -> None:
    before = set(threading.enumerate())  # those of earlier tests may end
    thread = traces_thread(Slow())
    assert not set(threading.enumerate()) - before
    thread.close(0)


class Faulty(Slow):
    """A writer that raises."""

    def write(self, items: object) -> None:
        super().write(items)
        raise MemoryError


def test_an_exception_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    writer = Faulty()
    writer.go.set()
    thread = traces_thread(writer)
    made = traces(2)
    thread.put(made[0])
    assert writer.begun.wait(30)
    thread.put(made[1])
    thread.close(30)
    assert writer.written == made
    assert writer.closed
    assert "bug while writing traces" in caplog.text
