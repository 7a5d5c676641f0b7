"""Loading, replacing and unloading of models.

What takes time happens on loading threads and comes back as values. A model is loaded beside what
serves under its name; then its versions take their places in one step, between two turns of the
event loop. What they replace finishes what it has accepted, and is freed. A version that would be
the same again stays. If something cannot be loaded, all that served goes on. If a model changes
while it is being loaded, what comes of that load is thrown away, since it may be made of files from
before and after: the last change wins, and changes do not pile up. To unload a model is such a
change, too: its versions finish what they have accepted and stay known as unloaded, and what is
being loaded for it is called off.

Owned by the event-loop thread. Invariants: of each model at most one load is under way and one is
wanted after it; a version that was replaced or unloaded is in `_leaving` until it is freed; of a
model that was unloaded no version takes requests.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.core.limits import ABANDONED_SECS
from headrace.engine.doors import Entrance
from headrace.engine.loading import Change, LoadedVersion, update
from headrace.engine.model import Model, ModelVersion, Router, State
from headrace.engine.model_services import EngineServices, LoadingServices
from headrace.engine.opening import LoadOptions, Opened, open_model
from headrace.engine.shared_memory import Regions
from headrace.engine.workbench import Stopped, Threads, TookTooLong
from headrace.observability.series import MemoryCounts
from headrace.observability.statistics import VersionStatistics
from headrace.placement.backend import Backend
from headrace.repository.layout import ModelSource
from headrace.repository.model_files import Digests

log = logging.getLogger(__name__)

Result: TypeAlias = LoadedVersion | Change
EXITING = "the server is shutting down"
_UNLOADED = "it was unloaded before it was loaded"
_LONG_DRAIN_SECS = 30.0  # from which on the log says that a version that goes still runs


class Loads:
    """Loading and unloading of models: the life cycle itself, or `OnRequest` in front of it.

    The defaults are of models that are loaded for good.
    """

    def load(self, source: ModelSource, added: bool = False) -> "asyncio.Future[str]":
        """Load a model, beside what serves under its name, and let it take the place of that.

        What serves goes on until then, and for good if the new one cannot be loaded; no request is
        lost. The answer is the reason why it could not be, "" if it was. If a model is handed in
        again before it is loaded, only the last one counts, and the answer is about that.
        `added` is for a model that nobody counts on yet: unless it is known already, the server is
        ready whether it can be loaded or not.
        """
        raise NotImplementedError

    def follow(self, source: ModelSource, added: bool) -> None:
        """Load a model that is new in its repository, or has changed, as `load` does."""
        self.load(source, added)

    def unload(self, name: str) -> "asyncio.Future[None]":
        """Let a model take no more requests, until it is loaded again; its versions stay known.

        What is being loaded for it never serves. Done when what it had accepted is finished and it
        is freed, at once for a name that is not known. To cancel the wait cancels nothing else.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Load nothing more; what is being loaded is closed again if it comes."""
        raise NotImplementedError

    def start(self) -> None:
        """Look after memory from now on."""

    def at_start(self, name: str) -> bool:
        """True if a model is loaded before anybody asks for it."""
        return True

    def offers(self, name: str, version: str = "") -> bool:
        """True if a model that is not in memory can be brought, with a version if one is named."""
        return False

    async def bring(self, name: str) -> None:
        """Load a model that is on offer, and wait for it; raises `ServerError`."""

    def cold_start(self, engine: Entrance, name: str, version: str) -> Router | None:
        """The target of requests for a model on offer, which it brings into memory."""
        return None

    def counts(self) -> MemoryCounts | None:
        """The models in memory as a scrape sees them; None if they are there for good."""
        return None


class Lifecycle(Loads):
    """Loads and frees the models of an engine.

    `changed` is called with a model of which other versions may be found than before, `host` makes
    what a version reaches of the server, and `statistics` its counters; `regions` are the clients'
    shared memory. `announce` is called when a model may have been loaded, or not.
    """

    def __init__(
        self,
        models: dict[str, Model],
        backends: Mapping[str, Backend],
        options: LoadOptions,
        changed: Callable[[Model], None],
        host: Callable[[ModelVersion], EngineServices],
        regions: Regions,
        statistics: Callable[[], VersionStatistics] = VersionStatistics,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        self._models = models
        self._backends = backends
        self._options = options
        self._changed = changed
        self._host = host
        self._statistics = statistics
        self._announce = announce
        self._threads = Threads(options.threads, "load")
        self._digests = Digests()
        self._regions = regions
        self._leaving: dict[ModelVersion, asyncio.Task[None]] = {}
        self._stopped = False

    @property
    def loading(self) -> bool:
        """True if anything is being loaded, be it that nobody waits for it any more."""
        left_behind = self._threads.under_way > 0
        return left_behind or any(model.loading for model in self._models.values())

    @property
    def leaving(self) -> Sequence[ModelVersion]:
        """Versions that were replaced, removed or unloaded and have still something to finish."""
        return tuple(self._leaving)

    def load(self, source: ModelSource, added: bool = False) -> "asyncio.Future[str]":
        """Begin to load a model; cancelling the future does not cancel the load."""
        model = self._models.get(source.name)
        if model is None:
            model = self.know(source)
            model.added = added
        model.want(source)
        if model.loading is None:
            model.loading = asyncio.get_running_loop().create_task(self._work_off(model))
        return asyncio.shield(model.loading)

    def _load_again(self, model: Model) -> "asyncio.Future[str]":
        """Load a model as it is, unless it is being loaded: then that may be a change."""
        loading = model.loading
        return self.load(model.source) if loading is None else asyncio.shield(loading)

    def know(self, source: ModelSource) -> Model:
        """A model of which nothing is loaded yet, known under its name from now on."""
        model = self._models[source.name] = Model(source, self._statistics, self._announce)
        return model

    def unload(self, name: str) -> "asyncio.Future[None]":
        model = self._models.get(name)
        leaving: list[asyncio.Task[None]] = []
        if model is not None:
            model.wanted = None
            model.unloaded = True
            model.reason = ""
            for version in model.versions.values():
                if version.ready:
                    leaving.append(self._retire(version))
                elif version.state is not State.UNLOADING:
                    version.fail("unloaded")
            self._changed(model)
        return asyncio.shield(asyncio.get_running_loop().create_task(_all(leaving)))

    def stop(self) -> None:
        self._stopped = True
        self._threads.stop()

    async def unload_all(self, grace: float = ABANDONED_SECS) -> None:
        """Finish what was accepted and free every model; `grace` as of `ModelVersion.unload`."""
        self.stop()
        versions = {v for model in self._models.values() for v in model.versions.values()}
        versions.update(self._leaving)
        await asyncio.gather(*(v.unload(grace) for v in versions), *self._leaving.values())

    async def _work_off(self, model: Model) -> str:
        problem = EXITING
        try:
            while (source := model.wanted) is not None and not self._stopped:
                model.wanted = None
                problem = await self._load(model, source)
            if model.unloaded and not self._stopped:
                problem = _UNLOADED
        finally:
            model.loading = None
        return problem

    def _is_stopped(self) -> bool:
        return self._stopped

    def _is_outdated(self, model: Model) -> bool:
        return self._stopped or model.unloaded or model.wanted is not None

    async def _load(self, model: Model, source: ModelSource) -> str:
        """Load once; why it did not work out. It is of no account if it is outdated by then."""
        try:
            opened = await self._threads.run(
                partial(open_model, source, self._backends, self._options, self._digests),
                self._options.limit_secs,
            )
        except Stopped:
            return EXITING
        except TookTooLong:
            return self._refuse(model, LoadFailed(self._too_long()))
        except Exception as error:  # one model's failure must not keep others from loading
            return self._refuse(model, error)
        if self._is_outdated(model):
            return EXITING
        model.unreadable = False
        for warning in opened.warnings:
            log.warning(warning)
        model.expect(opened.versions)
        loads = [self._update(model.versions[number], opened) for number in opened.versions]
        results = dict(zip(opened.versions, await asyncio.gather(*loads), strict=True))
        if self._is_outdated(model):
            problem = EXITING
        elif any(isinstance(r, str) for r in results.values()) and model.ready_versions():
            problem = self._abandon(model, results)
        else:
            return self._swap(model, source, results)
        await self._discard([r for r in results.values() if not isinstance(r, str)])
        return problem

    async def _update(self, version: ModelVersion, opened: Opened) -> Result | str:
        """Load what a version lacks, tried again as often as allowed; the reason if that fails."""
        what = f"{opened.source.name} version {version.name}"
        loop = asyncio.get_running_loop()
        limit = self._options.limit_secs
        left = self._options.retries
        while not self._is_stopped():
            asked = self._host(version)
            asked.loading = opened.source.name
            host = LoadingServices(asked, loop, self._threads.wait)
            options = replace(self._options, host=host)
            work = partial(update, version.serving, opened, version.number, options)
            try:
                return await self._threads.run(work, limit, _close)
            except Stopped:
                break
            except TookTooLong:
                reason = self._too_long()
                log.error(
                    "failed to load %s: %s; what cannot be stopped goes on by itself", what, reason
                )
                return reason
            except Exception as error:  # one version's failure must not keep others from loading
                reason = _reason(what, error)
            finally:
                host.close()
            if not left:
                return reason
            log.info("%s is loaded once more, %d times at most", what, left)
            left -= 1
        return EXITING

    def _too_long(self) -> str:
        seconds = self._options.limit_secs
        return f"loading has taken longer than {seconds:g} s (--model-load-timeout-secs)"

    def _refuse(self, model: Model, error: Exception) -> str:
        """The whole model could not be read."""
        reason = _reason(model.name, error)
        if self._is_outdated(model):
            return reason
        model.failed_loads += 1
        model.unreadable = True
        if not model.versions:
            model.reason = reason
        model.expect(model.versions)  # what was unloaded may have still something to finish
        for number in model.versions:
            model.refuse(number, reason)
        self._tell_of_those_that_go_on(model)
        return reason

    def _abandon(self, model: Model, results: Mapping[int, Result | str]) -> str:
        """Keep all that serves, since a new version could not be loaded; the reasons."""
        problems = {n: result for n, result in results.items() if isinstance(result, str)}
        for number in results:
            if number in problems:
                model.refuse(number, problems[number])
            elif not model.versions[number].ready:
                model.refuse(number, f"not served, since version {min(problems)} cannot be loaded")
        model.failed_loads += 1
        self._tell_of_those_that_go_on(model)
        return "; ".join(problems.values())

    def _swap(self, model: Model, source: ModelSource, results: Mapping[int, Result | str]) -> str:
        """Swap in the versions that were loaded; the reasons why others were not."""
        problems: list[str] = []
        for number, result in results.items():
            problem = result if isinstance(result, str) else self._take_in(model, number, result)
            if problem:
                model.refuse(number, problem)
                problems.append(problem)
        changed = not all(_is_nothing(result) for result in results.values())
        for number in sorted(set(model.versions) - set(results)):
            changed = changed or model.versions[number].ready
            self._free(model.remove(number))
        model.reason = ""
        self._changed(model)
        if problems:
            model.failed_loads += 1
            return "; ".join(problems)
        model.loads += changed
        model.source = source
        if not changed:
            log.info("%s is as it was loaded before", model.name, extra={"model": model.name})
        return ""

    def _take_in(self, model: Model, number: int, loaded: Result) -> str:
        """Swap in a loaded version for the one under its number; the reason if that fails."""
        old = model.versions[number]
        if isinstance(loaded, Change):
            return self._change(old, loaded)
        # Counters go on: to whoever watches them, it is the same model and version.
        version = ModelVersion(model.name, number, old.statistics)
        try:
            loop = asyncio.get_running_loop()
            version.serve(loaded, loop, self._host(version), self._regions)
        except Exception as error:  # a bug, which must not keep others from loading
            return _reason(f"{model.name} version {number}", error)
        version.search(partial(self._load_again, model))
        for warning in loaded.warnings:
            log.warning(warning)
        again = "again " if old.ready else ""
        log.info(
            "loaded %s version %s %sin %.2f s", model.name, version.name, again, loaded.seconds,
            extra={"model": model.name, "version": version.name},
        )  # fmt: skip
        model.put(version)
        self._free(old)
        return ""

    def _change(self, version: ModelVersion, change: Change) -> str:
        """Change a version that serves in place; the reason if that fails."""
        try:
            version.change(change)
        except Exception as error:  # a bug, which must not keep others from loading
            return _reason(f"{version.model} version {version.name}", error)
        if not _is_nothing(change):
            count = len(version.instances)
            log.info(
                "%s version %s goes on with %d instance%s", version.model, version.name,
                count, "s" if count > 1 else "",
                extra={"model": version.model, "version": version.name},
            )  # fmt: skip
        return ""

    def _tell_of_those_that_go_on(self, model: Model) -> None:
        for version in model.ready_versions():
            if version.reason:
                log.warning(
                    "%s version %s goes on as it was loaded before", model.name, version.name,
                    extra={"model": model.name, "version": version.name},
                )  # fmt: skip

    def _free(self, version: ModelVersion) -> None:
        """Free a version that cannot be found any more, if it was ever loaded."""
        if version.ready:
            self._retire(version)

    def _retire(self, version: ModelVersion) -> "asyncio.Task[None]":
        """Let a version that serves take no more, and free it once it has finished what it has."""
        loop = asyncio.get_running_loop()
        version.leave()
        task = loop.create_task(version.unload())
        self._leaving[version] = task
        timer = loop.call_later(
            _LONG_DRAIN_SECS, log.warning,
            "%s version %s was to go %d s ago and still has requests to finish",
            version.model, version.name, _LONG_DRAIN_SECS,
        )  # fmt: skip

        def gone(task: "asyncio.Task[None]") -> None:
            timer.cancel()
            del self._leaving[version]
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                log.error("bug while freeing %s", version.model, exc_info=error)
            elif self._is_gone(version):
                log.info(
                    "unloaded %s version %s", version.model, version.name,
                    extra={"model": version.model, "version": version.name},
                )  # fmt: skip

        task.add_done_callback(gone)
        return task

    def _is_gone(self, version: ModelVersion) -> bool:
        """True if a version that was freed has none in its place."""
        model = self._models.get(version.model)
        now = model.versions.get(version.number) if model is not None else None
        return now is None or not now.ready

    async def _discard(self, loaded: Sequence[Result]) -> None:
        """Close what nobody wants any more: on a loading thread, since it may take time."""
        try:
            await self._threads.run(partial(_close_all, loaded))
        except Stopped:
            _close_all(loaded)


async def _all(leaving: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for all of them; what failed was told when it did."""
    await asyncio.gather(*leaving, return_exceptions=True)


def _close(result: Result) -> None:
    for instance in result.instances:
        instance.model.close()


def _close_all(results: Sequence[Result]) -> None:
    for result in results:
        _close(result)


def _is_nothing(result: Result | str) -> bool:
    """True if it leaves a version as it is."""
    return isinstance(result, Change) and not (result.instances or result.removed)


def _reason(what: str, error: Exception) -> str:
    """The reason of a failed load for clients; the whole story goes to the log."""
    if isinstance(error, RepositoryError):
        for line in str(error).splitlines():
            log.error("failed to load %s: %s", what, line)
        return error.public
    log.error("failed to load %s", what, exc_info=error)
    return f"internal error: {type(error).__name__}"
