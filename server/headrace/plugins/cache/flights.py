"""The stage of a version that answers calls from the cache, and runs the model once for equal ones.

A call whose answer is kept gets it at the end of the tick, as from a light model. Any other begins
a flight, which looks for the answer on Redis, if there is one, and then runs the model by a call of
its own. Equal calls that come meanwhile join the flight; those with a priority or a timeout have
flights of their own, since their wait would be another's. If the run fails, its error goes to the
call that it was for: the others pass on, each for itself, and nothing is kept. A flight that nobody
waits for any more is cancelled.

Owned by the event-loop thread. Invariant: a flight is in `CachedVersion.flights` from its beginning
until its calls are answered, or passed on, unless its call may share it with nobody.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from headrace.core.cache_options import CacheOptions
from headrace.core.call import NO_OPTIONS, NOBODY, Call, Computed, InferResponse, Owner, Submit
from headrace.core.errors import ExecutionFailed, InvalidRequest, ServerError
from headrace.core.limits import Payer, uncharged
from headrace.core.texts import shown
from headrace.engine.caching import OPT_OUT, CachedParts
from headrace.engine.chain import StageModel
from headrace.engine.workbench import LARGE, Job
from headrace.observability.statistics import Family, Sourced
from headrace.plugins.cache.answers import AnswerHeads, FoundAnswer, KeptAnswers, packed
from headrace.plugins.cache.keys import Keys, salt_of
from headrace.plugins.cache.redis import RedisAnswers, open_redis
from headrace.protocol.status import INTERNAL_TEXT
from headrace.repository.model_files import Content

log = logging.getLogger(__name__)

_COPIED_HERE = 1 << 20  # bytes of an answer copied on the event loop
_AT_ONCE = 1_000  # answers dropped in a turn of the event loop


class _Work(Protocol):
    """Work that goes on elsewhere."""

    def cancel(self) -> object:
        """Stop it; nothing is called when it ends."""


class SharedCache:
    """The cache of an engine; a `ResponseCache`."""

    def __init__(self, options: CacheOptions) -> None:
        self.answers = KeptAnswers(options.size)
        self.redis = None if options.redis is None else open_redis(options.redis)
        self._composed: WeakSet[CachedVersion] = WeakSet()

    def version(self, model: StageModel, content: Content, composed: bool) -> "CachedVersion":
        """Implements `ResponseCache.version`; without Redis, which knows no change, if composed."""
        redis = None if composed else self.redis
        keys = Keys(salt_of(model, content, redis is not None), model.signature)
        made = CachedVersion(model.name, keys, self.answers, redis, composed)
        if composed:
            self._composed.add(made)
        return made

    def renew(self, headers: Callable[[str], Sequence[str]]) -> None:
        """Implements `ResponseCache.renew`."""
        for version in self._composed:
            version.renew(headers(version.model))

    def families(self) -> Iterable[Sourced]:
        """Implements `ResponseCache.families`."""
        for family in _FAMILIES:
            yield family, [({}, self.answers)]
        if self.redis is not None:
            yield _REDIS_FAILURES, [({}, self.redis)]

    async def close(self) -> None:
        """Implements `ResponseCache.close`."""
        if self.redis is not None:
            await self.redis.close()


_FAMILIES: tuple[Family[KeptAnswers], ...] = (
    Family("headrace_response_cache_bytes", "gauge", lambda a: a.nbytes,
           "Bytes of answers in the response cache"),
    Family("headrace_response_cache_limit_bytes", "gauge", lambda a: a.budget,
           "Most bytes of answers in the response cache"),
    Family("headrace_response_cache_answers", "gauge", len, "Answers in the response cache"),
    Family("headrace_response_cache_evictions_total", "counter", lambda a: a.evictions,
           "Answers that were dropped from the response cache for others, or were too large"),
)  # fmt: skip
_REDIS_FAILURES: Family[RedisAnswers] = Family(
    "headrace_response_cache_redis_failures_total", "counter", lambda redis: redis.failures,
    "Answers that could not be read from, or written to, Redis",
)  # fmt: skip


class CachedVersion:
    """The answers of one version; a `headrace.engine.caching.VersionCache`."""

    parts: CachedParts  # set by `stage`

    def __init__(
        self, model: str, keys: Keys, answers: KeptAnswers, redis: RedisAnswers | None,
        composed: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.headers: Sequence[str] = ()  # those of clients that answers depend on
        self.redis = redis
        self._composed = composed
        self.flights: dict[bytes, Flight] = {}
        self._keys = keys
        self.answers = answers
        self.heads = AnswerHeads()
        self._found = _FoundCalls()
        self.closed = False

    def stage(self, parts: CachedParts, submit: Submit) -> Submit:
        """Implements `headrace.engine.caching.VersionCache.stage`."""
        self.parts = parts
        if not self._composed:
            self.headers = parts.headers
        return partial(self._look, submit)

    def close(self) -> None:
        """Implements `headrace.engine.caching.VersionCache.close`; drops a few at a time."""
        self.closed = True
        self._drop()

    def renew(self, headers: Sequence[str]) -> None:
        """Forget all answers; runs that are under way give others none either.

        Answers depend on these `headers` of clients from now on.
        """
        self.headers = headers
        self._keys.renew()
        self._drop()

    def begin(self, submit: Submit, call: Call, begun: int, key: bytes) -> None:
        """Answer a call with this key, or let it fly; raises `ServerError`.

        `begun` is the time when its key began to be computed.
        """
        call.arrived = call.began = begun
        answer = self.answers.get(key)
        if answer is not None:
            self._found.add(call, answer, self)
            return
        options = call.options
        shared = options is NO_OPTIONS or not (options.priority or options.timeout)
        if shared and (flight := self.flights.get(key)) is not None:
            flight.join(call)
        else:
            Flight(self, submit, key, shared).begin(call)

    def _drop(self) -> None:
        if self.answers.drop(self._keys.prefix, _AT_ONCE):
            self.parts.clock.soon(self._drop)

    def _look(self, submit: Submit, call: Call) -> None:
        """The stage."""
        options = call.options
        if options is not NO_OPTIONS and options.sequence_id:
            submit(call)  # a model may know the sequence
            return
        if call.parameters and not _wants(call):
            if self._composed:
                call.parameters[OPT_OUT] = False  # nor from caches of its steps
            submit(call)
            return
        parts = self.parts
        begun, size = parts.clock.now(), 0
        for _, _, array in call.inputs.values():
            size += array.nbytes
            if array.dtype.hasobject:
                size += call.nbytes
        if size <= LARGE:
            self.begin(submit, call, begun, self._keys.of(call, self.headers))
        else:
            _LargeCall(self, self._keys, submit, call, begun, size)


def _wants(call: Call) -> bool:
    """False if a request wants no answer of the cache; raises `InvalidRequest`."""
    wanted = call.parameters.pop(OPT_OUT, True)
    if not isinstance(wanted, bool):
        raise InvalidRequest(f"parameter '{OPT_OUT}' must be true or false, got {shown(wanted)}")
    return wanted


class _FoundCalls(Owner):
    """Calls whose answers are kept, which get them at the end of the tick."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Call, bytes]] = []

    def add(self, call: Call, answer: bytes, cache: CachedVersion) -> None:
        """Answer a call after those that were added before."""
        call.owner = self
        self._waiting.append((call, answer))
        if len(self._waiting) == 1:
            cache.parts.clock.soon(self._answer, cache)

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`: the call, whose owner is another now, is passed over."""

    def _answer(self, cache: CachedVersion) -> None:
        now, statistics = cache.parts.clock.now, cache.parts.statistics
        waiting, self._waiting = self._waiting, []
        began = now()
        made: dict[int, FoundAnswer] = {}  # so that doors encode an answer once
        for call, answer in waiting:
            if call.owner is not self:
                statistics.request_failed("CANCELED", now() - call.arrived)
                continue
            found = made.get(id(answer))
            if found is None:
                found = FoundAnswer(answer, cache.heads.of(answer), call, began)
                made[id(answer)] = found
            call.owner = NOBODY
            _deliver(call, found.deliver, call)
            statistics.cache_hit(call.arrived, call.arrived, now())


class _LargeCall(Job[bytes]):
    """A call whose key is computed on the workbench, and its owner until then."""

    def __init__(
        self, cache: CachedVersion, keys: Keys, submit: Submit, call: Call, begun: int, size: int
    ) -> None:
        headers = cache.headers
        done = partial(self._computed, cache, submit, call, begun)
        super().__init__(lambda charge: keys.of(call, headers), done, uncharged, call.payer)
        self._expect = cache.parts.expect
        self._expect(1)
        call.owner = self
        cache.parts.bench.add(size, self)

    def cancel(self, call: Call | None = None) -> None:
        """Implements `Owner.cancel`."""
        super().cancel(call)
        self._expect(-1)

    def _computed(
        self, cache: CachedVersion, submit: Submit, call: Call, begun: int, key: bytes | None,
        problem: Exception | None,
    ) -> None:  # fmt: skip
        call.owner = NOBODY
        try:
            if key is None:
                raise problem or ExecutionFailed(INTERNAL_TEXT)
            cache.begin(submit, call, begun, key)
        except ServerError as error:
            call.pass_refusal(error.without_frames())
        except Exception:
            log.exception("bug while a request was looked for in the cache")
            call.pass_refusal(ExecutionFailed(INTERNAL_TEXT))
        finally:
            self._expect(-1)


class Flight(Owner):
    """Equal calls that wait for one answer, from Redis or of a run of the model.

    While it looks on Redis, or copies a large answer, `_work` is what can be cancelled, and the
    scheduler expects a call; in between the model runs `_run`. `calls` are in order, with whether
    they have joined: those are counted among the model's requests in flight, and as hits. The other
    one is the first, and in both the run's.
    """

    def __init__(self, cache: CachedVersion, submit: Submit, key: bytes, shared: bool) -> None:
        """`submit` is the next stage's; other calls may join a `shared` flight."""
        self.calls: dict[Call, bool] = {}
        self._cache = cache
        self._parts = cache.parts
        self._submit = submit
        self._key = key
        self._shared = shared
        self._run: _SharedRun | None = None
        self._work: _Work | None = None
        self._looked = 0  # nanoseconds that the search has taken

    def begin(self, call: Call) -> None:
        """Look for the answer of a call, or run the model; raises `ServerError`."""
        self.calls[call] = False
        if self._shared:
            self._cache.flights[self._key] = self
        if (redis := self._cache.redis) is not None and redis.usable:
            self._parts.expect(1)
            self._work = redis.get(self._key, self._looked_up)
        else:
            try:
                self._looked = self._parts.clock.now() - call.arrived
                run = _SharedRun(self, call)
                self._submit(run)
                self._run = run
            except BaseException:
                self._end()
                raise
        call.owner = self

    def join(self, call: Call) -> None:
        """Let an equal call wait for the same answer; raises `Overloaded`."""
        load = self._parts.load
        if load.requests >= load.free_requests or load.bytes >= load.free_bytes:
            load.check(call.payer)
        load.requests += 1
        load.bytes += call.nbytes
        self.calls[call] = True
        call.owner = self

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`: the last call takes the flight with it."""
        if self.calls.pop(call):
            self._uncount(call)
        elif self.calls:  # the run is the next one's
            heir = next(iter(self.calls))
            self.calls[heir] = False
            self._uncount(heir)
        run, work = self._run, self._work
        if self.calls or run is None:
            passed = self._parts.clock.now() - call.arrived
            self._parts.statistics.request_failed("CANCELED", passed)
        if self.calls:
            return
        self._end()
        if work is not None:
            work.cancel()
            self._parts.expect(-1)
        elif run is not None:
            run.cancel()

    # --- from Redis, and from the run

    def computed(self, batch: Computed) -> None:
        """Keep and pass on what the run has computed."""
        run = self._run
        assert run is not None, "an answer without a run. This is a bug."
        if len(batch.calls) == 1 and len(batch.tensors) == 1:  # as mostly: without a response
            outputs = batch.tensors
            nbytes = outputs[0].array.nbytes
        else:
            response = batch.response(run)
            outputs, nbytes = response.outputs, response.nbytes
        if nbytes > _COPIED_HERE:
            self.responded(batch.response(run))
            return
        self._keep(packed(batch.version, run.rows, {}, outputs))
        for call, joined in self._end():
            call.first = run.first
            if joined:
                self._note(call, batch.started)
            if call.stages is None:
                try:  # as `_deliver`, which would be one more Python call of each miss
                    call.respond_from(batch)
                except Exception:
                    _fail(call)
            else:
                _deliver(call, call.pass_response, batch.response(call), True)

    def responded(self, response: InferResponse) -> None:
        """Keep and pass on the response to the run."""
        run = self._run
        assert run is not None, "a response without a run. This is a bug."
        if response.nbytes <= _COPIED_HERE:
            self._copied(response, _packed(response, run), None)
            return
        # Before others get it: a caller in this process may write to its arrays.
        self._parts.expect(1)
        self._work = self._parts.bench.do(
            response.nbytes, lambda charge: _packed(response, run),
            partial(self._copied, response), uncharged, run.payer,
        )  # fmt: skip

    def failed(self, run: "_SharedRun", error: ServerError) -> None:
        """Fail the call that the run was for, and let the others pass on.

        Also if that has been cancelled: the failure may be that of its deadline.
        """
        for call, _ in self._end():
            if call is run.asked:
                call.started = run.started
                _deliver(call, call.pass_end, error)
            else:
                _deliver(call, self._pass_on, call)

    def _looked_up(self, answer: bytes | None) -> None:
        """Pass on the answer that Redis has, or run the model."""
        self._work = None
        if answer is not None:
            if not self._cache.closed:
                self._cache.answers.put(self._key, answer)
            now = self._parts.clock.now()
            found = FoundAnswer(answer, self._cache.heads.of(answer), next(iter(self.calls)), now)
            for call, _ in self._end():
                _deliver(call, found.deliver, call)
                self._parts.statistics.cache_hit(call.arrived, call.arrived, now)
        else:
            try:
                first = next(iter(self.calls))
                self._looked = self._parts.clock.now() - first.arrived
                run = _SharedRun(self, first)
                self._submit(run)
                self._run = run
            except ServerError as error:
                self._refuse(error)
            except Exception:
                log.exception("bug while a request that is not in the cache was submitted")
                self._refuse(ExecutionFailed(INTERNAL_TEXT))
        self._parts.expect(-1)

    def _refuse(self, error: ServerError) -> None:
        """Refuse the calls, which wait for a run that cannot begin."""
        for call, _ in self._end():
            _deliver(call, call.pass_refusal, error)

    def _copied(
        self, response: InferResponse, answer: bytes | None, problem: Exception | None
    ) -> None:
        """Keep the copy of a response, and pass the response on."""
        if answer is not None:
            self._keep(answer)
        else:
            log.error("bug while an answer was copied for the cache", exc_info=problem)
        started = 0
        for call, joined in self._end():
            started = started or call.arrived + response.timing.queue_ns
            own = replace(
                response, id=call.id, outputs=list(response.outputs),
                parameters=dict(response.parameters),
            )  # fmt: skip
            if joined:
                self._note(call, started)
            _deliver(call, call.pass_response, own, True)
        if self._work is not None:
            self._work = None
            self._parts.expect(-1)

    # --- steps

    def _keep(self, answer: bytes) -> None:
        begun = self._parts.clock.now()
        if not self._cache.closed:
            self._cache.answers.put(self._key, answer)
        if (redis := self._cache.redis) is not None:
            redis.put(self._key, answer)
        now = self._parts.clock.now()
        self._parts.statistics.cache_miss(self._looked + now - begun, now)

    def _note(self, call: Call, started: int) -> None:
        """Count a call that has joined as a hit; the scheduler counts the run itself."""
        now = self._parts.clock.now()
        self._parts.statistics.cache_hit(call.arrived, now, now)
        call.arrived = min(call.arrived, started)  # for its timing

    def _pass_on(self, call: Call) -> None:
        """Let a call pass on by itself."""
        call.owner = NOBODY
        try:
            self._submit(call)
        except ServerError as error:
            call.pass_refusal(error)

    def _end(self) -> list[tuple[Call, bool]]:
        """Take the calls; no others join."""
        if self._cache.flights.get(self._key) is self:
            del self._cache.flights[self._key]
        calls, self.calls = list(self.calls.items()), {}
        self._run = None  # which refers to this object
        for call, counted in calls:
            if counted:
                self._uncount(call)
        return calls

    def _uncount(self, call: Call) -> None:
        self._parts.load.requests -= 1
        self._parts.load.bytes -= call.nbytes


class _SharedRun(Call):
    """The run of a flight. Client information is that of the call for which it began."""

    __slots__ = ("asked", "flight")

    def __init__(self, flight: Flight, asked: Call) -> None:
        options = asked.options
        if options is not NO_OPTIONS:
            options = options._replace(classes=None, shared=None)
        super().__init__(
            asked.model_name, asked.model_version, asked.id, asked.inputs, asked.outputs,
            dict(asked.parameters), options, asked.nbytes,
        )  # fmt: skip
        self.context, self.rows = asked.context, asked.rows
        self.asked, self.flight = asked, flight

    @property
    def payer(self) -> Payer | None:
        return self.asked.payer

    def header(self, name: str) -> str:
        return self.asked.header(name)

    def remaining(self) -> float:
        return self.asked.remaining()

    def answered_by(self, backend: str) -> None:
        for call in self.flight.calls:
            call.pass_backend(backend)

    def respond_from(self, batch: Computed) -> None:
        self.flight.computed(batch)

    def respond(self, response: InferResponse, final: bool) -> None:
        self.flight.responded(response)

    def fail(self, error: ServerError) -> None:
        self.flight.failed(self, error)


def _packed(response: InferResponse, run: Call) -> bytes:
    """The answer to the requests of a run that get this response."""
    return packed(response.model_version, run.rows, response.parameters, response.outputs)


def _deliver(call: Call, answer: Callable[..., None], *given: Any) -> None:
    """Answer a call by `answer(*given)`; a bug in one answer must not affect others."""
    try:
        answer(*given)
    except Exception:
        _fail(call)


def _fail(call: Call) -> None:
    """End a call after a bug in its answer, which is being handled."""
    log.exception("bug while answering a request")
    with suppress(Exception):
        call.pass_end(ExecutionFailed(INTERNAL_TEXT))
