"""Placement in this process: instances on the event loop, or on a thread each.

The scheduler runs on the event loop; an instance on a thread takes batches from a queue and reports
through the loop, with one wake-up per batch. ONNX Runtime releases the GIL while it computes.

An instance in use is checked once a second: one whose batch takes too long is stalled, and a run
that exceeds the model's limit, or that is abandoned, is terminated. A thread cannot be: only what
the backend can terminate is, so ONNX Runtime's runs between two nodes of the graph, and Python's
not at all.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from time import monotonic_ns, thread_time_ns
from typing import Any, Literal, Protocol

from headrace.core.errors import ExecutionTimeout, ModelNotReady, Unavailable
from headrace.core.limits import ABANDONED_SECS, ExecutionLimits, Pulse, pace_for
from headrace.core.tensors import Array, TensorArray
from headrace.placement.choice import AutoChoice, InstanceKind, Size, size_of
from headrace.placement.placement import Placement, Surroundings
from headrace.scheduling.batch import Batch, BatchBuffer, Instance, NotStarted, Outcome

log = logging.getLogger(__name__)


_REST_SECS = 10.0  # without a batch after which cached memory is released
_LARGE = 16 << 20  # bytes of a batch's tensors that matter to the footprint
Done = Callable[[Instance, Batch, Outcome], None]
# See `headrace.placement.loaded.LoadedModel.infer`.
Infer = Callable[[Mapping[str, Any], Sequence[str]], Sequence[TensorArray]]
# Limits of BYTES elements, and of their bytes, that become objects on the event loop: each takes
# about half a microsecond, and the switch to a thread a hundred times that.
_MOST_ELEMENTS, _MOST_BYTES = 1000, 1 << 20


def run_batch(infer: Infer, batch: Batch, buffer: BatchBuffer | None = None) -> Outcome:
    """Gather the inputs of a batch and run it. Never raises: a failure is an outcome, too."""
    started = gathered = monotonic_ns()
    try:
        inputs = batch.gather(buffer)
        gathered = monotonic_ns()
        arrays = infer(inputs, batch.names)
        parts = None if batch.signature.ragged is None else batch.scattered(arrays)
    except Exception as error:  # any error concerns this batch alone
        # Not in a variable that outlives this block: the error refers to this frame.
        return Outcome((), error, started, gathered, monotonic_ns())
    return Outcome(arrays, None, started, gathered, monotonic_ns(), parts)


class InstanceModel(Protocol):
    """The part of a `headrace.placement.loaded.LoadedModel` that its instance uses."""

    # True if any thread may run it, one at a time.
    any_thread: bool

    def batch_function(self, buffer: BatchBuffer) -> Callable[[Batch], Outcome]:
        """The function that runs batches, gathered in `buffer`; a failure is an outcome, too."""

    def rest(self) -> None:
        """Release memory cached for further batches."""

    def terminate(self) -> bool:
        """Terminate the current run soon; False if that is impossible. Thread-safe."""

    def close(self) -> None:
        """Release the model's memory."""


