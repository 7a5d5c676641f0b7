"""Numbers of spans, as W3C Trace Context has them: random, and never zero."""

from random import getrandbits

from headrace.core.trace_context import TraceContext

_SAMPLED = 1


def new_context(parent: TraceContext | None) -> TraceContext:
    """A span that begins a trace, or goes on with a client's."""
    if parent is not None:
        return child_span(parent)
    return TraceContext(_number(128), _number(64), _SAMPLED)


def child_span(parent: TraceContext) -> TraceContext:
    """A span of the same trace."""
    return TraceContext(parent.trace_id, _number(64), _SAMPLED, parent.state)


def _number(bits: int) -> int:
    return getrandbits(bits) or 1
