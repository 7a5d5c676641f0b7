"""Model control by clients: the index, load and unload.

Clients may load and unload in explicit mode only; otherwise the operator or the files decide. All
reading of repositories runs on threads. Requests for one model take effect in order of arrival,
however long each takes to prepare; a request that has begun continues if its client disconnects.

Owned by the event-loop thread.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from headrace.core.errors import (
    InvalidConfig,
    InvalidRequest,
    LoadFailed,
    ModelLoadFailed,
    NotFound,
    Overloaded,
    RepositoryError,
    Unavailable,
)
from headrace.core.model_spec import LoadParameters
from headrace.engine.composition import Composition
from headrace.engine.lifecycle import EXITING, UNLOADED, Loads
from headrace.engine.model import Model
from headrace.engine.model_turns import ModelTurn
from headrace.engine.opening import Opened
from headrace.engine.pieces import Pieces
from headrace.engine.version import State
from headrace.engine.workbench import Stopped, Threads
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.catalogue import DUPLICATE, NO_SUCH, Catalogue
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile, parse_json_config, read_config
from headrace.repository.layout import ModelSource, materialised
from headrace.repository.model_files import Fingerprint, fingerprint
from headrace.repository.overrides import (
    Uploads,
    checked_paths,
    isolated_as,
    of_own_files,
    overridden,
)
from headrace.repository.store import Stored

_NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class LoadOverrides(IntEnum):
    """Overrides allowed in load requests, each level including those before it.

    `CONFIG` allows configurations, `FILES` models that are data, `CODE` any model: clients that may
    load models can then run code on this machine.
    """

    NONE = 0
    CONFIG = 1
    FILES = 2
    CODE = 3


def _called(name: str) -> str:
    """The name of a request's configuration in messages."""
    return f"config of {name}"


log = logging.getLogger(__name__)

T = TypeVar("T")
_State: TypeAlias = tuple[Fingerprint, bytes | None]

# Clients look for the first words, which Triton answers in the mode 'none', too.
_DISABLED = (
    "explicit model load / unload is not allowed if polling is enabled{};"
    " --model-control-mode=explicit allows it"
)
_READERS = 4  # threads that read repositories for requests


