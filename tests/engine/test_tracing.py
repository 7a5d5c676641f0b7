"""Tracing: which requests are traced, and the recorded events of every outcome."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.call import (
    NO_CONTEXT,
    Call,
    CallContext,
    CallOptions,
    InferResponse,
    Stage,
    Submit,
    Timing,
)
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, QueueFull, ServerError
from headrace.core.tensors import Tensor
from headrace.engine.tracing import Item, Tracing
from headrace.observability.statistics import VersionStatistics
from headrace.observability.trace_settings import (
    Choice,
    TailRules,
    TraceConfig,
    TraceMode,
    TraceSettings,
)
from headrace.observability.traces import Trace, read_link
from tests.engine import worlds
from tests.engine.worlds import question

ON = TraceSettings(timestamps=True, rate=1)
PARENT = f"00-{7:032x}-{9:016x}-"


@dataclass
class Version:
    """A version that ignores its requests."""

    model: str = "m"
    name: str = "3"
    decoupled: bool = False
    signature: None = None
    direct: None = None
    ready: bool = True
    error: ServerError | None = None
    got: list[Call] = field(default_factory=list)
    cancelled: int = 0
    held: list[bool] = field(default_factory=list)

    def submit(self, call: Call) -> None:
        if self.error is not None:
            raise self.error
        self.got.append(call)
        call.owner = self

    def cancel(self, call: Call) -> None:
        self.cancelled += 1

    def hold(self, call: Call, held: bool) -> None:
        self.held.append(held)


class Door(Call):
    """A door's call with headers."""

    door = "HTTP"

    def __init__(self, headers: dict[str, str] | None = None, link: object = None) -> None:
        super().__init__("m", "", "an id", question().inputs)
        self.context = NO_CONTEXT if link is None else CallContext(trace=str(link))
        self.headers = headers or {}
        self.came: list[Any] = []

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    def respond(self, response: InferResponse, final: bool) -> None:
        self.came.append(response)

    def finish(self) -> None:
        self.came.append(None)

    def fail(self, error: ServerError) -> None:
        self.came.append(error)


class Inner(Door):
    """A call of a model."""

    door = ""


@dataclass
class Kept:
    """Stores traces."""

    items: list[Item] = field(default_factory=list)

    def put(self, item: Item) -> None:
        self.items.append(item)

    def close(self, seconds: float) -> None: ...


class World:
    """Tracing with one model."""

    def __init__(
        self,
        settings: TraceSettings = ON,
        mode: TraceMode = TraceMode.TRITON,
        tail: TailRules | None = None,
    ) -> None:
        self.kept = Kept()
        config = TraceConfig(mode, settings, "file", "url", tail=tail or TailRules())
        self.tracing = Tracing(config, self.kept)
        self.tracing.known = lambda name: name == "m"
        self.version = Version()
        self.statistics = VersionStatistics()

    @property
    def stage(self) -> Submit:
        """The stage before the version, or the version itself."""
        return self.tracing.traced("m", "3", self.statistics, self.version.submit)

    def traced(self) -> bool:
        return self.stage != self.version.submit

    def submit(self, door: Door | None = None) -> Door:
        door = door or Door()
        self.stage(door)
        return door

    def accepted(self, door: Door | None = None) -> Call:
        """The one request given to the version."""
        self.submit(door)
        [call] = self.version.got
        return call

    def traces(self) -> list[Trace]:
        """The finished traces."""
        return [item for item in self.kept.items if isinstance(item, Trace)]


def a_response() -> InferResponse:
    return InferResponse("m", "3", "an id", [], Timing(1, 2, 1))


def names(trace: Trace) -> list[str]:
    return [name for name, _ in trace.times]


def test_untraced_models_have_no_stage() -> None:
    for settings in (TraceSettings(), TraceSettings(True, rate=0), TraceSettings(True, count=0)):
        assert not World(settings).traced()
    world, call = World(), Inner()  # a call of no client
    world.stage(call)
    assert world.version.got == [call]
    assert call.stages is None
    assert world.traces() == []


