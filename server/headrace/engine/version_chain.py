"""The chain of a version: the stages that a call passes before the queue.

Doors and other models submit to the chain, which is the `Target` of a version's calls. It is
composed anew when the version's state changes, when instances are lost, given up or recovered, and
when other calls are traced than before. Calls that are under way go on by the chain that they have
entered. Owned by the event-loop thread.
"""

from collections.abc import Callable, Collection, Sequence
from sys import maxsize
from typing import Any

from headrace.core.call import Call, Submit
from headrace.core.errors import ModelNotReady
from headrace.core.model_spec import Used
from headrace.core.signature import Signature
from headrace.engine.chain import check, classify, count_responses, divide, tell_servers
from headrace.engine.entrance import Direct
from headrace.engine.running import RunningVersion
from headrace.engine.shared_memory import share
from headrace.observability.statistics import VersionStatistics
from headrace.repository.reading import first_response_bounds
from headrace.scheduling.batcher import Batcher


class VersionChain:
    """The target of one version's calls; a `Router` to that version alone.

    `ready` is true while the version takes requests; all others are refused. `direct` is None if
    calls have to pass more than the check.
    """

    def __init__(
        self,
        model: str,
        name: str,
        statistics: VersionStatistics,
        not_ready: Callable[[], ModelNotReady],
    ) -> None:
        """`not_ready` makes the error of a call while nothing is loaded."""
        self.model = model
        self.name = name
        self.ready = False
        self.decoupled = False
        self.direct: Direct | None = None
        self.submit: Submit = self._refuse  # checks and queues a call; raises `ServerError`
        self._queue: Submit = self._refuse  # queues a checked call
        self._statistics = statistics
        self._not_ready = not_ready
        self._running: RunningVersion | None = None
        self._codecs: dict[object, Any] = {}  # those of doors, for the signature

    @property
    def signature(self) -> Signature:
        """The declared inputs and outputs; raises `ModelNotReady`."""
        if self._running is None:
            raise self._not_ready()
        return self._running.loaded.signature

    @property
    def forwarded_headers(self) -> Sequence[str]:
        """The client headers that go to upstreams."""
        running = self._running
        return () if running is None else running.forwarded_headers or ()

    @property
    def uses(self) -> Collection[Used]:
        """The models that the version runs."""
        return () if self._running is None else self._running.loaded.uses

    @property
    def obstacle(self) -> str:
        """The reason why calls are not executed although the version is READY; "" if they are."""
        return self._running.obstacle if self._running is not None and self.ready else ""

    def waits_for(self, target: object) -> bool:
        """True if a request may have to wait for `target` to finish: if it is this one, with a
        single instance, which runs one batch at a time.
        """
        if target is not self or self._running is None:
            return False
        instances = self._running.instances
        return len(instances) == 1 and instances[0].concurrency == 0

    def follow(self, running: RunningVersion | None, ready: bool) -> None:
        """Compose for a version with these parts, None while nothing is loaded."""
        if running is not None and running is not self._running:
            self.decoupled = running.decoupled  # also for doors with responses of an unloaded one
            self._codecs = {}
        self._running, self.ready = running, ready
        self.compose()

    def compose(self) -> None:
        """Compose the stages that a call passes before the queue, the last one first.

        `submit` takes calls as decoded, `_queue` those that have been checked. A plain version only
        has the check stage, and doors that have checked a call submit to its scheduler: `direct`.
        """
        self.direct = None
        self.submit = self._queue = self._refuse
        if (running := self._running) is None or running.given_up:
            return
        loaded, expect = running.loaded, running.scheduler.expect
        signature, bench = loaded.signature, running.regions.admission.workbench
        queue: Submit = running.scheduler.submit
        if running.sequences is not None:
            queue = running.sequences.submit
        if loaded.padding is not None:
            queue = loaded.padding.stage(running.padding_parts, queue)
        if running.decoupled:
            bounds = first_response_bounds(loaded.config)
            queue = count_responses(self._statistics.responses, queue, bounds)
        if running.forwarded_headers is not None:
            queue = tell_servers(running.forwarded_headers, queue)
        direct = queue
        if signature.max_batch_size:
            scheduler = running.scheduler
            batcher = scheduler if isinstance(scheduler, Batcher) else None
            if batcher is not None and queue != batcher.submit:
                batcher = None
            queue = divide(
                signature.max_batch_size, queue, expect, bench,
                running.regions.admission.check_answer, batcher,
            )  # fmt: skip
        if loaded.cache is not None:
            direct = queue = loaded.cache.stage(running.cached_parts, queue)
        for stage in loaded.stages:
            direct = queue = stage(queue)
        if (capture := running.host.capture) is not None:
            captured = capture.recorded(self.model, self.name, queue)
            if captured is not queue:
                direct = queue = captured
        self._queue = queue
        special = classify(loaded.labels, signature.batches, bench, self._queue_checked)
        special = share(running.regions, expect, special)
        submit = self.submit = check(signature, queue, special)
        if running.host.tracing is not None:
            counts = self._statistics
            self.submit = running.host.tracing.traced(self.model, self.name, counts, submit)
        if running.host.infer_audit is not None:
            self.submit = running.host.infer_audit.recorded(self.model, self.name, self.submit)
        if self.ready and not running.decoupled and self.submit is submit:
            most = signature.max_batch_size or maxsize
            told = signature, self.model, self.name
            self.direct = Direct(told, self._codecs, {}, most, direct, running.memory)
            scheduler = running.scheduler
            if isinstance(scheduler, Batcher) and direct == scheduler.submit:
                self.direct.lend, self.direct.join = scheduler.lend, scheduler.join

    def _queue_checked(self, call: Call) -> None:
        """Queue a call that was checked earlier; raises `ServerError`."""
        self._queue(call)

    def _refuse(self, call: Call) -> None:
        raise self._not_ready() if self._running is None else self._running.waiting_error()