class ControlMode(StrEnum):
    """Mode of model control: who decides which models are served."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """Settings of model control; `catalogue` lists what may be loaded by name.

    Load requests may contain what `overrides` allows, and at most `max_bytes` of files in use at a
    time, which the group `readers` may read, too. At most `max_new_models` models outside of
    repositories are kept.
    """

    mode: ControlMode = ControlMode.NONE
    catalogue: Catalogue = field(default_factory=Catalogue)
    overrides: LoadOverrides = LoadOverrides.CONFIG
    max_bytes: int = 1 << 30
    max_new_models: int = 1_000
    readers: int | None = None


NO_PARAMETERS = LoadParameters()


@dataclass(slots=True)
class _KeptConfig:
    """The configuration of a request for a model whose directory has this state.

    None for the file's own. If its load fails, that of `before` counts again.
    """

    state: Fingerprint
    override: ConfigFile | None
    before: "_KeptConfig | None"
    failed: bool = False


class Control:
    """Model control for the doors: the index, load and unload."""

    def __init__(
        self,
        models: dict[str, Model],
        lifecycle: Loads,
        index: Callable[[Model, bool], list[pb.RepositoryIndexResponse.ModelIndex]],
        pieces: Pieces,
        open_source: Callable[[ModelSource], Opened],
        options: ControlOptions,
        composition: Composition,
    ) -> None:
        """`index` lists the versions of a model that has been loaded or attempted, all of them in
        `pieces`; `open_source` reads and checks a model's configuration.
        """
        self._models = models
        self._lifecycle = lifecycle
        self._index = index
        self.pieces = pieces
        self._options = options
        self._composition = composition
        self.catalogue = options.catalogue  # of what may be loaded by name
        self._uploads = Uploads(options.max_bytes, options.readers)
        self._open = open_source
        self._uploaded: dict[str, None] = {}  # names outside of repositories, oldest first
        self._threads = Threads(_READERS, "read repositories")
        self._names: asyncio.Task[Mapping[str, str]] | None = None
        self._turns = WeakValueDictionary[str, ModelTurn]()  # of models with requests
        self._stopped = False
        self._waiting: set[asyncio.Future[str]] = set()  # for loads
        self._tasks: set[asyncio.Task[Any]] = set()  # kept alive, even if no one waits for them
        self._handed: dict[str, _State] = {}  # states of the models being loaded
        # Configurations from requests, and the states of the directories that they were given for.
        self._kept: dict[str, _KeptConfig] = {}
        self._waits: dict[str, list[str]] = {}  # models that wait for others while being loaded

    @property
    def mode(self) -> ControlMode:
        """The mode: who decides which models are served."""
        return self._options.mode

    async def index(self, ready_only: bool = False) -> list[pb.RepositoryIndexResponse.ModelIndex]:
        """Every model version with its state; models that were never loaded by name only."""
        explicit = self.by_clients and not ready_only
        never_loaded = await self._all_names() if explicit else {}

        def entries(name: str) -> list[pb.RepositoryIndexResponse.ModelIndex]:
            if (model := self._models.get(name)) is not None and (
                found := self._index(model, ready_only)
            ):
                return found
            if (reason := never_loaded.get(name)) is None:
                return []
            state = State.UNAVAILABLE.value if reason else ""
            return [pb.RepositoryIndexResponse.ModelIndex(name=name, state=state, reason=reason)]

        names = sorted({*self._models, *never_loaded})
        return list(chain.from_iterable(await self.pieces.each(names, entries)))

    async def load(
        self, name: str, parameters: LoadParameters = NO_PARAMETERS, waiter: str = ""
    ) -> None:
        """Load a model, or reload it if its files have changed.

        Without parameters, the configuration of the last load stays, as in Triton, until the
        directory changes or the model is unloaded. Uploaded files do not stay. `waiter` is the
        model, if any, that requests this during its own load, and waits for it.

        Raises `ModelLoadFailed` with the reason, `NotFound` for an unknown name, `InvalidRequest`
        for an invalid one, and `Unavailable` unless clients control models.
        """
        self.check(name)
        if not waiter:
            self._composition.asked_for(name)
            await self._load(name, parameters)
            return
        if way := self._way(name, waiter):
            raise ModelLoadFailed(
                f"failed to load '{name}', it would wait for itself: while models are loaded,"
                f" each has the next one loaded: {' -> '.join([waiter, *way])}"
            )
        waits = self._waits.setdefault(waiter, [])
        waits.append(name)
        try:
            await self._load(name, parameters)
        finally:
            waits.remove(name)
            if not waits:
                self._waits.pop(waiter, None)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model; it finishes the requests that it has accepted.

        An unknown name is no error. `unload_dependents` also unloads the models that were loaded
        for this one alone, since it runs them. Raises as `load` does.
        """
        self.check(name)
        fetched = self._composition.fetched_for(name) if unload_dependents else []
        await self._in_turn(name, self._unload)
        for other in fetched:
            await self.unload(other, unload_dependents)

    async def refresh(self) -> None:
        """Load models that are new or changed in the repositories, and unload those that are gone.

        If clients control models, only loaded ones that have changed are loaded. Nothing is
        unloaded if no model is found: the repositories may be unmounted. Raises `RepositoryError`
        for one that cannot be read.
        """
        sources, warnings = await self._aside(self.catalogue.sources)
        if not sources:
            raise LoadFailed("; ".join(warnings))
        for warning in warnings:
            log.warning("%s", warning)
        explicit = self.by_clients
        for source in sources:
            model = self._models.get(source.name)
            if explicit and (model is None or model.unloaded or model.source.uploaded):
                continue
            if problem := DUPLICATE if source.duplicate else source.problem:
                log.error("failed to load %s: %s", source.name, problem)
            elif explicit:
                await self._load_again(source.name)
            else:
                self._lifecycle.follow(source, model is None)
        gone = self._models.keys() - {source.name for source in sources}
        for name in () if explicit else sorted(gone):
            if not self._models[name].unloaded:
                log.info("unloading %s: it is gone from its repository", name)
                self._lifecycle.unload(name)

    async def _load_again(self, name: str) -> None:
        try:
            await self.load(name)
        except (ModelLoadFailed, NotFound) as error:
            log.error("%s", error)

    def stop(self) -> None:
        """Start nothing more; waiters get an error, since started loads are abandoned."""
        self._stopped = True
        self._threads.stop()
        for waiting in (*self._tasks, *self._waiting):
            waiting.cancel()

    def close(self) -> None:
        """Close the stores, and remove the uploaded files, even if still in use."""
        self.catalogue.close()
        self._uploads.close()

    def check(self, name: str) -> None:
        """Raise the error with which a load or unload of this name is refused at once."""
        self.allow()
        if not name.strip():
            raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")
        if ".." in name or "/" in name or "\0" in name:
            raise InvalidRequest(
                f"failed to load '{name[:80]}', model name must not contain path traversal"
                " characters"
            )

    @property
    def by_clients(self) -> bool:
        """True if clients control models."""
        return self._options.mode is ControlMode.EXPLICIT

    def allow(self) -> None:
        """Raise `Unavailable` unless clients control models."""
        if not self.by_clients:
            polls = self._options.mode is ControlMode.POLL
            more = "" if polls else ", nor in the model control mode 'none' of this server"
            raise Unavailable(_DISABLED.format(more))

    def _way(self, name: str, waiter: str) -> list[str]:
        """The chain of models, from one to the other, that each wait for the next.

        Empty if none.
        """
        if name == waiter:
            return [name]
        # Terminates, since no model ever waits for itself.
        ways = (self._way(following, waiter) for following in self._waits.get(name, ()))
        return next(([name, *way] for way in ways if way), [])

    async def _load(self, name: str, parameters: LoadParameters) -> None:
        loading = await self._in_turn(name, lambda name: self._begin(name, parameters))
        self._waiting.add(loading)
        loading.add_done_callback(self._waiting.discard)
        try:
            problem = await loading
        except asyncio.CancelledError:
            if self._stopped:
                raise Unavailable(EXITING) from None
            raise
        if problem:
            raise self._failure(self._models[name], problem)

    async def _begin(self, name: str, parameters: LoadParameters) -> "asyncio.Future[str]":
        """Begin a load, or join an equal one; the result is a future for the reason of failure."""
        source, state = await self._read(name, parameters)
        model = self._models.get(name)
        under_way = None if model is None or model.unloaded else model.loading
        if under_way is not None and self._handed.get(name) == state:
            return under_way.wait()
        self._admit(source)
        self._handed[name] = state
        loading = self._lifecycle.load(source)
        uploaded = source.lease if source.uploaded else None
        override = None if uploaded else source.override
        self._kept[name] = kept = _KeptConfig(state[0], override, self._kept.get(name))
        model = self._models[name]

        def ended(loading: "asyncio.Future[str]") -> None:  # whoever still waits for it
            if model.loading is None:
                self._handed.pop(name, None)
            if loading.cancelled():
                return
            failed = bool(loading.result())
            self._settle(name, kept, failed)
            if (
                failed and uploaded
                and all(v.lease is not uploaded for v in model.versions.values())
            ):  # fmt: skip
                uploaded.release()  # even if the error still refers to the load
                if model.source.lease is uploaded:
                    model.source = _without_files(model.source)

        loading.add_done_callback(ended)
        return asyncio.shield(loading)

    def _settle(self, name: str, kept: _KeptConfig, failed: bool) -> None:
        """Note the end of a load: of those so far, the last one that did not fail counts."""
        kept.failed = failed
        if not failed:
            kept.before = None
        now = self._kept.pop(name, None)
        while now is not None and now.failed:  # the serving versions stay
            now = now.before
        if now is not None and (now.override or now.before):
            self._kept[name] = now

    async def _unload(self, name: str) -> None:
        self._kept.pop(name, None)
        self._lifecycle.unload(name)
        if (model := self._models.get(name)) is not None:
            log.info("unloading %s: a client asks for it", name, extra={"model": name})
            model.source = _without_files(model.source)  # its versions still refer to them

    async def _read(self, name: str, parameters: LoadParameters) -> tuple[ModelSource, _State]:
        """The source that a request means, and its state for later comparison."""
        kept = None if parameters.files else self._kept.get(name)

        def read() -> tuple[ModelSource, _State] | None:
            source = self._source(name, parameters)
            if source is None:
                return None
            state = fingerprint(replace(source, override=None))
            if parameters.config is None and kept is not None and kept.state == state:
                source = replace(source, override=kept.override or source.override)
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

    def _source(self, name: str, parameters: LoadParameters) -> ModelSource | None:
        """The model source to load; None if no repository has a model of this name.

        Raises `RepositoryError` for invalid models, and `InvalidRequest` for files that are not
        allowed.
        """
        if parameters.files:
            return self._with_files(name, parameters)
        found = self.catalogue.read(name)
        if found is None or found.problem or parameters.config is None:
            return found
        self._permit(LoadOverrides.CONFIG, "a configuration")
        return replace(found, override=self._override(found, parameters.config))

    def _override(self, source: ModelSource, text: str) -> ConfigFile:
        """The configuration in a request for a model of a repository."""
        file = parse_json_config(text, _called(source.name))
        if file.config.name == source.name:  # the name that clients use
            file.config.name = source.written_name
        if self._options.overrides is LoadOverrides.CODE:
            written = read_config(source.config_path, source.name)
            return isolated_as(written.config, file)
        opened = self._open(source)
        return overridden(opened.file, normalise(opened.config), file)

    def _with_files(self, name: str, parameters: LoadParameters) -> ModelSource:
        self._permit(LoadOverrides.FILES, "files")
        if not _NEW_NAME.fullmatch(name) and name not in self.catalogue.names():
            raise InvalidConfig(
                "a new model is called by 1 to 128 letters, digits and any of . _ @ + -, beginning"
                " with a letter or digit"
            )
        if parameters.config is None:
            raise InvalidConfig("files have to come with a 'config', {} at least")
        file = parse_json_config(parameters.config, _called(name))
        restricted = self._options.overrides is not LoadOverrides.CODE
        if restricted:
            of_own_files(file)
        else:
            isolated_as(ModelConfig(), file)
        token = self._uploads.put(name, checked_paths(parameters.files))
        stored = Stored(self._uploads, name, token)
        source = materialised(ModelSource(name, Path(), None, (), stored=stored))
        return replace(source, config_path=None, override=file, uploaded=True, data_only=restricted)

    def _permit(self, needed: LoadOverrides, what: str) -> None:
        if self._options.overrides < needed:
            raise InvalidConfig(
                f"{what} in a load request {'is' if needed is LoadOverrides.CONFIG else 'are'} not"
                f" taken by this server; --load-overrides={needed.name.lower()} takes them"
            )

    def _admit(self, source: ModelSource) -> None:
        """Enforce the limit of models outside of repositories; raises `Overloaded`."""
        if not source.uploaded:
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
        """True if forgetting a model would lose nothing."""
        model = self._models.get(name)
        if model is None:
            return True
        if model.loading is not None or model.source.uploaded or name in self._handed:
            return False  # it may be evicted for now, and be loaded again
        return all(version.state is State.UNAVAILABLE for version in model.versions.values())

    def _failure(self, model: Model, problem: str) -> Exception:
        """The error for a failed load."""
        if problem == EXITING:
            return Unavailable(problem)
        if problem == UNLOADED:  # in Triton's words
            return ModelLoadFailed(
                f"failed to load '{model.name}', no version is available: {problem}"
            )
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
        """The names of the catalogue; concurrent callers share one read."""
        if self._names is None:
            task = self._names = self._keep(self._aside(self.catalogue.names))

            def done(_: object) -> None:
                self._names = None

            task.add_done_callback(done)
        return await self._outcome(self._names)

    async def _aside(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work)
        except Stopped:
            raise Unavailable(EXITING) from None

    async def _in_turn(self, name: str, work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """Do `work` on a model in its turn, and finish it even if the caller is cancelled.

        Callers that are cancelled before it is their turn leave nothing.
        """
        turn = self._turns.setdefault(name, ModelTurn())
        await turn.take()
        task = self._keep(work(name))
        task.add_done_callback(lambda _: turn.end())
        return await self._outcome(task)

    async def _outcome(self, task: "asyncio.Task[T]") -> T:
        """The result of a task; raises `Unavailable` if the server shuts down first."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable(EXITING) from None
            raise

    def _keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved


def _without_files(source: ModelSource) -> ModelSource:
    """The source of a model that a request has brought, without its files."""
    return replace(source, lease=None, uploaded=False) if source.uploaded else source


def _not_polled(name: str, reason: str) -> str:
    return f"failed to load '{name}', failed to poll from model repository: {_one_line(reason)}"


def _one_line(text: str) -> str:
    return "; ".join(text.splitlines())
