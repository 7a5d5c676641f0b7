"""Models that are loaded when somebody asks for them, and unloaded when memory is short.

A request for a model that is not in memory waits until it is, for a bounded time. Which models go
for it is decided in `headrace.engine.residency`; what is known of each is put together here. A
model that could not be loaded is not tried again with every request, but after a while, which
grows.

Owned by the event-loop thread. Invariants: a name is in `_coming` exactly while a task brings it;
who waits for it is in `_waiting`, and is told once, either by that task or by its own timer.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.core.errors import ServerError, ServerExiting, Unavailable
from headrace.engine.control import Loads
from headrace.engine.model import Model
from headrace.engine.residency import ResidencyOptions, Resident, idle, make_room, surplus
from headrace.engine.version import ModelVersion
from headrace.observability.metrics import MemoryCounts
from headrace.repository.layout import ModelSource

log = logging.getLogger(__name__)

Done = Callable[[ServerError | None], None]

_SWEEP_SECS = 1.0
_LEAST_BYTES = 1 << 20  # of a model whose files tell nothing of the memory that it will take
_RETRY_SECS, _LONGEST_RETRY_SECS = 1.0, 60.0


class KnownLoads(Loads, Protocol):
    """What loads and unloads, and tells what has not gone yet."""

    def know(self, source: ModelSource) -> Model:
        """A model of which nothing is loaded yet, known under its name from now on."""

    @property
    def leaving(self) -> Sequence[ModelVersion]:
        """Versions that are being unloaded."""


@dataclass(frozen=True, slots=True)
class _Failure:
    source: ModelSource
    reason: str
    until: float
    delay: float


class _Waiter:
    """Somebody who is told once."""

    __slots__ = ("done", "timer")

    def __init__(self, done: Done) -> None:
        self.done = done
        self.timer: asyncio.TimerHandle | None = None


class OnRequest:
    """Brings models into memory and sends them out of it."""

    def __init__(
        self, models: Mapping[str, Model], loads: KnownLoads, options: ResidencyOptions
    ) -> None:
        self.evictions = 0  # models that went for others, or for want of requests
        self._models = models
        self._loads = loads
        self._options = options
        self._clock = options.clock
        self._waiting: dict[str, set[_Waiter]] = {}
        self._coming: dict[str, int] = {}  # estimates of those that are being loaded, else 0
        self._expected: dict[str, int] = {}  # what each took last, or may take
        self._loaded: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._failed: dict[str, _Failure] = {}
        self._off: set[str] = set()  # models that are to stay unloaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._stopped = False
        self._sweeper: asyncio.TimerHandle | None = None

    def counts(self) -> MemoryCounts:
        """What a scrape sees."""
        loaded = sum(1 for model in self._models.values() if model.newest() is not None)
        return MemoryCounts(loaded, self._options.budget, self.evictions)

    # --- what is asked

    def offers(self, name: str, version: str = "") -> bool:
        """Whether a model can be brought, with a version if one is named."""
        model = self._models.get(name)
        if model is None or model.source.problem or model.source.duplicate or name in self._off:
            return False
        return not version or int(version) in model.source.versions

    def failing(self, name: str) -> bool:
        """Whether it is known that a model cannot be loaded."""
        return name in self._failed

    def when_loaded(self, name: str, done: Done, patient: bool = False) -> Callable[[], None]:
        """Have `done` called when a model that is on offer is in memory, or with an error.

        Who is not patient waits for a bounded time. What is returned calls that off.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(done)
        model, now = self._models[name], self._clock()
        self._asked[name] = now
        failure = self._failed.get(name)
        if failure is not None and now < failure.until and failure.source == model.source:
            loop.call_soon(done, _refused(name, failure.reason))
            return _nothing
        waiters = self._waiting.setdefault(name, set())
        waiters.add(waiter)
        if not patient:
            waiter.timer = loop.call_later(self._options.wait_secs, self._give_up, name, waiter)
        if name not in self._coming:
            self._coming[name] = 0
            self._begin(self._bring(model))
        return lambda: self._forget(name, waiter)

    async def bring(self, name: str, patient: bool = False) -> None:
        """Have a model that is on offer in memory; raises `ServerError`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: ServerError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        forget = self.when_loaded(name, done, patient)
        try:
            await future
        finally:
            forget()

    # --- what the operator does

    def at_start(self, name: str) -> bool:
        """Whether a model is loaded before anybody asks for it."""
        first = self._options.first
        return name in self._options.pinned or name in first or "*" in first

    def load(self, source: ModelSource) -> "asyncio.Future[str]":
        """Load a model that nobody has asked for, or load it again; answers as `Loads.load`.

        One that is not in memory waits for room, as long as that takes.
        """
        self._off.discard(source.name)
        self._failed.pop(source.name, None)
        model = self._models.get(source.name)
        if model is None or model.ready_versions() or model.loading:
            return self._loads.load(source)
        model.source = source
        return asyncio.ensure_future(self._load_and_tell(source.name))

    def follow(self, source: ModelSource) -> None:
        """A model is new in its repository, or has changed: load it again if it is in memory."""
        model = self._models.get(source.name)
        self._off.discard(source.name)
        self._failed.pop(source.name, None)
        if model is None:
            self._loads.know(source)
        elif model.ready_versions() or model.loading:
            self._loads.load(source)
        else:
            model.source, model.reason = source, source.problem

    async def _load_and_tell(self, name: str) -> str:
        try:
            await self.bring(name, patient=True)
        except ServerError as error:
            return str(error)
        return ""

    def unload(self, name: str) -> "asyncio.Future[None]":
        """Unload a model, also for those who ask for it, until it is loaded; as `Loads.unload`."""
        self._off.add(name)
        return self._loads.unload(name)

    def start(self) -> None:
        """Look after memory from now on."""
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_SECS, self._sweep)

    def stop(self) -> None:
        """Bring nothing more; who waits is told."""
        self._stopped = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for name in list(self._waiting):
            self._tell(name, ServerExiting("Server exiting"))
        self._change.set()

    # --- how it is done

    async def _bring(self, model: Model) -> None:
        name = model.name
        error: ServerError | None = None
        try:
            error = await self._make_room(model)
            if error is None and name in self._waiting:
                error = await self._load(model)
        except Exception as bug:
            log.error("bug while loading %s on request", name, exc_info=bug)
            error = Unavailable(f"model '{name}' could not be loaded: internal error")
        finally:
            del self._coming[name]
            self._changed()
        self._tell(name, error)

    async def _make_room(self, model: Model) -> ServerError | None:
        """Wait until there is room for a model; it is counted in from then on."""
        options, name = self._options, model.name
        needed = self._expected.get(name, 0) or await asyncio.to_thread(_size, model.source)
        self._expected[name] = needed
        while options.budget and name in self._waiting and not self._stopped:
            others = [one for one in self._residents() if one.name != name or one.leaving]
            room = make_room(others, needed, options.budget, self._clock(), options.minimum_secs)
            if room.problem:
                return Unavailable(f"model '{name}' cannot be loaded: {room.problem}")
            self._unload(room.unload, f"to make room for {name}")
            if room.wait is None:
                break
            await self._wait_for_change(room.wait)
        self._coming[name] = needed
        return None

    async def _load(self, model: Model) -> ServerError | None:
        name, source = model.name, model.source
        reason = await self._loads.load(source)
        now = self._clock()
        if not model.ready_versions():
            before = self._failed.get(name)
            again = before is not None and before.source == source
            delay = min(before.delay * 2, _LONGEST_RETRY_SECS) if again and before else _RETRY_SECS
            self._failed[name] = _Failure(source, reason, now + delay, delay)
            return _refused(name, reason)
        self._failed.pop(name, None)
        self._loaded[name] = now
        self._trim()
        return None

    def _residents(self) -> list[Resident]:
        """The models in memory, and those on their way."""
        found = []
        for model in self._models.values():
            versions = model.ready_versions()
            coming = self._coming.get(model.name, 0)
            if not (versions or coming):
                continue
            nbytes = sum(version.memory_bytes for version in versions)
            if nbytes and not coming:
                self._expected[model.name] = nbytes
            nbytes = nbytes or self._expected.get(model.name, 0)
            found.append(
                Resident(
                    model.name,
                    max(nbytes, coming),
                    self._last_used(model.name, versions),
                    self._loaded.get(model.name, 0.0),
                    pinned=model.name in self._options.pinned,
                    busy=bool(coming) or any(version.busy for version in versions),
                )
            )
        found += [
            Resident(version.model, self._size_of(version), 0.0, 0.0, leaving=True)
            for version in self._loads.leaving
        ]
        return found

    def _size_of(self, version: ModelVersion) -> int:
        return version.memory_bytes or self._expected.get(version.model, 0)

    def _last_used(self, name: str, versions: Iterable[ModelVersion]) -> float:
        executed = max((version.statistics.last_inference_ms for version in versions), default=0)
        return max(executed / 1_000, self._asked.get(name, 0.0))

    def _unload(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.evictions += 1
            log.info("unloading %s %s", name, why, extra={"model": name})
            self._begin(self._unload_one(name))

    async def _unload_one(self, name: str) -> None:
        await self._loads.unload(name)
        self._changed()

    def _trim(self) -> None:
        if budget := self._options.budget:
            over = surplus(self._residents(), budget, self._clock(), self._options.minimum_secs)
            self._unload(over, "because models in memory have grown beyond the budget")

    def _sweep(self) -> None:
        if self._stopped:
            return
        self._trim()
        if seconds := self._options.idle_secs:
            names = idle(self._residents(), self._clock(), seconds)
            self._unload(names, f"after {seconds:g} s without a request")
        self.start()

    # --- who is told what

    def _tell(self, name: str, error: ServerError | None) -> None:
        for waiter in self._waiting.pop(name, ()):
            if waiter.timer is not None:
                waiter.timer.cancel()
            waiter.done(error)

    def _give_up(self, name: str, waiter: _Waiter) -> None:
        self._forget(name, waiter)
        seconds = self._options.wait_secs
        waiter.done(Unavailable(f"model '{name}' was not loaded within {seconds:g} s; try again"))

    def _forget(self, name: str, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiters = self._waiting.get(name)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiting[name]
                self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change.wait()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refused(name: str, reason: str) -> ServerError:
    return Unavailable(f"model '{name}' could not be loaded: {reason}")


def _size(source: ModelSource) -> int:
    """The size of a model's largest version, which stands in for the memory that it will take."""
    if source.file is not None:
        sizes = [_file_size(source.file)]
    else:
        sizes = [
            sum(_file_size(Path(top, name)) for top, _, names in os.walk(path) for name in names)
            for path in (source.path / str(number) for number in source.versions)
        ]
    return max([*sizes, _LEAST_BYTES])


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it has gone meanwhile; loading tells
        return 0


def _nothing() -> None:
    """There is nothing to call off."""
