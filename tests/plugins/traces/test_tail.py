"""Tail sampling: what is passed on, and in which order."""

from headrace.engine.tracing import Item
from headrace.observability.trace_settings import Sampler, TraceSettings
from headrace.observability.traces import Trace
from headrace.plugins.traces.tail import TailSink

SAMPLER = Sampler(TraceSettings(timestamps=True))


class PassedOn:
    """A sink that records."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.closed = 0.0

    def put(self, item: Item) -> None:
        self.items.append(item)

    def close(self, seconds: float) -> None:
        self.closed = seconds


def trace(number: int, root: int = 0, **known: bool) -> Trace:
    made = Trace(number, root, SAMPLER, "" if root else "HTTP", "m", "", 0, root=root)
    made.picked = known.get("picked", False)
    made.kept, made.last = known.get("kept", False), known.get("last", False)
    return made


def test_calls_wait_for_their_request() -> None:
    out = PassedOn()
    sink = TailSink(out)
    first, second, other = trace(2, 1), trace(3, 1), trace(5, 4)
    for one in (first, other, second):
        sink.put(one)
    assert out.items == []
    sink.put(dropped := trace(4))
    sink.put(kept := trace(1, kept=True))
    assert out.items == [first, second, kept]
    sink.put(late := trace(6, 1))  # a call that outlives its request
    sink.put(trace(7, dropped.number))
    assert out.items[3:] == [late]
    sink.close(3)
    assert out.closed == 3


def test_picked_traces_and_samplers_pass() -> None:
    out = PassedOn()
    sink = TailSink(out)
    items: list[Item] = [trace(2, 1, picked=True), SAMPLER, trace(1, picked=True)]
    for item in items:
        sink.put(item)
    assert out.items == items


def test_the_end_of_a_sampler_is_told_if_its_last_trace_is_dropped() -> None:
    out = PassedOn()
    sink = TailSink(out)
    sink.put(trace(1, last=True))
    assert out.items == [SAMPLER]


def test_waiting_traces_are_bounded() -> None:
    out = PassedOn()
    sink = TailSink(out, most=3)
    calls = [trace(number, root) for number, root in ((11, 1), (12, 1), (21, 2), (22, 2))]
    for item in calls:
        sink.put(item)
    for root in (1, 2):
        sink.put(trace(root, kept=True))
    assert [item.number for item in out.items if isinstance(item, Trace)] == [1, 21, 22, 2]
