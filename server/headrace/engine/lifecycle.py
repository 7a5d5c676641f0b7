"""Loading, replacing and unloading of models.

Slow work runs on loading threads and returns values. A model is loaded beside the versions that
serve under its name; then its versions take their places in one step, between two turns of the
event loop. Replaced versions finish the requests that they have accepted, and are freed. A version
that would be identical stays. If anything cannot be loaded, all serving versions stay. If a model
changes while it is being loaded, the result of that load is discarded, since it may mix old and new
files: the last change wins, and changes do not pile up. An unload is such a change, too: the
versions finish what they have accepted and stay known as unloaded, and a running load is cancelled.

Owned by the event-loop thread. Invariants: each model has at most one load in progress and one
wanted after it; a replaced or unloaded version is in `_leaving` until it is freed; no version of an
unloaded model takes requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.core.limits import ABANDONED_SECS
from headrace.engine.composition import Composition
from headrace.engine.entrance import Entrance, Router
from headrace.engine.loading import Change, LoadedVersion, update
from headrace.engine.model import Model
from headrace.engine.model_services import EngineServices, LoadingServices
from headrace.engine.opening import LoadOptions, Opened, open_model
from headrace.engine.shared_memory import Regions
from headrace.engine.shared_outcome import SharedOutcome
from headrace.engine.version import ModelVersion, State
from headrace.engine.workbench import Stopped, Threads, TookTooLong
from headrace.observability.statistics import MemoryCounts, VersionStatistics
from headrace.placement.backend import Backend
from headrace.repository.layout import ModelSource
from headrace.repository.model_files import Digests

log = logging.getLogger(__name__)

Result: TypeAlias = LoadedVersion | Change
EXITING = "the server is shutting down"
UNLOADED = "it was unloaded before it was loaded"
_UNLOADED = "unloaded"
_LONG_DRAIN_SECS = 30.0  # after which the log reports a version that still drains


class Loads:
    """Interface for loading and unloading models: `Lifecycle`, or `OnRequest` in front of it.

    The defaults are for models that stay loaded.
    """

    def load(self, source: ModelSource, added: bool = False) -> "asyncio.Future[str]":
        """Load a model beside what serves under its name, then replace that.

        The serving versions stay until then, and for good if the load fails; no request is lost.
        The result is the reason of the failure, "" on success. If a model is passed again before it
        is loaded, only the last one counts, and the result is about that one. `added` marks a model
        that is not relied on yet: unless it is known already, it does not affect the server's
        readiness.
        """
        raise NotImplementedError

    def follow(self, source: ModelSource, added: bool) -> None:
        """Load a model that is new in its repository, or has changed, as `load` does."""
        self.load(source, added)

    def unload(self, name: str) -> "asyncio.Future[None]":
        """Stop a model's requests until it is loaded again; its versions stay known.

        A running load is discarded. Done when accepted requests are finished and the model is
        freed, at once for an unknown name. Cancelling the wait cancels nothing else.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Start no more loads; the results of running ones are closed."""
        raise NotImplementedError

    def start(self) -> None:
        """Start memory management."""

    def at_start(self, name: str) -> bool:
        """True if a model is loaded at start rather than on request."""
        return True

    def offers(self, name: str, version: str = "") -> bool:
        """True if an absent model can be loaded on request, in this version if one is named."""
        return False

    def bring(self, name: str) -> Awaitable[None]:
        """Load a model that it offers, and wait for it; raises `ServerError`."""
        raise NotImplementedError

    def cold_start(self, engine: Entrance, name: str, version: str) -> Router | None:
        """The target of requests for a model that is loaded on request."""
        return None

    def counts(self) -> MemoryCounts | None:
        """Counters of models in memory, for a scrape; None if models stay loaded."""
        return None


class Lifecycle(Loads):
    """Loads and frees the models of an engine.

    `changed` is called with a model whose versions have changed, `host` makes the server services
    of a version, and `statistics` its counters; `regions` are the clients' shared memory.
    `announce` is called after a load has ended. `composition` has the models that run others.
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
        self.composition = Composition(models, self.load, self.unload)

    @property
    def loading(self) -> bool:
        """True if anything is being loaded, even if no longer awaited."""
        left_behind = self._threads.under_way > 0
        return left_behind or any(model.loading for model in self._models.values())

    @property
    def leaving(self) -> Sequence[ModelVersion]:
        """Versions that were replaced, removed or unloaded and still have requests to finish."""
        return tuple(self._leaving)

    def load(self, source: ModelSource, added: bool = False) -> "asyncio.Future[str]":
        """Start loading a model; cancelling the future does not cancel the load."""
        model = self._models.get(source.name)
        if model is None:
            model = self.know(source)
            model.added = added
        model.want(source)
        if model.loading is None:
            task = asyncio.get_running_loop().create_task(self._work_off(model))
            model.loading = SharedOutcome(task)
        return model.loading.wait()

    def _load_again(self, model: Model) -> "asyncio.Future[str]":
        """Reload a model from its source, unless a load, possibly of a change, is in progress."""
        loading = model.loading
        return self.load(model.source) if loading is None else loading.wait()

    def know(self, source: ModelSource) -> Model:
        """Register a model without loading it."""
        model = self._models[source.name] = Model(source, self._statistics, self._announce)
        return model

    def unload(self, name: str, reason: str = _UNLOADED) -> "asyncio.Future[None]":
        """Implements `Loads.unload`; `reason` is reported for the versions."""
        model = self._models.get(name)
        leaving: list[asyncio.Task[None]] = []
        if model is not None:
            model.wanted = None
            model.unloaded = True
            model.reason = ""
            for version in model.versions.values():
                if version.ready:
                    leaving.append(self._retire(version, reason))
                elif version.state is not State.UNLOADING:
                    version.fail(reason)
            self._changed(model)
            self.composition.follow(model)
        return asyncio.shield(asyncio.get_running_loop().create_task(_all(leaving)))

    def stop(self) -> None:
        self._stopped = True
        self._threads.stop()

    async def unload_all(self, grace: float = ABANDONED_SECS) -> None:
        """Finish accepted requests and free every model; `grace` as in `ModelVersion.unload`."""
        self.stop()
        versions = {v for model in self._models.values() for v in model.versions.values()}
        versions.update(self._leaving)
        for wave in self.composition.waves({version.model for version in versions}):
            await asyncio.gather(*(v.unload(grace) for v in versions if v.model in wave))
        await asyncio.gather(*self._leaving.values())

    async def _work_off(self, model: Model) -> str:
        problem = EXITING
        try:
            while (source := model.wanted) is not None and not self._stopped:
                model.wanted = None
                problem = await self._load(model, source)
            if model.unloaded and not self._stopped:
                problem = UNLOADED
        finally:
            model.loading = None
        return problem

    def _is_stopped(self) -> bool:
        return self._stopped

    def _is_outdated(self, model: Model) -> bool:
        return self._stopped or model.unloaded or model.wanted is not None

    async def _load(self, model: Model, source: ModelSource) -> str:
        """Load once; returns the reason of a failure. The result is ignored if outdated."""
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
        if opened.uses and not self._is_outdated(model):
            try:
                opened = await self.composition.completed(opened)
            except RepositoryError as error:
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
        elif objection := self.composition.objection(model.name, results):
            log.error("failed to load %s: %s", model.name, objection, extra={"model": model.name})
            problem = self._abandon(model, {**results, min(results): objection})
            self.composition.refuse(source)
        else:
            shrunk = [
                model.versions[number] for number, result in results.items()
                if isinstance(result, Change) and result.removed
            ]  # fmt: skip
            problem = self._swap(model, source, results)
            self.composition.follow(model)
            # As in Triton, whose clients count finalized instances when a load has returned.
            await asyncio.gather(*(version.settled() for version in shrunk))
            return problem
        await self._discard([r for r in results.values() if not isinstance(r, str)])
        return problem

    async def _update(self, version: ModelVersion, opened: Opened) -> Result | str:
        """Load what a version lacks, with retries; returns the reason if that fails."""
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
        """Note that the whole model could not be read."""
        reason = _reason(model.name, error)
        if self._is_outdated(model):
            return reason
        model.failed_loads += 1
        model.unreadable = True
        if not model.versions:
            model.reason = reason
        model.expect(model.versions)  # unloaded versions may still have requests to finish
        for number in model.versions:
            model.refuse(number, reason)
        self._tell_of_those_that_go_on(model)
        return reason

    def _abandon(self, model: Model, results: Mapping[int, Result | str]) -> str:
        """Keep the serving versions, since a new version failed to load; returns the reasons."""
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
        """Swap in the loaded versions; returns the reasons why others were not loaded."""
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
        """Swap in a loaded version for the one with its number; returns the reason of a failure."""
        old = model.versions[number]
        if isinstance(loaded, Change):
            return self._change(old, loaded)
        # Counters continue: for an observer, it is the same model and version.
        version = ModelVersion(model.name, number, old.report.statistics)
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
        """Change a serving version in place; returns the reason of a failure."""
        try:
            version.change(change)
        except Exception as error:  # a bug, which must not keep others from loading
            return _reason(f"{version.model} version {version.name}", error)
        if not _is_nothing(change):
            count = len(version.report.instances)
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
        """Free a version that can no longer be found, if it was loaded."""
        if version.ready:
            self._retire(version)

    def _retire(self, version: ModelVersion, reason: str = _UNLOADED) -> "asyncio.Task[None]":
        """Drain a serving version, and free it afterwards; `reason` is reported then."""
        loop = asyncio.get_running_loop()
        version.leave()
        task = loop.create_task(version.unload(reason=reason))
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
        """True if a version was freed and not replaced."""
        model = self._models.get(version.model)
        now = model.versions.get(version.number) if model is not None else None
        return now is None or not now.ready

    async def _discard(self, loaded: Sequence[Result]) -> None:
        """Close unused instances on a loading thread, since it may take time."""
        try:
            await self._threads.run(partial(_close_all, loaded))
        except Stopped:
            _close_all(loaded)


async def _all(leaving: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for all of them; failures were logged when they happened."""
    await asyncio.gather(*leaving, return_exceptions=True)


def _close(result: Result) -> None:
    for instance in result.instances:
        instance.model.close()


def _close_all(results: Sequence[Result]) -> None:
    for result in results:
        _close(result)


def _is_nothing(result: Result | str) -> bool:
    """True if the result leaves a version unchanged."""
    return isinstance(result, Change) and not (result.instances or result.removed)


def _reason(what: str, error: Exception) -> str:
    """The reason of a failed load for clients; the details go to the log."""
    if isinstance(error, RepositoryError):
        for line in str(error).splitlines():
            log.error("failed to load %s: %s", what, line)
        return error.public
    log.error("failed to load %s", what, exc_info=error)
    return f"internal error: {type(error).__name__}"
