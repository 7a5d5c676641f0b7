"""Models that are loaded on request, and unloaded when memory is short.

A request for a model that is not in memory waits until it is, for a bounded time (`ColdStart`). A
model whose load has failed is tried again after a growing delay, not with every request. What an
operator loads or unloads takes precedence.

Room is made by evicting the least recently used models (pure decisions), but never one that is
pinned, that has unfinished requests, or that was loaded only just now: two models that do not fit
side by side would otherwise evict each other with every request. If that is not enough, nothing is
evicted in vain; the request waits for the first model that can be evicted, or fails if there will
never be room.

Owned by the event-loop thread. Invariants: a model is `coming` exactly while a task brings it; each
future of `bring` is ended by that task, by its own timer, or by an unload of the model.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, TypeVar

from headrace.core.call import Call, Owner
from headrace.core.errors import (
    ExecutionFailed,
    LoadFailed,
    ServerError,
    ServerExiting,
    Unavailable,
    Unsupported,
)
from headrace.core.limits import ResidencyOptions
from headrace.engine.entrance import Entrance, submit_raw
from headrace.engine.lifecycle import EXITING, Lifecycle, Loads
from headrace.engine.model import Model, parse_version
from headrace.engine.version import ModelVersion, State
from headrace.observability.statistics import MemoryCounts
from headrace.protocol.status import INTERNAL_TEXT
from headrace.repository.catalogue import DUPLICATE
from headrace.repository.layout import ModelSource, largest_version, looked_at_again
from headrace.repository.model_files import Fingerprint, fingerprint


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory, or being loaded or unloaded.

    `nbytes` is its memory. `last_used` and `loaded` are in seconds of one clock. `leaving` means
    that it is being unloaded: its memory will soon be free.
    """

    name: str
    nbytes: int
    last_used: float
    loaded: float
    pinned: bool = False
    busy: bool = False
    leaving: bool = False

    @property
    def evictable(self) -> bool:
        """True if it may be unloaded."""
        return not (self.pinned or self.busy or self.leaving)


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The models to evict before another one may be loaded.

    `unload` are to be evicted. If `wait` is set, there is no room yet: ask again after so many
    seconds, or after any change. `problem` is the reason why there will never be room.
    """

    unload: tuple[str, ...] = ()
    wait: float | None = None
    problem: str = ""


_SOON = 0.1  # seconds until models with unfinished requests are checked again


def make_room(
    residents: Sequence[Resident], needed: int, budget: int, now: float, minimum: float
) -> EvictionPlan:
    """Plan the eviction that leaves `needed` bytes free within `budget` bytes.

    A resident stays for `minimum` seconds after its load.
    """
    pinned = sum(one.nbytes for one in residents if one.pinned)
    if needed > budget - pinned:
        taken = f", {pinned} of them taken by models that are pinned" if pinned else ""
        return EvictionPlan(
            problem=f"it needs about {needed} bytes, more than the {budget} bytes that models may"
            f" take{taken} (--model-memory-budget)"
        )
    missing = sum(one.nbytes for one in residents) + needed - budget
    if missing <= 0:
        return EvictionPlan()
    # Residents being unloaded come first: their memory need not be requested again.
    missing -= sum(one.nbytes for one in residents if one.leaving)
    unload, missing = _least_used(residents, missing, now, minimum)
    if missing <= 0:
        return EvictionPlan(unload=tuple(unload), wait=_SOON)
    staying = [one for one in residents if not (one.leaving or one.pinned)]
    ends = [one.loaded + minimum - now for one in staying if now - one.loaded < minimum]
    return EvictionPlan(wait=max(min(ends, default=_SOON), _SOON))


def surplus(residents: Sequence[Resident], budget: int, now: float, minimum: float) -> list[str]:
    """The models to evict because those in memory have grown beyond `budget` bytes."""
    excess = sum(one.nbytes for one in residents if not one.leaving) - budget
    return _least_used(residents, excess, now, minimum)[0]


def _least_used(
    residents: Sequence[Resident], missing: int, now: float, minimum: float
) -> tuple[list[str], int]:
    """The least recently used models that take `missing` bytes, and the bytes still missing."""
    unload = []
    for one in sorted(residents, key=_last_used):
        if missing <= 0:
            break
        if one.evictable and now - one.loaded >= minimum:
            unload.append(one.name)
            missing -= one.nbytes
    return unload, missing


def idle(residents: Sequence[Resident], now: float, seconds: float) -> list[str]:
    """The models without a request for so many seconds."""
    return [one.name for one in residents if one.evictable and now - _last_used(one) >= seconds]


def _last_used(one: Resident) -> float:
    return max(one.last_used, one.loaded)


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A failed load: its reason, and the time of the next attempt."""

    reason: str
    until: float
    delay: float


