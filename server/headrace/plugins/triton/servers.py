"""The managed Tritons of this server, and the models loaded on them.

All models share the processes, which are started when the first model needs one. Their directory is
private, and removed with them: each process has a model repository in it, since instance groups
differ between processes. A model there is a configuration of its own, and links to the model's
files.

The processes belong to the event loop. Models are placed on loading threads, which delegate work on
processes to the loop, and wait.
"""

import asyncio
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from google.protobuf import text_format

from headrace.connections.endpoint import Endpoint
from headrace.core.daemon_thread import run_in_daemon_thread
from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.placement.child_process import ChildProcess, Reaping
from headrace.placement.upstream.options import RemoteOptions, Url, remote_parameters
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.reconciler import LOAD_SECS, Reconciler
from headrace.placement.upstream.triton_options import (
    BACKEND,
    PLATFORM,
    TRITON_PARAMETERS,
    LoadCounts,
    NumberedProcess,
    TritonControl,
    TritonOptions,
)
from headrace.plugins.triton.groups import as_configured, gpu_count, groups_of, places
from headrace.plugins.triton.process import Secret, TritonProcess, arguments, environment
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup

log = logging.getLogger(__name__)

_CONFIG = "config.pbtxt"
_NOT_LINKED = frozenset({_CONFIG, "configs"})
# Parameters read here: of any model, and of an upstream model.
_OWN_PARAMETERS = TRITON_PARAMETERS | {
    "execution", "batching", "split_requests", "traffic", "fail_over", "fail_over_instances",
    "fail_over_queue_size", "fair_share", "overload_delay_ms",
}  # fmt: skip
_ODD = re.compile(r"[^A-Za-z0-9._@+-]")


def remote_name(model: str, version: int, serial: int) -> str:
    """The name of a version on Triton. Each load is a separate model, so that a new one can be
    loaded while the old one serves.
    """
    return f"{_ODD.sub('_', model)}.{version}.{serial}"


def remote_config(
    config: ModelConfig, name: str, version: int, groups: Sequence[ModelInstanceGroup]
) -> ModelConfig:
    """The configuration of one version for a Triton process with these instance groups.

    The model's own configuration, except for settings applied here: requests are batched here
    unless `batching` is off, and would only wait again there.
    """
    result = ModelConfig()
    result.CopyFrom(config)
    result.name = name
    parameters = config.parameters
    result.backend = parameters[BACKEND].string_value if BACKEND in parameters else ""
    result.platform = parameters[PLATFORM].string_value if PLATFORM in parameters else ""
    alone = "batching" in parameters and parameters["batching"].string_value == "off"
    if not alone and result.WhichOneof("scheduling_choice") == "dynamic_batching":
        result.ClearField("dynamic_batching")
    for own in (_OWN_PARAMETERS | remote_parameters()) & set(result.parameters):
        del result.parameters[own]
    result.ClearField("version_policy")
    result.version_policy.specific.versions.append(version)
    result.ClearField("instance_group")
    result.instance_group.extend(groups)
    return result


