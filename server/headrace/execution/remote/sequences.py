"""Calls for sequences: each goes to the server that has the state of its sequence.

Owned by the event-loop thread, like the pool.
"""

from collections.abc import Set

from headrace.core.errors import RemoteLost
from headrace.execution.remote.connection import RemoteRequest
from headrace.execution.remote.errand import Errand, Lost, Members, Sender, Sent
from headrace.execution.remote.member import Member
from headrace.execution.remote.stream_errand import (
    StreamErrandMaker,
    StreamSender,
    StreamSent,
)
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.sequences import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, SequenceTable
from headrace.scheduling.upstreams import Ending, Way, after, way
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Failure, Fate

_ENDINGS = {Fate.ANSWERED: Ending.RUN, Fate.REFUSED: Ending.REFUSED}


class SequenceCalls:
    """Makes the errands of a model's requests, whose sequences are in `table`."""

    def __init__(self, model: str, table: SequenceTable) -> None:
        self._model = model
        self._table = table

    def errand(self, members: Members, request: RemoteRequest, sender: Sender) -> Sent:
        """An errand for a request, which need not be of a sequence."""
        if SEQUENCE_ID not in request.parameters:
            return Errand(members, request, sender)
        return _Noting(Step(self._model, self._table, members, request), request, sender)

    def streams(self, make: StreamErrandMaker) -> StreamErrandMaker:
        """The same for errands with any number of responses, which `make` makes."""

        def errand(members: Members, request: RemoteRequest, sender: StreamSender) -> StreamSent:
            if SEQUENCE_ID not in request.parameters:
                return make(members, request, sender)
            step = Step(self._model, self._table, members, request)
            return _NotingStream(step, make, request, sender)

        return errand


class Step:
    """One request of a sequence, on its way; `Members` of which mostly one will do.

    It is told how its way ends: by `run`, `cancelled`, or by what `failed` makes of an error.
    """

    def __init__(
        self, model: str, table: SequenceTable, members: Members, request: RemoteRequest
    ) -> None:
        given = request.parameters
        id = given[SEQUENCE_ID]
        assert isinstance(id, int | str)
        self._id = id
        self._start = bool(given.get(SEQUENCE_START))
        self._end = bool(given.get(SEQUENCE_END))
        self._model = model
        self._table = table
        self._members = members
        self._before = table.pin(id)
        self._server: Member | None = None

    def next(self, tried: Set[Member]) -> Member | None:
        """`Members.next`; raises `Lost` if the sequence cannot go on."""
        pin = self._before
        server = pin.server if pin is not None else None
        pinned = server if isinstance(server, Member) else None
        usable = pinned is not None and pinned.condition.reachable and pinned not in tried
        chosen = way(pin, self._start, usable)
        if chosen is Way.NOWHERE:
            if tried:  # it was there: the errand says what has become of it
                return None
            raise self._lost()
        self._server = pinned if chosen is Way.PINNED else self._members.next(tried)
        return self._server

    def run(self) -> None:
        """The server has run it."""
        self._note(Ending.RUN, self._end)

    def cancelled(self) -> None:
        """Nobody waits for it any more, and nobody knows whether the server will run it."""
        self._note(Ending.UNSURE)

    def failed(self, error: Exception) -> Exception:
        """It has not been answered; what its client is told."""
        if isinstance(error, NotStarted):
            if not self._start:
                return self._lost()
            self._note(Ending.REFUSED)
        elif isinstance(error, Lost):
            self._note(_ENDINGS.get(error.failure.fate, Ending.UNSURE), self._end)
        else:
            self._note(Ending.UNSURE)
        return error

    def _note(self, ending: Ending, end: bool = False) -> None:
        self._table.put(self._id, after(self._before, self._server, end, ending))

    def _lost(self) -> Lost:
        self._note(Ending.UNSURE)
        error = RemoteLost(
            f"sequence {self._id} of model '{self._model}' is lost: its server cannot be reached,"
            " or one of its requests was cancelled or not answered; it has to be begun again"
        )
        return Lost(Failure(Fate.UNCERTAIN, error))


class _Noting:
    """An errand of which is noted how it ends, before its sender is told."""

    def __init__(self, step: Step, request: RemoteRequest, sender: Sender) -> None:
        self._step = step
        self._sender = sender
        self._errand = Errand(step, request, self)

    def begin(self) -> bool:
        """`Errand.begin`."""
        return self._errand.begin()

    def cancel(self) -> None:
        """`Errand.cancel`."""
        self._errand.cancel()
        self._step.cancelled()

    def answered(self, answer: RemoteAnswer) -> None:
        """`Sender.answered`."""
        self._step.run()
        self._sender.answered(answer)

    def failed(self, error: Exception) -> None:
        """`Sender.failed`."""
        self._sender.failed(self._step.failed(error))


class _NotingStream:
    """The same for an errand with any number of responses."""

    def __init__(
        self, step: Step, make: StreamErrandMaker, request: RemoteRequest, sender: StreamSender
    ) -> None:
        self._step = step
        self._sender = sender
        self._errand = make(step, request, self)
        self._begun = False  # a response has come

    def begin(self) -> bool:
        """`StreamErrand.begin`."""
        return self._errand.begin()

    def cancel(self) -> None:
        """`StreamErrand.cancel`."""
        self._errand.cancel()
        if self._begun:  # the model has the request, and sees that nobody wants more of it
            self._step.run()
        else:
            self._step.cancelled()

    def hold(self, held: bool) -> None:
        """`StreamErrand.hold`."""
        self._errand.hold(held)

    def received(self, answer: RemoteAnswer) -> None:
        """`StreamSender.received`."""
        self._begun = True
        self._sender.received(answer)

    def finished(self, answer: RemoteAnswer | None) -> None:
        """`StreamSender.finished`."""
        self._step.run()
        self._sender.finished(answer)

    def failed(self, error: Exception) -> None:
        """`StreamSender.failed`."""
        self._sender.failed(self._step.failed(error))
