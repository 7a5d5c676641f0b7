"""The pool of a model's upstreams: a batch is sent as one call, whose response is its outcome.

The scheduler has one instance per possible call in flight; the upstream for a batch is chosen when
it is sent, unless the batch has one as its target, which has the state of a sequence. A call that
no upstream has begun is retried on another one. One that may have been executed is not sent again,
whatever happens: its requests fail. After an error of the model, a batch is run again in halves, as
with any backend.

While no upstream can be reached, instances are suspended and requests wait; after a while those
fail, and further ones are refused, until an upstream can be reached again.

Owned by the event-loop thread, except for name resolution.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from time import monotonic_ns

from headrace.connections.endpoint import Endpoint
from headrace.core.call import Call, Parameter
from headrace.core.daemon_thread import run_in_daemon_thread
from headrace.core.errors import Cancelled, InvalidOption, LoadFailed, ModelNotReady
from headrace.observability.statistics import EndpointCounts, EndpointSeries
from headrace.placement.choice import InstanceKind
from headrace.placement.placement import Placement, Surroundings
from headrace.placement.upstream.attempt import Attempt, Policy, StreamAttempt
from headrace.placement.upstream.connection import CallTrace, RemoteRequest
from headrace.placement.upstream.model import RemoteModel
from headrace.placement.upstream.requests import Forwarding, inputs_of, take_answer, take_error
from headrace.placement.upstream.upstream import Upstream
from headrace.protocol.v2_protobuf import RemoteAnswer
from headrace.scheduling.batch import Batch, Deferral, Instance, NotStarted, Outcome, Part
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.sequences import SequenceQueue, SequenceTable
from headrace.scheduling.upstreams import Condition, choose

log = logging.getLogger(__name__)

Done = Callable[[Instance, Batch, Outcome], None]
_TELL_END = "triton_enable_empty_final_response"
_RESOLVE_SECS = 15.0  # between resolutions of names
_SEQUENCES_SECS = 0.2  # between checks whether a leaving upstream still has sequences


class UpstreamPool(Placement):
    """The upstreams of a version, and the instances for calls to them."""

    kind = InstanceKind.REMOTE
    given_up = False  # no upstream can be reached, and requests no longer wait

    def __init__(self, name: str, model: RemoteModel, version: Surroundings) -> None:
        """Use the upstreams of `model`, after its `begin`, for a version's scheduler."""
        self.name = name
        self._model = model
        self._version = version
        self._label = version.signature.model
        self._loop = loop = version.loop
        self._sequences: SequenceTable | None = None
        self._upstreams: list[Upstream] = []
        self._conditions: list[Condition] = []  # conditions of the upstreams
        self._leaving: set[asyncio.Task[None]] = set()
        self._reachable = True
        self._wait: asyncio.TimerHandle | None = None
        self._closed: asyncio.Task[None] | None = None
        for endpoint in model.endpoints:
            upstream = self._upstream(endpoint, endpoint == model.answered)
            if endpoint == model.answered:
                upstream.note(model.drift)
            self._upstreams.append(upstream)
        self._conditions = [upstream.condition for upstream in self._upstreams]
        if model.sequences is not None:
            self._sequences = SequenceTable(model.sequences.idle_ns, monotonic_ns)
        silence = model.options.timeout
        policy = Policy(self._label, self.next, loop, silence, self._sequences)
        self._instances = [
            UpstreamInstance(self, policy, model.forwarding, version)
            for _ in range(model.max_in_flight)
        ]
        for instance in self._instances:
            version.scheduler.add_instance(instance)
        self._resolving = loop.create_task(self._resolve())

    @property
    def concurrency(self) -> int:
        """The number of concurrent batches, 0 for one after the other."""
        return len(self._instances) if len(self._instances) > 1 else 0

    @property
    def healthy(self) -> bool:
        """True if any reachable upstream has the model ready."""
        return any(upstream.condition.reachable for upstream in self._upstreams)

    @property
    def obstacle(self) -> str:
        return "none of its servers can be reached"

    def __iter__(self) -> Iterator["UpstreamPool"]:
        """Iterate over the pool itself: all upstreams count as one instance."""
        yield self

    def add(self, *loaded: object) -> None:
        """Do nothing: the upstreams are added with their first instance."""

    def remove(self, name: str) -> None:
        """Do nothing: instance groups are the upstreams' concern."""

    def leave(self, grace: float) -> None:
        """Do nothing: abandoned executions are the upstreams' concern."""

    def waiting_error(self) -> ModelNotReady:
        """The error of requests that wait for upstreams in vain."""
        return ModelNotReady(
            f"model '{self._label}' is not ready: none of its servers can be reached",
            retry_after=1,
        )

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """The upstreams, for a scrape."""
        found = [upstream.series() for upstream in self._upstreams]
        if self._sequences is not None:
            self._sequences.forget_idle()
            for upstream, series in zip(self._upstreams, found, strict=True):
                series.sequences = self._sequences.count(upstream)
        return found

    def in_sequence(
        self, scheduler: Scheduler, failed: Callable[[str, int], None]
    ) -> SequenceQueue | None:
        """The queue of sequences in front of the scheduler; arguments of `SequenceQueue`."""
        rules, table = self._model.sequences, self._sequences
        if rules is None or table is None:
            return None
        starts = max(len(self._instances) // 2, 1)
        soon = self._loop.call_soon
        return SequenceQueue(self._label, table, rules, starts, scheduler, failed, soon)

    def next(self, tried: Set[Upstream]) -> Upstream | None:
        """The upstream for the next call, other than those `tried`; None if there is none."""
        upstreams = self._upstreams
        among = {i for i, one in enumerate(upstreams) if one in tried} if tried else ()
        index = choose(self._conditions, self._loop.time(), among)
        return None if index is None else upstreams[index]

    def rest(self, instance: "UpstreamInstance") -> None:
        """Handle an idle instance; it is suspended while nothing can be reached."""
        if not self._reachable:
            self._version.scheduler.suspend(instance)

    def close(self) -> None:
        """Close all connections; see `closed`."""
        if self._closed is not None:
            return
        self._resolving.cancel()
        if self._wait is not None:
            self._wait.cancel()
        self._closed = self._loop.create_task(self._close())

    async def closed(self) -> None:
        """Wait until all connections are closed."""
        if self._closed is not None:
            await asyncio.shield(self._closed)

    async def _close(self) -> None:
        await asyncio.gather(*(upstream.close() for upstream in self._upstreams), *self._leaving)
        await run_in_daemon_thread(self._model.close, f"release {self.name}")

    def _upstream(self, endpoint: Endpoint, reachable: bool = False) -> Upstream:
        counts = self._version.endpoints.setdefault(endpoint.name, EndpointCounts())
        model = self._model
        return Upstream(
            endpoint, model.clients.connect(endpoint), model.options,
            self._label, self._loop, self._on_upstream, reachable, model.reconciler, counts,
        )  # fmt: skip

    # --- reachability

    def _on_upstream(self) -> None:
        """Update after an upstream has become reachable or unreachable."""
        if self._closed is not None:
            return
        reachable = self.healthy
        if reachable is not self._reachable:
            self._reachable = reachable
            if reachable:
                self._go_on()
            else:
                for instance in self._instances:
                    self._version.scheduler.suspend(instance)
                wait = self._model.options.wait
                self._wait = self._loop.call_later(wait, self._give_up)
        self._version.changed()

    def _go_on(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        self.given_up = False
        for instance in self._instances:
            self._version.scheduler.resume(instance)

    def _give_up(self) -> None:
        self._wait = None
        self.given_up = True
        # First, since a callback of a failed request may submit the next one.
        self._version.changed()
        alone = self._version.scheduler.fail_waiting(self.waiting_error())
        log.log(
            logging.ERROR if alone else logging.WARNING,
            "model %s: none of its servers can be reached", self._label,
            extra={"model": self._label},
        )  # fmt: skip

    # --- the set of upstreams

    async def _resolve(self) -> None:
        while True:
            await asyncio.sleep(_RESOLVE_SECS)
            await self.look_again()

    async def look_again(self) -> None:
        """Update addresses and credentials."""
        name, known = self._label, self._model.clients
        try:
            # Resolution may take long: neither other names nor other work must wait for one.
            found, clients = await run_in_daemon_thread(
                lambda: (known.options.resolve(), known.renewed()), f"look up {self.name}"
            )
        except (LoadFailed, InvalidOption, OSError) as error:
            # The known upstreams may work all the same.
            log.warning("model %s: %s", name, error, extra={"model": name})
            return
        if clients is not None:
            self._model.reconciler.clients = clients
            log.info("model %s: its credentials have changed; servers are connected to anew", name,
                     extra={"model": name})  # fmt: skip
        self._adopt(found, anew=clients is not None)

    def _adopt(self, found: Sequence[Endpoint], anew: bool) -> None:
        kept = [m for m in self._upstreams if m.endpoint in found and not anew]
        gone = [upstream for upstream in self._upstreams if upstream not in kept]
        before = {upstream.endpoint: upstream for upstream in gone}
        known = {upstream.endpoint for upstream in kept}
        self._upstreams = kept
        for endpoint in found:
            if endpoint not in known:
                upstream = self._upstream(endpoint)
                if endpoint in before:
                    upstream.condition.reachable = before[endpoint].condition.reachable
                    upstream.differences = before[endpoint].differences
                self._upstreams.append(upstream)
        self._conditions = [upstream.condition for upstream in self._upstreams]
        for upstream in gone:
            task = self._loop.create_task(self._dismiss(upstream))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        if gone:
            self._on_upstream()

    async def _dismiss(self, upstream: Upstream) -> None:
        """Close the connection to an upstream once its calls have ended."""
        await upstream.drained()
        while self._sequences is not None and self._closed is None:
            self._sequences.forget_idle()
            if not self._sequences.count(upstream):
                break
            await asyncio.sleep(_SEQUENCES_SECS)
            await upstream.drained()
        upstream.condition.reachable = False
        await upstream.close()
        name = upstream.endpoint.name
        if not any(other.endpoint.name == name for other in self._upstreams):
            self._version.endpoints.pop(name, None)  # bounds memory when addresses change often


class UpstreamInstance:
    """An instance for the scheduler: one batch at a time, by one attempt in flight.

    Each request of a decoupled model is a batch of its own, in flight until its last response.
    Responses are passed on as they come; a final error is the batch's outcome.
    """

    load = 0

    def __init__(
        self,
        pool: UpstreamPool,
        policy: Policy,
        forwarding: Forwarding,
        version: Surroundings,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._streams = version.signature.decoupled
        self._kind = StreamAttempt if self._streams else Attempt
        self._forwarding = forwarding
        self._give = version.scheduler.answer
        self._batch: Batch | None = None
        self._done: Done | None = None
        self._attempt: Attempt | None = None
        self._trace: CallTrace | None = None
        self._started = 0
        self._gathered = 0

    def execute(self, batch: Batch, done: Done) -> None:
        """Send `batch`; see `headrace.scheduling.batch.Instance`."""
        self._batch, self._done = batch, done
        self._started = self._gathered = monotonic_ns()
        for call in batch.calls:
            call.execution = self
        try:
            attempt = self._kind(self._policy, self._request(batch), self)
            self._gathered = monotonic_ns()
            begun = attempt.begin()
        except Exception as error:  # any error concerns this batch alone
            self._policy.loop.call_soon(self.failed, error)
            return
        if not begun:
            self._policy.loop.call_soon(self.failed, NotStarted())
            return
        self._attempt = attempt
        if batch.calls[0].held:
            attempt.hold(True)

    def serves(self, target: object) -> bool:
        """Implements `Instance.serves`: each calls any server, also one that no name is for now."""
        return isinstance(target, Upstream)

    def close(self) -> None:
        """Close the pool with the first of its instances."""
        self._pool.close()

    def cancel(self, call: Call) -> None:
        """Cancel a request; the attempt ends with the last one of its batch."""
        attempt = self._attempt_of(call)
        if attempt is None or self._batch is None:
            return
        if all(other.ended for other in self._batch.calls):
            self._attempt = None
            attempt.cancel()
            # Deferred, since the canceller is still in the middle of its work.
            self._policy.loop.call_soon(self.failed, Cancelled("all clients have disconnected"))

    def call_off(self, call: Call) -> bool:
        """Implements `Execution.call_off`: upstreams know only requests that are abandoned."""
        return False

    def hold(self, call: Call, held: bool) -> None:
        """Pause or resume the upstream's responses."""
        attempt = self._attempt_of(call)
        if attempt is not None:
            attempt.hold(held)

    def received(self, answer: RemoteAnswer) -> None:
        """Implements `Sender.received`."""
        assert self._batch is not None
        self._give(self._batch.calls[0], Part(answer.outputs, answer.parameters), False)

    def answered(self, answer: RemoteAnswer | None) -> None:
        """Implements `Sender.answered`."""
        if self._streams:
            assert self._batch is not None
            last = None if answer is None else Part(answer.outputs, answer.parameters)
            # The request first: it is the only one of its batch.
            self._give(self._batch.calls[0], last, True)
            answer = None
        self._end(answer, None)

    def failed(self, error: Exception) -> None:
        """Implements `Sender.failed`."""
        self._end(None, error)

    def _attempt_of(self, call: Call) -> Attempt | None:
        """The current attempt of a request, if it belongs to this instance."""
        batch = self._batch
        return self._attempt if batch is not None and call in batch.calls else None

    def _request(self, batch: Batch) -> RemoteRequest:
        more: dict[str, Parameter] = {}
        if self._streams:
            batch.calls[0].began = self._started
            more[_TELL_END] = True
        request = self._forwarding.request(batch, inputs_of(batch), more, self._started)
        self._trace = request.trace
        return request

    def _end(self, answer: RemoteAnswer | None, error: Exception | None) -> None:
        batch, done = self._batch, self._done
        assert batch is not None
        assert done is not None
        self._batch = self._done = self._attempt = None
        # The response of a stream stays: response counters need to know that one was due.
        if not self._streams or isinstance(error, NotStarted):
            for call in batch.calls:
                call.execution = None
        outcome = Outcome((), None, self._started, self._gathered, monotonic_ns())
        if answer is not None:
            try:
                take_answer(batch, answer, outcome)
            except Exception as broken:
                error = broken
        elif error is None:
            outcome.parts = [Deferral.LATER]  # ignored: the request has ended
        if (trace := self._trace) is not None:
            self._trace = None
            trace.ended("" if error is None else str(error))
        if error is not None:
            take_error(batch, error, outcome)
        done(self, batch, outcome)
        del error, outcome  # an error raised here refers to this frame, and would keep the batch
        self._pool.rest(self)