def test_a_change_is_logged_and_applies_to_the_next_request() -> None:
    world, told = World(TraceSettings(rate=1, count=1)), list[int]()
    world.tracing.changed = lambda: told.append(1)
    assert not world.traced()
    world.tracing.change("m", {"trace_level": ["TIMESTAMPS"]})
    assert world.traced()
    assert len(told) == 1
    world.submit()
    assert len(told) == 2
    world.tracing.change("m", {"trace_level": []})
    assert not world.traced()
    assert len(told) == 3


def test_tracing_ends_at_its_count() -> None:
    world = World(TraceSettings(timestamps=True, rate=2, count=1))
    for _ in range(2):
        world.submit()
    assert not world.traced()
    assert world.tracing.document("m")["trace_count"] == ["0"]
    for request in world.version.got:
        request.pass_response(a_response(), True)
        assert bool(request.context.trace) == (request is world.version.got[1])
    [trace] = world.traces()
    assert trace.last


def test_one_response_or_many_and_an_end() -> None:
    world, door = World(), Door()
    ticket = world.submit(door)
    [call] = world.version.got
    call.pass_response(response := a_response(), True)
    ticket.hold(True)
    assert door.came == [response]
    assert world.version.held == [True]
    many = world.submit()
    for _ in range(2):
        many.pass_response(a_response(), False)
    many.pass_end()
    first, second = world.traces()
    assert (first.number, first.model, first.version, first.request_id) == (1, "m", 3, "an id")
    times = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "INFER_RESPONSE_COMPLETE",
             "HTTP_SEND_START", "HTTP_SEND_END", "REQUEST_END"]  # fmt: skip
    assert names(first) == times
    assert not first.error
    assert names(second).count("INFER_RESPONSE_COMPLETE") == 2
    assert names(second)[-1] == "REQUEST_END"


def test_an_error_a_refusal_and_a_disconnect() -> None:
    world, door = World(), Door()
    world.accepted(door).pass_end(error := QueueFull("full"))
    assert door.came == [error]
    world.version.error = InvalidRequest("no such input")
    with pytest.raises(InvalidRequest):
        world.submit()
    world.version.error = None
    ticket = world.submit()
    ticket.cancel()
    ticket.cancel()
    assert world.version.cancelled == 1
    traces = world.traces()
    assert [trace.error for trace in traces] == ["full", "no such input", "the client went away"]
    assert {names(trace)[-1] for trace in traces} == {"REQUEST_END"}


def test_tensors_are_copied() -> None:
    world = World(TraceSettings(tensors=True, rate=1))
    call = world.accepted()
    array = np.asarray(call.inputs["X"].array)
    array += 1
    call.pass_response(a_response(), True)
    [trace] = world.traces()
    [(_, tensor)] = trace.tensors
    assert tensor.array.tolist() == [[0]]


def test_settings_that_are_replaced_end_with_their_last_trace() -> None:
    world = World()
    world.submit()
    world.tracing.change("", {"trace_rate": ["5"]})
    [call] = world.version.got
    call.pass_response(a_response(), True)
    [trace] = world.traces()
    assert world.kept.items == [trace, trace.sampler]


def test_calls_of_models_have_a_parent() -> None:
    world = World()
    call = world.accepted()
    link = call.context.trace
    world.tracing.submit_child(world.version.submit, Door(link=link))
    [_, inner] = world.version.got
    inner.pass_response(a_response(), True)
    call.pass_response(a_response(), True)
    child, parent = world.traces()
    assert (child.parent, parent.parent, child.door) == (parent.number, 0, "")


@pytest.mark.parametrize("link", ["", "99", "0 00-x", "what"])
def test_an_unknown_trace_is_none(link: str) -> None:
    world, door = World(), Door(link=link)
    world.tracing.submit_child(world.version.submit, door)
    assert world.version.got == [door]
    assert door.stages is None
    assert world.traces() == []


