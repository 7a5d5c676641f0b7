"""Reconciliation of upstreams with a model's configuration: loads, and reloads after losses.

`DesiredState` is the state that a configuration requests. A `Reconciler` loads the model on its
servers, and unloads it in the end; it blocks and is for threads. `UpstreamReconciler` and
`DriftWatch` call it from the event loop while the model is served.

Differences between a server's model and its configuration are found by plain functions over
messages. GPUs have Triton's numbers: their index among those visible to its process. If each
process sees one GPU of its own, a configuration numbers them as if one process saw them all.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Protocol, TypeAlias

from google.protobuf import json_format

from headrace.connections.endpoint import Endpoint
from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.tensors import brackets
from headrace.placement.child_process import Backoff
from headrace.placement.daemon_thread import run_in_daemon_thread
from headrace.placement.upstream.connection import CallFailed, RemoteDescription, Visit
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.triton_options import ControlOptions, LoadCounts
from headrace.protocol.documents import to_json
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import (
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)
from headrace.protocol.pb.model_config_pb2 import ModelInstanceGroup as Group
from headrace.protocol.status import Fate


def agree(asked: Sequence[Group], reported: Sequence[Group]) -> bool:
    """True if reported groups satisfy the requested ones.

    Unspecified properties, such as the GPUs, are the server's choice. Names do not matter.
    """
    if not asked:
        return True
    if len(asked) == len(reported):
        pairs = zip(asked, reported, strict=True)
        if all(_is(wanted, there) for wanted, there in pairs):
            return True
    return _instances(asked) == _instances(reported)


def described(groups: Sequence[Group]) -> str:
    """Groups as text, such as `2 x GPU 0, 2 x GPU 1`."""
    parts = []
    for group in groups:
        kind = Group.Kind.Name(group.kind).removeprefix("KIND_")
        where = [f"{kind} {gpu}" for gpu in group.gpus] or [kind]
        parts += [f"{max(group.count, 1)} x {one}" for one in where]
    return ", ".join(parts) or "none"


def _is(asked: Group, reported: Group) -> bool:
    kind = Group.KIND_GPU if asked.kind == Group.KIND_AUTO and asked.gpus else asked.kind
    if kind not in (Group.KIND_AUTO, reported.kind):
        return False
    if asked.gpus and sorted(asked.gpus) != sorted(reported.gpus):
        return False
    return not asked.count or asked.count == max(reported.count, 1)


def _instances(groups: Iterable[Group]) -> Counter[tuple[int, int | None]]:
    """The number of instances by kind and GPU."""
    counts: Counter[tuple[int, int | None]] = Counter()
    for group in groups:
        for gpu in group.gpus or [None]:
            counts[group.kind, gpu] += max(group.count, 1)
    return counts


Tensor: TypeAlias = ModelInput | ModelOutput
Reported: TypeAlias = pb.ModelMetadataResponse.TensorMetadata


@dataclass(frozen=True, slots=True)
class Difference:
    """A field with its requested and reported values, as text."""

    path: str
    asked: str
    reported: str

    @property
    def field(self) -> str:
        """The configuration field concerned."""
        return self.path.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.path}: {self.asked} asked for, {self.reported} there"


def differences(asked: ModelConfig, said: RemoteDescription, version: str = "") -> list[Difference]:
    """The differences between a server's model and a configuration.

    Anything that the configuration leaves open is the server's choice. `version` is the wanted one,
    "" for any.
    """
    return list(_differences(asked, said, version))


def _differences(asked: ModelConfig, said: RemoteDescription, version: str) -> Iterator[Difference]:
    versions = list(said.metadata.versions)
    if version and versions and version not in versions:
        yield Difference("version", version, ", ".join(versions))
    groups = list(asked.instance_group)
    if said.config is None:
        if groups:
            yield Difference("instance_group", described(groups), "what the server does not tell")
    else:
        most = said.config.max_batch_size
        if asked.max_batch_size > most:
            yield Difference("max_batch_size", str(asked.max_batch_size), str(most))
        if not agree(groups, list(said.config.instance_group)):
            reported = described(list(said.config.instance_group))
            yield Difference("instance_group", described(groups), reported)
    batches = asked.max_batch_size > 0
    optional = {one.name for one in said.config.input if one.optional} if said.config else set()
    yield from _tensors("input", asked.input, said.metadata.inputs, batches, optional)
    yield from _tensors("output", asked.output, said.metadata.outputs, batches, None)


def _tensors(
    path: str,
    asked: Sequence[Tensor],
    reported: Sequence[Reported],
    batches: bool,
    optional: set[str] | None,
) -> Iterator[Difference]:
    """Compare tensors; `optional` are names of optional inputs, None for outputs."""
    if not asked or not reported:
        return  # a server without them leaves them to the configuration
    there = {tensor.name: tensor for tensor in reported}
    for tensor in asked:
        at = f"{path} '{tensor.name}'"
        found = there.pop(tensor.name, None)
        if found is None:
            yield Difference(at, "it is", "it is not")
            continue
        datatype = BY_CONFIG_NUMBER.get(tensor.data_type)
        if datatype is not None and datatype != found.datatype:
            yield Difference(f"{at} datatype", str(datatype), found.datatype)
        dims = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        shape = [-1, *dims] if batches else dims
        if tensor.dims and found.shape and not _fits(shape, list(found.shape)):
            yield Difference(f"{at} shape", brackets(shape), brackets(found.shape))
    if optional is not None:
        for name in there.keys() - optional:
            yield Difference(f"{path} '{name}'", "no such one is", "a needed one is")


def _fits(asked: Sequence[int], reported: Sequence[int]) -> bool:
    return len(asked) == len(reported) and all(
        -1 in (one, other) or one == other for one, other in zip(asked, reported, strict=True)
    )


log = logging.getLogger(__name__)

_ASK_SECS = 10.0
LOAD_SECS = 900.0  # default time limit of a load
_AT_ONCE = 16  # servers queried concurrently


class BlockingClients:
    """Connections to the servers of one model, named `model` here, for threads."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        self.options = options
        self.model = model

    def to(self, endpoint: Endpoint) -> AbstractContextManager[Visit]:
        """A connection, open within `with`."""
        # A client is for one thread at a time, and the pool's belongs to the event loop.
        return ProtocolClients(self.options, self.model).visit(endpoint)