@dataclass(slots=True)
class Entry:
    """The state of one model that is loaded on request.

    `wanted` is an operator's load, in place of the model's source. While the model is `coming`, its
    expected bytes are `counted`, from when there is room for it. `expected` is its last memory, or
    an estimate from its files, which have `size` bytes. `loaded` and `asked` are times in seconds.
    `off` means that it stays unloaded; `problem` is the reason of the last failure.
    """

    waiting: "set[asyncio.Future[None]]" = field(default_factory=set)
    wanted: ModelSource | None = None
    coming: bool = False
    counted: int = 0
    size: int = 0
    expected: int = 0
    loaded: float = 0.0
    asked: float = 0.0
    failure: FailedLoad | None = None
    off: bool = False
    problem: str = ""

    def tell(self, error: ServerError | None) -> None:
        """End all waits, with the error, None for success."""
        waiting, self.waiting = self.waiting, set()
        for future in waiting:
            _end_wait(future, error)

    def resident(self, model: Model, pinned: bool) -> Resident | None:
        """The model as charged to the budget; None if it is not in memory, nor being loaded."""
        versions = model.ready_versions()
        if not (versions or self.counted):
            return None
        nbytes = sum(version.report.memory_bytes for version in versions)
        if nbytes and not self.counted:
            self.expected = nbytes
        return Resident(
            model.name,
            max(nbytes or self.expected, self.counted),
            max(_last_run(versions), self.asked),
            self.loaded,
            pinned,
            busy=self.coming or model.loading is not None or any(v.report.busy for v in versions),
        )


