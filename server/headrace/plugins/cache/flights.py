"""The stage of a version that answers calls from the cache, and runs the model once for equal ones.

A call whose answer is kept gets it at the end of the tick, as from a light model. Any other begins
a flight, which looks for the answer on Redis, if there is one, and then runs the model by a call of
its own. Equal calls that come meanwhile join the flight; those with a priority or a timeout have
flights of their own, since their wait would be another's. If the run fails, its error goes to the
call that it was for: the others pass on, each for itself, and nothing is kept. A flight that nobody
waits for any more is cancelled. Of the many calls of a flight that has ended, some are answered, or
passed on, in each turn of the event loop.

Owned by the event-loop thread. Invariant: a flight is in `CachedVersion.flights` from its beginning
until its first calls are answered, or passed on, unless its call may share it with nobody.
"""

import logging
from asyncio import Task
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from headrace.core.cache_options import CacheOptions
from headrace.core.call import (
    NO_OPTIONS,
    NOBODY,
    Call,
    Computed,
    InferResponse,
    Owner,
    Submit,
    deliver,
    end_after_bug,
)
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.limits import Payer, uncharged
from headrace.core.tensors import Tensor, new_tensor
from headrace.core.texts import shown
from headrace.core.turns import ENDED_AT_ONCE, TurnQueue
from headrace.engine.caching import OPT_OUT, CachedParts
from headrace.engine.chain import StageModel
from headrace.engine.workbench import LARGE, Expected, Job, refuse
from headrace.observability.statistics import Family, Sourced
from headrace.plugins.cache.answers import FoundAnswer, KeptAnswers, packed
from headrace.plugins.cache.keys import Keys, salt_of
from headrace.plugins.cache.redis import RedisAnswers
from headrace.repository.model_files import Content

log = logging.getLogger(__name__)

_COPIED_HERE = 1 << 20  # bytes of an answer copied on the event loop
_AT_ONCE = 1_000  # answers dropped in a turn of the event loop


class SharedCache:
    """The cache of an engine; a `ResponseCache`."""

    def __init__(self, options: CacheOptions) -> None:
        """Raises `LoadFailed` if the library for its Redis is missing."""
        self.answers = KeptAnswers(options.size)
        self.redis = None if options.redis is None else RedisAnswers(options.redis)
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


