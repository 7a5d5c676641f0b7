"""Models that another server runs, by the V2 protocol: Triton, or whatever speaks it.

There is nothing to load. What the model takes and gives is asked of the first server that answers;
a server that offers no configuration (an extension of the protocol) is taken by its metadata alone.
What it says of decoupled responses and sequences completes the configuration here, and what that
says is held against it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.message import Message

from headrace.connections.endpoint import Endpoint
from headrace.core.datatypes import BY_CONFIG_NUMBER, BY_NAME, BY_NUMPY
from headrace.core.errors import Contradiction, LoadFailed
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.signature import Signature
from headrace.core.tensors import TensorArray
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.placement.local.instances import LoadedModel
from headrace.placement.placement import ModelServices, Placement, Surroundings
from headrace.placement.upstream.connection import CallFailed, RemoteDescription, RemoteRequest
from headrace.placement.upstream.options import MOST_IN_FLIGHT, V2, RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.reconciler import (
    BlockingClients,
    DesiredState,
    Difference,
    DriftWatch,
    OwnServers,
    RepositoryReconciler,
    UpstreamReconciler,
    asked_of,
    differences,
    load_everywhere,
)
from headrace.placement.upstream.requests import Forwarding
from headrace.placement.upstream.triton_options import (
    MANAGED_PARAMETERS,
    ControlOptions,
    LoadCounts,
    check_managed,
    is_managed,
)
from headrace.placement.warming import Sample
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from headrace.protocol.v2_protobuf import RemoteInput
from headrace.scheduling.sequences import SequenceRules

_METADATA_SECS = 10.0
_MOST_CALLS = 64  # under way at a time, unless the configuration says more
_MOST_STREAMS = 256  # the same, where each has any number of responses
_FEW_CALLS = 4  # of a model of which nothing is known
_FEW_SEQUENCE_CALLS = 64  # that may be under way for sequences, if the servers have room for fewer
_SEQUENCES = "sequence_batching"
_IDLE = "max_sequence_idle_microseconds"


def load_remote(
    spec: LoadSpec, tritons: "Callable[[], OwnServers] | None", known: LoadCounts
) -> "RemoteModel":
    """Ask a server about the model; raises `LoadFailed` or `InvalidOption`.

    `tritons` start those that this server starts; `known` are the models that others have loaded
    for this one.
    """
    asked = asked_of(spec.config)
    if is_managed(spec.parameters):
        check_managed(spec.parameters)
        if tritons is None:
            raise LoadFailed("no Triton is started here")
        placed = tritons().place(spec, asked)
        # What the processes have was written for each of them.
        asked.ClearField("instance_group")
        wanted = DesiredState(asked, ControlOptions.of(spec.parameters), placed, placed.groups)
        visits = BlockingClients(placed.options, spec.model)
        clients = ProtocolClients(placed.options, spec.model)
        return _described(visits, clients, placed.endpoints, wanted)
    directory = spec.version if (spec.root / str(spec.version)).is_dir() else 0
    if "fail_over" in spec.parameters and "remote_version" in spec.parameters:
        directory = 0  # it is there for another backend
    options = RemoteOptions.of(spec.parameters, spec.model, directory, spec.root)
    clients = ProtocolClients(options, spec.model)
    endpoints = options.resolve()
    control = ControlOptions.of(spec.parameters)
    visits = BlockingClients(options, spec.model)
    reconciler: RepositoryReconciler | None = None
    if control.load:
        uses = known if control.unload else None
        reconciler = RepositoryReconciler(visits, asked.instance_group, uses)
        load_everywhere(reconciler, spec.model, endpoints, spec.deadline)
    return _described(visits, clients, endpoints, DesiredState(asked, control, reconciler))


def _described(
    visits: BlockingClients,
    clients: ProtocolClients,
    endpoints: Sequence[Endpoint],
    wanted: DesiredState,
) -> "RemoteModel":
    """The model as the first server that answers says it is; raises `LoadFailed`."""
    problems = []
    try:
        for endpoint in endpoints:
            with clients.visit(endpoint) as connection:
                try:
                    said = connection.describe(_METADATA_SECS)
                except CallFailed as failed:
                    problems.append(f"{endpoint.name}: {failed.text}")
                else:
                    return RemoteModel(visits, clients, endpoints, endpoint, said, wanted)
        what = f"no server answers for model '{visits.options.model}'"
        raise LoadFailed(f"{what}: {'; '.join(problems)}", what)
    except BaseException:
        if wanted.reconciler is not None:
            wanted.reconciler.release()
        raise


class RemoteModel(LoadedModel):
    """A model elsewhere, as one of its servers has described it."""

    reads_parameters = True  # for all that is known here
    exact_shapes = True  # its servers tell what their clients see
    row_limit = ""

    def __init__(
        self,
        visits: BlockingClients,
        clients: ProtocolClients,
        endpoints: Sequence[Endpoint],
        answered: Endpoint,
        said: RemoteDescription,
        wanted: DesiredState,
    ) -> None:
        """`answered` is that of the endpoints which has `said` what the model is.

        `visits` are also those of who keeps it loaded: for all of them credentials are renewed.
        """
        options = visits.options
        self._wanted = wanted
        self._visits = visits
        self._asked = wanted.config
        self.drift = differences(wanted.config, said, options.version)
        self.options = options
        self.forwarding = Forwarding(options)
        self.forward_headers = options.forward_headers
        self.alike = self.forwarding.alike
        self.clients = clients
        self.endpoints = list(endpoints)
        self.answered = answered
        self.config = said.config
        optional = {i.name for i in said.config.input if i.optional} if said.config else set()
        self.inputs = [_info(tensor, optional) for tensor in said.metadata.inputs]
        self.outputs = [_info(tensor, set()) for tensor in said.metadata.outputs]
        self._batches = self._decoupled = self._managed = False
        # Set by the backend: the pool of servers knows the model.
        self.make_pool: Callable[[str, RemoteModel, Surroundings], Placement]
        self.sequences: SequenceRules | None = None  # what holds for them, if it has any

    def look(self) -> tuple[list[Endpoint], ProtocolClients | None]:
        """The addresses that names have now, and clients with other credentials if those have
        changed. May take a while; raises `LoadFailed` or `InvalidOption`.
        """
        found, renewed = self.options.resolve(), self.options.renewed()
        if renewed is None:
            return found, None
        return found, ProtocolClients(renewed, self.clients.model, self.clients.declared)

    def renew(self, clients: ProtocolClients) -> None:
        """Speak in these from now on."""
        self.clients = clients
        self.options = self._visits.options = clients.options

    @property
    def max_batch_size(self) -> int | None:
        """The most rows of a request there; None if that is not known."""
        return None if self.config is None else self.config.max_batch_size

    def rows(self, default: int) -> int:
        """The most rows of a request if the configuration does not say; a model that the servers
        tell nothing of takes requests as they come.
        """
        if self.max_batch_size is not None:
            return self.max_batch_size
        return default if self.inputs and self.outputs else 0

    @property
    def max_in_flight(self) -> int:
        """How many calls may be under way at a time.

        For batches, one more than there are instances on all servers, so that each has its next
        batch when it ends one, and what waits grows a larger one here.
        """
        if self.options.max_in_flight:
            return self.options.max_in_flight
        if self.sequences is not None:
            return calls_for_sequences(self.config or ModelConfig(), self._servers)
        if self._decoupled:
            return _MOST_STREAMS
        if not self._batches:
            return _MOST_CALLS
        if self.config is None:
            return _FEW_CALLS
        return min((_instances(self.config) + 1) * self._servers, _MOST_CALLS)

    @property
    def _servers(self) -> int:
        return len({(endpoint.address, endpoint.port) for endpoint in self.endpoints})

    def completed(self, config: ModelConfig, auto_complete: bool = True) -> ModelConfig:
        """A copy of a configuration with what the servers say of the model, unless it says so.

        These are its inputs, since optional ones could not be told apart later, whether it is
        decoupled, its sequences, and its instance groups. Raises `Contradiction` for what neither
        the servers nor the configuration tell.
        """
        if not auto_complete:
            return config
        result = ModelConfig()
        result.CopyFrom(config)
        if self.config is not None:
            complete(result, self.config)
        if not result.input:
            for info in self.inputs:
                if info.datatype is not None:
                    result.input.add(name=info.name, optional=info.optional)
        if not result.instance_group and self.config is not None:
            result.instance_group.extend(self._wanted.groups(self.answered, self.config))
        if problems := list(self._untold(result)):
            raise Contradiction(problems)
        return result

    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """Other servers."""
        return InstanceKind.REMOTE

    def warnings(self) -> Sequence[str]:
        """Differences between what a server has and what was asked for."""
        return [f"server {self.answered.name} has it otherwise: {one}" for one in self.drift]

    def warm_up(self, signature: Signature, version: int, samples: Sequence[Sample]) -> None:
        """Warm the model up, unless a managed Triton does so in each of its instances."""
        if not self._managed:
            super().warm_up(signature, version, samples)

    def placement(self, name: str, version: Surroundings) -> Placement:
        self.forwarding.traces = version.traces
        return self.make_pool(name, self, version)

    def told(self, config: ModelConfig) -> tuple[Sequence[TensorInfo], Sequence[TensorInfo]]:
        """The inputs and outputs that the servers tell of; where there are none, as declared."""
        lead = (-1,) if config.max_batch_size > 0 else ()
        return (
            self.inputs or [_declared(tensor, lead) for tensor in config.input],
            self.outputs or [_declared(tensor, lead) for tensor in config.output],
        )

    def _untold(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        """Fields that neither the servers nor a configuration tell, and what is wrong.

        A server that tells the whole configuration tells so of a model without inputs or outputs.
        """
        if self.config is not None:
            return
        for path, infos, tensors in (
            ("input", self.inputs, config.input), ("output", self.outputs, config.output)
        ):  # fmt: skip
            if not infos and not tensors:
                yield path, f"the model's server does not tell its {path}s: declare them here"

    def begin(
        self,
        config: ModelConfig,
        signature: Signature,
        batches: bool,
        host: ModelServices | None = None,
    ) -> None:
        """Settle signature and form; raises `Contradiction` where the servers disagree."""
        problems = list(self._problems(config))
        if problems:
            raise Contradiction(problems)
        self._batches = batches
        self._managed = is_managed({n: p.string_value for n, p in config.parameters.items()})
        self.clients.declared.signature = signature
        self._decoupled = config.model_transaction_policy.decoupled
        self.sequences = sequence_rules(config)
        asked = ModelConfig()
        asked.CopyFrom(config)
        asked.ClearField("instance_group")
        asked.instance_group.extend(self._wanted.config.instance_group)
        self._asked = asked

    def reconciler(self, endpoint: Endpoint) -> UpstreamReconciler | None:
        """The reconciler of one server; None where loading is not up to this server."""
        reconciler = self._wanted.reconciler
        return None if reconciler is None else UpstreamReconciler(reconciler, endpoint)

    def watch(self, endpoints: Callable[[], Sequence[Endpoint]]) -> DriftWatch:
        """Look now and then whether those servers have it as it was asked for."""
        watch = DriftWatch(
            self._asked.name, self._wanted.control.drift_secs, endpoints, self._look,
            self._wanted.reconciler,
        )  # fmt: skip
        watch.note(self.answered, self.drift)
        return watch

    def _look(self, endpoint: Endpoint) -> Sequence[Difference]:
        with self._visits.to(endpoint) as connection:
            try:
                said = connection.describe(_METADATA_SECS)
            except CallFailed as failed:
                raise LoadFailed(failed.text) from None
        return differences(self._asked, said, self.options.version)

    def infer(
        self, inputs: Mapping[str, TensorArray], outputs: Sequence[str]
    ) -> Sequence[TensorArray]:
        """The outputs of one blocking call, for samples that warm the model up."""
        # On a thread of its own: a call that waits has an event loop, and so has who warms up.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._infer, inputs, outputs).result()

    def _infer(
        self, inputs: Mapping[str, TensorArray], outputs: Sequence[str]
    ) -> Sequence[TensorArray]:
        tensors = [
            RemoteInput(name, BY_NUMPY[array.dtype], array.shape, [array])
            for name, array in inputs.items()
        ]
        request = RemoteRequest(tensors, outputs, {})
        with self.clients.visit(self.answered) as connection:
            try:
                answer = connection.infer(request, self.options.timeout)
            except CallFailed as failed:
                raise failed.failure.error from None
        return [answer.outputs[name] for name in outputs]

    def close(self) -> None:
        """Unload the model on its servers if that is wanted, which may take a while."""
        if self._wanted.reconciler is not None:
            self._wanted.reconciler.release()

    def _problems(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        most = self.max_batch_size
        if most is not None and config.max_batch_size > most:
            yield (
                "max_batch_size",
                f"the remote model takes {most or 'no'} rows in a batch, not"
                f" {config.max_batch_size}",
            )
        if self._wanted.control.strict:
            for found in self.drift:
                yield found.field, f"{found.asked} asked for, {found.reported} there"
        if config.model_transaction_policy.decoupled:
            for endpoint in self.endpoints:
                if not endpoint.scheme.startswith("grpc"):
                    text = (
                        f"{endpoint.name}: a decoupled model is asked over gRPC only; name the"
                        " server's gRPC port, such as grpc://HOST:8001"
                    )
                    yield "parameters['endpoints']", text
        if self.options.protocol.name != V2:
            yield from _not_in(self.options.protocol.name, config)
        if self.options.shared_memory and config.model_transaction_policy.decoupled:
            yield (
                "parameters['shared_memory']",
                "is for models with one response to a request: streams share no memory",
            )
        yield from problems(config, self.config, self.options.max_in_flight)


def _not_in(protocol: str, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Fields of a configuration that other protocols have no form for."""
    if config.model_transaction_policy.decoupled:
        yield "model_transaction_policy.decoupled", f"{protocol} has no decoupled models"
    if config.WhichOneof("scheduling_choice") == "sequence_batching":
        yield "sequence_batching", f"{protocol} has no sequences"


