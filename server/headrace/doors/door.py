"""The interface of doors that packages add: where further calls come from.

A door is declared in the group `DOORS` under its name, by which its connections, answers and traces
are counted, and opened by `--door NAME=ADDRESS`. Its calls are subclasses of `DoorCall`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import Protocol

from headrace.api.gate import Gate
from headrace.api.operations import NAMED
from headrace.core.call import Call, InferResponse, context_of
from headrace.core.errors import ServerError
from headrace.core.identity import NO_PEER, Identity, PeerFacts
from headrace.core.plugins import PluginGroup
from headrace.doors.tls import DoorTls
from headrace.engine.admission import Account
from headrace.engine.engine import Engine
from headrace.engine.entrance import Entrance, Target
from headrace.observability.statistics import AnswerCounters, Sourced
from headrace.protocol.status import STATUS

_GONE = 499  # in place of a status: the client has left before its answer


class Door(Protocol):
    """A door, made with the engine. Owned by the event loop."""

    operations: Sequence[str]  # names of the operations that it offers, as in the protocol's table
    # Set before `open`: what each request has to pass, and TLS if the door has settings for it.
    gate: Gate
    tls: DoorTls | None = None

    def __init__(self, engine: Entrance) -> None: ...

    async def open(self, address: str) -> str:
        """Take calls; returns the address that is shown. Raises `OSError` with the reason."""

    async def drain(self, seconds: float) -> None:
        """Announce the end to clients, who have so many seconds; their calls are still taken."""

    async def close(self, grace: float) -> None:
        """Close everything; calls under way have `grace` seconds."""

    def metrics(self) -> Iterable[Sourced]:
        """Metric families of the door, beside connections and answers."""
        return ()


DOORS: PluginGroup[Callable[[Engine], Door]] = PluginGroup("headrace.doors")


class DoorCall(Call):
    """A call that is charged to an account, mostly its connection's, until it is over.

    Subclasses have the door's name in capitals as `door`, and write responses and errors. `named`
    is the client that a trusted proxy names, as in `Account.of`.
    """

    named = ""

    def __init__(
        self, account: Account, answers: AnswerCounters, gate: Gate, peer: PeerFacts = NO_PEER
    ) -> None:
        """`answers` counts by HTTP status: `engine.admission.answers.of(door, operation)`.

        The client is known by the door's `gate`, from `header` and the facts about its `peer`.
        """
        self.begin()
        self.gate, self.peer = gate, peer
        self.account = account
        self.answers = answers
        self.nbytes = 0
        self.over = asyncio.Event()
        self._entered = False
        self._since = perf_counter_ns()

    def write(self, response: InferResponse) -> None:
        """Write a response to the client; raises `ServerError` if it has no form there."""
        raise NotImplementedError

    def write_error(self, error: ServerError) -> None:
        """Write the error that ends the call."""
        raise NotImplementedError

    def start(
        self, engine: Entrance, name: str, nbytes: int, decode: Callable[[Target], Call],
        version: str = "",
    ) -> None:  # fmt: skip
        """Charge a request of `nbytes` to a model, decode it for its target, and submit it."""
        try:
            self.charge_to(self.enter_gate(name, version), name, nbytes)
            target = engine.find(name, version)
            self.take(decode(target))
            target.submit(self)
        except ServerError as error:
            self.fail(error)

    def charge_to(self, identity: Identity, model: str, nbytes: int) -> None:
        """Charge a request to a client until the call is over; raises `ServerError`."""
        self.account = self.account.of(identity, model, self.named)
        self.account.enter(nbytes)
        self.nbytes, self._entered = nbytes, True
        self.context = context_of(identity)

    def enter_gate(self, model: str, version: str) -> Identity:
        """The client, if it may run this version of a model; raises as `Gate.enter` and `check`."""

        def values(name: str) -> list[bytes]:
            given = self.header(name)
            return [given.encode("latin-1", "replace")] if given else []

        operation, gate = NAMED["ModelInfer"], self.gate
        identity = gate.enter(operation, values, self.peer)
        gate.check(operation, identity, values, self.peer, model, version)
        return identity

    def leave(self) -> None:
        """Cancel the call, whose client is gone; nothing if it is over."""
        if not self.over.is_set():
            self.cancel()
            self._end(_GONE)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Call.respond`."""
        try:
            self.write(response)
        except ServerError as error:
            if not final:
                self.cancel()
            self.fail(error)
        else:
            if final:
                self._end(200)

    def finish(self) -> None:
        """Implements `Call.finish`."""
        self._end(200)

    def fail(self, error: ServerError) -> None:
        """Implements `Call.fail`."""
        self._end(STATUS[type(error)].http)  # first: the door may then give the call up
        self.write_error(error)

    def _end(self, status: int) -> None:
        if self._entered:
            self._entered = False
            self.account.leave(self.nbytes)
        answers = self.answers.of_class(self.context.identity.kind)
        answers.answered(status, perf_counter_ns() - self._since)
        self.over.set()
