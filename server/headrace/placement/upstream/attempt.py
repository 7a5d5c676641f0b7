"""Attempts of a request at a model's upstreams, one upstream at a time.

An attempt is a call, or a stream of its own for a decoupled model. If it fails, `RULES` in
`placement.upstream.upstream` has the consequences: for the request, which may be retried on another
upstream while no response has come, for the upstream, and for the request's sequence. An upstream
that sends nothing on a stream for too long, although it could, is abandoned.

Owned by the event-loop thread, like the pool.
"""

import asyncio
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol, cast

from headrace.core.errors import RemoteUnavailable
from headrace.placement.upstream.connection import (
    CallFailed,
    RemoteRequest,
    RemoteStream,
    UpstreamCall,
)
from headrace.placement.upstream.upstream import RULES, Upstream
from headrace.protocol.status import Failure, Fate, late
from headrace.protocol.v2_protobuf import RemoteAnswer
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.sequences import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, SequenceTable
from headrace.scheduling.upstreams import Ending, after

_NONE: Set[Upstream] = frozenset()
_FINAL = "triton_final_response"
_END_SECS = 5.0  # for an upstream to end a stream after the last response


class Lost(Exception):
    """The request has failed at an upstream, and must not be retried."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


class AttemptSender(Protocol):
    """The sender of a request; `answered` or `failed` is called once, unless it is cancelled."""

    def received(self, answer: RemoteAnswer) -> None:
        """Receive a response of a stream that need not be the last one."""

    def answered(self, answer: RemoteAnswer | None) -> None:
        """End of the request, with its last response; None for a stream that has delivered it."""

    def failed(self, error: Exception) -> None:
        """End by `Lost`, `NotStarted` if no upstream can be reached, or a bug's exception."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for all requests of a model, named `model` in errors.

    `choose` returns the best upstream except those tried. On a stream an upstream may be silent for
    `silence` seconds, 0 for no limit. `sequences` has the locations of sequence states, for a model
    with sequences.
    """

    model: str
    choose: Callable[[Set[Upstream]], Upstream | None]
    loop: asyncio.AbstractEventLoop
    silence: float = 0.0
    sequences: SequenceTable | None = None


class Attempt:
    """A request with one response, and its current attempt; a `Receiver` of its call."""

    __slots__ = (
        "_begun", "_call", "_policy", "_request", "_sender", "_step", "_tried", "_upstream",
    )  # fmt: skip

    def __init__(self, policy: Policy, request: RemoteRequest, sender: AttemptSender) -> None:
        self._policy = policy
        self._request = request
        self._sender = sender
        in_sequence = policy.sequences is not None and SEQUENCE_ID in request.parameters
        self._step = _Step(policy, request) if in_sequence else None
        self._tried = _NONE
        self._upstream: Upstream | None = None
        self._call: UpstreamCall | None = None
        self._begun = False  # true once a response has come

    def begin(self) -> bool:
        """Make the first attempt; False, without a callback, if no upstream can be reached.

        Raises `Lost` for a request of a lost sequence, and any bug's exception.
        """
        upstream = self._next()
        if upstream is None:
            return False
        self._open(upstream)
        return True

    def cancel(self) -> None:
        """Cancel the current attempt, without a callback."""
        if self._call is None:
            return
        self._call.cancel()
        self._release().abandoned()
        if self._step is not None:
            # After a response the model has the request, and notices the cancellation itself.
            self._step.note(Ending.RUN if self._begun else Ending.UNSURE)

    def hold(self, held: bool) -> None:
        """Do nothing: there is only one response to pause."""

    def answered(self, answer: RemoteAnswer) -> None:
        """Implements `Receiver.answered`."""
        self._release().succeeded()
        self._complete(answer)

    def failed(self, error: Exception) -> None:
        """Implements `Receiver.failed`: the end of the request, or the next attempt."""
        upstream = self._release()
        if not isinstance(error, CallFailed):
            upstream.abandoned()
            self._give_up(error)
            return
        upstream.failed(error)
        failure = error.failure
        if self._begun or not RULES[failure.fate].retry:
            self._lose(failure)
            return
        self._tried |= {upstream}
        try:
            other = self._next()
            if other is not None:
                self._open(other)
                return
        except Exception as bug:
            self._give_up(bug)
        else:
            self._give_up(NotStarted() if failure.fate is Fate.UNSENT else Lost(failure))

    def _next(self) -> Upstream | None:
        return (self._policy.choose if self._step is None else self._step.choose)(self._tried)

    def _open(self, upstream: Upstream) -> None:
        self._upstream = upstream
        try:
            self._call = self._start(upstream)
        except BaseException:
            self._upstream = None
            raise

    def _start(self, upstream: Upstream) -> UpstreamCall:
        return upstream.begin(self._request, self)

    def _release(self) -> Upstream:
        """End the current attempt; returns its upstream."""
        upstream = self._upstream
        assert upstream is not None
        self._upstream = self._call = None
        return upstream

    def _complete(self, answer: RemoteAnswer | None) -> None:
        if self._step is not None:
            self._step.note(Ending.RUN)
        self._sender.answered(answer)

    def _lose(self, failure: Failure) -> None:
        # No other backend may run it, nor its client send it again.
        if self._begun and failure.fate in (Fate.REFUSED, Fate.UNSENT):
            failure = Failure(Fate.LATE, RemoteUnavailable(str(failure.error)))
        self._give_up(Lost(failure))

    def _give_up(self, error: Exception) -> None:
        self._sender.failed(error if self._step is None else self._step.failed(error))


class StreamAttempt(Attempt):
    """A request with any number of responses; a `StreamReceiver` of its stream.

    Once the sender has all responses, the attempt remains until the upstream has ended the stream.
    """

    __slots__ = ("_heard", "_held", "_over", "_stream", "_timer")

    def __init__(self, policy: Policy, request: RemoteRequest, sender: AttemptSender) -> None:
        super().__init__(policy, request, sender)
        self._stream: RemoteStream | None = None
        self._over = False  # the sender has all responses
        self._held = False
        self._heard = 0.0  # time of the last message, or when messages could start
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, held: bool) -> None:
        """Pause or resume the responses of the upstream."""
        self._held = held
        self._heard = self._policy.loop.time()
        if self._stream is not None:
            self._stream.hold(held)

    def received(self, answer: RemoteAnswer | Failure) -> None:
        """Implements `StreamReceiver.received`."""
        if self._over:
            return
        self._heard = self._policy.loop.time()
        if isinstance(answer, Failure):
            self._refused(answer)
            return
        self._begun = True
        if answer.parameters.pop(_FINAL, False) is not True:
            self._sender.received(answer)
            return
        self._let_end()
        self._complete(answer if answer.outputs else None)

    def ended(self) -> None:
        """Implements `StreamReceiver.ended`: not every server marks its last response."""
        self._release().succeeded()
        if not self._over:
            self._complete(None)

    def failed(self, error: Exception) -> None:
        """Implements `StreamReceiver.failed`."""
        if self._over:  # failures after the last response are ignored
            self._release().succeeded()
        else:
            super().failed(error)

    def _start(self, upstream: Upstream) -> UpstreamCall:
        self._heard = self._policy.loop.time()
        self._stream = stream = upstream.stream(self._request, self)
        if self._held:
            stream.hold(True)
        if self._policy.silence:
            self._timer = self._policy.loop.call_later(self._policy.silence, self._look)
        return stream

    def _release(self) -> Upstream:
        if self._timer is not None:
            self._timer.cancel()
        self._stream = self._timer = None
        return super()._release()

    def _let_end(self) -> None:
        """Let the upstream end the stream: the sender has all responses, or will have them."""
        self._over = True
        if self._held and self._stream is not None:
            self._stream.hold(False)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._policy.loop.call_later(_END_SECS, self._look)

    def _refused(self, failure: Failure) -> None:
        """Process an error response, which may mean that the server refuses the request."""
        if failure.fate is Fate.REFUSED and not self._begun:
            self._fail(CallFailed(failure, str(failure.error)))
            return
        self._let_end()
        self._lose(failure)

    def _fail(self, failed: CallFailed) -> None:
        assert self._stream is not None
        self._stream.cancel()
        super().failed(failed)

    def _look(self) -> None:
        """Abandon an upstream that is silent for too long, or has not ended the stream."""
        self._timer = None
        policy = self._policy
        if self._over:
            assert self._stream is not None
            self._stream.cancel()
            self._release().succeeded()
            return
        now = policy.loop.time()
        if self._held:
            self._heard = now
        left = self._heard + policy.silence - now
        if left > 0:
            self._timer = policy.loop.call_later(left, self._look)
        else:
            text = f"nothing has come for {policy.silence:g} s"
            self._fail(CallFailed(late(policy.model), text))


class _Step:
    """The sequence part of a request: its destination, and the sequence's pin afterwards.

    A request with a target goes there alone, unless it begins its sequence anew.
    """

    def __init__(self, policy: Policy, request: RemoteRequest) -> None:
        table, given = policy.sequences, request.parameters
        id = given[SEQUENCE_ID]
        assert table is not None
        assert isinstance(id, int | str)
        self._id = id
        self._start = bool(given.get(SEQUENCE_START))
        self._end = bool(given.get(SEQUENCE_END))
        self._policy = policy
        self._table = table
        self._before = table.pin(id)
        self._target = cast(Upstream | None, request.target)
        self._upstream: Upstream | None = None

    def choose(self, tried: Set[Upstream]) -> Upstream | None:
        """The upstream for the next attempt; raises `Lost` if the sequence cannot continue."""
        target = self._target
        if target is not None and target.usable and not tried:
            self._upstream = target
        elif self._start:
            self._upstream = self._policy.choose(tried)
        elif tried:  # the attempt there determines the outcome
            return None
        else:
            raise self._lost()
        return self._upstream

    def note(self, ending: Ending) -> None:
        """Update the sequence's pin at the request's end."""
        self._table.ended["end"] += self._end and ending is Ending.RUN
        self._table.put(self._id, after(self._before, self._upstream, self._end, ending))

    def failed(self, error: Exception) -> Exception:
        """Update the sequence for a failed request; returns the error for its client."""
        if isinstance(error, NotStarted):
            if not self._start:
                return self._lost()
            self.note(Ending.REFUSED)
        else:
            fate = error.failure.fate if isinstance(error, Lost) else Fate.UNCERTAIN
            self.note(RULES[fate].ending)
        return error

    def _lost(self) -> Lost:
        error = self._table.lose(self._id, self._policy.model)
        return Lost(Failure(Fate.UNCERTAIN, error))