def _declared(tensor: ModelInput | ModelOutput, lead: tuple[int, ...]) -> TensorInfo:
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    datatype = BY_CONFIG_NUMBER.get(tensor.data_type)
    optional = isinstance(tensor, ModelInput) and tensor.optional
    return TensorInfo(tensor.name, datatype, (*lead, *dims), str(datatype), optional)


def _info(tensor: pb.ModelMetadataResponse.TensorMetadata, optional: set[str]) -> TensorInfo:
    return TensorInfo(
        tensor.name,
        BY_NAME.get(tensor.datatype),
        tuple(tensor.shape),
        tensor.datatype,
        tensor.name in optional,
    )


def complete(config: ModelConfig, remote: ModelConfig) -> None:
    """Write into `config` what `remote` says and it leaves open."""
    if remote.model_transaction_policy.decoupled:
        config.model_transaction_policy.decoupled = True
    if _in_sequences(remote) and config.WhichOneof("scheduling_choice") in (None, _SEQUENCES):
        config.sequence_batching.SetInParent()
        _fill(config.sequence_batching, remote.sequence_batching)


def problems(
    config: ModelConfig, remote: ModelConfig | None, calls: int
) -> Iterator[tuple[str, str]]:
    """Where the configuration is not what the servers say, or cannot be followed.

    So many `calls` may be under way, 0 if that is left open.
    """
    decoupled = config.model_transaction_policy.decoupled
    if remote is not None:
        if decoupled is not remote.model_transaction_policy.decoupled:
            kind = "not decoupled" if decoupled else "decoupled"
            yield "model_transaction_policy.decoupled", f"the remote model is {kind}"
        yield from _sequence_problems(config, remote)
    if _in_sequences(config) and calls == 1:
        text = (
            "must be at least 2 for a model with sequences: the first request of one may have to"
            " wait until another one has gone on"
        )
        yield "parameters['max_in_flight']", text
    if decoupled and config.dynamic_batching.preserve_ordering:
        text = "cannot be combined with a decoupled model, which answers when it likes"
        yield "dynamic_batching.preserve_ordering", text
    managed = MANAGED_PARAMETERS & set(config.parameters)  # its Triton has them by itself
    if (decoupled or _in_sequences(config)) and config.model_warmup and not managed:
        kind = "decoupled" if decoupled else "with sequences"
        yield "model_warmup", f"cannot be sent to a model on other servers that is {kind}"


