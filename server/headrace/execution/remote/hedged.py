"""Errands that ask a second server if the first one takes long: the first answer counts.

Both may execute the request, so this is for models without a state. Owned by the event-loop thread.
"""

import asyncio

from headrace.execution.remote.connection import Call, CallFailed
from headrace.execution.remote.errand import Answer, Lost, Members, Request, Sender
from headrace.execution.remote.member import Member
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.hedging import HedgePolicy, HedgeRules
from headrace.wire.remote_status import Fate


class HedgedCalls:
    """Makes the errands of a pool whose calls are hedged."""

    def __init__(self, rules: HedgeRules, loop: asyncio.AbstractEventLoop) -> None:
        self.policy = HedgePolicy(rules)
        self.loop = loop

    def errand(self, members: Members, request: Request, sender: Sender) -> "HedgedErrand":
        """An errand for a request."""
        return HedgedErrand(self, members, request, sender)


class _Attempt:
    """One call; `Receiver` of it. `second` is whether another one was under way when it began."""

    __slots__ = ("call", "errand", "member", "second")

    def __init__(self, errand: "HedgedErrand", member: Member, second: bool) -> None:
        self.errand = errand
        self.member = member
        self.second = second
        self.call: Call | None = None

    def answered(self, answer: Answer) -> None:
        """`Receiver.answered`."""
        self.errand.answered(self, answer)

    def failed(self, error: Exception) -> None:
        """`Receiver.failed`."""
        self.errand.failed(self, error)

    def cancel(self) -> None:
        """End the call; it says nothing of its server."""
        if self.call is not None:
            self.call.cancel()
        self.member.abandoned()


class HedgedErrand:
    """As `headrace.execution.remote.errand.Errand`, with two calls under way at most."""

    __slots__ = (
        "_begun", "_hedged", "_hedging", "_lost", "_members", "_request", "_sender", "_timer",
        "_tried", "_under_way",
    )  # fmt: skip

    def __init__(
        self, hedging: HedgedCalls, members: Members, request: Request, sender: Sender
    ) -> None:
        self._hedging = hedging
        self._members = members
        self._request = request
        self._sender = sender
        self._begun = 0.0
        self._under_way: list[_Attempt] = []
        self._tried: set[Member] = set()
        self._hedged = False
        self._lost: Lost | None = None  # by a call that may have been executed
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """`Errand.begin`."""
        hedging = self._hedging
        self._begun = hedging.loop.time()
        if not self._send():
            return False
        delay = hedging.policy.begun()
        if delay is not None:
            self._timer = hedging.loop.call_later(delay, self._hedge)
        return True

    def cancel(self) -> None:
        """`Errand.cancel`."""
        self._stop_waiting()
        attempts, self._under_way = self._under_way, []
        for attempt in attempts:
            attempt.cancel()

    def answered(self, attempt: _Attempt, answer: Answer) -> None:
        """A server has run the request."""
        attempt.member.succeeded()
        self._under_way.remove(attempt)
        self.cancel()
        hedging = self._hedging
        hedging.policy.answered(hedging.loop.time() - self._begun)
        if attempt.second:
            attempt.member.won()
        elif self._hedged and self._request.trace is not None:
            self._request.trace.sent(attempt.member.endpoint.name)  # and not to the second
        self._sender.answered(answer)

    def failed(self, attempt: _Attempt, error: Exception) -> None:
        """A call has failed: another one that is under way may still be answered."""
        self._under_way.remove(attempt)
        member = attempt.member
        if not isinstance(error, CallFailed):
            member.abandoned()
            self._end(error)
            return
        member.failed(error)
        failure = error.failure
        self._tried.add(member)
        begun = failure.fate is not Fate.UNSENT and failure.fate is not Fate.REFUSED
        lost = Lost(failure, error.told)
        if begun:
            self._lost = self._lost or lost
        if failure.fate is Fate.ANSWERED:
            self._end(lost)
        elif self._under_way:
            return
        elif self._lost is not None:
            self._end(self._lost)
        else:
            try:
                sent = self._send()
            except Exception as bug:
                self._end(bug)
                return
            if not sent:
                self._end(NotStarted() if failure.fate is Fate.UNSENT else lost)

    def _send(self) -> bool:
        """Ask a server that has not been asked; False if there is none."""
        used = self._tried | {attempt.member for attempt in self._under_way}
        member = self._members.next(used)
        if member is None:
            return False
        attempt = _Attempt(self, member, bool(self._under_way))
        attempt.call = member.begin(self._request, attempt)
        self._under_way.append(attempt)
        if attempt.second:
            self._hedged = True
            member.hedges()
        return True

    def _hedge(self) -> None:
        """It has taken long."""
        self._timer = None
        used = self._tried | {attempt.member for attempt in self._under_way}
        if self._members.next(used) is not None and self._hedging.policy.spend():
            self._send()

    def _end(self, error: Exception) -> None:
        self.cancel()
        self._sender.failed(error)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