class Reconciler(ABC):
    """Loads one model on servers, and unloads it in the end. For threads that may block."""

    def __init__(self, clients: BlockingClients) -> None:
        self._clients = clients
        self._model = clients.model
        self._lock = Lock()
        self._released = False

    def ensure(self, endpoint: Endpoint, seconds: float) -> None:
        """Load the model on one server as desired; raises `LoadFailed`."""
        with self._lock:
            if self._released:
                raise LoadFailed("it is being unloaded")
            self._begin(endpoint)
        with self._asking(endpoint) as connection:
            self._load(connection, endpoint, seconds)
        if self._is_released():  # released meanwhile
            self._undo(endpoint)

    def release(self) -> None:
        """Give the model up, and unload it where desired."""
        with self._lock:
            released, self._released = self._released, True
        if not released:
            self._release()

    def _unload(self, endpoints: Iterable[Endpoint]) -> None:
        def unload(endpoint: Endpoint) -> None:
            with self._asking(endpoint) as connection:
                connection.unload(_ASK_SECS)

        for problem in each(endpoints, unload):
            log.warning("model %s is not unloaded: %s", self._model, problem)

    @contextmanager
    def _asking(self, endpoint: Endpoint) -> Iterator[Visit]:
        with self._clients.to(endpoint) as connection:
            try:
                yield connection
            except CallFailed as failed:
                raise LoadFailed(f"{endpoint.name}: {failed.text}") from None

    def _is_released(self) -> bool:
        with self._lock:
            return self._released

    @abstractmethod
    def _begin(self, endpoint: Endpoint) -> None:
        """Note that a server is about to load the model."""

    @abstractmethod
    def _load(self, connection: Visit, endpoint: Endpoint, seconds: float) -> None:
        """Load the model unless it is as desired; may raise `CallFailed`."""

    @abstractmethod
    def _undo(self, endpoint: Endpoint) -> None:
        """Unload the model if it was loaded after `release`."""

    @abstractmethod
    def _release(self) -> None:
        """Unload the model where desired."""