class Footprint:
    """The memory that recent batches needed, for an instance that goes on with smaller ones.

    ONNX Runtime's arena and the buffers of batches keep what the largest batch took. An instance
    without batches gives it back; one that is in use all the time never would, although a single
    client may have sent that batch. Owned by the event-loop thread.
    """

    def __init__(self, rest_secs: float) -> None:
        """Memory is kept for `rest_secs` after the last batch that needed it."""
        self._rest_secs = rest_secs
        self._most = 0  # bytes of the largest batch since memory was given back
        self._secs = 0.0  # since a batch of about that size

    def ran(self, nbytes: int) -> None:
        """Note a batch with `nbytes` of inputs and outputs."""
        if 2 * nbytes >= self._most:
            self._most = max(self._most, nbytes)
            self._secs = 0.0

    def look(self, elapsed: float) -> bool:
        """True if memory is to be given back now; `elapsed` seconds after the last look."""
        self._secs += elapsed
        if self._most < _LARGE or self._secs < self._rest_secs:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Begin anew: memory was given back."""
        self._most, self._secs = 0, 0.0


class LocalInstance:
    """Runs batches of one loaded model, inline or on its own thread.

    Batches with many BYTES elements run on the thread in any case.

    The scheduler gives it one batch at a time, so two threads never run the model at once, not even
    when `auto` changes the kind.
    """

    load = 0
    concurrency = 0

    def __init__(
        self,
        name: str,
        model: InstanceModel,
        kind: InstanceKind | AutoChoice,
        loop: asyncio.AbstractEventLoop,
        place: Callable[[int], Array | None] | None = None,
        rest_secs: float = _REST_SECS,
        limits: ExecutionLimits | None = None,
        changed: Callable[[], None] = lambda: None,
        ended: Counter[str] | None = None,
    ) -> None:
        """`place` allocates preferred memory for large batches, or returns None.

        Cached memory is released after `rest_secs` without a batch, or without one that needs it.
        By default there are no `limits`. `changed` is called when the instance stalls or recovers;
        `ended` counts terminated runs, by reason.
        """
        self.name = name
        self._model = model
        self._auto = kind if isinstance(kind, AutoChoice) else None
        self._kind = kind.kind if isinstance(kind, AutoChoice) else kind
        self._sizes = self._auto.sizes if self._auto is not None else None
        self._size: Size = ()  # of the current batch, if that matters
        self._busy: int | None = None  # CPU time of its run on the loop
        self._loop = loop
        self._buffer = BatchBuffer(place)
        self._run_batch = model.batch_function(self._buffer)
        self._work: SimpleQueue[tuple[Batch, Done] | Literal["rest"] | None] = SimpleQueue()
        self._rest_secs = rest_secs
        self._ran = False  # ran since the last look
        self._rested = 0.0  # seconds without a batch
        self._footprint = Footprint(rest_secs)  # of batches on the thread: others are small
        self._looking: asyncio.TimerHandle | None = None
        self._looked = 0.0  # time of the last look, by the loop's clock
        self._limits = limits or ExecutionLimits()
        self._changed = changed
        self._ended = Counter() if ended is None else ended
        self._pace = min(rest_secs, self._limits.pace)
        self._grace = ABANDONED_SECS
        self._batch: Batch | None = None  # the thread's current batch
        self._number = 0  # the batch's number
        self._pulse, self._abandoned = Pulse(), Pulse()
        # The reason for termination, instead of the run's error.
        self._verdict: Exception | None = None
        self.silent = 0.0  # seconds that the batch has taken, as of the last look
        self.stalled = False
        self._thread: Thread | None = None
        self._closed = asyncio.Event()

    @property
    def kind(self) -> InstanceKind:
        """The kind of the next batch."""
        return self._kind

    def execute(self, batch: Batch, done: Done) -> None:
        """Run `batch`; see `headrace.scheduling.batch.Instance`."""
        self._ran = True
        if self._looking is None:
            self._looked = self._loop.time()
            self._looking = self._loop.call_later(self._pace, self._look)
        texts = batch.signature.texts
        if self._sizes is not None:
            self._size, self._busy = size_of(batch), None
            if self._sizes.light(self._size) and not (texts and _is_heavy(texts, batch)):
                begun = thread_time_ns()
                outcome = self._run_batch(batch)
                self._busy = thread_time_ns() - begun
                self._report(batch, done, outcome)
                del outcome  # its error refers to this frame
                return
        elif self._kind is InstanceKind.INLINE and not (texts and _is_heavy(texts, batch)):
            self._report(batch, done, self._run_batch(batch))
            return
        if self._thread is None:
            # A daemon: a model that hangs must not keep the process from exiting.
            thread = Thread(target=self._serve, name=self.name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                now = monotonic_ns()
                refused = Unavailable(f"model '{batch.signature.model}' cannot run now: {error}")
                outcome = Outcome((), NotStarted(refused), now, now, now)
                self._loop.call_soon(self._report, batch, done, outcome)
                return
            self._thread = thread
        self._batch = batch
        self._number += 1
        self._work.put((batch, done))

    @property
    def lendable(self) -> bool:
        """Implements `LentInstance.lendable`."""
        return self._model.any_thread and self._looking is not None  # else none is looked after

    def light(self, batch: Batch) -> bool:
        """Implements `LentInstance.light`."""
        if self._looking is None or (
            batch.signature.texts and _is_heavy(batch.signature.texts, batch)
        ):
            return False
        if self._sizes is not None:
            return self._sizes.light(size_of(batch))
        return self._kind is InstanceKind.INLINE

    def run(self, batch: Batch) -> Outcome:
        """Implements `LentInstance.run`."""
        self._ran = True
        self._batch = batch
        self._number += 1
        outcome = self._run_batch(batch)
        self._batch = None
        if self._verdict is not None:
            self._judge(self._verdict, outcome)
        return outcome

    def run_each(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        """Implements `LentInstance.run_each`."""
        self._ran = True
        run = self._run_batch
        return [run(batch) for batch in batches]

    def serves(self, target: object) -> bool:
        """Implements `Instance.serves`: it is its only target."""
        return target is self

    def leave(self, grace: float) -> None:
        """Terminate runs that are still abandoned after `grace` seconds."""
        self._grace = min(self._grace, grace)
        self._pace = min(self._pace, pace_for(self._grace))
        if self._looking is not None:
            self._looking.cancel()
            self._look()

    def close(self) -> None:
        """Release the model; on its thread, if any, without waiting."""
        if self._looking is not None:
            self._looking.cancel()
            if self._batch is None:
                self._looking = None  # otherwise `leave` would keep a reference to the model
        if self._thread is None:
            self._model.close()
            self._closed.set()
        else:
            self._work.put(None)

    @property
    def released(self) -> bool:
        """True if the model has been released."""
        return self._closed.is_set()

    async def closed(self) -> None:
        """Wait until the model has been released."""
        await self._closed.wait()

    def _look(self) -> None:
        self._looking = None
        now = self._loop.time()
        elapsed, self._looked = now - self._looked, now
        self._feel(elapsed)
        if self._ran or self._batch is not None:
            self._ran = False
            self._rested = 0.0
        else:
            self._rested += elapsed
        if self._rested < self._rest_secs:
            if self._footprint.look(elapsed):
                self._work.put("rest")
            self._looking = self._loop.call_later(self._pace, self._look)
        elif self._thread is not None:
            self._footprint.forget()
            self._work.put("rest")
        else:
            self._rest()

    def _feel(self, elapsed: float) -> None:
        """Detect a batch that takes too long, or is abandoned."""
        batch, limits = self._batch, self._limits
        number = self._number if batch is not None else None
        self.silent = self._pulse.look(number, elapsed)
        wanted = batch is None or not all(call.ended for call in batch.calls)
        abandoned = self._abandoned.look(None if wanted else number, elapsed)
        stalled = 0 < limits.stall_secs <= self.silent
        if stalled is not self.stalled:
            self.stalled = stalled
            if stalled:
                log.warning("%s has had a batch for %.0f s", self.name, self.silent)
            self._changed()
        limit = limits.execution_secs
        if batch is not None and 0 < limit <= self.silent:
            text = f"has taken longer than {limit:g} s for a batch and was ended"
            self._end(ExecutionTimeout(f"model '{batch.signature.model}' {text}"), "limit")
        elif abandoned >= self._grace:
            self._end(NotStarted(), "abandoned")

    def _end(self, verdict: Exception, why: str) -> None:
        """Terminate the current run, if possible; repeated until it has ended."""
        if self._model.terminate() and self._verdict is None:
            told = "it takes too long" if why == "limit" else "no client waits for it any more"
            log.error("the run of %s is ended after %.0f s: %s", self.name, self.silent, told)
            self._ended[why] += 1
            self._verdict = verdict

    def _rest(self) -> None:
        self._buffer.clear()
        try:
            self._model.rest()
        except Exception:
            log.exception("bug while %s gave memory back", self.name)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            if item == "rest":
                self._rest()
                continue
            try:
                self._run(*item)
            except RuntimeError:
                return  # the loop is closed: the process is ending
            del item  # its tensors must not stay in memory until the next batch
        self._model.close()
        with suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._closed.set)

    def _run(self, batch: Batch, done: Done) -> None:
        outcome = self._run_batch(batch)
        self._loop.call_soon_threadsafe(self._report_run, batch, done, outcome)
        del outcome  # its error refers to this frame

    def _report_run(self, batch: Batch, done: Done, outcome: Outcome) -> None:
        """Report the outcome of a batch that ran on the thread; on the event loop."""
        inputs = [tensor.array.nbytes for call in batch.calls for tensor in call.inputs.values()]
        self._footprint.ran(sum(inputs) + sum(array.nbytes for array in outcome.arrays))
        self._report(batch, done, outcome)

    def _judge(self, verdict: Exception, outcome: Outcome) -> None:
        """Note why a run was terminated."""
        if outcome.error is not None:  # the run may have succeeded at the last moment
            outcome.error = verdict
        self._verdict = None

    def _report(self, batch: Batch, done: Done, outcome: Outcome) -> None:
        """Report the outcome of a batch; on the event loop."""
        self._batch = None
        if self._verdict is not None:
            self._judge(self._verdict, outcome)
        # A failed run may have been short: it must not bring a heavy model back inline.
        auto, cost = self._auto, outcome.computed - outcome.started
        if self._sizes is not None:
            self._sizes.ran(self._size, cost, self._busy, outcome.error is not None)
            elsewhere = self._busy is None
            self._kind = InstanceKind.THREAD if elsewhere else InstanceKind.INLINE
        elif (
            auto is not None
            and cost > auto.calm_ns
            and (outcome.error is None or self._kind is InstanceKind.INLINE)
            and auto.observe(cost)
        ):
            self._kind = auto.kind
            log.info("instance %s now runs %s by its measured cost", self.name, self._kind)
        done(self, batch, outcome)


def _is_heavy(texts: Sequence[str], batch: Batch) -> bool:
    """True if the BYTES inputs of these names are too large for the event loop."""
    elements = nbytes = 0
    for call in batch.calls:
        inputs = call.inputs
        for name in texts:
            if name in inputs:
                array = inputs[name].array
                elements += array.size
                nbytes += array.nbytes
    return elements > _MOST_ELEMENTS or nbytes > _MOST_BYTES


class LocalPlacement(Placement):
    """The instances of one backend in this process."""

    def __init__(self, version: Surroundings) -> None:
        self._version = version
        self._instances: list[LocalInstance] = []
        self._removed: list[LocalInstance] = []

    def __iter__(self) -> Iterator[LocalInstance]:
        return iter(self._instances)

    def add(
        self,
        name: str,
        model: Any,
        kind: InstanceKind | AutoChoice,
        place: Callable[[int], Array | None] | None = None,
    ) -> None:
        version = self._version
        instance = LocalInstance(
            name, model, kind, version.loop, place, limits=version.limits,
            changed=version.changed, ended=version.ended_runs,
        )  # fmt: skip
        self._instances.append(instance)
        version.scheduler.add_instance(instance)

    def remove(self, name: str) -> None:
        self._removed = [instance for instance in self._removed if not instance.released]
        if instance := next((i for i in self._instances if i.name == name), None):
            self._instances.remove(instance)
            self._removed.append(instance)
            self._version.scheduler.remove_instance(instance, instance.close)

    @property
    def healthy(self) -> bool:
        """True if any instance is not stalled."""
        return any(not instance.stalled for instance in self._instances)

    @property
    def stalled(self) -> list[LocalInstance]:
        return [instance for instance in self._instances if instance.stalled]

    @property
    def given_up(self) -> bool:
        return not self._instances

    def waiting_error(self) -> ModelNotReady:
        return ModelNotReady(
            f"model '{self._version.signature.model}' is not ready: it has no instances",
            retry_after=1,
        )

    def leave(self, grace: float) -> None:
        for instance in (*self._instances, *self._removed):
            instance.leave(grace)

    def close(self) -> None:
        """Do nothing: only the instances need closing."""

    async def closed(self) -> None:
        await asyncio.gather(*(i.closed() for i in (*self._instances, *self._removed)))
