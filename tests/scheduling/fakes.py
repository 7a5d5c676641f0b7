"""Fakes around a scheduler: a manual clock, instances that finish on request, recording calls."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from headrace.core.call import Call, CallOptions, InferResponse, Owner, Submit
from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batch import Answer, Batch, Instance, Outcome, Part
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy

Done = Callable[[Instance, Batch, Outcome], None]
Model = Callable[[Mapping[str, Array], Sequence[str]], Sequence[Array]]

C = TypeVar("C", bound=Call)

GATHER_NS = 3  # cost of gathering within the time of a batch
POISON = -1  # a value that makes `double` raise


class FakeTimer:
    """A timer of `FakeClock`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.live = True

    def cancel(self) -> None:
        self.live = False


class FakeClock:
    """Time that moves by `advance` alone, and ticks that end by `tick` alone."""

    def __init__(self) -> None:
        self.time = 0
        self.ticks = 0
        self._ready: list[Callable[[], object]] = []
        self._timers: list[tuple[int, int, FakeTimer]] = []
        self._ties = count()

    def now(self) -> int:
        return self.time

    def soon(self, callback: Callable[..., object], *args: Any) -> object:
        self._ready.append(partial(callback, *args))
        return callback

    def at(self, when: int, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._ties), timer))
        return timer

    def tick(self) -> bool:
        """End one tick; true if anything ran."""
        self.ticks += 1
        ready, self._ready = self._ready, []
        for callback in ready:
            callback()
        return bool(ready)

    def settle(self) -> None:
        """End ticks until one runs nothing."""
        for _ in range(1_000):
            if not self.tick():
                return
        raise AssertionError("the scheduler does not come to rest")

    def advance(self, ns: int) -> None:
        """Let `ns` pass; timers fire on time, each at the end of a tick."""
        target = self.time + ns
        while self._timers and self._timers[0][0] <= target:
            when, _, timer = heapq.heappop(self._timers)
            if timer.live:
                self.time = max(self.time, when)
                timer.callback()
                self.settle()
        self.time = target

    @property
    def armed(self) -> list[int]:
        """Due times of the live timers."""
        return sorted(when for when, _, timer in self._timers if timer.live)