class PlacedReconciler(Reconciler):
    """The reconciler of a model on managed servers, from `OwnServers.place`.

    `options` are for connections to the servers, `endpoints` are their addresses.
    """

    options: RemoteOptions
    endpoints: Sequence[Endpoint]

    @abstractmethod
    def load(self, deadline: float) -> None:
        """Load the model on every live server; raises `LoadFailed`, with the model released."""

    @abstractmethod
    def groups(
        self, endpoint: Endpoint, reported: Sequence[ModelInstanceGroup]
    ) -> list[ModelInstanceGroup]:
        """Reported instance groups, with GPUs numbered as in the configuration."""


class OwnServers(Protocol):
    """Managed servers, created by a plugin of the group `headrace.servers`."""

    def attach(self, loop: AbstractEventLoop) -> None:
        """Attach processes to this loop; called before a model is placed."""

    def stop(self) -> None:
        """Stop loads and unloads: the processes end soon."""

    async def close(self) -> None:
        """End all processes, and remove their files."""

    def place(self, spec: LoadSpec, config: ModelConfig) -> PlacedReconciler:
        """Start the servers for a model, and write its files; raises `LoadFailed`. Blocks."""


class RepositoryReconciler(Reconciler):
    """Loads a model on servers started by others, with the desired instance groups.

    The rest of its configuration is the servers'. Empty `groups` leave the groups to them, too.
    """

    def __init__(
        self,
        clients: BlockingClients,
        groups: Sequence[ModelInstanceGroup],
        loads: LoadCounts | None,
    ) -> None:
        """`loads` is None if the model stays loaded at the end."""
        super().__init__(clients)
        self._model = clients.options.model
        self._groups = list(groups)
        self._loads = loads
        self._taken: set[Endpoint] = set()

    def _begin(self, endpoint: Endpoint) -> None:
        if self._loads is not None and endpoint not in self._taken:
            self._loads.take((self._model, endpoint))
            self._taken.add(endpoint)

    def _load(self, connection: Visit, endpoint: Endpoint, seconds: float) -> None:
        deadline = monotonic() + seconds
        said = loaded(connection)
        if said is None:
            connection.load("", seconds)
            said = loaded(connection)
        config = None if said is None else said.config
        if config is None or agree(self._groups, config.instance_group):
            return
        log.info(
            "%s: model %s is loaded again with %s, in place of %s", endpoint.name, self._model,
            described(self._groups), described(config.instance_group),
        )  # fmt: skip
        config.ClearField("instance_group")
        config.instance_group.extend(self._groups)
        connection.load(json.dumps(to_json(config)), max(deadline - monotonic(), 1.0))

    def _undo(self, endpoint: Endpoint) -> None:
        if self._loads is not None:
            self._loads.take((self._model, endpoint))
            self._give_back([endpoint])

    def _release(self) -> None:
        self._give_back(self._taken)

    def _give_back(self, taken: Iterable[Endpoint]) -> None:
        if self._loads is not None:
            give_back = self._loads.give_back
            self._unload([one for one in taken if give_back((self._model, one))])


def load_everywhere(
    reconciler: Reconciler, model: str, endpoints: Sequence[Endpoint], deadline: float
) -> None:
    """Load a model on all reachable servers; raises `LoadFailed` if none loads it.

    Health checks retry the others.
    """
    seconds = max(min(deadline - monotonic(), LOAD_SECS), 1.0)
    problems = each(endpoints, lambda endpoint: reconciler.ensure(endpoint, seconds))
    if len(problems) < len(endpoints):
        for problem in problems:
            log.warning("model %s is not loaded by a server: %s", model, problem)
        return
    reconciler.release()
    what = f"no server loads model '{model}'"
    raise LoadFailed(f"{what}: {'; '.join(map(str, problems))}", what)


def loaded(connection: Visit) -> RemoteDescription | None:
    """The description of a model loaded on a server; None if it is not loaded.

    Raises `CallFailed` if the server does not answer.
    """
    try:
        return connection.describe(_ASK_SECS)
    except CallFailed as failed:
        if failed.failure.fate in (Fate.UNSENT, Fate.UNCERTAIN, Fate.LATE):
            raise
        return None


def each(endpoints: Iterable[Endpoint], work: Callable[[Endpoint], None]) -> list[LoadFailed]:
    """Call `work` for several servers concurrently; returns the errors raised."""

    def attempt(endpoint: Endpoint) -> LoadFailed | None:
        try:
            work(endpoint)
        except LoadFailed as error:
            return error
        return None

    found = list(endpoints)
    if not found:
        return []
    with ThreadPoolExecutor(min(len(found), _AT_ONCE), "remote") as pool:
        return [problem for problem in pool.map(attempt, found) if problem is not None]


