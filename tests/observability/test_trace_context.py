"""W3C Trace Context, and the parameter that it travels in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observability.traces import (
    TraceContext,
    TraceLink,
    read_link,
    read_traceparent,
    write_link,
)

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
def test_what_is_no_context_is_ignored(text: str) -> None:
    assert read_traceparent(text) is None


def test_later_versions_may_say_more() -> None:
    assert read_traceparent(f"01-{TRACE}-{SPAN}-03-what-ever") is not None


@pytest.mark.parametrize("flags", ["00", "02", "fe"])
def test_a_context_that_is_not_recorded(flags: str) -> None:
    context = read_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert not context.sampled


@pytest.mark.parametrize("state", ["a\r\nb: c", "ü", "x" * 513])
def test_a_state_that_is_none_is_left_out(state: str) -> None:
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
