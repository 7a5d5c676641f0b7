"""Engines without a server: the models of a repository, a script or a notebook, in this process.

No sockets, signal handlers, printing, or change of the process's limits and collector. Python
models still run in processes of their own, which end with this one.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Self

import uvloop

from headrace.build import build_engine, make_tracing, scraper, sources_at_start, watches
from headrace.client.asynchronous import TIMEOUT_SECS, AsyncModel, AsyncModels
from headrace.client.blocking import BlockingModels, Model, finish
from headrace.client.transport import InferRequest, Result
from headrace.core.errors import LoadFailed, RepositoryError
from headrace.core.limits import ABANDONED_SECS
from headrace.engine.engine import Engine
from headrace.engine.exposition import TEXT, Exposition
from headrace.engine.tracing import Tracing
from headrace.options import SettingsError
from headrace.placement.cores import core_share
from headrace.runner.in_process import FORKS, InProcessTransport
from headrace.runner.plain import CoroutineCall, KnownInputs, ThreadCall
from headrace.serving.models import GivenModel, lay_out
from headrace.serving.sources import ServeError
from headrace.settings import OPTIONS, Settings, unknown

log = logging.getLogger(__name__)

_TRACES_SECS = 5  # time limit for writing the last traces
_PART_BYTES = 4 << 20  # of large requests, as limits and other callers bear them
_LEAST_SECS = 2.0  # for freeing models, after calls have taken the time to end


class AsyncEngine(AsyncModels):
    """The models of a repository or program in this process, on the caller's event loop.

    Models are loaded by `open`, or at the begin of an `async with` block, and freed by `aclose`.
    """

    def __init__(
        self,
        *models: GivenModel | Mapping[str, GivenModel],
        timeout: float = TIMEOUT_SECS,
        **options: Any,
    ) -> None:
        """Models and settings as for `headrace.serve`; those of doors have no effect.

        Raises `ServeError` for models that have no source, and `SettingsError`.
        """
        super().__init__(timeout)
        self._directory = tempfile.mkdtemp(prefix="headrace-engine-")
        try:
            files, repositories = lay_out(models, Path(self._directory))
            self._settings = _settings(files, repositories, options)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._process = os.getpid()
        self._engine: Engine | None = None
        self._tracing: Tracing | None = None
        self._transport: InProcessTransport | None = None
        self._closing: asyncio.Future[None] | None = None
        self._scrape: Callable[[Exposition], Awaitable[bytes]] | None = None

    @property
    def _place(self) -> str:
        return "this engine"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("an engine cannot be pickled: create one in each process")

    async def open(self) -> None:
        """Load the models; raises `ServeError` if one cannot be loaded, unless `exit_on_error` is
        false: then the others are served.
        """
        if self._engine is not None or self._closing is not None:
            raise RuntimeError("an engine is opened once")
        settings = self._settings
        try:
            self._tracing = make_tracing(settings.traces)
            engine = self._engine = build_engine(
                settings, tracing=self._tracing, cores=core_share()
            )
            sources, told = sources_at_start(settings, engine)
            for warning in told:
                log.warning(warning)
            engine.open(watches(settings, engine, sources))
            await engine.load_all(sources, settings.exit_on_error)
            if settings.exit_on_error and (failed := engine.unavailable()):
                raise ServeError("\n".join(f"{name}: {reason}" for name, reason in failed))
            engine.start()
        except (LoadFailed, RepositoryError, OSError) as error:
            await self.aclose()
            raise ServeError(str(error)) from error
        except BaseException:
            await self.aclose()
            raise
        self._transport = InProcessTransport(engine, settings.max_request_bytes)

    def _part_rows(self, request: InferRequest, most_rows: int) -> int:
        """Implements `AsyncModels._part_rows`: the engine divides parts further, with less work."""
        rows = max((len(tensor.array) for tensor in request.inputs if tensor.array.ndim), default=0)
        each = sum(tensor.array.nbytes for tensor in request.inputs) // max(rows, 1)
        return max(_PART_BYTES // max(each, 1) // most_rows, 1) * most_rows

    def model(self, name: str, version: str | int = "") -> "AsyncEngineModel":
        """A handle of a model, to be called with its inputs by name."""
        self._open()
        return AsyncEngineModel(self, name, version)

    async def metrics(self) -> bytes:
        """The metrics in Prometheus' text format, as of a server."""
        self._open()
        assert self._engine is not None
        if self._scrape is None:
            self._scrape = scraper(self._settings, self._engine)
        return await self._scrape(TEXT)

    async def aclose(self) -> None:
        """Finish calls under way, free all models, and end their processes."""
        if self._process != os.getpid():
            return  # everything is the parent's
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._engine is not None:
                await self._end(self._engine)
        finally:
            self._transport = None
            if self._tracing is not None:
                with suppress(RuntimeError):  # the interpreter ends, which starts no more threads
                    await asyncio.to_thread(self._tracing.close, _TRACES_SECS)
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _end(self, engine: Engine) -> None:
        """Shut down in the order of the server; see `headrace.app`."""
        seconds = max(self._settings.exit_timeout_secs, 0.1)
        deadline = monotonic() + seconds
        engine.stop()
        engine.admission.close()
        empty = asyncio.Event()
        engine.admission.when_empty(empty.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await empty.wait()
                    if self._transport is not None:
                        await self._transport.emptied()
            if self._transport is not None:
                await self._transport.close()
            await engine.stopped()
            left = max(deadline - monotonic(), _LEAST_SECS)
            async with asyncio.timeout(left):
                await engine.unload_all(min(ABANDONED_SECS, left / 2))
        except TimeoutError:
            names = ", ".join(f"{v.model} version {v.name}" for v in engine.unloading())
            log.error("still running when the engine was closed: %s", names)
        finally:
            await engine.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    def _open(self) -> InProcessTransport:
        if self._transport is None:
            raise RuntimeError("the engine is closed")
        if self._transport.forks != FORKS.count:
            raise RuntimeError("an engine belongs to the process that has created it")
        return self._transport


class AsyncEngineModel(AsyncModel):
    """A model of an engine on this event loop; see `headrace.runner.plain`."""

    _client: AsyncEngine

    def __init__(self, engine: AsyncEngine, name: str, version: str | int) -> None:
        super().__init__(engine, name, version)
        self._layout: KnownInputs | None = None

    async def __call__(self, table: Any = None, /, **inputs: Any) -> Result:
        """Run the model with its inputs by name, or with a table."""
        if table is None:
            transport = self._client._transport
            if transport is None or transport.forks != FORKS.count:
                transport = self._client._open()  # raises
            call = CoroutineCall(transport, self._client.timeout)
            layout = call.fill(self.name, self.version, inputs, self._layout)
            if layout is not None:
                self._layout = layout
                if not layout.direct.join(call):
                    call.submit(layout.direct.submit)
                if not call.over:
                    call.future = transport.loop.create_future()
                    try:
                        await call.future
                    except BaseException:
                        call.give_up()
                        raise
                return call.result() if call.found is None else call.found
        return await super().__call__(table, **inputs)


class EmbeddedEngine(BlockingModels[AsyncEngine]):
    """The models of a repository or program in this process, on an event loop of their own.

    For any number of threads; usable as soon as it is created, until `close`, or the end of its
    `with` block.
    """

    def __init__(
        self,
        *models: GivenModel | Mapping[str, GivenModel],
        timeout: float = TIMEOUT_SECS,
        **options: Any,
    ) -> None:
        """Load models; arguments and errors are those of `AsyncEngine`."""
        super().__init__(
            AsyncEngine(*models, timeout=timeout, **options), "headrace engine",
            uvloop.new_event_loop, _finish,
        )  # fmt: skip
        self._unclosed = weakref.finalize(self, _warn)
        self._unclosed.atexit = False
        try:
            self._run(self._asynchronous.open())
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("an engine cannot be pickled: create one in each process")

    def model(self, name: str, version: str | int = "") -> "EngineModel":
        """A handle of a model, to be called with its inputs by name."""
        return EngineModel(self, name, version, self._call)

    def _call(self) -> ThreadCall:
        """A call of this thread."""
        engine = self._asynchronous
        return ThreadCall(engine._open(), engine.timeout, self._loop)

    def metrics(self) -> bytes:
        """The metrics in Prometheus' text format, as of a server."""
        return self._run(self._asynchronous.metrics())

    def close(self) -> None:
        """Finish calls under way, free all models, and end their processes."""
        self._unclosed.detach()
        super().close()

    def _start_again(self) -> None:
        raise RuntimeError("an engine belongs to the process that has created it")


class EngineModel(Model):
    """A model of an engine, for any number of threads; see `headrace.runner.plain`."""

    def __init__(
        self, engine: EmbeddedEngine, name: str, version: str | int,
        call: Callable[[], ThreadCall],
    ) -> None:  # fmt: skip
        super().__init__(engine, name, version)
        self._call = call
        self._layout: KnownInputs | None = None

    def __call__(self, table: Any = None, /, **inputs: Any) -> Result:
        """Run the model with its inputs by name, or with a table."""
        if table is None:
            call, model = self._call(), self._asynchronous
            found = call.answered(model.name, model.version, inputs, self._layout)
            if found is not None:
                self._layout = call.layout
                return found
        return super().__call__(table, **inputs)


async def _finish(engine: AsyncModels) -> None:
    """Close an engine, which answers all calls; their tasks have a turn to pass that on."""
    await engine.aclose()
    await asyncio.sleep(0)
    await finish(engine)


def _warn() -> None:
    warnings.warn("an engine was not closed", ResourceWarning, stacklevel=2)


def _settings(files: list[str], repositories: list[str], options: Mapping[str, Any]) -> Settings:
    """Checked settings; raises `SettingsError`."""
    known = {option.field: option for option in OPTIONS}
    values: dict[str, Any] = {"allow_gpu_metrics": False}
    for name, value in options.items():
        if name not in known:
            raise SettingsError(unknown("setting", name, known))
        given = list(value) if isinstance(value, tuple) else value
        values[name] = known[name].parse(given, name)
    values["model_file"] = [*files, *values.get("model_file", ())]
    values["model_repository"] = [*repositories, *values.get("model_repository", ())]
    settings = Settings(**values)
    settings.check()
    return settings