def sequence_rules(config: ModelConfig) -> SequenceRules | None:
    """The rules for sequences, if there are any."""
    if not _in_sequences(config):
        return None
    sequences = config.sequence_batching
    return SequenceRules(
        sequences.max_sequence_idle_microseconds * 1000, not sequences.iterative_sequence
    )


def calls_for_sequences(config: ModelConfig, servers: int) -> int:
    """How many calls may be under way for a model with sequences.

    Twice as many as the servers can have sequences under way, since first requests, which may have
    to wait for room, get one half.
    """
    sequences = config.sequence_batching
    oldest = sequences.WhichOneof("strategy_choice") == "oldest"
    room = max(sequences.oldest.max_candidate_sequences if oldest else config.max_batch_size, 1)
    return min(max(2 * room * _instances(config) * servers, _FEW_SEQUENCE_CALLS), MOST_IN_FLIGHT)


def _instances(config: ModelConfig) -> int:
    """How many instances a server has of a model, at least one."""
    groups = config.instance_group
    return max(sum(max(group.count, 1) * max(len(group.gpus), 1) for group in groups), 1)


def _in_sequences(config: ModelConfig) -> bool:
    return config.WhichOneof("scheduling_choice") == _SEQUENCES


def _sequence_problems(config: ModelConfig, remote: ModelConfig) -> Iterator[tuple[str, str]]:
    choice = config.WhichOneof("scheduling_choice")
    if _in_sequences(remote) and choice != _SEQUENCES:
        yield (
            choice or _SEQUENCES,
            "the remote model takes its requests in sequences (sequence_batching), which are not"
            " batched here",
        )
    elif choice == _SEQUENCES and not _in_sequences(remote):
        yield _SEQUENCES, "the remote model has no sequences"
    elif choice == _SEQUENCES:
        for field in config.sequence_batching.DESCRIPTOR.fields:
            ours, theirs = (_value(c.sequence_batching, field.name) for c in (config, remote))
            if field.name != _IDLE and ours != theirs and ours is not None:
                yield f"{_SEQUENCES}.{field.name}", "the remote model's configuration differs"


def _value(message: Message, name: str) -> object:
    """The value of a field, None for a part that is not there."""
    singular = message.DESCRIPTOR.fields_by_name[name].has_presence
    return getattr(message, name) if not singular or message.HasField(name) else None


def _fill(target: Message, source: Message) -> None:
    """Write into `target` what `source` has set and it has not."""
    for field, value in source.ListFields():
        if isinstance(value, Message):
            oneof = field.containing_oneof
            if oneof is None or target.WhichOneof(oneof.name) in (None, field.name):
                getattr(target, field.name).SetInParent()
                _fill(getattr(target, field.name), value)
        elif not getattr(target, field.name):
            if isinstance(value, int | float | str):
                setattr(target, field.name, value)
            else:
                getattr(target, field.name).MergeFrom(value)
