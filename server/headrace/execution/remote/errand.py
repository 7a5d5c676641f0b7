"""One request on its way through a pool: to the server that is best, and to another one if need be.

Owned by the event-loop thread, like the pool.
"""

from collections.abc import Callable, Set
from typing import Protocol

from headrace.execution.remote.connection import (
    Call,
    CallFailed,
    RemoteRequest,
)
from headrace.execution.remote.member import Member
from headrace.scheduling.batch import NotStarted
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Failure, Fate

_NONE: Set[Member] = frozenset()


class Lost(Exception):
    """A call has failed, and is not to be sent to another server."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


class Members(Protocol):
    """The servers of a pool."""

    def next(self, tried: Set[Member]) -> Member | None:
        """The best server for a call, other than those `tried`; None if there is none."""


class Sender(Protocol):
    """Who waits for an errand; one of these is called, once, unless it is cancelled."""

    def answered(self, answer: RemoteAnswer) -> None:
        """A server has run the request."""

    def failed(self, error: Exception) -> None:
        """None has: `Lost`, `NotStarted` if none can be reached, or what a bug has raised."""


class Errand:
    """`headrace.execution.remote.connection.Receiver`: has a server run a request."""

    __slots__ = ("_call", "_member", "_members", "_request", "_sender", "_tried")

    def __init__(self, members: Members, request: RemoteRequest, sender: Sender) -> None:
        self._members = members
        self._request = request
        self._sender = sender
        self._member: Member | None = None
        self._call: Call | None = None
        self._tried: set[Member] | None = None

    def begin(self) -> bool:
        """Make the first call; False if no server can be reached, and nothing is told then."""
        member = self._members.next(_NONE)
        if member is None:
            return False
        self._member = member
        self._call = member.begin(self._request, self)
        return True

    def cancel(self) -> None:
        """End what is under way, and tell nothing."""
        if self._call is not None:
            self._call.cancel()
        if self._member is not None:
            self._member.abandoned()
        self._call = self._member = None

    def answered(self, answer: RemoteAnswer) -> None:
        """`Receiver.answered`."""
        assert self._member is not None
        self._member.succeeded()
        self._call = self._member = None
        self._sender.answered(answer)

    def failed(self, error: Exception) -> None:
        """`Receiver.failed`."""
        member = self._member
        assert member is not None
        self._call = self._member = None
        if not isinstance(error, CallFailed):
            member.abandoned()
            self._sender.failed(error)
            return
        member.failed(error)
        failure = error.failure
        if failure.fate is not Fate.UNSENT and failure.fate is not Fate.REFUSED:
            self._sender.failed(Lost(failure))
            return
        if self._tried is None:
            self._tried = set()
        self._tried.add(member)
        other = self._members.next(self._tried)
        if other is None:
            unsent = failure.fate is Fate.UNSENT
            self._sender.failed(NotStarted() if unsent else Lost(failure))
            return
        self._member = other
        try:
            self._call = other.begin(self._request, self)
        except Exception as bug:
            self._member = None
            self._sender.failed(bug)


class Sent(Protocol):
    """An errand of any kind."""

    def begin(self) -> bool:
        """`Errand.begin`."""

    def cancel(self) -> None:
        """`Errand.cancel`."""


ErrandMaker = Callable[[Members, RemoteRequest, Sender], Sent]