def _end_wait(future: "asyncio.Future[None]", error: ServerError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _last_run(versions: Iterable[ModelVersion]) -> float:
    last = (version.report.statistics.last_inference_ms for version in versions)
    return max(last, default=0) / 1_000


log = logging.getLogger(__name__)

T = TypeVar("T")
_SWEEP_SECS = 1.0
_LEAST_BYTES = 1 << 20  # assumed for a model whose files do not indicate its memory
_RETRY_SECS, _LONGEST_RETRY_SECS = 1.0, 60.0
_UNLOADED = "it was unloaded"


class OnRequest(Loads):
    """Loads models on request and evicts them."""

    def __init__(
        self, options: ResidencyOptions, models: Mapping[str, Model], loads: Lifecycle
    ) -> None:
        self.evictions = 0  # models evicted for others, or for lack of requests
        self._models = models
        self._loads = loads
        self._options = options
        self._clock = options.clock
        self._entries: dict[str, Entry] = {}  # entries of known models
        self._tasks: set[asyncio.Task[Any]] = set()
        self._change = asyncio.Event()
        self._stopped = False
        self._sweeper: asyncio.TimerHandle | None = None

    def counts(self) -> MemoryCounts:
        loaded = sum(1 for model in self._models.values() if model.newest() is not None)
        return MemoryCounts(loaded, self._options.budget, self.evictions)

    # --- requests

    def offers(self, name: str, version: str = "") -> bool:
        model = self._models.get(name)
        if model is None or model.newest() is not None or self._entry(name).off:
            return False  # a model in memory has no other versions
        source = model.source
        if source.problem or source.duplicate:
            return False
        # There are none if the model is on an upstream.
        return not version or not source.versions or parse_version(version) in source.versions

    def failing(self, name: str) -> str:
        """The reason why a model cannot be loaded, as far as known; "" if it can."""
        failure = self._entry(name).failure
        return "" if failure is None else f"it could not be loaded: {failure.reason}"

    def bring(self, name: str, patient: bool = False) -> "asyncio.Future[None]":
        """Load a model on request; the future fails with a `ServerError`.

        Unless `patient`, the wait is bounded. Cancelling the future ends it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry, now = self._entry(name), self._clock()
        entry.asked = now
        if self._stopped:
            future.set_exception(ServerExiting("Server exiting"))
        elif entry.failure is not None and now < entry.failure.until:
            seconds = ceil(entry.failure.until - now)
            future.set_exception(_refused(name, entry.failure.reason, seconds))
        else:
            entry.waiting.add(future)
            future.add_done_callback(partial(self._forget, entry))
            if not patient:
                text = f"was not loaded within {self._options.wait_secs:g} s; try again"
                late = Unavailable(f"model '{name}' {text}", retry_after=1)
                timer = loop.call_later(self._options.wait_secs, _end_wait, future, late)
                future.add_done_callback(lambda _: timer.cancel())
            if not entry.coming:
                entry.coming = True
                self._begin(self._bring(name, entry))
        return future

    def cold_start(self, engine: Entrance, name: str, version: str) -> "ColdStart | None":
        return ColdStart(engine, self, name, version) if self.offers(name, version) else None

    # --- operators and file changes

    def at_start(self, name: str) -> bool:
        first = self._options.first
        return name in self._options.pinned or name in first or "*" in first

    def load(self, source: ModelSource, added: bool = False) -> "asyncio.Future[str]":
        """Load a model by command, or reload it; see `Loads`.

        One that is not in memory waits for room, however long. If the load fails, the state is as
        before.
        """
        model = self._models.get(source.name)
        if new := model is None:
            model = self._loads.know(source)
        entry = self._entry(source.name)
        entry.off, entry.failure = False, None
        if model.ready_versions() or model.loading:
            return self._loads.load(source)
        entry.wanted = source
        return asyncio.shield(self._begin(self._load_and_tell(source.name, new)))

    async def _load_and_tell(self, name: str, new: bool) -> str:
        entry = self._entry(name)
        try:
            await self.bring(name, patient=True)
        except ServerError:
            entry.off = entry.off or new  # it was never loaded successfully
        return entry.problem

    def follow(self, source: ModelSource, added: bool) -> None:
        """Reload a model if it is in memory or pinned; otherwise only register it."""
        model = self._models.get(source.name) or self._loads.know(source)
        entry = self._entry(source.name)
        entry.off, entry.failure = False, None
        model.source = source
        if model.ready_versions() or model.loading:
            self._loads.load(source)
            return
        model.reason = DUPLICATE if source.duplicate else source.problem
        if source.name in self._options.pinned and not model.reason:
            self.load(source)

    def unload(self, name: str) -> "asyncio.Future[None]":
        """Unload a model and keep it from being loaded on request; see `Loads`."""
        gone = self._loads.unload(name)
        if (model := self._models.get(name)) is not None:
            entry = self._entry(name)
            entry.off, entry.wanted, entry.problem = True, None, _UNLOADED
            entry.tell(_refused(name, _UNLOADED))
            self._changed()
            if not model.versions:
                model.reason = "unloaded"
        return gone

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_SECS, self._sweep)

    def stop(self) -> None:
        """Start no more loads; waiters get an error."""
        self._stopped = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for entry in self._entries.values():
            entry.problem = EXITING
            entry.tell(ServerExiting("Server exiting"))
        self._changed()

    # --- implementation

    async def _bring(self, name: str, entry: Entry) -> None:
        problem, decided, again = "", False, False
        try:
            while not decided:
                wanted = entry.wanted
                state = await self._look(name, entry)
                problem = await self._make_room(name, entry)
                if not problem and entry.waiting and entry.wanted is wanted:
                    problem = await self._load(name, entry)
                if problem and not again:  # possibly because its files were just replaced
                    again = state != await self._look(name, entry)
                    decided = not again
                else:
                    decided = True
                # Or an operator has given another source.
                decided = decided and entry.wanted is wanted
        except Exception as bug:
            log.error("bug while loading %s on request", name, exc_info=bug)
            problem = "internal error"
        finally:
            entry.coming, entry.counted, entry.wanted = False, 0, None
        if entry.waiting:
            entry.problem = problem or self._left_out(name)
            entry.tell(_refused(name, problem) if problem else None)
        self._changed()  # behind those told, who use the model before it may be evicted

    async def _look(self, name: str, entry: Entry) -> object:
        """Examine the files of a model; returns a value that changes with them."""
        model = self._models[name]
        source = entry.wanted or model.source
        found, size, state = await asyncio.to_thread(_look_at, source)
        if model.source is source:
            model.source = found
        if size != entry.size:
            entry.size = entry.expected = size
        return state

    async def _make_room(self, name: str, entry: Entry) -> str:
        """Wait for room for a model, which is charged from then on, as long as it has waiters;
        returns the reason if it will never fit.
        """
        options, needed = self._options, entry.expected
        while options.budget and entry.waiting:
            others = [one for one in self._residents() if one.name != name or one.leaving]
            room = make_room(others, needed, options.budget, self._clock(), options.minimum_secs)
            if room.problem:
                return room.problem
            self._unload(room.unload, f"to make room for {name}")
            if room.wait is None:
                break
            await self._wait_for_change(room.wait)
        entry.counted = needed
        return ""

    async def _load(self, name: str, entry: Entry) -> str:
        """Load a model; returns the reason of a failure."""
        source, failure = entry.wanted or self._models[name].source, entry.failure
        reason = await self._loads.load(source)
        model, now = self._models[name], self._clock()
        if model.newest() is not None:
            entry.failure, entry.loaded = None, now
            self._trim()
            return ""
        if source == model.source and not entry.off:
            delay = min(failure.delay * 2, _LONGEST_RETRY_SECS) if failure else _RETRY_SECS
            entry.failure = FailedLoad(reason, now + delay, delay)
        return reason or _UNLOADED

    def _left_out(self, name: str) -> str:
        """The reason why some versions of a loaded model are missing."""
        versions = self._models[name].versions.values()
        return "; ".join(one.reason for one in versions if one.state is State.UNAVAILABLE)

    def _entry(self, name: str) -> Entry:
        """The entry of a model, created on first use."""
        found = self._entries.get(name)
        if found is None:
            found = self._entries[name] = Entry()
        return found

    def _residents(self) -> list[Resident]:
        """The models in memory, and those being loaded."""
        pinned = self._options.pinned
        found = [
            self._entry(name).resident(model, name in pinned)
            for name, model in self._models.items()
        ]
        leaving = [
            Resident(version.model, self._size_of(version), 0.0, 0.0, leaving=True)
            for version in self._loads.leaving
        ]
        return [*(one for one in found if one is not None), *leaving]

    def _size_of(self, version: ModelVersion) -> int:
        entry = self._entries.get(version.model)
        return version.report.memory_bytes or (entry.expected if entry is not None else 0)

    def _unload(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.evictions += 1
            log.info("unloading %s %s", name, why, extra={"model": name})
            self._loads.unload(name).add_done_callback(lambda _: self._changed())

    def _trim(self) -> None:
        if budget := self._options.budget:
            over = surplus(self._residents(), budget, self._clock(), self._options.minimum_secs)
            self._unload(over, "because models in memory have grown beyond the budget")

    def _sweep(self) -> None:
        self.start()
        for name in self._entries.keys() - self._models.keys():
            if not self._entries[name].coming:
                del self._entries[name]
        self._trim()
        if seconds := self._options.idle_secs:
            names = idle(self._residents(), self._clock(), seconds)
            self._unload(names, f"after {seconds:g} s without a request")

    def _forget(self, entry: Entry, future: "asyncio.Future[None]") -> None:
        entry.waiting.discard(future)
        if not entry.waiting:
            self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change.wait()

    def _begin(self, work: Coroutine[None, None, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _look_at(source: ModelSource) -> tuple[ModelSource, int, Fingerprint | None]:
    """A model's current source, its estimated memory, and the state of its files."""
    found, state = source, None
    with suppress(LoadFailed):  # reported by the load
        found = looked_at_again(source)
        state = fingerprint(found)
    return found, max(largest_version(found), _LEAST_BYTES), state


def _refused(name: str, reason: str, retry_after: int = 1) -> ServerError:
    if reason == EXITING:
        return ServerExiting("Server exiting")
    return Unavailable(f"model '{name}' could not be loaded: {reason}", retry_after)


class ColdStart(Owner):
    """Target and owner of one call until its model is in memory.

    Invariant: `_call` is set until the call is passed to the model, refused or cancelled.
    """

    direct = None
    signature = None
    ready = False
    name = ""  # the version is only known once the model is loaded
    decoupled = False  # as far as known

    __slots__ = ("_bringing", "_call", "_engine", "_loaded", "model", "version")

    def __init__(self, engine: Entrance, bringing: OnRequest, model: str, version: str) -> None:
        self.model = model
        self.version = version
        self._engine = engine
        self._bringing = bringing
        self._call: Call | None = None
        self._loaded: asyncio.Future[None] | None = None

    @property
    def obstacle(self) -> str:
        """The reason why the model cannot be loaded, as far as known."""
        return self._bringing.failing(self.model)

    def submit(self, call: Call) -> None:
        """Submit the call once the model is in memory."""
        self._call = call
        call.owner = self
        self._loaded = self._bringing.bring(self.model)
        self._loaded.add_done_callback(self._on_loaded)

    def waits_for(self, target: object) -> bool:
        """True if a call may have to wait for `target` to finish: never.

        A model that is not in memory executes nothing.
        """
        return False

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        self._call = None
        if self._loaded is not None:
            self._loaded.cancel()

    def _on_loaded(self, loaded: "asyncio.Future[None]") -> None:
        # Thousands may have waited for the same model.
        self._engine.admission.turns.go_on_later(partial(self._go_on, loaded))

    def _go_on(self, loaded: "asyncio.Future[None]") -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            loaded.result()
            self._hand_over(call)
        except ServerError as error:
            call.pass_refusal(error)
        except Exception as bug:
            log.error("bug in a request that waited for its model", exc_info=bug)
            call.pass_refusal(ExecutionFailed(INTERNAL_TEXT))

    def _hand_over(self, call: Call) -> None:
        found = self._engine.find(self.model, self.version)
        if found.decoupled and call.refusal:
            raise Unsupported(call.refusal)
        call.pass_routed(found)
        if call.options.raw is not None and found.signature is not None:
            submit_raw(found, call, self._engine)
        else:
            found.submit(call)
