"""What a request carries of the trace that it is part of: W3C Trace Context, and a number of ours.

It travels as a parameter of the request, from the door to the engine and on to a Python model, and
back with what that model asks of others. The text is the number of the trace here, 0 for none, the
`traceparent` and the `tracestate`, with spaces between; what is not there at the end is left out.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

TRACE_PARAMETER = "headrace_trace"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{0,512}")
_SAMPLED = 1
_LONGEST_NUMBER = 19  # digits


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, which may be another program's; `state` is the text of `tracestate`."""

    trace_id: int
    span_id: int
    flags: int
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether it is recorded."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The value of the header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags & _SAMPLED:02x}"


class TraceLink(NamedTuple):
    """What a request says: the number of a trace of this server, 0 for none, and the context."""

    number: int
    context: TraceContext | None


def read_traceparent(text: str, state: str = "") -> TraceContext | None:
    """The context of these two headers; None if they are none, which is to be ignored."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    context = TraceContext(
        int(trace, 16), int(span, 16), int(flags, 16), state if _STATE.fullmatch(state) else ""
    )
    return context if context.trace_id and context.span_id else None


def write_link(link: TraceLink) -> str:
    """The text of the parameter."""
    context = link.context
    if context is None:
        return str(link.number)
    return f"{link.number} {context.traceparent} {context.state}".rstrip()


def read_link(text: object) -> TraceLink:
    """What the parameter says; clients may have put anything there."""
    number, _, rest = str(text).partition(" ")
    parent, _, state = rest.partition(" ")
    known = number.isascii() and number.isdigit() and len(number) <= _LONGEST_NUMBER
    return TraceLink(int(number) if known else 0, read_traceparent(parent, state))