def write_model(directory: Path, root: Path, version: int, config: ModelConfig) -> None:
    """Create Triton's model directory for the model directory `root`; raises `LoadFailed`.

    Nothing is copied: large files exist once.
    """
    source = Path(os.path.abspath(root))
    if not (source / str(version)).is_dir():
        raise LoadFailed(
            "it has no version directory, in which the files lie that Triton is to load"
        )
    try:
        directory.mkdir(mode=0o700)
        for entry in os.listdir(source):
            other = entry.isdecimal() and entry != str(version)
            if entry not in _NOT_LINKED and not other and not entry.startswith("."):
                (directory / entry).symlink_to(source / entry)
        (directory / _CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise LoadFailed(f"its directory for Triton cannot be written: {error.strerror}") from error


def remove_model(directory: Path) -> None:
    """Remove a directory made by `write_model`; links, not their targets."""
    shutil.rmtree(directory, ignore_errors=True)


T = TypeVar("T")
_WAIT_SECS = "15"


class TritonServers:
    """The Tritons that this server starts for models with a `remote_backend`.

    `attach` to the event loop before a model is placed, and `close` there at the end.
    """

    def __init__(self, options: TritonOptions, found: Mapping[str, str] = os.environ) -> None:
        """`found` are the server's environment variables."""
        self._options = options
        self._environment = dict(found)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._processes: list[TritonProcess] = []
        self._directory: Path | None = None
        self._secret = Secret(secrets.token_urlsafe(24))
        self._serials = count(1)
        self._starting: asyncio.Future[None] | None = None
        self._closed = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach processes to this loop."""
        self._loop = loop

    @property
    def processes(self) -> Sequence[TritonProcess]:
        """The Triton processes; none before the first model."""
        return self._processes

    def stop(self) -> None:
        """Stop loads and unloads: the processes end soon."""
        self._closed = True

    async def close(self) -> None:
        """End all processes, and remove their directory."""
        self.stop()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.close() for process in processes))
        if self._directory is not None:
            directory = self._directory
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: shutil.rmtree(directory, ignore_errors=True)
            )

    # --- on loading threads

    def place(self, spec: LoadSpec, config: ModelConfig) -> "PlacedModel":
        """Place a version; raises `LoadFailed` or `InvalidOption`.

        `config` is the model's configuration as written.
        """
        program = self._program()
        wanted = places(self._options, self._environment, gpu_count())
        groups = {place: groups_of(config.instance_group, place) for place in wanted}
        deadline = min(spec.deadline, monotonic() + LOAD_SECS)
        processes = self._wait_for(self._started(program, wanted), deadline)
        name = remote_name(spec.model, spec.version, next(self._serials))
        written: dict[TritonProcess, Path] = {}
        try:
            for process in processes:
                own = groups[process.place]
                if own is not None:
                    directory = self._models(process.place) / name
                    whole = remote_config(config, name, spec.version, own)
                    write_model(directory, spec.root, spec.version, whole)
                    written[process] = directory
            if not written:
                raise LoadFailed("none of its instance groups is for any process of Triton")
            placed = PlacedModel(self, spec, config, name, written)
        except BaseException:
            for directory in written.values():
                remove_model(directory)
            raise
        placed.load(deadline)
        return placed

    def still_there(self) -> bool:
        """True until the processes are told to end."""
        return not self._closed

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """The metadata of calls."""
        return self._secret.metadata

    def _program(self) -> str:
        program = self._options.program
        found = shutil.which(program, path=self._environment.get("PATH"))
        if found is None:
            raise LoadFailed(
                f"there is no program {program!r} to run it; --triton-server names Triton's",
                "this server has no Triton to run it",
            )
        return os.path.abspath(found)

    def _wait_for(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        if self._loop is None:
            work.close()
            raise LoadFailed("no Triton is started where nothing is served")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(max(deadline - monotonic(), 0.0))
        except TimeoutError:
            future.cancel()
            raise LoadFailed("Triton was not live in time") from None

    # --- on the event loop

    async def _started(
        self, program: str, wanted: Sequence[NumberedProcess]
    ) -> Sequence[TritonProcess]:
        """The processes once each is live or has failed, with at least one live."""
        if self._closed:
            raise LoadFailed("the server is shutting down")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._begin(program, wanted))
            self._starting.add_done_callback(self._begun)
        await asyncio.shield(self._starting)
        processes = self._processes
        await asyncio.gather(*(process.settled() for process in processes))
        if not any(process.live.is_set() for process in processes):
            problems = (f"{process.label} {process.problem}" for process in processes)
            raise LoadFailed(f"no Triton runs: {'; '.join(problems)}", "no Triton runs")
        return processes

    def _begun(self, starting: asyncio.Future[None]) -> None:
        # After any failure the next load starts over, even if this one is no longer awaited.
        if starting.cancelled() or starting.exception() is not None:
            self._starting = None

    async def _begin(self, program: str, wanted: Sequence[NumberedProcess]) -> None:
        processes: list[TritonProcess] = []

        def make() -> Path:
            # One by one, so that started processes are known if another one fails.
            processes.extend(TritonProcess(p, self._options, self._secret) for p in wanted)
            return _make_directory(wanted)

        try:
            directory = self._directory = await run_in_daemon_thread(make, "directory of Triton")
            if self._closed:
                raise LoadFailed("the server is shutting down")
            for process in processes:
                models = self._models(process.place)
                region = f"{directory.name}-{process.place.index}-"
                command = arguments(
                    program, self._options, models, process.port, region, self._secret
                )
                own = environment(self._environment, self._options, process.place)
                reaping = Reaping(region, str(directory))
                process.begin(partial(ChildProcess, command, own, reaping=reaping))
        except BaseException as error:
            await asyncio.gather(*(process.close() for process in processes))
            if isinstance(error, OSError):
                raise LoadFailed(f"Triton cannot be started: {error.strerror}") from error
            raise
        self._processes = processes

    def _models(self, place: NumberedProcess) -> Path:
        assert self._directory is not None
        return _models(self._directory, place)


def _make_directory(wanted: Sequence[NumberedProcess]) -> Path:
    """The processes' private directory; raises `OSError`."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-triton-"))
    try:
        for place in wanted:
            _models(directory, place).mkdir(mode=0o700, parents=True)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _models(directory: Path, place: NumberedProcess) -> Path:
    return directory / str(place.index) / "models"


class PlacedModel(Reconciler):
    """One version of a model on managed Tritons, which only this server loads and unloads."""

    def __init__(
        self,
        servers: TritonServers,
        spec: LoadSpec,
        config: ModelConfig,
        name: str,
        written: Mapping[TritonProcess, Path],
    ) -> None:
        """`written` has the model's directory for each process. Raises `InvalidOption`."""
        self._servers = servers
        self._written = dict(written)
        self._by_port = {process.port: process for process in written}
        urls = [Url("grpc", "127.0.0.1", p.port, label=p.label) for p in written]
        # A restarted process is back after seconds, for which requests can wait.
        given = {"wait_secs": _WAIT_SECS, **spec.parameters, "endpoints": "grpc://127.0.0.1:1"}
        options = RemoteOptions.of(given, name, spec.version, spec.root)
        credentials = replace(options.credentials, metadata=servers.metadata)
        options = replace(options, urls=tuple(urls), credentials=credentials)
        clients, endpoints = ProtocolClients(options, spec.model), options.resolve()
        control = replace(TritonControl.of(spec.parameters), load=True, unload=True)
        asked = ModelConfig()
        asked.CopyFrom(config)
        # Processes have a copy written for each of them.
        asked.ClearField("instance_group")
        super().__init__(clients, endpoints, asked, control, LoadCounts())

    def load(self, deadline: float) -> None:
        """Load the model on every live process; raises `LoadFailed`, with the model released."""
        live = self._live(self.endpoints)
        try:
            if problems := self._load_on(live, deadline):
                raise LoadFailed("; ".join(dict.fromkeys(map(str, problems))))
            if not live:
                raise LoadFailed("no Triton runs that is to have it")
        except BaseException:
            self.release()
            raise

    def groups(
        self, endpoint: Endpoint, reported: Sequence[ModelInstanceGroup]
    ) -> Sequence[ModelInstanceGroup]:
        """The instance groups reported by a server, with GPUs numbered as in the configuration."""
        return as_configured(reported, self._by_port[endpoint.port].place)

    def release(self) -> None:
        """Unload the model from the processes, and remove its files."""
        super().release()
        for directory in self._written.values():
            remove_model(directory)

    def _unload(self, endpoints: Sequence[Endpoint]) -> None:
        if self._servers.still_there():  # otherwise they end anyway
            super()._unload(self._live(endpoints))  # others have nothing loaded

    def _live(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [one for one in endpoints if self._by_port[one.port].live.is_set()]