Renumbered = Callable[[Endpoint, Sequence[ModelInstanceGroup]], Sequence[ModelInstanceGroup]]


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The desired configuration of a model, and the reconciler that establishes it.

    `reconciler` is None if the servers load the model themselves. `renumbered`, if set, maps a
    server's GPUs to those of the configuration.
    """

    config: ModelConfig
    control: ControlOptions
    reconciler: Reconciler | None = None
    renumbered: Renumbered | None = None

    def groups(self, endpoint: Endpoint, reported: ModelConfig) -> Sequence[ModelInstanceGroup]:
        """The instance groups reported by a server, in the configuration's terms."""
        found = list(reported.instance_group)
        return found if self.renumbered is None else self.renumbered(endpoint, found)


def asked_of(config: str) -> ModelConfig:
    """The configuration in a `LoadSpec`."""
    result: ModelConfig = json_format.ParseDict(json.loads(config), ModelConfig())
    return result


class UpstreamReconciler:
    """Makes one server serve the model again when it does not.

    A failed attempt is repeated after a delay that doubles each time.
    """

    def __init__(self, reconciler: Reconciler, endpoint: Endpoint) -> None:
        self._reconciler = reconciler
        self._endpoint = endpoint
        self._backoff = Backoff(1.0, 60.0)
        self._not_before = 0.0
        self._problem = ""

    async def mend(self) -> str:
        """Try to mend the server; returns the reason why it still does not serve, or ""."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return self._problem
        try:
            await run_in_daemon_thread(
                lambda: self._reconciler.ensure(self._endpoint, LOAD_SECS),
                f"load on {self._endpoint.name}",
            )
        except LoadFailed as error:
            self._not_before = loop.time() + self._backoff.failed()
            self._problem = str(error)
            return self._problem
        self._backoff.succeeded()
        self._not_before = 0.0
        return ""


class DriftWatch:
    """Checks periodically whether a model's servers have drifted from its configuration.

    `look` queries one server, blocks, and raises `LoadFailed` without an answer. The `reconciler`,
    if any, mends the drift.
    """

    def __init__(
        self,
        model: str,
        interval: float,
        endpoints: Callable[[], Sequence[Endpoint]],
        look: Callable[[Endpoint], Sequence[Difference]],
        reconciler: Reconciler | None,
    ) -> None:
        self._model = model
        self._interval = interval
        self._endpoints = endpoints
        self._look = look
        self._reconciler = reconciler
        self._found: dict[Endpoint, Sequence[Difference]] = {}
        self._task: asyncio.Task[None] | None = None
        if interval:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    def count(self, endpoint: Endpoint) -> int:
        """The number of differences found at a server's last check."""
        return len(self._found.get(endpoint, ()))

    def note(self, endpoint: Endpoint, found: Sequence[Difference]) -> None:
        """Store the differences of a server, and log changes."""
        found = tuple(found)
        if found != self._found.get(endpoint, ()):
            texts = "; ".join(map(str, found))
            level = logging.WARNING if found else logging.INFO
            log.log(level, "model %s: server %s has it %s", self._model, endpoint.name,
                    f"otherwise than asked for: {texts}" if found else "as asked for again",
                    extra={"model": self._model})  # fmt: skip
        self._found[endpoint] = found

    def close(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            endpoints = self._endpoints()
            self._found = {one: found for one, found in self._found.items() if one in endpoints}
            for endpoint in endpoints:
                await self._check(endpoint)

    async def _check(self, endpoint: Endpoint) -> None:
        reconciler = self._reconciler

        def check() -> Sequence[Difference]:
            found = self._look(endpoint)
            if found and reconciler is not None:
                reconciler.ensure(endpoint, LOAD_SECS)
                found = self._look(endpoint)
            return found

        try:
            found = await run_in_daemon_thread(check, f"look at {endpoint.name}")
        except LoadFailed as error:
            log.debug("model %s: server %s: %s", self._model, endpoint.name, error)
            return
        except Exception:
            log.exception("bug while looking at the servers of model %s", self._model)
            return
        self.note(endpoint, found)