class CachedVersion(Owner):
    """The answers of one version; a `headrace.engine.caching.VersionCache`.

    The owner of the calls that wait for one: in `waiting`, by their flight, in `_found` until the
    end of the tick, or in `_landed`, after their flight.
    """

    parts: CachedParts  # set by `stage`
    _landed: TurnQueue[tuple[Call, Callable[[Call], None]]]

    def __init__(
        self, model: str, keys: Keys, answers: KeptAnswers, redis: RedisAnswers | None,
        composed: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.headers: Sequence[str] = ()  # those of clients that answers depend on
        self.flights: dict[bytes, Flight] = {}
        self.waiting: dict[Call, Flight] = {}
        self.closed = False
        self.answers, self.redis = answers, redis
        self._composed, self._keys = composed, keys
        self._found: list[tuple[Call, bytes]] = []

    def stage(self, parts: CachedParts, submit: Submit) -> Submit:
        """Implements `headrace.engine.caching.VersionCache.stage`."""
        self.parts = parts
        self._landed = TurnQueue(self._let_go, parts.clock.soon)
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

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        if (flight := self.waiting.pop(call, None)) is not None:
            flight.leave(call)

    def let_go_later(self, calls: Sequence[Call], answer: Callable[[Call], None]) -> None:
        """Answer calls in later turns of the event loop; the scheduler expects them until then."""
        self.parts.expect(len(calls))
        self._landed.extend((call, answer) for call in calls)

    def _let_go(self, landed: tuple[Call, Callable[[Call], None]]) -> None:
        call, answer = landed
        if call.owner is self:
            deliver(call, answer, call)
        else:
            self.count_cancelled(call)
        self.parts.expect(-1)

    def hit(self, found: FoundAnswer, call: Call) -> None:
        """Answer and count a call whose answer was found without a search of its own."""
        now = self.parts.clock.now()
        self.parts.statistics.cache_hit(call.arrived, now, now)
        found.deliver(call)

    def count_cancelled(self, call: Call) -> None:
        """Count a call that was cancelled while it waited."""
        self.parts.statistics.request_failed("CANCELED", self.parts.clock.now() - call.arrived)

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
        parts, keys, headers = self.parts, self._keys, self.headers
        call.arrived = call.began = parts.clock.now()
        size = 0
        for _, _, array in call.inputs.values():
            size += array.nbytes
            if array.dtype.hasobject:
                size += call.nbytes
        if size <= LARGE:
            self._begin(submit, call, keys.of(call, headers))
        else:
            begin = partial(self._begin, submit, call)
            Expected(parts.bench, size, lambda _: keys.of(call, headers), begin, call, parts.expect)

    def _begin(self, submit: Submit, call: Call, key: bytes) -> None:
        """Answer a call with this key, or let it fly; raises `ServerError`."""
        answer = self.answers.get(key)
        if answer is not None:
            self._found.append((call, answer))
            if len(self._found) == 1:
                self.parts.clock.soon(self._answer)
            call.owner = self
            return
        options = call.options
        shared = options is NO_OPTIONS or not (options.priority or options.timeout)
        flight = self.flights.get(key) if shared else None
        if flight is not None:
            flight.join(call)
        else:
            flight = Flight(self, submit, key, call)
            if shared:
                self.flights[key] = flight
            try:
                flight.begin()
            except BaseException:
                flight.end()
                raise
        self.waiting[call] = flight
        call.owner = self

    def _answer(self) -> None:
        """Answer the calls whose answers were found in this tick."""
        found, self._found = self._found, []
        statistics, now = self.parts.statistics, self.parts.clock.now
        began = now()
        made: dict[int, FoundAnswer] = {}  # by the answer, of which most have the same
        for call, answer in found:
            if call.owner is not self:
                self.count_cancelled(call)
                continue
            batch = made.get(id(answer))
            if batch is None:
                batch = made[id(answer)] = FoundAnswer(answer, call, began)
            call.owner = NOBODY
            deliver(call, batch.deliver, call)
            statistics.cache_hit(call.arrived, call.arrived, now())


def _wants(call: Call) -> bool:
    """False if a request wants no answer of the cache; raises `InvalidRequest`."""
    wanted = call.parameters.pop(OPT_OUT, True)
    if not isinstance(wanted, bool):
        raise InvalidRequest(f"parameter '{OPT_OUT}' must be true or false, got {shown(wanted)}")
    return wanted


class Flight(Call):
    """Equal calls that wait for one answer, from Redis or of a run of the model, which it is.

    While it looks on Redis, or copies a large answer, `_work` is what can be cancelled, and the
    scheduler expects a call; in between it is `_running`. Of the `calls`, in order, the first has
    the run, which the scheduler counts. The others have joined: they are counted here, among the
    model's requests in flight, and as hits. Client information is that of the call that `asked`.
    """

    __slots__ = ("_cache", "_key", "_looked", "_running", "_submit", "_work", "asked", "calls")

    def __init__(self, cache: CachedVersion, submit: Submit, key: bytes, asked: Call) -> None:
        """`submit` is the next stage's."""
        self._ask_for(asked)
        self.calls = {asked: None}
        self._cache, self._submit, self._key = cache, submit, key
        self._running = False
        self._work: Task[None] | Job[bytes] | None = None
        self._looked = 0  # nanoseconds that the search has taken

    def _ask_for(self, asked: Call) -> None:
        """Become the run for a call."""
        options, parameters = asked.options, asked.parameters
        if options is not NO_OPTIONS:
            options = options._replace(classes=None, shared=None)
        self.ask(
            asked.model_name, asked.model_version, asked.id, asked.inputs, asked.outputs,
            dict(parameters) if parameters else None, options, asked.nbytes,
        )  # fmt: skip
        self.context, self.rows, self.asked = asked.context, asked.rows, asked

    @property
    def payer(self) -> Payer | None:
        return self.asked.payer

    def header(self, name: str) -> str:
        return self.asked.header(name)

    def remaining(self) -> float:
        return self.asked.remaining()

    # --- for the calls

    def begin(self) -> None:
        """Look for the answer, or run the model; raises `ServerError`."""
        cache = self._cache
        if (redis := cache.redis) is not None and redis.usable:
            cache.parts.expect(1)
            self._work = redis.get(self._key, self._looked_up)
        else:
            self._run()

    def _run(self) -> None:
        self._looked = self._cache.parts.clock.now() - self.asked.arrived
        self._submit(self)
        self._running = True

    def join(self, call: Call) -> None:
        """Let an equal call wait for the same answer; raises `Overloaded`."""
        self._cache.parts.load.admit(call.nbytes, call.payer)
        self.calls[call] = None

    def leave(self, call: Call) -> None:
        """Let a cancelled call go: the last one takes the flight with it."""
        parts, running, first = self._cache.parts, self._running, next(iter(self.calls))
        del self.calls[call]
        if self.calls or not running:
            self._cache.count_cancelled(call)
        if self.calls:
            if call is first:  # the run is the next one's
                call = next(iter(self.calls))
                if not running:
                    self._ask_for(call)
            parts.load.release(call.nbytes)
            return
        self.end()
        if self._work is not None:
            self._work.cancel()
            parts.expect(-1)
        elif running:
            self.cancel()

    def end(self) -> list[Call]:
        """Take the calls; no others join."""
        cache = self._cache
        if cache.flights.get(self._key) is self:
            del cache.flights[self._key]
        calls, waiting = list(self.calls), cache.waiting
        self.calls.clear()
        for call in calls:
            waiting.pop(call, None)
        for call in calls[1:]:
            cache.parts.load.release(call.nbytes)
        return calls

    def _taken(self, later: Callable[[], Callable[[Call], None]]) -> Iterable[tuple[int, Call]]:
        """Take the first calls as `end`, but for those that the answer to an earlier one cancels.

        `later` makes what answers the others, in later turns of the event loop.
        """
        calls = self.end()
        if len(calls) == 1 and calls[0].owner is self._cache:  # as mostly: without a generator
            return ((0, calls[0]),)
        return self._each(calls, later)

    def _each(
        self, calls: list[Call], later: Callable[[], Callable[[Call], None]]
    ) -> Iterator[tuple[int, Call]]:
        cache = self._cache
        if len(calls) > ENDED_AT_ONCE:
            cache.let_go_later(calls[ENDED_AT_ONCE:], later())
            del calls[ENDED_AT_ONCE:]
        for place, call in enumerate(calls):
            if call.owner is cache:
                yield place, call
            else:
                cache.count_cancelled(call)

    def _hit(self, answer: bytes) -> Callable[[Call], None]:
        """The callback that answers calls later, like those that find the answer.

        Callers in this process may write to the arrays of the run by then.
        """
        cache = self._cache
        return partial(cache.hit, FoundAnswer(answer, self.asked, cache.parts.clock.now()))

    # --- from Redis

    def _looked_up(self, answer: bytes | None) -> None:
        """Pass on the answer that Redis has, or run the model."""
        self._work = None
        cache, parts = self._cache, self._cache.parts
        if answer is not None:
            if not cache.closed:
                cache.answers.put(self._key, answer)
            now = parts.clock.now()
            found = FoundAnswer(answer, self.asked, now)
            for _, call in self._taken(partial(self._hit, answer)):
                deliver(call, found.deliver, call)
                parts.statistics.cache_hit(call.arrived, call.arrived, now)
        else:
            try:
                self._run()
            except Exception as error:
                for _, call in self._taken(partial(partial, refuse, error=error)):
                    deliver(call, refuse, call, error)
        parts.expect(-1)

    # --- from the run

    def answered_by(self, backend: str) -> None:
        for call in self.calls:
            call.pass_backend(backend)

    def respond_from(self, batch: Computed) -> None:
        tensors, calls = batch.tensors, batch.calls
        outputs: Sequence[Tensor]
        if len(tensors) == 1:  # as mostly: without a response
            name, datatype, array = tensors[0]
            if len(calls) > 1:
                array = array[self.first : self.first + self.rows]
            outputs, nbytes = (new_tensor((name, datatype, array)),), array.nbytes
        else:
            response = batch.response(self)
            outputs, nbytes = response.outputs, response.nbytes
        if nbytes > _COPIED_HERE:
            self.respond(batch.response(self), True)
            return
        answer = packed(batch.version, self.rows, {}, outputs)
        self._keep(answer)
        for place, call in self._taken(partial(self._hit, answer)):
            call.first = self.first
            if place:
                self._note(call, batch.started)
            if call.stages is None:
                try:  # as `deliver`, which would be one more Python call of each miss
                    call.respond_from(batch)
                except Exception:
                    end_after_bug(call)
            else:
                deliver(call, call.pass_response, batch.response(call), True)

    def respond(self, response: InferResponse, final: bool) -> None:
        kept = response.model_version, self.rows, response.parameters, response.outputs
        if response.nbytes <= _COPIED_HERE:
            self._copied(response, packed(*kept), None)
            return
        # Before others get it: a caller in this process may write to its arrays.
        parts = self._cache.parts
        parts.expect(1)
        self._work = parts.bench.do(
            response.nbytes, lambda charge: packed(*kept), partial(self._copied, response),
            uncharged, self.payer,
        )  # fmt: skip

    def _copied(
        self, response: InferResponse, answer: bytes | None, problem: Exception | None
    ) -> None:
        """Keep the copy of a response, and pass the response on."""
        if answer is not None:
            self._keep(answer)
        elif not isinstance(problem, ServerError):
            log.error("bug while an answer was copied for the cache", exc_info=problem)
        first = next(iter(self.calls))
        started = first.arrived + response.timing.queue_ns

        def give(call: Call) -> None:
            if call is not first:
                self._note(call, started)
            own = replace(
                response, id=call.id, outputs=list(response.outputs),
                parameters=dict(response.parameters),
            )  # fmt: skip
            call.pass_response(own, True)

        for _, call in self._taken(lambda: give if answer is None else self._hit(answer)):
            deliver(call, give, call)
        if self._work is not None:
            self._work = None
            self._cache.parts.expect(-1)

    def fail(self, error: ServerError) -> None:
        """Fail the call that the run was for, and let the others pass on.

        Also if that has been cancelled: the failure may be that of its deadline.
        """
        for _, call in self._taken(lambda: self._pass_on):
            if call is self.asked:
                call.started = self.started
                deliver(call, call.pass_end, error)
            else:
                deliver(call, self._pass_on, call)

    def _pass_on(self, call: Call) -> None:
        """Let a call pass on by itself."""
        call.owner = NOBODY
        try:
            self._submit(call)
        except ServerError as error:
            call.pass_refusal(error)

    def _keep(self, answer: bytes) -> None:
        cache = self._cache
        parts = cache.parts
        now = parts.clock.now
        begun = now()
        if not cache.closed:
            cache.answers.put(self._key, answer)
        if cache.redis is not None:
            cache.redis.put(self._key, answer)
        ended = now()
        parts.statistics.cache_miss(self._looked + ended - begun, ended)

    def _note(self, call: Call, started: int) -> None:
        """Count a call that has joined as a hit; the scheduler counts the run itself."""
        now = self._cache.parts.clock.now()
        self._cache.parts.statistics.cache_hit(call.arrived, now, now)
        call.arrived = min(call.arrived, started)  # for its timing
