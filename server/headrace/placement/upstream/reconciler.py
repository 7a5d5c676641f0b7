"""Reconciliation of upstreams with a model's configuration: loads, and reloads after losses.

A `Reconciler` has the state that a configuration requests. It loads the model on its servers, and
unloads it in the end, on threads; while the model is served, each `Upstream` calls it.

Differences between a server's model and its configuration are found by plain functions over
messages. GPUs have Triton's numbers: their index among those visible to its process. If each
process sees one GPU of its own, a configuration numbers them as if one process saw them all.
"""

import json
import logging
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic
from typing import Protocol, TypeAlias

from google.protobuf import json_format

from headrace.connections.endpoint import Endpoint
from headrace.core.columns import COLUMNS, columns_by_input
from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.tensors import brackets
from headrace.placement.upstream.connection import CallFailed, ProtocolClient, RemoteDescription
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.triton_options import LoadCounts, TritonControl
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


def columns_said(said: RemoteDescription) -> str:
    """The names of columns of a server's model, "" if it tells none."""
    found = said.metadata.properties.get(COLUMNS, "")
    if not found and said.config is not None and COLUMNS in said.config.parameters:
        found = said.config.parameters[COLUMNS].string_value
    return found if columns_by_input(found) else ""


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
    if COLUMNS in asked.parameters and (reported := columns_said(said)):
        names = asked.parameters[COLUMNS].string_value
        if columns_by_input(names) != columns_by_input(reported):
            yield Difference(f"parameters['{COLUMNS}']", names, reported)
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

ASK_SECS = 10.0
LOAD_SECS = 900.0  # default time limit of a load
_AT_ONCE = 16  # servers queried concurrently