def test_contexts_of_clients_decide_before_the_rate_does() -> None:
    world = World(TraceSettings(timestamps=True, rate=2, count=1), TraceMode.OPENTELEMETRY)
    headers = [{}, {"traceparent": PARENT + "01"}, {"traceparent": PARENT + "00"}]
    for sent in [*headers, *headers]:
        world.submit(Door(sent))
    for call in world.version.got:
        call.pass_response(a_response(), True)
    parents = [trace.spans and trace.spans.parent for trace in world.traces()]
    assert [parent and parent.trace_id for parent in parents] == [7, None, 7]
    links = [read_link(request.context.trace).context for request in world.version.got]
    assert [link and (link.trace_id == 7, link.sampled) for link in links[:3]] == [
        None, (True, True), (True, False)
    ]  # fmt: skip
    assert links[3] is not None
    assert links[3].trace_id not in (0, 7)


RARE = TraceSettings(timestamps=True, rate=1_000)


def test_requests_that_fail_are_kept_at_their_end() -> None:
    world = World(RARE, tail=TailRules(failed=True))
    for error in (None, QueueFull("full"), None):
        world.submit().pass_end(error)
    assert [(trace.kept, trace.picked) for trace in world.traces()] == [
        (False, False), (True, False), (False, False),
    ]  # fmt: skip


def test_slow_requests_are_kept_at_their_end() -> None:
    for slow_ns, kept in ((1, True), (10**15, False)):
        world = World(RARE, tail=TailRules(slow_ns))
        world.accepted().pass_response(a_response(), True)
        assert [trace.kept for trace in world.traces()] == [kept]


def test_requests_that_are_kept_count() -> None:
    settings = TraceSettings(timestamps=True, rate=1_000, count=2)
    world = World(settings, tail=TailRules(failed=True))
    for _ in range(2):
        world.submit().pass_end()
        world.submit().pass_end(QueueFull("full"))
    assert [trace.kept for trace in world.traces()] == [False, True, False, True]
    assert not world.traced()
    assert world.traces()[-1].last


@pytest.mark.parametrize(("choice", "request_id", "headers", "parameters", "chosen"), [
    (Choice("id", "debug-*"), "debug-7", {}, {}, True),
    (Choice("id", "debug-*"), "other", {}, {}, False),
    (Choice("id", "*"), "", {}, {}, False),
    (Choice("header", "x-trace"), "", {"x-trace": "1"}, {}, True),
    (Choice("header", "x-trace"), "", {"x-trace": " 0 "}, {}, False),
    (Choice("header", "x-trace"), "", {}, {"x-trace": True}, False),
    (Choice("parameter", "trace"), "", {}, {"trace": True}, True),
    (Choice("parameter", "trace"), "", {}, {"trace": False}, False),
    (Choice("parameter", "trace"), "", {}, {"other": 1}, False),
])  # fmt: skip
def test_requests_that_are_chosen(
    choice: Choice, request_id: str, headers: Any, parameters: Any, chosen: bool
) -> None:
    world = World(RARE, tail=TailRules(choices=(choice,)))
    door = Door(headers)
    door.id, door.parameters = request_id, parameters
    world.accepted(door).pass_end()
    assert [trace.picked for trace in world.traces()] == [True] * chosen
    assert world.tracing.headers == ({"": ("x-trace",)} if choice.kind == "header" else {})


def test_calls_of_a_request_are_decided_with_it() -> None:
    world = World(RARE, tail=TailRules(failed=True))
    call = world.accepted()
    world.tracing.submit_child(world.version.submit, Inner(link=call.context.trace))
    inner = world.version.got[1]
    world.tracing.submit_child(world.version.submit, Inner(link=inner.context.trace))
    for one in reversed(world.version.got):
        one.pass_response(a_response(), True)
    third, second, first = world.traces()
    assert (first.root, second.root, third.root) == (0, first.number, first.number)
    assert not any(trace.picked for trace in (first, second, third))
    assert not first.kept


