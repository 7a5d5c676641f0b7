"""An instance in a worker process: batches are sent as frames, results become outcomes.

A worker has slots, each for one batch in progress: while the model runs one, the next is already in
the worker. To the scheduler each slot is an instance. There is only more than one if batches are
short: nothing should wait behind a long one that another worker could run.

A worker that ends fails only the batches that it has started; the others go back to the queue. It
is restarted: at once if it had answered anything or run for a while, else after a growing delay.
After a loop of early ends restarts are paused, and its model is not ready.

Owned by the event-loop thread, except for starting, which happens on a separate thread.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from time import monotonic_ns

from headrace.core.daemon_thread import NoResources, run_in_daemon_thread
from headrace.core.errors import RepositoryError
from headrace.core.limits import ABANDONED_SECS, Pulse
from headrace.ipc.elements import Buffer
from headrace.ipc.frames import ANSWERS, SLOTS, FrameKind, Header
from headrace.observability.statistics import EndKind, WorkerCounters
from headrace.placement.child_process import RestartPolicy
from headrace.placement.choice import InstanceKind
from headrace.placement.placement import Surroundings
from headrace.placement.worker.conversation import Conversation, Slot
from headrace.placement.worker.python_options import RunOptions, WorkerOptions
from headrace.placement.worker.shared_blocks import SharedBlocks
from headrace.placement.worker.worker_process import WorkerProcess
from headrace.scheduling.batch import Batch, Outcome

log = logging.getLogger(__name__)

_SHORT_NS = 2_000_000  # duration of a batch up to which sending the next one ahead pays
_WEIGHT = 0.2  # weight of the last batch in the mean
_PAUSE_SECS = 0.1  # before a worker killed for abandoned work is restarted
_ASK_SECS = 1.0  # between readiness requests to the model
_ANSWER_SECS = 5.0  # time limit for the answer


class WorkerInstance:
    """One instance of a model, across restarts of its process.

    As of the last `look`: seconds without progress of all executing batches (`silent`) or of one of
    them (`longest`), and seconds of executing abandoned work only (`abandoned`).

    `start` makes another process like the first; it blocks, and raises `RepositoryError`.
    """

    def __init__(
        self,
        name: str,
        process: WorkerProcess,
        start: Callable[[], WorkerProcess],
        options: WorkerOptions,
        run_options: RunOptions,
        version: Surroundings,
        counters: WorkerCounters,
        changed: Callable[[], None],
        shared: SharedBlocks | None = None,
    ) -> None:
        """`changed` is called after any change that may affect readiness.

        `shared` is memory in which requests of the version are received.
        """
        self._shared = shared
        self.name = name
        self.grace = ABANDONED_SECS  # time for the model to end abandoned open requests
        self._counters = counters
        self._killed: tuple[EndKind, str] | None = None
        self.silent = 0.0
        self.longest = 0.0
        self.abandoned = 0.0
        self.stalled = False
        self._abandoned = Pulse()
        self.start = start
        self.options = options
        self.run_options = run_options
        self.slots = [Slot(self, number) for number in range(run_options.concurrency or SLOTS)]
        self.slots_left = 0  # slots of a replaced worker that the scheduler still has
        self.outsized = False  # too large from the start: replacing it would not help
        self.heartbeat = Pulse()
        self.running = True
        self.given_up = False  # restarts are paused after a loop of early ends ...
        self.tried_again = 0.0  # ... until this time of the loop's clock
        self._process = process
        self._signature = version.signature
        self._loop = version.loop
        self._scheduler = version.scheduler
        self._host = version.host
        self._changed = changed
        self._lost = version.lost
        self._begun = self._loop.time()
        self._answered = False  # the process has answered a batch
        self._restarts = RestartPolicy()
        self._restart: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        self._willing = True  # the readiness last reported by the model
        self._question: asyncio.TimerHandle | None = None
        self._asked = 0
        self._late = False  # true if the last readiness request is overdue
        self._mean_ns = 2.0 * _SHORT_NS  # mean duration of a batch; initially assumed long
        self._prefetches = True
        self._calls_out = False  # the model has called other models
        self._attach()

    @property
    def requests(self) -> int:
        """The number of requests sent to the process."""
        return self.talk.requests

    @property
    def concurrency(self) -> int:
        """The number of concurrent batches, 0 for one after the other."""
        return self.run_options.concurrency

    @property
    def kind(self) -> InstanceKind:
        """Always a process."""
        return InstanceKind.PROCESS

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def scratch_excess(self) -> str:
        """The limit that its scratch directory exceeds; "" for none; see `Scratch.excess`."""
        process = self._process
        confinement = process.spec.confinement
        if confinement is None or process.scratch is None or process.ended:
            return ""
        return process.scratch.excess(confinement.scratch_bytes)

    @property
    def confined(self) -> bool:
        """True if it has a scratch directory."""
        return self._process.scratch is not None

    @property
    def beats(self) -> int:
        """The number of heartbeats of the running process."""
        return self._process.beats

    @property
    def idle(self) -> bool:
        """True if no request for the process is waiting."""
        return not self.running or self.talk.idle

    def resident(self) -> int:
        """Bytes of memory in use by the process."""
        return self._process.resident()

    def close(self) -> None:
        """End the process; see `closed`."""
        if self._closed is not None:
            return
        self._closed = self._loop.create_future()
        if self._restart is not None:
            self._restart.cancel()
        if not self.running:  # a starting process is ended once it runs
            self._closed.set_result(None)
        elif self.talk.open:
            self._stop_timer = self._loop.call_later(self.grace, self._process.stop)
        else:
            self._process.stop()

    def _stop_if_settled(self) -> None:
        """End a closed process after the last of its open requests."""
        if self._stop_timer is not None and not self.talk.open:
            self._stop_timer.cancel()
            self._stop_timer = None
            self._process.stop()

    def kill(self, kind: EndKind, why: str) -> None:
        """Kill the running process as if it had died; `why` follows its name in messages."""
        log.error(
            "worker %d of %s %s and is killed", self.pid, self.name, why,
            extra={"model": self._signature.model, "worker": self.pid},
        )  # fmt: skip
        self._killed = kind, why
        for slot in self.slots:  # batches sent until it has ended would be lost
            self._scheduler.suspend(slot)
        self._process.kill()

    async def closed(self) -> None:
        """Wait until all processes have ended."""
        if self._closed is not None:
            await asyncio.shield(self._closed)

    # --- to the worker

    def not_sent(self, slot: Slot, error: Exception) -> None:
        """End the batch of a slot, which could not be sent, after the sender has returned."""

        def end() -> None:
            now = monotonic_ns()
            slot.end(Outcome((), error, slot.sent, now, now))
            if not self.running:
                self._scheduler.suspend(slot)

        self._loop.call_soon(end)

    # --- once a second

    @property
    def start_secs(self) -> float:
        """Seconds that the running process took to start."""
        return self._process.start_secs

    def look(self, elapsed: float, stall_secs: float) -> None:
        """Compare executions with those at the last look, `elapsed` seconds ago.

        The instance is stalled after `stall_secs` without progress, unless 0.
        """
        talk = self.talk
        times = [slot.pulse.look(talk.sign(slot), elapsed) for slot in talk.executing]
        self.silent, self.longest = (min(times), max(times)) if times else (0.0, 0.0)
        executed = (self.pid, *[slot.sent for slot in talk.executing])
        self.abandoned = self._abandoned.look(executed if talk.abandoned else None, elapsed)
        stalled = 0 < stall_secs <= self.silent
        if stalled is not self.stalled:
            self.stalled = stalled
            if stalled:
                log.warning(
                    "worker %d of %s has made no progress with its batch for %.0f s", self.pid,
                    self.name, self.silent,
                    extra={"model": self._signature.model, "worker": self.pid},
                )  # fmt: skip
            self._changed()

    # --- from the worker

    def _attach(self) -> None:
        self.talk = Conversation(
            self._process, self._signature, bool(self.concurrency), self._scheduler.answer,
            self._report, self._host, self._shared,
        )  # fmt: skip
        self._process.attach(self._loop, self._on_frame, self._on_exit)
        if self.run_options.asks:
            self._ask()

    def _on_frame(self, header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
        kind = header.kind
        if kind not in ANSWERS:
            self._on_other(header, meta, data)
            return
        outcome = self.talk.finish(header, meta, data)
        self._answered = self._answered or outcome.error is None
        self._mean_ns += _WEIGHT * (outcome.computed - outcome.started - self._mean_ns)
        if self._calls_out or self._prefetches is not (self._mean_ns <= _SHORT_NS):
            self.choose_slots()

    def _on_other(self, header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
        """Process a frame that does not end a batch."""
        kind = header.kind
        if kind is FrameKind.METRIC:
            self._host.metric(json.loads(meta))
        elif kind is FrameKind.ANSWER:
            self._on_answer(bool(json.loads(meta)["ready"]))
        elif kind is FrameKind.BACK:
            self.talk.finish(header, meta, data)
            self._scheduler.suspend(self.slots[header.number])
        else:
            if kind is FrameKind.CALL and not self._calls_out:
                # A worker that waits for another model must not hold batches that this one waits
                # for.
                self._calls_out = True
                self.choose_slots()
            self.talk.take(kind, meta, data, header.data)
            self._stop_if_settled()

    def choose_slots(self) -> None:
        """Use further slots only while batches are short."""
        if self.run_options.concurrency:
            return
        prefetches = self._mean_ns <= _SHORT_NS and not self._calls_out
        if self._calls_out:
            spare = next((slot for slot in self.slots if slot.batch is not None), self.slots[0])
            for slot in self.slots:
                if slot.batch is None:
                    (self._scheduler.resume if slot is spare else self._scheduler.suspend)(slot)
            self._prefetches = False
        elif prefetches != self._prefetches:
            free = [slot for slot in self.slots[1:] if slot.batch is None]
            if len(free) == len(self.slots) - 1:  # otherwise after the next batch
                self._prefetches = prefetches
                for slot in free:
                    (self._scheduler.resume if prefetches else self._scheduler.suspend)(slot)

    def _report(self, batch: Batch, text: str, lines: str) -> None:
        fields = {"model": self._signature.model, "worker": self.pid}
        if len(batch.calls) > 1 and not self._signature.stateful:
            log.debug("%s; its %d requests are run again in halves", text, len(batch.calls),
                      extra=fields)  # fmt: skip
        else:
            self._process.note(logging.ERROR, text, lines, batch.calls[0].id)

    # --- the model's own readiness

    @property
    def willing(self) -> bool:
        """True if it runs, and the model does not report itself as not ready."""
        return self.running and self._willing

    def _ask(self) -> None:
        """Request the model's readiness; it stays unchanged until the answer, or a timeout."""
        self._asked = monotonic_ns()
        self._late = False
        self._process.send(FrameKind.ASK)
        self._question = self._loop.call_later(_ANSWER_SECS, self._on_silence)

    def _on_silence(self) -> None:
        # An earlier batch is no reason for not being ready: the request waits for its end.
        if any(slot.sent < self._asked for slot in self.talk.under_way.values()):
            self._question = self._loop.call_later(_ANSWER_SECS, self._on_silence)
        else:
            self._late = True
            self._set_willing(False)

    def _on_answer(self, ready: bool) -> None:
        """Process the answer; a late one counts as not ready, as in Triton."""
        if self._question is not None:
            self._question.cancel()
        self._question = self._loop.call_later(_ASK_SECS, self._ask)
        self._set_willing(ready and not self._late)

    def _set_willing(self, willing: bool) -> None:
        if willing != self._willing:
            self._willing = willing
            log.info("%s says that it is %s", self.name, "ready" if willing else "not ready",
                     extra={"model": self._signature.model, "worker": self.pid})  # fmt: skip
            self._changed()

    # --- end and restart

    def _on_exit(self, how: str) -> None:
        self.running = False
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
        self.silent = self.longest = self.abandoned = 0.0
        self.stalled = False
        for timer in (self._question, self._stop_timer):
            if timer is not None:
                timer.cancel()
        self._willing = True
        kind = self._process.end_kind
        if self._killed is not None:
            kind, why = self._killed
            how = f"{why} and {how}"
            self._killed = None
        abandoned = kind is EndKind.ABANDONED
        if self._closed is None:
            if self._answered or self._loop.time() - self._begun >= RestartPolicy.STEADY_SECS:
                self._restarts.steady()
            if not abandoned:
                # A worker that dies while idle was killed from outside.
                outside = kind is EndKind.SIGNAL and self._process.killed and self.talk.idle
                self._restarts.ended(to_blame=not outside)
            self._counters.ends[kind] += 1
            log.error(
                "worker %d of %s %s", self.pid, self.name, how,
                extra={"model": self._signature.model, "worker": self.pid},
            )  # fmt: skip
        self._lost(self)
        self.talk.end(how, abandoned)
        for slot in self.slots:
            self._scheduler.suspend(slot)
        if self._closed is None:
            # Abandoned work may have been the last thing that kept its version from being freed.
            self._plan_restart(_PAUSE_SECS if abandoned else 0.0)
        self._changed()

    def _plan_restart(self, least: float = 0.0) -> None:
        """Restart after at least `least` seconds."""
        delay = max(self._restarts.delay, least)
        if self._restarts.looping:
            self.given_up = True
            self.tried_again = self._loop.time() + delay
            log.error(
                "%s ends again and again: it is tried again in %d s", self.name, delay,
                extra={"model": self._signature.model},
            )  # fmt: skip
        self._restart = self._loop.call_later(delay, self._start_again)

    def _start_again(self) -> None:
        self._restart = None
        started = run_in_daemon_thread(self.start, f"start {self.name}", WorkerProcess.kill)
        started.add_done_callback(self._on_started)

    def _on_started(self, started: asyncio.Future[WorkerProcess]) -> None:
        problem = started.exception()
        if self._closed is not None:
            if problem is None:
                started.result().kill()
            return
        if problem is not None:
            trace = None if isinstance(problem, RepositoryError) else problem
            log.error("%s cannot be started again: %s", self.name, problem, exc_info=trace)
            self._restarts.ended(to_blame=not isinstance(problem, NoResources))
            self._plan_restart()
            self._changed()
            return
        process = started.result()
        self._process = process
        self._begun = self._loop.time()
        self._answered = False
        self.running = True
        self.given_up = False
        self._attach()
        log.info("%s runs again as worker %d", self.name, process.pid,
                 extra={"model": self._signature.model})  # fmt: skip
        for slot in self.slots if self._prefetches else self.slots[:1]:
            self._scheduler.resume(slot)
        self._changed()
