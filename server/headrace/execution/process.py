"""Instances in worker processes: batches go out as frames, and what comes back is an outcome.

A worker has slots, each of which can have a batch under way: while the model runs one, the next is
in the worker's hands already. To the scheduler each slot is an instance. Only where batches are
short is there more than one: nothing should wait behind a long one that another worker could run.

A worker that ends takes with it only what it had begun, which is answered at once; what it had not
goes back to the queue. It is started again: at once if it had answered anything or run for a while,
else after a delay that grows. One that ends again and again before it has answered anything is left
alone for a while, and its model is not ready.

Owned by the event-loop thread, but for starting, which happens on a thread of the loop's executor.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable
from threading import Thread
from time import monotonic_ns
from typing import Any

from headrace.core.errors import ExecutionFailed, ModelNotReady, RepositoryError, WorkerDied
from headrace.core.signature import Signature
from headrace.execution.batch_frames import BatchFrames, printable
from headrace.execution.choice import InstanceKind
from headrace.execution.worker import WorkerProcess
from headrace.scheduling.batch import Batch, Instance, NotStarted, Outcome
from headrace.workers.elements import Buffer
from headrace.workers.frames import SLOTS, BrokenFrame, Header, Kind, lay_out, pack_batch

log = logging.getLogger(__name__)

_SHORT_NS = 2_000_000  # the time of a batch up to which it is worth having the next one there
_WEIGHT = 0.2  # of the last batch in the mean
_STEADY_SECS = 10.0  # what has run for so long has not ended because it cannot run
_FIRST_DELAY_SECS = 0.1
_MAX_DELAY_SECS = 10.0
_LOOP = 5  # early ends in a row, from which on a worker is left alone
_PAUSE_SECS = 30.0  # for so long
Done = Callable[[Instance, Batch, Outcome], None]


class Slot:
    """One of the batches that a worker may have; an instance, as the scheduler sees it."""

    def __init__(self, owner: "WorkerInstance", number: int) -> None:
        self.owner = owner
        self.number = number
        self.batch: Batch | None = None
        self.done: Done | None = None
        self.sent = 0

    @property
    def load(self) -> int:
        """See `headrace.scheduling.batch.Instance`."""
        return self.owner.under_way

    def execute(self, batch: Batch, done: Done) -> None:
        """Hand `batch` to the worker; see `headrace.scheduling.batch.Instance`."""
        self.batch, self.done = batch, done
        self.sent = monotonic_ns()
        self.owner.send(self)

    def close(self) -> None:
        """End the worker, with whichever of its slots is closed first."""
        self.owner.close()

    def end(self, outcome: Outcome) -> None:
        """Report what has come of the batch."""
        batch, done = self.batch, self.done
        self.batch = self.done = None
        assert batch is not None
        assert done is not None
        done(self, batch, outcome)


class WorkerInstance:
    """One instance of a model through all its processes.

    `start` makes another process like the first; it takes its time, and raises `RepositoryError`.
    `suspend` and `resume` are told when its slots can run nothing, and when they can again, and
    `changed` when that may matter to whether the model is ready.
    """

    def __init__(
        self,
        name: str,
        process: WorkerProcess,
        start: Callable[[], WorkerProcess],
        signature: Signature,
        loop: asyncio.AbstractEventLoop,
        suspend: Callable[[Instance], None],
        resume: Callable[[Instance], None],
        changed: Callable[[], None],
        limit_secs: float = 0.0,
    ) -> None:
        """A batch that takes longer than `limit_secs`, unless that is 0, ends the worker."""
        self.name = name
        self._limit = limit_secs
        self._limit_timer: asyncio.TimerHandle | None = None
        self.slots = [Slot(self, number) for number in range(SLOTS)]
        self.running = True
        self.given_up = False  # it has ended so often that it is left alone for now
        self._process = process
        self._start = start
        self._signature = signature
        self._loop = loop
        self._suspend = suspend
        self._resume = resume
        self._changed = changed
        self._begun = loop.time()
        self._answered = False  # the process has given an answer
        self._early_ends = 0
        self._restart: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None
        self._under_way: deque[Slot] = deque()  # in the order in which the worker takes them
        self._frames = BatchFrames(signature, self._tell_form)
        self._mean_ns = 2.0 * _SHORT_NS  # of a batch's time; not short before it is known to be
        self._prefetches = True
        self._attach()

    @property
    def under_way(self) -> int:
        """Batches that the worker has."""
        return len(self._under_way)

    @property
    def kind(self) -> InstanceKind:
        """Where its batches run."""
        return InstanceKind.PROCESS

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def close(self) -> None:
        """End the process; `closed` can be waited for."""
        if self._closed is not None:
            return
        self._closed = self._loop.create_future()
        if self._restart is not None:
            self._restart.cancel()
        if self.running:
            self._process.stop()
        else:  # one that is being started is ended when it is there
            self._closed.set_result(None)

    async def closed(self) -> None:
        """Wait until no process is left."""
        if self._closed is not None:
            await asyncio.shield(self._closed)

    # --- to the worker

    def send(self, slot: Slot) -> None:
        """Send the batch of a slot."""
        batch = slot.batch
        assert batch is not None
        if not self.running:
            self._end_soon(slot, NotStarted())
            return
        try:
            said, blocks = self._frames.pack(batch)
            sizes, pieces, total = lay_out(blocks)
            meta = pack_batch(said._replace(sizes=sizes))
            self._process.send_data(Kind.EXECUTE, slot.number, meta, pieces, total)
        except Exception as error:  # no memory for its file, say: it belongs to this batch alone
            self._end_soon(slot, error)
            return
        self._under_way.append(slot)
        if self._limit and len(self._under_way) == 1:
            self._watch()

    def _end_soon(self, slot: Slot, error: Exception) -> None:
        """Report that a batch did not get to the worker, once whoever sends it is done."""

        def end() -> None:
            now = monotonic_ns()
            slot.end(Outcome((), error, slot.sent, now, now))
            if not self.running:
                self._suspend(slot)

        self._loop.call_soon(end)

    def _watch(self) -> None:
        """Hold the batch that the worker has now against the limit."""
        if self._limit_timer is not None:
            self._limit_timer.cancel()
            self._limit_timer = None
        if self._limit and self._under_way:
            self._limit_timer = self._loop.call_later(self._limit, self._on_limit)

    def _on_limit(self) -> None:
        self._limit_timer = None
        log.error(
            "worker %d of %s has taken longer than %g s for a batch and is killed", self.pid,
            self.name, self._limit, extra={"model": self._signature.model, "worker": self.pid},
        )  # fmt: skip
        self._process.kill()

    def _tell_form(self, document: bytes) -> None:
        self._process.send(Kind.FORM, document)

    # --- from the worker

    def _attach(self) -> None:
        self._process.attach(self._loop, self._on_frame, self._on_exit)

    def _on_frame(self, header: Header, meta: bytes, data: Buffer) -> None:
        if header.kind is Kind.FORM:
            self._frames.learn(json.loads(meta))
            return
        if header.kind not in (Kind.RESULT, Kind.RESPONSES, Kind.BROKEN):
            raise BrokenFrame(f"a frame of kind {header.kind.name}")
        if not self._under_way or self._under_way[0].number != header.slot:
            raise BrokenFrame("an answer to no batch")
        slot = self._under_way[0]
        assert slot.batch is not None
        if header.kind is Kind.RESULT:
            outcome = self._frames.result(slot.sent, slot.batch, meta, data, header.data)
        elif header.kind is Kind.RESPONSES:
            outcome = self._frames.responses(
                slot.sent, slot.batch, json.loads(meta), data, header.data
            )
        else:
            outcome = self._broken(slot, slot.batch, json.loads(meta))
        self._under_way.popleft()
        if self._limit:
            self._watch()
        self._answered = self._answered or outcome.error is None
        self._mean_ns += _WEIGHT * (outcome.computed - outcome.started - self._mean_ns)
        slot.end(outcome)
        self.choose_slots()

    def choose_slots(self) -> None:
        """Take part with further slots only while batches are short."""
        prefetches = self._mean_ns <= _SHORT_NS
        if prefetches != self._prefetches:
            free = [slot for slot in self.slots[1:] if slot.batch is None]
            if len(free) == len(self.slots) - 1:  # else after the next batch
                self._prefetches = prefetches
                for slot in free:
                    (self._resume if prefetches else self._suspend)(slot)

    def _broken(self, slot: Slot, batch: Batch, document: dict[str, Any]) -> Outcome:
        """The model has raised, or given back something else than responses."""
        text, lines = printable(document["text"]), printable(document["traceback"])
        several = len(batch.pendings) > 1
        fields = {"model": self._signature.model, "worker": self.pid}
        if several:
            log.debug("%s; its %d requests are run again in halves", text, len(batch.pendings),
                      extra=fields)  # fmt: skip
        else:
            log.error("%s", lines.rstrip() or text, extra=fields)
        now = monotonic_ns()
        error = ExecutionFailed(
            f"Failed to process the request(s) for model '{self._signature.model}', message: {text}"
        )
        return Outcome((), error, slot.sent, slot.sent, now)

    # --- its end, and the next one

    def _on_exit(self, how: str) -> None:
        now = monotonic_ns()
        self.running = False
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
        under_way, self._under_way = self._under_way, deque()
        self._watch()
        self._frames = BatchFrames(self._signature, self._tell_form)  # the next one knows nothing
        steady = self._answered or self._loop.time() - self._begun >= _STEADY_SECS
        if self._closed is None:
            self._early_ends = 1 if steady else self._early_ends + 1
            log.error(
                "worker %d of %s %s", self.pid, self.name, how,
                extra={"model": self._signature.model, "worker": self.pid},
            )  # fmt: skip
        for index, slot in enumerate(under_way):
            error: Exception = NotStarted()
            if not index:
                error = WorkerDied(
                    f"the worker process of model '{self._signature.model}' {how} while it"
                    " executed the request"
                )
            slot.end(Outcome((), error, slot.sent, slot.sent, now))
        for slot in self.slots:
            self._suspend(slot)
        if self._closed is None:
            self._plan_restart()
        self._changed()

    def _plan_restart(self) -> None:
        if self._early_ends >= _LOOP:
            self.given_up = True
            delay = _PAUSE_SECS
            log.error(
                "%s ends again and again: it is tried again in %d s", self.name, delay,
                extra={"model": self._signature.model},
            )  # fmt: skip
        else:
            delay = restart_delay(self._early_ends)
        self._restart = self._loop.call_later(delay, self._start_again)

    def _start_again(self) -> None:
        self._restart = None
        # A thread of its own, and a daemon: a model that takes for ever to start must neither keep
        # others from being started nor the server from ending.
        Thread(target=self._start_another, name=f"start {self.name}", daemon=True).start()

    def _start_another(self) -> None:
        process: WorkerProcess | None = None
        problem: Exception | None = None
        try:
            process = self._start()
        except Exception as error:  # RepositoryError, or a bug
            problem = error
        try:
            self._loop.call_soon_threadsafe(self._on_started, process, problem)
        except RuntimeError:  # the loop is closed: the server has ended
            if process is not None:
                process.kill()

    def _on_started(self, process: WorkerProcess | None, problem: Exception | None) -> None:
        if self._closed is not None:
            if process is not None:
                process.kill()
            return
        if process is None:
            trace = None if isinstance(problem, RepositoryError) else problem
            log.error("%s cannot be started again: %s", self.name, problem, exc_info=trace)
            self._early_ends += 1
            self._plan_restart()
            self._changed()
            return
        self._process = process
        self._begun = self._loop.time()
        self._answered = False
        self.running = True
        self.given_up = False
        self._attach()
        log.info("%s runs again as worker %d", self.name, process.pid,
                 extra={"model": self._signature.model})  # fmt: skip
        for slot in self.slots if self._prefetches else self.slots[:1]:
            self._resume(slot)
        self._changed()


def restart_delay(early_ends: int) -> float:
    """Seconds to wait before starting again what has ended early so many times in a row."""
    if early_ends <= 1:
        return 0.0
    return min(_FIRST_DELAY_SECS * 2.0 ** min(early_ends - 2, 20), _MAX_DELAY_SECS)


def waiting_error(signature: Signature) -> ModelNotReady:
    """What a request is told that waits for workers which do not come back."""
    return ModelNotReady(
        f"model '{signature.model}' is not ready: its worker processes end again and again; the"
        " server's log says how"
    )