class FakeCall(Call):
    """Records its answers; a shared `log` shows the order over several calls."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        super().__init__("", "", "", {})
        self.name = name
        self.responses: list[InferResponse] = []
        self.errors: list[ServerError] = []
        self.finished = False
        self.log = log if log is not None else []
        self.then: Callable[[], None] = lambda: None

    def respond(self, response: InferResponse, final: bool) -> None:
        assert final
        self.responses.append(response)
        self.log.append(self.name)
        self.then()

    def finish(self) -> None:
        self.finished = True
        self.log.append(self.name)

    def fail(self, error: ServerError) -> None:
        self.errors.append(error)
        self.log.append(self.name)
        self.then()

    @property
    def calls(self) -> int:
        return len(self.responses) + len(self.errors)

    @property
    def values(self) -> list[int]:
        """Values of output `y` of the only response."""
        (response,) = self.responses
        (tensor,) = response.outputs
        return [int(value) for value in np.asarray(tensor.array).ravel()]


def ends_by_tick(clock: FakeClock, calls: Iterable[FakeCall]) -> Counter[int]:
    """The numbers of calls that are answered, or fail, in each tick from now on."""
    found = Counter[int]()
    for call in calls:
        call.then = lambda: found.update((clock.ticks,))
    return found


def double(inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
    """y = 2x; fails if `POISON` is among x."""
    x = inputs["x"]
    if (x == POISON).any():
        raise ValueError("poisoned")
    return [2 * x for _ in outputs]


class FakeInstance:
    """Holds its batch until `finish`, or runs it at once if inline."""

    load = 0

    def __init__(
        self,
        clock: FakeClock,
        model: Model = double,
        inline: bool = False,
        all_runs: list[list[str]] | None = None,
        name: str = "",
    ) -> None:
        self.name = name
        self._clock = clock
        self._all_runs = all_runs if all_runs is not None else []
        self._model = model
        self._inline = inline
        self._work: tuple[Batch, Done, int] | None = None
        self.runs: list[list[str]] = []  # the requests' ids, run by run
        self.rows: list[int] = []
        self.closed = False

    @property
    def busy(self) -> bool:
        return self._work is not None

    def serves(self, target: object) -> bool:
        return target is self

    @property
    def running(self) -> list[str]:
        return self.runs[-1] if self.busy else []

    def execute(self, batch: Batch, done: Done) -> None:
        assert not self.busy, "an instance gets one batch at a time"
        assert not self.closed
        assert all(call.started for call in batch.calls)
        self.runs.append([call.id for call in batch.calls])
        self._all_runs.append(self.runs[-1])
        self.rows.append(batch.rows)
        self._work = (batch, done, self._clock.time)
        if self._inline:
            self.finish()

    def finish(self) -> None:
        """Run the held batch and report its outcome."""
        assert self._work is not None
        (batch, done, started), self._work = self._work, None
        arrays: Sequence[Array] = ()
        error: Exception | None = None
        try:
            inputs = {name: np.asarray(array) for name, array in batch.gather().items()}
            arrays = self._model(inputs, [spec.name for spec in batch.outputs])
        except Exception as raised:
            error = raised
        computed = self._clock.time
        gathered = min(started + GATHER_NS, computed)
        done(self, batch, Outcome(arrays, error, started, gathered, computed))

    def report(self, error: Exception | None = None, parts: Sequence[Answer] | None = None) -> None:
        """Report like an instance in another process: without arrays of the whole batch."""
        assert self._work is not None
        (batch, done, started), self._work = self._work, None
        now = self._clock.time
        done(self, batch, Outcome((), error, started, started, now, parts))

    def close(self) -> None:
        assert not self.busy
        self.closed = True


def signature(max_batch_size: int = 4, dims: tuple[int, ...] = (-1,)) -> Signature:
    """One input x and one output y of INT64."""
    return Signature(
        "double",
        max_batch_size,
        (TensorSpec("x", Datatype.INT64, dims),),
        (TensorSpec("y", Datatype.INT64, dims),),
    )


def request(name: str, *values: int, width: int = 1, priority: int = 0, timeout: int = 0) -> Call:
    """A request with one row per value, `width` elements wide."""
    array = np.repeat(np.array(values, np.int64).reshape(-1, 1), width, axis=1)
    tensor = Tensor("x", Datatype.INT64, array)
    return Call("double", "", name, {"x": tensor}, options=CallOptions(priority, timeout))


def entered(asked: Call, rows: int, key: object, arrived: int, owner: Owner) -> Call:
    """A call in the state `Batcher.submit` gives it, in no queue."""
    call = FakeCall(asked.id)
    call.take(asked)
    call.nbytes = asked.nbytes
    call.rows, call.key, call.owner = rows, key, owner
    call.arrived = call.began = arrived
    call.level, call.run_number = 1, 0
    call.deadline = call.execution = call.outcome = None
    return call


def submitted(submit: Submit, asked: Call, call: C, rows: int = 0) -> C:
    """`submit` a call with the properties of `asked`, and `rows` if known."""
    call.take(asked)
    call.nbytes, call.rows = asked.nbytes, rows
    submit(call)
    return call


class ManyCall(FakeCall):
    """A call that takes any number of responses."""

    def __init__(self) -> None:
        super().__init__()
        self.finals: list[bool] = []

    def respond(self, response: InferResponse, final: bool) -> None:
        self.responses.append(response)
        self.finals.append(final)


class FakeExecution:
    """An execution that records what it is told."""

    def __init__(self) -> None:
        self.cancelled: list[Call] = []
        self.held: list[bool] = []

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call)

    def call_off(self, call: Call) -> bool:
        return False

    def hold(self, call: Call, held: bool) -> None:
        self.held.append(held)


def part(value: int, rows: int = 1) -> Part:
    """One value."""
    return Part({"y": np.full((rows, 1), value, np.int64)}, {})


class Bench:
    """A batcher with its clock and instances."""

    def __init__(
        self,
        policy: SchedulingPolicy | None = None,
        instances: int = 1,
        *,
        inline: bool = False,
        model: Model = double,
        shape: Signature | None = None,
        kind: Callable[..., Batcher] = Batcher,
    ) -> None:
        self.clock = FakeClock()
        self.statistics = VersionStatistics()
        self.reports: list[tuple[int, Exception]] = []
        self.log: list[str] = []
        self.batcher = kind(
            shape or signature(),
            "3",
            policy or SchedulingPolicy(BatchPolicy(4)),
            self.clock,
            self.statistics,
            lambda calls, error: self.reports.append((len(calls), error)),
        )
        self._runs: list[list[str]] = []
        self.instances = [
            FakeInstance(self.clock, model, inline, self._runs) for _ in range(instances)
        ]
        for instance in self.instances:
            self.batcher.add_instance(instance)
        self.clock.settle()

    def submit(
        self,
        name: str,
        *values: int,
        width: int = 1,
        priority: int = 0,
        timeout: int = 0,
        target: object = None,
    ) -> FakeCall:
        """Submit a request of `values` (default: one row) without ending the tick."""
        asked = request(name, *(values or (1,)), width=width, priority=priority, timeout=timeout)
        rows = len(asked.inputs["x"].array)
        submit = partial(self.batcher.submit, target=target)
        return submitted(submit, asked, FakeCall(name, self.log), rows)

    def submit_to(
        self, call: FakeCall, values: Sequence[int], width: int, *, priority: int, timeout: int
    ) -> Call:
        """Submit a request; no values mean no rows."""
        asked = request(call.name, *values, width=width, priority=priority, timeout=timeout)
        return submitted(self.batcher.submit, asked, call, len(values))

    def send(self, name: str, *values: int, timeout: int = 0) -> FakeCall:
        """Submit a request and end the tick."""
        call = self.submit(name, *values, timeout=timeout)
        self.clock.settle()
        return call

    def finish(self, name: str) -> None:
        """Finish the run of the batch that begins with this request."""
        (instance,) = [one for one in self.instances if one.running[:1] == [name]]
        instance.finish()

    def drained(self) -> list[bool]:
        """Await `drain`; the returned list records its single report."""
        told: list[bool] = []
        self.batcher.when_drained(lambda: told.append(True))
        return told

    @property
    def started(self) -> list[str]:
        """Ids of requests given to instances, run by run, over all instances."""
        return [name for run in self._runs for name in run]

    def finish_all(self) -> None:
        """End ticks and runs until none is left."""
        self.clock.settle()
        while busy := [instance for instance in self.instances if instance.busy]:
            busy[0].finish()
            self.clock.settle()
