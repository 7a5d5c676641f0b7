"""Forwarded properties of requests: parameters, headers and deadline."""

from pathlib import Path
from typing import Any, cast

import pytest

from headrace.core.call import NO_CONTEXT, Call, CallContext, CallOptions
from headrace.engine.tracing import TracedCall
from headrace.observability.traces import TraceContext
from headrace.placement.upstream.connection import RemoteRequest
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.requests import Forwarding
from headrace.scheduling.batch import Aimed, Batch
from tests.scheduling.fakes import entered, signature

MS = 1_000_000


def forwarding(**parameters: str) -> Forwarding:
    given = {"endpoints": "grpc://127.0.0.1", **parameters}
    return Forwarding(RemoteOptions.of(given, "m", 0, Path()))


def request(parameters: Any = None, context: CallContext = NO_CONTEXT, **fields: Any) -> Call:
    made = Call("m", "", "", {}, parameters=parameters or {}, options=CallOptions(**fields))
    made.context = context
    return made


def call(given: Call, arrived: int = 0) -> Call:
    return entered(given, 1, None, arrived, cast(Any, None))


def of(rules: Forwarding, calls: list[Call], now: int) -> RemoteRequest:
    return rules.request(Batch(signature(), calls), [], {}, now)


def test_forwarded_headers_and_parameters() -> None:
    assert forwarding().alike(request(priority=1)) is None
    found = of(forwarding(), [call(request(priority=1))], 0)
    assert (found.parameters, found.headers, found.deadline, found.trace) == ({}, (), 0, None)
    context = CallContext({"x-tenant": "me"}, trace="7")
    all_kinds = of(forwarding(), [call(request({"a": 1}, context))], 0)
    assert all_kinds.parameters == {"a": 1}
    assert all_kinds.headers == [("x-tenant", "me")]


def test_a_request_of_a_sequence_has_its_target() -> None:
    asked, there = request({"sequence_id": 1}), object()
    aimed = entered(asked, 1, Aimed(there, None), 0, cast(Any, None))
    assert of(forwarding(), [aimed], 0).target is there
    assert of(forwarding(), [call(asked)], 0).target is None


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (request(), request(context=CallContext(trace="1", deadline=5)), True),
        (request({"a": 1, "b": 2}), request({"b": 2, "a": 1}), True),
        (request({"a": 1}), request({"a": True}), False),
        (request({"a": 1}), request({"a": "1"}), False),
        (request(context=CallContext({"x": "1"})), request(context=CallContext({"x": "2"})), False),
        (request({"x": "1"}), request(context=CallContext({"x": "1"})), False),
    ],
)
def test_requests_that_share_a_call(one: Call, other: Call, alike: bool) -> None:
    key = forwarding().alike
    assert (key(one) == key(other)) is alike


def test_the_remaining_timeout_is_forwarded() -> None:
    rules = forwarding()
    assert rules.alike(request(timeout=5)) == rules.alike(request(timeout=6))
    assert rules.alike(request(timeout=5)) != rules.alike(request())
    both = [call(request(timeout=5_000)), call(request(timeout=4_500), 2 * MS)]
    assert of(rules, both, 3 * MS).parameters == {"timeout": 3_500}
    assert of(rules, both, 60 * MS).parameters == {"timeout": 1}
    # Priorities are forwarded if configured.
    forwarding_all = forwarding(forward_priority="true")
    assert of(forwarding_all, [call(request(priority=2))], 0).parameters == {"priority": 2}
    assert forwarding_all.alike(request(priority=2)) != forwarding_all.alike(request(priority=1))


def test_a_call_lasts_until_its_last_deadline() -> None:
    first, last = (call(request(context=CallContext(deadline=n))) for n in (5, 9))
    assert of(forwarding(), [first, last], 0).deadline == 9
    assert of(forwarding(), [last, call(request())], 0).deadline == 0


class Traces:
    """Trace contexts: requests with an even number are traced."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin_call(self, link: str) -> TracedCall | None:
        self.begun.append(link)
        number = int(link)
        return TracedCall(TraceContext(7, number, 1 - number % 2, "a=b")) if number else None


@pytest.mark.parametrize(
    ("links", "begun", "told"),
    [
        (["0", "1", "2", "4"], ["0", "1", "2"], 2),  # the first that is traced
        (["0", "1", "3"], ["0", "1", "3"], 1),
        (["0"], ["0"], 0),
    ],
)
def test_a_call_is_part_of_one_trace(links: list[str], begun: list[str], told: int) -> None:
    rules = forwarding()
    rules.traces = traces = Traces()
    calls = [call(request()), *(call(request(context=CallContext(trace=x))) for x in links)]
    found = of(rules, calls, 0)
    assert traces.begun == begun
    expected = [
        ("traceparent", f"00-{7:032x}-{told:016x}-{1 - told % 2:02x}"), ("tracestate", "a=b")
    ]  # fmt: skip
    assert found.headers == (expected if told else [])
