"""The scheduler of a model with sequences: acts on decisions, in front of the version's batcher.

The requests of a sequence go to the batcher one at a time, for the instance where its state is.
Instances are added to the batcher as `SlotInstance`s. A request that its client has cancelled while
the model has it is over when the model is done with it, which may be after its batch: the next one
must not overtake it.

Owned by the event-loop thread. Decisions are carried out one after the other, by whoever caused the
first of them: an answer may submit the next request, and so cause others. Of many requests that are
refused together, some end in each turn of the event loop, and wait here until then.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.call import Call, Done, InferResponse, Owner, Stage
from headrace.core.errors import InvalidRequest, QueueTimeout, SequenceLost, ServerError, WorkerDied
from headrace.core.limits import ModelLoad
from headrace.core.tensors import Tensor
from headrace.core.turns import ENDED_AT_ONCE, TurnQueue
from headrace.observability.statistics import SequenceSeries
from headrace.placement.worker.conversation import Slot
from headrace.plugins.sequences.controls import CarriedState, Controls
from headrace.plugins.sequences.decisions import (
    Begin,
    Decision,
    Refuse,
    SequenceSeats,
    Turn,
    Vacate,
    Why,
)
from headrace.plugins.sequences.slots import SlotInstance, lost_before, lost_with
from headrace.scheduling.batch import Answer, Batch, Deferral, Instance
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import Clock, Timer
from headrace.scheduling.gates import BACKLOG_DELAY, DELAY, delay_in
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.sequences import not_named, not_single

_NO_CLIENTS = -(2**63)  # ids below are no client's
_COPIED = 64 << 10  # bytes up to which a state is copied out of the memory of its batch


@dataclass(frozen=True, slots=True)
class LocalSequencePlan:
    """The sequences of a model, as its configuration has them.

    An instance has so many `seats`; with `fixed`, their numbers are places in its batches, and
    responses are in order if they are `ordered`. If the model is `iterative`, a request without an
    id is a sequence of its own.
    """

    model: str
    seats: int
    idle_ns: int
    policy: BatchPolicy
    ordered: bool
    fixed: bool
    iterative: bool
    controls: Controls
    states: Sequence[CarriedState]

    def scheduling(self, common: SchedulingPolicy) -> SchedulingPolicy:
        """The policies of the batcher; a timeout ends with the wait for a seat, as in Triton."""
        return SchedulingPolicy(
            self.policy, QueuePolicy(), preserve_ordering=self.ordered, overload=common.overload
        )

    def start(
        self, batcher: Batcher, clock: Clock, load: ModelLoad, failed: Callable[[str, int], None]
    ) -> "LocalSequences":
        """The scheduler of a version that is about to serve."""
        sequences = LocalSequences(self, batcher, clock, load, failed)
        if delay := delay_in(DELAY):
            sequences.delay(delay, delay_in(BACKLOG_DELAY))
        return sequences


class LocalSequences:
    """The sequences of one version; an `InstanceScheduler` in front of its batcher.

    `waiting` is the number of requests here that the batcher does not have yet. The server keeps
    states for the model if it `has_states`.
    """

    def __init__(
        self, plan: LocalSequencePlan, batcher: Batcher, clock: Clock, load: ModelLoad,
        failed: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        """`failed` is `VersionStatistics.request_failed`, for requests that waited here in vain.

        All requests from here to their end are counted as `load`, which refuses them only here: one
        that its sequence goes on behind is not refused later.
        """
        self.waiting = 0
        self.has_states = bool(plan.states)
        self.seats = SequenceSeats(plan.seats, plan.idle_ns)
        self._plan = plan
        self._batcher = batcher
        self._clock = clock
        self._load = load
        self._failed = failed
        self._turns: dict[Call, _CallTurn] = {}  # of the calls that the batcher has
        self._slots: dict[Instance, SlotInstance] = {}
        self._leaving: dict[object, list[tuple[Instance, Callable[[], None]]]] = {}
        self._decided: deque[Decision] = deque()
        self._refused: TurnQueue[tuple[Turn, Why | ServerError]] = TurnQueue(
            self._refuse, clock.soon
        )
        self._acting = False
        self._delayed = False
        self._unnamed = 0  # sequences without an id so far
        self._timer: Timer | None = None
        self._timer_at = 0

    def delay(self, requests: int, backlog: int) -> None:
        """Run the first requests once there are so many, of sequences with a seat and of others.

        As in Triton: with the strategy `oldest`, one of each sequence counts, by instance.
        """
        batcher, seats = self._batcher, self.seats

        def enough(instance: Instance) -> bool:
            if not self._plan.fixed:
                return batcher.waiting_for(instance) >= requests
            others = seats.backlog_requests
            if others >= backlog and batcher.pending + self.waiting - others >= requests:
                self._delayed = False
            return not self._delayed

        self._delayed = self._plan.fixed
        batcher.delay(enough)

    # --- calls

    def submit(self, call: Call) -> None:
        """Take a checked request; raises `ServerError`."""
        options = call.options
        if call.rows > 1:
            raise not_single(self._plan.model)
        id, start, end = options.sequence_id, options.sequence_start, options.sequence_end
        if id:
            self._plan.controls.check(id)
        elif self._plan.iterative:
            self._unnamed += 1
            id, start, end = _NO_CLIENTS - self._unnamed, True, True
            told = self._plan.controls.told(id)
            call.options = options._replace(sequence_id=told, sequence_start=True)
        else:
            raise not_named(self._plan.model)
        now = self._clock.now()
        load = self._load
        if load.requests >= load.free_requests or load.bytes >= load.free_bytes:
            load.check(call.payer)
        turn = _CallTurn(self, call, now, start, end)
        decided = self.seats.arrive(id, turn, now)
        if decided and isinstance(decided[0], Refuse):
            raise self._error(turn, decided[0].why)
        load.requests += 1
        load.bytes += call.nbytes
        if not decided:
            self._wait(turn)
            self._arm()
            call.enter(turn, turn.keep)
            return
        call.enter(turn, lambda call: self._begin(turn))

    def ended(self, turn: "_CallTurn") -> None:
        """Count a request no more, which has ended in whatever way, and go on."""
        self._load.requests -= 1
        self._load.bytes -= turn.call.nbytes
        self.over(turn)

    def over(self, turn: "_CallTurn") -> None:
        """Go on after a request has ended, unless the model has it still."""
        if turn.running or turn.lasts:  # its client has gone
            return
        if turn.waits:
            self._wait(turn, False)
        self._turns.pop(turn.call, None)
        if decided := self.seats.over(turn, self._clock.now(), turn.ran):
            self._act(decided)
        if self._timer is None:  # any other end is later
            self._arm()

    def in_vain(self, turn: "_CallTurn", reason: str) -> None:
        """Count a request that never reaches the batcher."""
        self._failed(reason, self._clock.now() - turn.arrived)

    def drain(self) -> None:
        """Implements `SequenceScheduler.drain`."""
        self._act(self.seats.drain())

    def close(self) -> None:
        """Stop looking at idle sequences."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def series(self) -> SequenceSeries:
        """Implements `SequenceScheduler.series`."""
        ended = {how.value: count for how, count in self.seats.ended.items()}
        return SequenceSeries(self.seats.seated, self.seats.backlog, self.seats.restarted, ended)

    # --- instances

    @property
    def quarantine(self) -> Quarantine:
        """Implements `InstanceScheduler.quarantine`."""
        return self._batcher.quarantine

    def add_instance(self, instance: Instance) -> None:
        """Implements `InstanceScheduler.add_instance`."""
        slot = self._slots[instance] = SlotInstance(instance, self)
        self._batcher.add_instance(slot)
        self._act(self.seats.open(_holder(instance)))

    def remove_instance(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Implements `InstanceScheduler.remove_instance`, once no sequence is left there."""
        holder = _holder(instance)
        self._leaving.setdefault(holder, []).append((instance, removed))
        self._act(self.seats.retire(holder))

    def suspend(self, instance: Instance) -> None:
        """Implements `InstanceScheduler.suspend`."""
        if (slot := self._slots.get(instance)) is not None:
            self._batcher.suspend(slot)

    def resume(self, instance: Instance) -> None:
        """Implements `InstanceScheduler.resume`."""
        if (slot := self._slots.get(instance)) is None:
            return
        self._batcher.resume(slot)
        if slot.lost:
            holder = _holder(instance)
            for each in self._of(holder):
                each.lost = False
            self._act(self.seats.open(holder))

    def fail_waiting(self, error: ServerError) -> bool:
        """Implements `InstanceScheduler.fail_waiting`."""
        self._refused.process([(turn, error) for turn in self.seats.waiting()])
        return self._batcher.fail_waiting(error)

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Implements `InstanceScheduler.answer`."""
        if isinstance(answer, WorkerDied):
            answer = lost_with(answer)
        elif answer is Deferral.AGAIN and call in self._turns:
            self.again(call)
        gone = call.ended
        turn = self._turns.get(call) if final else None
        if turn is not None:
            turn.answered, turn.lasts = True, False
        self._batcher.answer(call, answer, final)
        if turn is not None and gone:
            self.over(turn)

    def lose(self, holder: object) -> None:
        """End the sequences whose state was in a worker that has ended."""
        for slot in self._of(holder):
            slot.lost = True
        lost = self.seats.lose(holder, self._clock.now())
        self._batcher.refuse(holder, lost_before(self._plan.model))
        for turn in [turn for turn in self._turns.values() if turn.lasts and turn.sequence.gone]:
            turn.lasts = False
            if turn.call.ended:
                self.over(turn)
        self._act(lost)

    # --- batches; see `slots.Seats`

    def begun(self, batch: Batch) -> None:
        """Implements `Seats.begun`."""
        for call in batch.calls:
            turn = self._turns[call]
            turn.running, turn.answered = True, False

    def done(self, batch: Batch, ran: bool) -> None:
        """Implements `Seats.done`."""
        for call in batch.calls:
            turn = self._turns[call]
            turn.running, turn.ran = False, ran
            if call.ended:
                self.over(turn)

    def later(self, call: Call) -> None:
        """Implements `Seats.later`."""
        turn = self._turns[call]
        turn.lasts = not turn.answered

    def places(self, batch: Batch) -> Sequence[int]:
        """Implements `Seats.places`."""
        return [self._turns[call].place for call in batch.calls] if self._plan.fixed else ()

    def again(self, call: Call) -> None:
        """Implements `Seats.again`."""
        turn = self._turns[call]
        options = call.options = call.options._replace(sequence_start=False)
        flags = self._plan.controls.flags(False, options.sequence_end)
        call.inputs = {**call.inputs, **flags, **_memory(turn).states}

    def empty(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Implements `Seats.empty`."""
        return inputs | self._plan.controls.idle

    # --- states

    def keep_states(self, turn: "_CallTurn", response: InferResponse) -> None:
        """Keep the states that a response has, and take out of it what its client does not get."""
        kept = _memory(turn)
        outputs = {tensor.name: tensor for tensor in response.outputs}
        for state in self._plan.states:
            if (tensor := outputs.get(state.output)) is None:
                continue
            array = tensor.array
            if array.nbytes <= _COPIED or response.timing.batch_rows > 1:
                array = array.copy()
            kept.states[state.input] = Tensor(state.input, tensor.datatype, array)
            if not (state.shown and (not turn.wanted or state.output in turn.wanted)):
                del outputs[state.output]
        response.outputs = list(outputs.values())

    # --- what was decided

    def _act(self, decided: Sequence[Decision]) -> None:
        """Carry decisions out, behind those that are being carried out."""
        if len(decided) > ENDED_AT_ONCE:
            self._refused.extend(one for one in decided if isinstance(one, Refuse))
            decided = [one for one in decided if not isinstance(one, Refuse)]
        self._decided.extend(decided)
        if self._acting:
            return
        self._acting = True
        try:
            while self._decided:
                match self._decided.popleft():
                    case Begin(turn):
                        self._begin_next(_mine(turn))
                    case Refuse() as refused:
                        self._refuse(refused)
                    case Vacate(instance):
                        for left, removed in self._leaving.pop(instance, ()):
                            self._batcher.remove_instance(self._slots.pop(left), removed)
        finally:
            self._acting = False

    def _begin_next(self, turn: "_CallTurn") -> None:
        """Begin a request that has waited, unless an answer has cancelled it meanwhile."""
        if turn.call.ended:
            return
        try:
            self._begin(turn)
        except ServerError as error:
            self._end(turn, error, "OTHER")

    def _begin(self, turn: "_CallTurn") -> None:
        """Give a request to the batcher; raises `ServerError`."""
        call, sequence, plan = turn.call, turn.sequence, self._plan
        seat = sequence.seat
        assert seat is not None
        turn.place = seat.number
        if turn.start:
            states = {state.input: state.initial for state in plan.states}
            identity = plan.controls.of_id(call.options.sequence_id)
            sequence.state = _SequenceMemory(identity, states)
        kept = _memory(turn)
        inputs, turn.wanted = call.inputs, call.outputs
        flags = plan.controls.flags(call.options.sequence_start, call.options.sequence_end)
        call.inputs = {**inputs, **flags, **kept.identity, **kept.states}
        if plan.states and call.outputs:
            hidden = [s.output for s in plan.states if s.output not in call.outputs]
            call.outputs = (*call.outputs, *hidden)
        self._turns[call] = turn
        try:
            self._batcher.submit(call, seat.instance)
        except BaseException:
            call.inputs, call.outputs = inputs, turn.wanted
            raise
        call.arrived = turn.arrived  # the wait for its turn is time in the queue
        if turn.waits:
            self._wait(turn, False)

    def _refuse(self, refused: tuple[Turn, Why | ServerError]) -> None:
        """End a request that was not run."""
        turn, why = _mine(refused[0]), refused[1]
        reason = "REJECTED" if why is Why.EXPIRED else "OTHER"
        self._end(turn, self._error(turn, why) if isinstance(why, Why) else why, reason)

    def _end(self, turn: "_CallTurn", error: ServerError, reason: str) -> None:
        """End a request that the batcher has not had, or has refused."""
        if turn.call.ended:
            return
        turn.call.ended = True
        self.in_vain(turn, reason)
        if turn.waits:
            self._wait(turn, False)
        turn.call.pass_end(error)

    def _error(self, turn: "_CallTurn", why: Why) -> ServerError:
        """The error of a request that is refused; in Triton's words, if it has any."""
        id = turn.call.options.sequence_id
        model = self._plan.model
        match why:
            case Why.UNSTARTED:
                return InvalidRequest(
                    f"inference request for sequence {id} to model '{model}' must specify the"
                    " START flag on the first request of the sequence"
                )
            case Why.EXPIRED:
                return QueueTimeout("timeout of the corresponding sequence has been expired")
            case Why.LOST:
                return SequenceLost(
                    f"sequence {id} of model '{model}' is lost, since its worker process has"
                    " ended: it has to be begun again"
                )

    def _wait(self, turn: "_CallTurn", waits: bool = True) -> None:
        turn.waits = waits
        more = 1 if waits else -1
        self.waiting += more
        self._batcher.expect(more)
        if self._delayed:
            self._batcher.wake()

    # --- time

    def _arm(self) -> None:
        """Look at sequences when the first of them may end."""
        if (when := self.seats.next_at) is None:
            return
        if self._timer is not None:
            if self._timer_at <= when:  # too early, mostly, which costs less than another timer
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._clock.at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        self._act(self.seats.expire(self._clock.now()))
        self._arm()

    # --- instances

    def _of(self, holder: object) -> list[SlotInstance]:
        """The slots of an instance, also while it leaves."""
        return [slot for one, slot in self._slots.items() if _holder(one) is holder]


class _CallTurn(Turn, Stage, Owner):
    """A call's turn in its sequence, and its owner while it `waits` here.

    `running` is true while the model has it in a batch, `ran` once it has had it. After a batch the
    request `lasts` until its last response, unless it is `answered` by then. `wanted` are the
    outputs that its client has asked for, `place` is the number of its seat.
    """

    __slots__ = (
        "_sequences", "answered", "arrived", "call", "lasts", "passive", "place", "ran", "running",
        "waits", "wanted",
    )  # fmt: skip

    def __init__(
        self, sequences: LocalSequences, call: Call, arrived: int, start: bool, end: bool
    ) -> None:
        timeout = call.options.timeout
        super().__init__(start, end, arrived + timeout * 1_000 if timeout else 0)
        self._sequences = sequences
        self.call = call
        self.arrived = arrived
        self.waits = self.running = self.ran = self.lasts = self.answered = False
        self.wanted: tuple[str, ...] = ()
        self.place = 0
        self.passive = not sequences.has_states

    def keep(self, call: Call) -> None:
        """Own the call while it waits."""
        call.owner = self

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        if not call.ended:
            call.ended = True
            self._sequences.in_vain(self, "CANCELED")

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        """Keep the states of the model."""
        if not self.passive:
            self._sequences.keep_states(self, response)

    def over(self, call: Call) -> None:
        """Go on with the next request of the sequence."""
        self._sequences.ended(self)


def _mine(turn: Turn) -> _CallTurn:
    """A turn of a decision; all turns are those of calls."""
    assert isinstance(turn, _CallTurn)
    return turn


@dataclass(slots=True)
class _SequenceMemory:
    """Tensors that the model is given with each request of a sequence: the id, the states."""

    identity: Mapping[str, Tensor]
    states: dict[str, Tensor]


def _memory(turn: _CallTurn) -> _SequenceMemory:
    """The tensors of the sequence of a turn, since its start."""
    kept = turn.sequence.state
    assert isinstance(kept, _SequenceMemory)
    return kept


def _holder(instance: Instance) -> object:
    """The keeper of an instance's states: itself, or the worker that it is a slot of."""
    return instance.owner if isinstance(instance, Slot) else instance
