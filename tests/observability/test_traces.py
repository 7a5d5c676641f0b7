"""Contents of a trace, and its transport."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor
from headrace.observability.trace_settings import Sampler, TraceSettings
from headrace.observability.traces import (
    BACKEND_OUTPUT,
    MOST_BYTES,
    MOST_TIMES,
    QUEUE_INPUT,
    Trace,
    TraceContext,
    TraceLink,
    read_link,
    read_traceparent,
    write_link,
)

SETTINGS = TraceSettings(timestamps=True, tensors=True)


def a_trace() -> Trace:
    return Trace(1, 0, Sampler(SETTINGS), "HTTP", "m", "", 0)


def floats(nbytes: int) -> Tensor:
    return Tensor("x", Datatype.FP32, np.zeros(nbytes // 4, np.float32))


def test_tensors_count_with_all_their_bytes() -> None:
    trace = a_trace()
    trace.keep(QUEUE_INPUT, [floats(400)])
    assert trace.nbytes == 400
    strings: Array = np.array([b"a" * 1000, b"b" * 2000], object)
    trace.keep(QUEUE_INPUT, [Tensor("s", Datatype.BYTES, strings)])
    assert trace.nbytes > 3400


def test_large_tensors_are_kept_without_their_data() -> None:
    trace = a_trace()
    trace.keep(QUEUE_INPUT, [floats(MOST_BYTES + 4), floats(400)])
    strings: Array = np.array([b"a" * MOST_BYTES], object)
    trace.keep(BACKEND_OUTPUT, [Tensor("s", Datatype.BYTES, strings)])
    assert [(a, t.array.shape, t.array.nbytes) for a, t in trace.tensors] == [
        (QUEUE_INPUT, (MOST_BYTES // 4 + 1,), 0),
        (QUEUE_INPUT, (100,), 400),
        (BACKEND_OUTPUT, (1,), 0),
    ]
    assert trace.nbytes == 400


def test_the_first_of_many_responses_are_kept() -> None:
    trace = a_trace()
    for number in range(2 * MOST_TIMES):
        trace.time("INFER_RESPONSE_COMPLETE", number)
        trace.keep(BACKEND_OUTPUT, [floats(4)])
    trace.time("REQUEST_END", 5)
    assert len(trace.times) <= MOST_TIMES + 1
    assert trace.times[-1] == ("REQUEST_END", 5)
    assert len(trace.tensors) <= MOST_TIMES


# --- W3C Trace Context, and the parameter that carries it


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
contexts = st.builds(
    TraceContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.sampled_from([0, 1]),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=512),
)


def test_a_context_is_read_and_written() -> None:
    context = read_traceparent(GOOD, "vendor=x,other=y")
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), 1, "vendor=x,other=y")
    assert context.sampled
    assert context.traceparent == GOOD


@pytest.mark.parametrize(
    "text",
    [
        "", "00", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01", f"00-{TRACE}-{SPAN}-1", f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n00",
    ],
)  # fmt: skip
def test_invalid_contexts_are_ignored(text: str) -> None:
    assert read_traceparent(text) is None


def test_contexts_of_other_implementations() -> None:
    assert read_traceparent(f"01-{TRACE}-{SPAN}-03-what-ever") is not None  # a later version
    for flags in ("00", "02", "fe"):
        context = read_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
        assert context is not None
        assert not context.sampled
    for state in ("a\r\nb: c", "ü", "x" * 513):  # invalid ones, left out
        context = read_traceparent(GOOD, state)
        assert context is not None
        assert context.state == ""


@given(st.integers(0, 10**18), st.none() | contexts)
def test_a_link_is_read_as_it_was_written(number: int, context: TraceContext | None) -> None:
    link = TraceLink(number, context)
    assert read_link(write_link(link)) == link


@given(st.text() | st.integers() | st.booleans())
def test_a_parameter_may_be_anything(value: object) -> None:
    assert read_link(value).number >= 0
