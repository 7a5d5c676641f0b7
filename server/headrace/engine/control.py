"""Which models are served, as clients decide it: the index, load and unload.

Only in explicit mode may clients load and unload; otherwise the operator has decided, or the files
do. Whatever reads the repositories runs on threads. Requests for one model take effect in the order
in which they came, whatever each takes to prepare; one that was begun goes on when its client has
gone.

Owned by the event-loop thread.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias, TypeVar

from headrace.core.errors import (
    InvalidConfig,
    InvalidRequest,
    ModelLoadFailed,
    NotFound,
    Overloaded,
    RepositoryError,
    Unavailable,
)
from headrace.core.model_spec import LoadParameters
from headrace.engine.lifecycle import EXITING, Loads
from headrace.engine.model import Model, State
from headrace.engine.opening import Opened
from headrace.engine.workbench import Stopped, Threads
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile, parse_json_config
from headrace.repository.layout import NO_SUCH, Catalogue, ModelSource, read_model_directory
from headrace.repository.model_files import Fingerprint, fingerprint
from headrace.repository.overrides import Uploads, checked_paths, of_own_files, overridden

_NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class LoadOverrides(IntEnum):
    """Overrides that load requests may bring along, each level with those before it.

    `CONFIG` is how a model of the repository is served, `FILES` are models that are data, and
    `CODE` is anything: whoever may load models may run code on this machine then.
    """

    NONE = 0
    CONFIG = 1
    FILES = 2
    CODE = 3


@dataclass(frozen=True, slots=True)
class Sources:
    """Finds what a request asks for; `open` reads and checks the configuration of a model."""

    catalogue: Catalogue
    allowed: LoadOverrides
    uploads: Uploads
    open: Callable[[ModelSource], Opened]

    def read(self, name: str, parameters: LoadParameters) -> ModelSource | None:
        """The model source to load; None if nothing of this name lies in a repository.

        Raises `RepositoryError` for what cannot be, and `InvalidRequest` for files that must not
        be.
        """
        if parameters.files:
            return self._with_files(name, parameters)
        found = self.catalogue.read(name)
        if found is None or found.problem or parameters.config is None:
            return found
        self._check(LoadOverrides.CONFIG, "a configuration")
        return replace(found, override=self._override(found, parameters.config))

    def _override(self, source: ModelSource, text: str) -> ConfigFile:
        """The configuration of a request for a model that lies in a repository."""
        file = parse_json_config(text, _called(source.name))
        if file.config.name == source.name:  # by which clients know it
            file.config.name = source.written_name
        if self.allowed is LoadOverrides.CODE:
            return file
        opened = self.open(source)
        return overridden(opened.file, normalise(opened.config), file)

    def _with_files(self, name: str, parameters: LoadParameters) -> ModelSource:
        self._check(LoadOverrides.FILES, "files")
        if not _NEW_NAME.fullmatch(name) and name not in self.catalogue.names():
            raise InvalidConfig(
                "a new model is called by 1 to 128 letters, digits and any of . _ @ + -, beginning"
                " with a letter or digit"
            )
        if parameters.config is None:
            raise InvalidConfig("files have to come with a 'config', {} at least")
        file = parse_json_config(parameters.config, _called(name))
        restricted = self.allowed is not LoadOverrides.CODE
        if restricted:
            of_own_files(file)
        upload = self.uploads.write(checked_paths(parameters.files))
        source = read_model_directory(upload.path)
        return replace(
            source, name=name, config_path=None, override=file, upload=upload, data_only=restricted
        )

    def _check(self, needed: LoadOverrides, what: str) -> None:
        if self.allowed < needed:
            raise InvalidConfig(
                f"{what} in a load request {'is' if needed is LoadOverrides.CONFIG else 'are'} not"
                f" taken by this server; --load-overrides={needed.name.lower()} takes them"
            )


def _called(name: str) -> str:
    """The name that messages give to the configuration of a request."""
    return f"config of {name}"


log = logging.getLogger(__name__)

T = TypeVar("T")
_State: TypeAlias = tuple[Fingerprint, bytes | None]

_DISABLED = (
    "explicit model load / unload is not allowed {}; --model-control-mode=explicit allows it"
)
_READERS = 4  # threads that read repositories for requests


class ControlMode(StrEnum):
    """Mode of model control: whose decision it is which models are served."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """The operator's choices about control; `catalogue` has what may be loaded by name.

    Load requests may bring along what `overrides` allows, and in all `max_bytes` of files that are
    in use at a time. At most `max_new_models` of them are known that no repository has.
    """

    mode: ControlMode = ControlMode.NONE
    catalogue: Catalogue = field(default_factory=Catalogue)
    overrides: LoadOverrides = LoadOverrides.CONFIG
    max_bytes: int = 1 << 30
    max_new_models: int = 1_000


NO_PARAMETERS = LoadParameters()


class Control:
    """Model control for the doors: the index, load and unload."""

    def __init__(
        self,
        models: dict[str, Model],
        lifecycle: Loads,
        index: Callable[[bool], pb.RepositoryIndexResponse],
        open_source: Callable[[ModelSource], Opened],
        options: ControlOptions,
    ) -> None:
        """`index` tells of the models that were ever to be loaded."""
        self._models = models
        self._lifecycle = lifecycle
        self._index = index
        self._options = options
        self._uploads = Uploads(options.max_bytes)
        self._sources = Sources(options.catalogue, options.overrides, self._uploads, open_source)
        self._uploaded: dict[str, None] = {}  # names that no repository has, the oldest first
        self._threads = Threads(_READERS, "control")
        self._exit = asyncio.Event()
        self._names: asyncio.Task[Mapping[str, str]] | None = None
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # and how many want it
        self._tasks: set[asyncio.Task[Any]] = set()  # which nobody may wait for any more
        self._handed: dict[str, _State] = {}  # of what is being loaded
        # Configurations of requests, and the states of the directories that they were given for.
        self._kept: dict[str, tuple[Fingerprint, ConfigFile]] = {}
        self._waits: dict[str, list[str]] = {}  # what models have loaded while they are loaded

    async def index(self, ready_only: bool = False) -> pb.RepositoryIndexResponse:
        """Every model version with its state; what could be loaded and never was, by name."""
        if self._options.mode is not ControlMode.EXPLICIT or ready_only:
            return self._index(ready_only)
        found = dict(await self._all_names())
        response = self._index(False)
        for model in response.models:
            found.pop(model.name, None)
        for name, reason in found.items():
            state = State.UNAVAILABLE.value if reason else ""
            response.models.add(name=name, state=state, reason=reason)
        response.models.sort(key=lambda model: (model.name, int(model.version or 0)))
        return response

    async def load(
        self, name: str, parameters: LoadParameters = NO_PARAMETERS, waiter: str = ""
    ) -> None:
        """Load a model, or load it again if its files have changed; it serves then.

        Without parameters, the configuration that it was loaded with stays, as in Triton, until its
        directory changes or it is unloaded. Files that came along do not. `waiter` is the model, if
        any, that asks for it while it is loaded itself, and is not ready before.

        Raises `ModelLoadFailed` with the reason, `NotFound` if there is none of this name,
        `InvalidRequest` for what can be no name, and `Unavailable` unless clients decide.
        """
        self.check(name)
        if not waiter:
            await self._see_through(self._load(name, parameters))
            return
        if way := self._way(name, waiter):
            raise ModelLoadFailed(
                f"failed to load '{name}', it would wait for itself: while models are loaded,"
                f" each has the next one loaded: {' -> '.join([waiter, *way])}"
            )
        waits = self._waits.setdefault(waiter, [])
        waits.append(name)
        try:
            await self._see_through(self._load(name, parameters))
        finally:
            waits.remove(name)
            if not waits:
                self._waits.pop(waiter, None)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Let a model take no more requests; it finishes afterwards what it has accepted.

        A name that is not known is no error. `unload_dependents` asks for the models, too, that
        were loaded for this one alone: there are none, since no model is made of others. Raises as
        `load` does.
        """
        self.check(name)
        await self._see_through(self._unload(name))

    def stop(self) -> None:
        """Begin nothing more; who waits is told, since nothing comes of what was begun."""
        self._threads.stop()
        self._exit.set()

    def close(self) -> None:
        """Remove the files that requests have brought along, whatever still uses them."""
        self._uploads.close()

    def check(self, name: str) -> None:
        """Raise what a load or unload of this name is refused with at once."""
        if self._options.mode is not ControlMode.EXPLICIT:
            polls = self._options.mode is ControlMode.POLL
            why = "if polling is enabled" if polls else "in the model control mode 'none'"
            raise Unavailable(_DISABLED.format(why))
        if not name.strip():
            raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")
        if ".." in name or "/" in name or "\0" in name:
            raise InvalidRequest(
                f"failed to load '{name[:80]}', model name must not contain path traversal"
                " characters"
            )

    def _way(self, name: str, waiter: str) -> list[str]:
        """Models from one to another that each wait for the next; none if there is no such way."""
        if name == waiter:
            return [name]
        # It ends, since nothing ever waits for itself.
        ways = (self._way(following, waiter) for following in self._waits.get(name, ()))
        return next(([name, *way] for way in ways if way), [])

    async def _load(self, name: str, parameters: LoadParameters) -> None:
        async with self._turn(name):
            source, state = await self._read(name, parameters)
            model = self._models.get(name)
            under_way = model is not None and model.loading is not None and not model.unloaded
            if model is not None and under_way and self._handed.get(name) == state:
                assert model.loading is not None
                loading: asyncio.Future[str] = asyncio.shield(model.loading)
            else:
                self._admit(source)
                self._handed[name] = state
                loading = self._lifecycle.load(source)
            upload = source.upload
            before, kept = self._kept.pop(name, None), None
            if source.override is not None and upload is None:
                self._kept[name] = kept = state[0], source.override
            del source, state  # which keep its files
        model = self._models[name]
        try:
            problem = await loading
        finally:
            if model.loading is None:
                self._handed.pop(name, None)
        if problem:
            if self._kept.get(name) is kept and not model.unloaded:  # what serves goes on
                self._kept.pop(name, None)
                if before is not None:
                    self._kept[name] = before
            if upload is not None and all(v.upload is not upload for v in model.versions.values()):
                upload.remove()  # whatever of the load may still be held by its error
                if model.source.upload is upload:
                    model.source = replace(model.source, upload=None)
            raise self._failure(model, problem)

    async def _unload(self, name: str) -> None:
        async with self._turn(name):
            self._kept.pop(name, None)
            self._lifecycle.unload(name)
            if (model := self._models.get(name)) is not None:
                log.info("unloading %s: a client asks for it", name, extra={"model": name})
                model.source = replace(model.source, upload=None)  # its versions keep it for now

    async def _read(self, name: str, parameters: LoadParameters) -> tuple[ModelSource, _State]:
        """The source that a request means, and its state, by which to know it again."""
        kept = None if parameters.files else self._kept.get(name)

        def read() -> tuple[ModelSource, _State] | None:
            source = self._sources.read(name, parameters)
            if source is None:
                return None
            state = fingerprint(replace(source, override=None))
            if parameters.config is None and kept is not None and kept[0] == state:
                source = replace(source, override=kept[1])
            override = source.override
            config = override.config.SerializeToString(deterministic=True) if override else None
            return source, (state, config)

        try:
            found = await self._aside(read)
        except InvalidRequest as error:
            raise ModelLoadFailed(_not_polled(name, str(error))) from error
        except RepositoryError as error:
            raise ModelLoadFailed(_not_polled(name, error.public)) from error
        if found is None:
            raise NotFound(_not_polled(name, NO_SUCH))
        if found[0].problem:
            raise ModelLoadFailed(_not_polled(name, found[0].problem))
        return found

    def _admit(self, source: ModelSource) -> None:
        """Keep the number of models within bounds that no repository has; raises `Overloaded`."""
        if source.upload is None:
            return
        most = self._options.max_new_models
        self._uploaded.pop(source.name, None)
        if len(self._uploaded) >= most:
            idle = next((name for name in self._uploaded if self._is_idle(name)), None)
            if idle is None:
                raise Overloaded(
                    f"{most} models are loaded from files of load requests, which is as"
                    " many as this server takes; unload one"
                )
            del self._uploaded[idle]
            self._models.pop(idle, None)
        self._uploaded[source.name] = None

    def _is_idle(self, name: str) -> bool:
        """True if nothing would be lost with what is known of a model."""
        model = self._models.get(name)
        if model is None:
            return True
        if model.loading is not None or model.source.upload is not None or name in self._handed:
            return False  # it may be out of memory for now, and come back
        return all(version.state is State.UNAVAILABLE for version in model.versions.values())

    def _failure(self, model: Model, problem: str) -> Exception:
        """The error for a load that did not work out."""
        if problem == EXITING:
            return Unavailable(problem)
        if model.unreadable:
            return ModelLoadFailed(_not_polled(model.name, problem))
        failed = "; ".join(
            f"version {v.name} is at UNAVAILABLE state: {v.reason}"
            for v in model.versions.values()
            if v.state is State.UNAVAILABLE and v.reason in problem
        )
        text = _one_line(failed or problem)
        return ModelLoadFailed(f"load failed for model '{model.name}': {text}")

    async def _all_names(self) -> Mapping[str, str]:
        """The names of the catalogue; whoever asks while it is read gets what comes of that."""
        if self._names is None:
            task = self._names = self._keep(self._aside(self._options.catalogue.names))

            def done(_: object) -> None:
                self._names = None

            task.add_done_callback(done)
        return await self._outcome(self._names)

    async def _aside(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work)
        except Stopped:
            raise Unavailable(EXITING) from None

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to the end, even if whoever waits for it goes."""
        return await self._outcome(self._keep(work))

    async def _outcome(self, task: "asyncio.Task[T]") -> T:
        """The result of a task; raises `Unavailable` if the server ends before."""
        exiting = asyncio.get_running_loop().create_task(self._exit.wait())
        try:
            await asyncio.wait((task, exiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exiting.cancel()
        if not task.done():
            raise Unavailable(EXITING)
        return task.result()

    def _keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits, if anybody does

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One request after the other for each model."""
        turn, wanted = self._turns.get(name) or (asyncio.Lock(), 0)
        self._turns[name] = turn, wanted + 1
        try:
            async with turn:
                yield
        finally:
            turn, wanted = self._turns[name]
            if wanted == 1:
                del self._turns[name]
            else:
                self._turns[name] = turn, wanted - 1


def _not_polled(name: str, reason: str) -> str:
    return f"failed to load '{name}', failed to poll from model repository: {_one_line(reason)}"


def _one_line(text: str) -> str:
    return "; ".join(text.splitlines())
