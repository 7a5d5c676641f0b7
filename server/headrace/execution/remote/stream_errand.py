"""One request with any number of responses, on its way through a pool: a stream of its own.

To another server it goes only while no response has come, and only if the one that it was sent to
has not begun it. A server that sends nothing for too long, although it is let, is given up.

Owned by the event-loop thread, like the pool.
"""

import asyncio
from collections.abc import Callable, Set
from typing import Protocol

from headrace.core.errors import ServerError
from headrace.execution.remote.connection import (
    CallFailed,
    RemoteRequest,
    RemoteStream,
    StreamAnswer,
)
from headrace.execution.remote.errand import Lost, Members
from headrace.execution.remote.member import Member
from headrace.scheduling.batch import NotStarted
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Fate, failure_of_text, late

_NONE: Set[Member] = frozenset()
_FINAL = "triton_final_response"
_END_SECS = 5.0  # that a server may take to end a stream after the last response


class StreamSender(Protocol):
    """Who waits for such an errand."""

    def received(self, answer: RemoteAnswer) -> None:
        """A response that need not be the last one."""

    def finished(self, answer: RemoteAnswer | None) -> None:
        """The end of the request, perhaps with a last response; nothing comes after this."""

    def failed(self, error: Exception) -> None:
        """The end by an error: `Lost`, `NotStarted` if no server can be reached, or a bug."""


class StreamErrand:
    """`headrace.execution.remote.connection.StreamReceiver`: has a server answer a request."""

    def __init__(
        self,
        members: Members,
        request: RemoteRequest,
        sender: StreamSender,
        model: str,
        loop: asyncio.AbstractEventLoop,
        silence: float,
    ) -> None:
        """`silence` is how many seconds a server may send nothing, 0 for any time.

        `model` is what the model is called here, which errors name.
        """
        self._members = members
        self._request = request
        self._sender: StreamSender | None = sender  # until it has all
        self._model = model
        self._loop = loop
        self._silence = silence
        self._tried: set[Member] = set()
        self._member: Member | None = None
        self._stream: RemoteStream | None = None
        self._begun = False  # a response has come
        self._held = False
        self._heard = 0.0  # when something came, or could begin to come
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """Open a stream; False if no server can be reached, and nothing is told then."""
        member = self._members.next(_NONE)
        if member is None:
            return False
        self._open(member)
        return True

    def cancel(self) -> None:
        """End what is under way, and tell nothing."""
        self._sender = None
        if self._stream is not None:
            self._stream.cancel()
            self._release().abandoned()

    def hold(self, held: bool) -> None:
        """Have the server pause, or go on."""
        self._held = held
        self._heard = self._loop.time()
        if self._stream is not None:
            self._stream.hold(held)

    # --- from the connection

    def received(self, answer: StreamAnswer) -> None:
        """`StreamReceiver.received`."""
        sender = self._sender
        if sender is None:
            return  # it has all
        self._heard = self._loop.time()
        if answer.error is not None:
            self._refused(answer.error)
            return
        given = answer.answer
        assert given is not None
        self._begun = True
        final = given.parameters.pop(_FINAL, False) is True
        if not final:
            sender.received(given)
            return
        self._complete()
        sender.finished(given if given.outputs else None)

    def ended(self, failed: CallFailed | None) -> None:
        """`StreamReceiver.ended`."""
        sender, self._sender = self._sender, None
        member = self._release()
        if sender is None:
            member.succeeded()  # whatever became of the stream after the last response
        elif failed is None:
            # Not every server tells the end by a response, but this one has answered.
            member.succeeded()
            sender.finished(None)
        else:
            self._sender = sender
            self._fail(member, failed)

    # --- its steps

    def _open(self, member: Member) -> None:
        self._member = member
        self._heard = self._loop.time()
        stream = member.stream(self._request, self)
        if self._member is not member:
            return  # it has failed already
        self._stream = stream
        if self._held:
            stream.hold(True)
        if self._silence:
            self._timer = self._loop.call_later(self._silence, self._look)

    def _complete(self) -> None:
        """The sender has all, or will have: the server is to end the stream."""
        self._sender = None
        if self._held and self._stream is not None:
            self._stream.hold(False)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_END_SECS, self._look)

    def _refused(self, error: ServerError) -> None:
        """A response is an error, which may be that the server takes nothing."""
        failure = failure_of_text(str(error))
        if failure.fate is Fate.REFUSED and not self._begun:
            assert self._stream is not None
            self._stream.cancel()
            self._fail(self._release(), CallFailed(failure, str(error)))
            return
        sender = self._sender
        assert sender is not None
        self._complete()
        sender.failed(Lost(failure))

    def _fail(self, member: Member, failed: CallFailed) -> None:
        """The stream has failed, with the request unanswered or answered in part."""
        sender = self._sender
        assert sender is not None
        member.failed(failed)
        failure = failed.failure
        if self._begun or failure.fate not in (Fate.UNSENT, Fate.REFUSED):
            self._sender = None
            sender.failed(Lost(failure))
            return
        self._tried.add(member)
        other = self._members.next(self._tried)
        if other is not None:
            try:
                self._open(other)
            except Exception as bug:
                self._member = self._sender = None
                sender.failed(bug)
            return
        self._sender = None
        sender.failed(NotStarted() if failure.fate is Fate.UNSENT else Lost(failure))

    def _look(self) -> None:
        """Give the server up if it was silent for too long."""
        self._timer = None
        assert self._stream is not None
        if self._sender is None:
            self._stream.cancel()
            self._release().succeeded()
            return
        now = self._loop.time()
        if self._held:
            self._heard = now
        left = self._heard + self._silence - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self._stream.cancel()
        text = f"nothing has come for {self._silence:g} s"
        self._fail(self._release(), CallFailed(late(self._model), text))

    def _release(self) -> Member:
        """No stream is under way any more; where it was."""
        member = self._member
        assert member is not None
        if self._timer is not None:
            self._timer.cancel()
        self._member = self._stream = self._timer = None
        return member


class StreamSent(Protocol):
    """An errand of any kind."""

    def begin(self) -> bool:
        """`StreamErrand.begin`."""

    def cancel(self) -> None:
        """`StreamErrand.cancel`."""

    def hold(self, held: bool) -> None:
        """`StreamErrand.hold`."""


StreamErrandMaker = Callable[[Members, RemoteRequest, StreamSender], StreamSent]