def test_other_servers_are_told_what_is_sampled_for_sure() -> None:
    world = World(
        RARE, TraceMode.OPENTELEMETRY, TailRules(failed=True, choices=(Choice("id", "x"),))
    )
    doors = [Door({"traceparent": PARENT + flags}) for flags in ("00", "01", "00")] + [Door()]
    doors[2].id = "x"
    for door in doors:
        world.submit(door)
    contexts = [read_link(call.context.trace).context for call in world.version.got]
    assert [found and found.sampled for found in contexts] == [False, True, True, False]
    assert [found and found.trace_id == 7 for found in contexts] == [True, True, True, False]
    for call in world.version.got:
        call.pass_end()
    assert [trace.kept for trace in world.traces()] == [False, True, True, False]


def test_invalid_contexts_and_those_without_a_collector_are_ignored() -> None:
    world = World(ON, TraceMode.OPENTELEMETRY)
    call = world.accepted(Door({"traceparent": "00-0-0-0"}))
    call.pass_response(a_response(), True)
    [trace] = world.traces()
    assert trace.spans is not None
    assert trace.spans.parent is None
    world = World()
    call = world.accepted(Door({"traceparent": PARENT + "00"}))
    assert read_link(call.context.trace) == (1, None)
    call.pass_end()
    assert len(world.traces()) == 1


def test_settings_of_unknown_models() -> None:
    tracing = World().tracing
    for ask in (tracing.document, lambda name: tracing.change(name, {})):
        with pytest.raises(InvalidRequest, match="Request for unknown model : nope"):
            ask("nope")


async def test_a_version_has_a_stage_while_its_model_is_traced(tmp_path: Path) -> None:
    """Plain calls bypass all stages only while there are none."""
    kept = Kept()
    tracing = Tracing(TraceConfig(TraceMode.TRITON, TraceSettings(rate=1), "file", "url"), kept)
    world = worlds.World(tmp_path, tracing=tracing)
    engine = world.engine
    await engine.load_all([world.write("m", "1")])
    chain = engine.find("m")
    assert chain.direct is not None
    tracing.change("m", {"trace_level": ["TIMESTAMPS"], "trace_count": ["1"]})
    assert engine.find("m") is chain
    assert [chain.direct] == [None]
    call = Door()
    chain.submit(call)  # the traced one
    assert chain.direct is not None
    assert call.stages is not None
    await engine.unload_all()
    assert len(call.came) == 1
    [trace] = [item for item in kept.items if isinstance(item, Trace)]
    assert trace.version == 1
    computed = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    times = [(name, ns) for name, ns in trace.times if name in ("QUEUE_START", *computed)]
    assert [name for name, _ in times] == ["QUEUE_START", *computed]
    assert times == sorted(times, key=lambda time: time[1])


async def test_a_divided_request_is_traced_to_its_end(tmp_path: Path) -> None:
    """No scheduler has it, only its parts."""

    class Outer(Stage):
        told = False

        def over(self, call: Call) -> None:
            self.told = True

    tracing = Tracing(TraceConfig(TraceMode.OPENTELEMETRY, ON, "file", "url"), Kept())
    world = worlds.World(tmp_path, tracing=tracing)
    await world.engine.load_all([world.write("m", "1")])
    version, call, outer = world.engine.find_version("m"), Door(), Outer()
    call.inputs = {"X": Tensor("X", Datatype.FP32, np.zeros((6, 1), np.float32))}
    call.options = CallOptions(table=True)
    call.enter(outer, version.chain.submit)
    await worlds.until(lambda: call.came)
    assert outer.told
    assert len(version.report.statistics.exemplars) == 1
    await world.engine.unload_all()