class Reconciler:
    """The desired state of a model on its servers, which it establishes there if `control` asks.

    It loads the model with the desired instance groups, or those of the server if there are none,
    and unloads it in the end; the rest of the configuration is the servers'. A model is loaded, and
    released, on threads; the loop of its pool ensures that single servers have it.
    """

    def __init__(
        self,
        clients: ProtocolClients,
        endpoints: Sequence[Endpoint],
        asked: ModelConfig,
        control: TritonControl,
        loads: LoadCounts,
    ) -> None:
        """`loads` are the models that servers have loaded for this one."""
        self.clients = clients
        self.endpoints = endpoints
        self.control = control
        self._asked = asked
        self._groups = list(asked.instance_group)
        self._loads = loads
        self._taken: set[Endpoint] = set()
        self._lock = Lock()
        self._released = Event()

    def load(self, deadline: float) -> None:
        """Load the model on all reachable servers; raises `LoadFailed`, with the model released, if
        none loads it.

        Health checks retry the others.
        """
        model = self.clients.model
        problems = self._load_on(self.endpoints, deadline)
        if len(problems) < len(self.endpoints):
            for problem in problems:
                log.warning("model %s is not loaded by a server: %s", model, problem)
            return
        self.release()
        what = f"no server loads model '{model}'"
        raise LoadFailed(f"{what}: {'; '.join(map(str, problems))}", what)

    async def ensure(self, client: ProtocolClient, endpoint: Endpoint, seconds: float) -> None:
        """Load the model on one server as desired; raises `LoadFailed`."""
        key = self.clients.options.model, endpoint
        with self._lock:
            if self._released.is_set():
                raise LoadFailed("it is being unloaded")
            if self.control.unload and endpoint not in self._taken:
                self._loads.take(key)
                self._taken.add(endpoint)
        try:
            await self._load(client, endpoint, seconds)
            if self._released.is_set() and self.control.unload:  # released meanwhile
                self._loads.take(key)
                if self._loads.give_back(key):
                    await client.unload(ASK_SECS)
        except CallFailed as failed:
            raise LoadFailed(f"{endpoint.name}: {failed.text}") from None

    def release(self) -> None:
        """Give the model up, and unload it where nothing else uses it. Blocks."""
        with self._lock:
            released = self._released.is_set()
            self._released.set()
        if not released:
            model = self.clients.options.model
            self._unload([one for one in self._taken if self._loads.give_back((model, one))])

    def groups(
        self, endpoint: Endpoint, reported: Sequence[ModelInstanceGroup]
    ) -> Sequence[ModelInstanceGroup]:
        """The instance groups reported by a server, with GPUs numbered as in the configuration."""
        return reported

    def expect(self, config: ModelConfig) -> None:
        """Compare servers with the completed configuration; instance groups are those asked for."""
        self._asked = ModelConfig()
        self._asked.CopyFrom(config)
        self._asked.ClearField("instance_group")
        self._asked.instance_group.extend(self._groups)

    def differences(self, said: RemoteDescription) -> list[Difference]:
        """The differences between a server's model and the configuration."""
        return differences(self._asked, said, self.clients.options.version)

    def _load_on(self, endpoints: Sequence[Endpoint], deadline: float) -> list[LoadFailed]:
        seconds = max(min(deadline - monotonic(), LOAD_SECS), 1.0)
        return self._each(
            endpoints, lambda client, endpoint: self.ensure(client, endpoint, seconds)
        )

    def _unload(self, endpoints: Sequence[Endpoint]) -> None:
        for problem in self._each(endpoints, lambda client, _: client.unload(ASK_SECS)):
            log.warning("model %s is not unloaded: %s", self.clients.model, problem)

    def _each(
        self,
        endpoints: Sequence[Endpoint],
        work: Callable[[ProtocolClient, Endpoint], Awaitable[None]],
    ) -> list[LoadFailed]:
        """Do `work` on several servers concurrently; returns the failures."""

        def attempt(endpoint: Endpoint) -> LoadFailed | None:
            try:
                self.clients.visit(endpoint, lambda client: work(client, endpoint))
            except CallFailed as failed:
                return LoadFailed(f"{endpoint.name}: {failed.text}")
            except LoadFailed as error:
                return error
            return None

        with ThreadPoolExecutor(_AT_ONCE, "remote") as pool:
            return [problem for problem in pool.map(attempt, endpoints) if problem is not None]

    async def _load(self, client: ProtocolClient, endpoint: Endpoint, seconds: float) -> None:
        deadline = monotonic() + seconds
        said = await _loaded(client)
        if said is None:
            await client.load("", seconds)
            said = await _loaded(client) if self._groups else None
        config = None if said is None else said.config
        if config is None or agree(self._groups, config.instance_group):
            return
        log.info(
            "%s: model %s is loaded again with %s, in place of %s", endpoint.name,
            self.clients.options.model, described(self._groups), described(config.instance_group),
        )  # fmt: skip
        config.ClearField("instance_group")
        config.instance_group.extend(self._groups)
        await client.load(json.dumps(to_json(config)), max(deadline - monotonic(), 1.0))


async def _loaded(client: ProtocolClient) -> RemoteDescription | None:
    """The description of a model loaded on a server; None if it is not loaded.

    Raises `CallFailed` if the server does not answer.
    """
    try:
        return await client.describe(ASK_SECS)
    except CallFailed as failed:
        if failed.failure.fate in (Fate.UNSENT, Fate.UNCERTAIN, Fate.LATE):
            raise
        return None


class OwnServers(Protocol):
    """Managed servers, which an optional part of the server starts."""

    def attach(self, loop: AbstractEventLoop) -> None:
        """Attach processes to this loop; called before a model is placed."""

    def stop(self) -> None:
        """Stop loads and unloads: the processes end soon."""

    async def close(self) -> None:
        """End all processes, and remove their files."""

    def place(self, spec: LoadSpec, config: ModelConfig) -> Reconciler:
        """Start the servers for a model, and load it there; raises `LoadFailed`. Blocks."""


def asked_of(config: str) -> ModelConfig:
    """The configuration in a `LoadSpec`."""
    result: ModelConfig = json_format.ParseDict(json.loads(config), ModelConfig())
    return result
