"""Models on upstreams, over the V2 protocol: Triton, or any other server.

Nothing is loaded here. The first server that answers describes the model's tensors; a server
without configurations (an extension of the protocol) is used by its metadata alone. What it reports
about decoupled responses and sequences completes the configuration here, and is checked against it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from google.protobuf.message import Message

from headrace.connections.endpoint import Endpoint
from headrace.core.columns import COLUMNS
from headrace.core.datatypes import BY_CONFIG_NUMBER, BY_NAME, BY_NUMPY
from headrace.core.errors import Contradiction, LoadFailed
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.signature import Signature
from headrace.core.tensors import TensorArray
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.placement.loaded import ModelTraits, Servable
from headrace.placement.local.instances import run_batch
from headrace.placement.placement import ModelServices, Placement, Surroundings
from headrace.placement.upstream.connection import CallFailed, RemoteDescription, RemoteRequest
from headrace.placement.upstream.options import MOST_IN_FLIGHT, V2, RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.reconciler import (
    ASK_SECS,
    OwnServers,
    Reconciler,
    asked_of,
    columns_said,
)
from headrace.placement.upstream.requests import Forwarding
from headrace.placement.upstream.triton_options import (
    MANAGED_PARAMETERS,
    LoadCounts,
    TritonControl,
    check_managed,
    is_managed,
)
from headrace.placement.warming import Sample, warm_up
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput
from headrace.scheduling.sequences import SequenceRules

_MOST_CALLS = 64  # default limit of calls in flight
_MOST_STREAMS = 256  # default limit for decoupled models
_FEW_CALLS = 4  # limit for a model of which nothing is known
_FEW_SEQUENCE_CALLS = 64  # minimum for sequences, if the servers have room for fewer
_SEQUENCES = "sequence_batching"
_IDLE = "max_sequence_idle_microseconds"


def load_remote(
    spec: LoadSpec, tritons: "Callable[[], OwnServers]", known: LoadCounts
) -> "RemoteModel":
    """Query a server for the model; raises `LoadFailed` or `InvalidOption`.

    `tritons` returns the managed servers; `known` are the models that other servers have loaded for
    this one.
    """
    asked = asked_of(spec.config)
    if is_managed(spec.parameters):
        check_managed(spec.parameters)
        return _described(tritons().place(spec, asked))
    directory = spec.version if (spec.root / str(spec.version)).is_dir() else 0
    if "fail_over" in spec.parameters and "remote_version" in spec.parameters:
        directory = 0  # the directory is for another backend
    options = RemoteOptions.of(spec.parameters, spec.model, directory, spec.root)
    clients = ProtocolClients(options, spec.model)
    endpoints = options.resolve()
    control = TritonControl.of(spec.parameters)
    reconciler = Reconciler(clients, endpoints, asked, control, known)
    if control.load:
        reconciler.load(spec.deadline)
    return _described(reconciler)


def _described(reconciler: Reconciler) -> "RemoteModel":
    """The model as described by the first server that answers; raises `LoadFailed`."""
    clients, problems = reconciler.clients, []
    try:
        for endpoint in reconciler.endpoints:
            try:
                said = clients.visit(endpoint, lambda client: client.describe(ASK_SECS))
            except CallFailed as failed:
                problems.append(f"{endpoint.name}: {failed.text}")
            else:
                return RemoteModel(reconciler, endpoint, said)
        what = f"no server answers for model '{clients.options.model}'"
        raise LoadFailed(f"{what}: {'; '.join(problems)}", what)
    except BaseException:
        reconciler.release()
        raise


class RemoteModel(Servable):
    """An upstream model, as described by one of its servers."""

    def __init__(self, reconciler: Reconciler, answered: Endpoint, said: RemoteDescription) -> None:
        """`answered` is the endpoint that has `said` the description."""
        self.reconciler = reconciler
        self.drift = reconciler.differences(said)
        self.forwarding = Forwarding(self.options)
        self.endpoints = list(reconciler.endpoints)
        self.answered = answered
        self.config = said.config
        self._columns = columns_said(said)
        optional = {i.name for i in said.config.input if i.optional} if said.config else set()
        self.inputs = [_info(tensor, optional) for tensor in said.metadata.inputs]
        self.outputs = [_info(tensor, set()) for tensor in said.metadata.outputs]
        self.warnings = [f"server {answered.name} has it otherwise: {one}" for one in self.drift]
        rows = self.max_batch_size
        if rows is None and not (self.inputs and self.outputs):
            rows = 0  # nothing is known of it: its requests are sent unbatched
        self.traits = ModelTraits(
            reads_parameters=True,  # possibly, as far as known here
            exact_shapes=True,  # its servers report the clients' shapes
            max_rows=rows,
            row_limit="",
            forward_headers=self.options.forward_headers,
            alike=self.forwarding.alike,
        )
        self._batches = self._decoupled = self._managed = False
        # Set by the backend: the model knows its pool of servers.
        self.make_pool: Callable[[str, RemoteModel, Surroundings], Placement]
        self.sequences: SequenceRules | None = None  # the rules for sequences, if it has any

    @property
    def clients(self) -> ProtocolClients:
        """The clients of the servers; replaced when credentials have changed."""
        return self.reconciler.clients

    @property
    def options(self) -> RemoteOptions:
        """The current options."""
        return self.clients.options

    @property
    def max_batch_size(self) -> int | None:
        """The maximum number of rows of a request; None if unknown."""
        return None if self.config is None else self.config.max_batch_size

    @property
    def max_in_flight(self) -> int:
        """The maximum number of calls in flight.

        For batches, one more than the instances on all servers, so that each has its next batch
        when one ends, while further requests gather here to a larger one.
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
        """A copy of a configuration completed by the servers' descriptions.

        This concerns inputs, since optional ones could not be recognised later, the names of their
        columns, the decoupled policy, sequences, and instance groups. Raises `Contradiction` for
        missing information.
        """
        if not auto_complete:
            return config
        result = ModelConfig()
        result.CopyFrom(config)
        if self.config is not None:
            complete(result, self.config)
        if self._columns and COLUMNS not in result.parameters:
            result.parameters[COLUMNS].string_value = self._columns
        if not result.input:
            for info in self.inputs:
                if info.datatype is not None:
                    result.input.add(name=info.name, optional=info.optional)
        if not result.instance_group and self.config is not None:
            groups = self.reconciler.groups(self.answered, self.config.instance_group)
            result.instance_group.extend(groups)
        if problems := list(self._untold(result)):
            raise Contradiction(problems)
        return result

    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """Always upstream."""
        return InstanceKind.REMOTE

    def warm_up(self, signature: Signature, version: int, samples: Sequence[Sample]) -> None:
        """Warm the model up, unless a managed Triton does so in each of its instances."""
        if not self._managed:
            warm_up(partial(run_batch, self._infer), signature, str(version), samples)

    def placement(self, name: str, version: Surroundings) -> Placement:
        self.forwarding.traces = version.traces
        return self.make_pool(name, self, version)

    def reported(self, config: ModelConfig) -> tuple[Sequence[TensorInfo], Sequence[TensorInfo]]:
        """The inputs and outputs reported by the servers; without a report, the declared ones."""
        lead = (-1,) if config.max_batch_size > 0 else ()
        return (
            self.inputs or [_declared(tensor, lead) for tensor in config.input],
            self.outputs or [_declared(tensor, lead) for tensor in config.output],
        )

    def _untold(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        """Fields missing in both the servers' descriptions and a configuration, with the problem.

        A server that provides the complete configuration may report a model without tensors.
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
        """Fix signature and form; raises `Contradiction` if the servers disagree."""
        problems = list(self._problems(config))
        if problems:
            raise Contradiction(problems)
        self._batches = batches
        self._managed = is_managed({n: p.string_value for n, p in config.parameters.items()})
        self.clients.signature = signature
        self._decoupled = config.model_transaction_policy.decoupled
        self.sequences = sequence_rules(config)
        self.reconciler.expect(config)

    def _infer(
        self, inputs: Mapping[str, TensorArray], outputs: Sequence[str]
    ) -> Sequence[TensorArray]:
        """The outputs of one blocking call, for warm-up samples."""
        tensors = [
            RemoteInput(name, BY_NUMPY[array.dtype], array.shape, [array])
            for name, array in inputs.items()
        ]
        request, seconds = RemoteRequest(tensors, outputs, {}), self.options.timeout

        def call() -> RemoteAnswer:
            return self.clients.visit(self.answered, lambda client: client.infer(request, seconds))

        try:
            # On a temporary thread: waiting needs an event loop, and the warm-up's thread has one.
            with ThreadPoolExecutor(1) as thread:
                answer = thread.submit(call).result()
        except CallFailed as failed:
            raise failed.failure.error from None
        return [answer.outputs[name] for name in outputs]

    def close(self) -> None:
        """Unload the model on its servers if configured, which may take a while."""
        self.reconciler.release()

    def _problems(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        most = self.max_batch_size
        if most is not None and config.max_batch_size > most:
            yield (
                "max_batch_size",
                f"the remote model takes {most or 'no'} rows in a batch, not"
                f" {config.max_batch_size}",
            )
        if self.reconciler.control.strict:
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
    """Fields of a configuration that other protocols cannot express."""
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
    """Copy what `remote` sets and `config` leaves open into `config`."""
    if remote.model_transaction_policy.decoupled:
        config.model_transaction_policy.decoupled = True
    if _in_sequences(remote) and config.WhichOneof("scheduling_choice") in (None, _SEQUENCES):
        config.sequence_batching.SetInParent()
        _fill(config.sequence_batching, remote.sequence_batching)


def problems(
    config: ModelConfig, remote: ModelConfig | None, calls: int
) -> Iterator[tuple[str, str]]:
    """Contradictions between the configuration and the servers, and unsupported settings.

    `calls` is the configured limit of calls in flight, 0 if it is not set.
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
    managed = MANAGED_PARAMETERS & set(config.parameters)  # its Triton runs them itself
    if (decoupled or _in_sequences(config)) and config.model_warmup and not managed:
        kind = "decoupled" if decoupled else "with sequences"
        yield "model_warmup", f"cannot be sent to a model on other servers that is {kind}"


def sequence_rules(config: ModelConfig) -> SequenceRules | None:
    """The rules for sequences, if any."""
    if not _in_sequences(config):
        return None
    sequences = config.sequence_batching
    return SequenceRules(
        sequences.max_sequence_idle_microseconds * 1000, not sequences.iterative_sequence
    )


def calls_for_sequences(config: ModelConfig, servers: int) -> int:
    """The limit of calls in flight for a model with sequences.

    Twice the number of concurrent sequences on the servers, since first requests, which may have to
    wait for room, get one half.
    """
    sequences = config.sequence_batching
    oldest = sequences.WhichOneof("strategy_choice") == "oldest"
    room = max(sequences.oldest.max_candidate_sequences if oldest else config.max_batch_size, 1)
    return min(max(2 * room * _instances(config) * servers, _FEW_SEQUENCE_CALLS), MOST_IN_FLIGHT)


def _instances(config: ModelConfig) -> int:
    """The number of instances of a model per server, at least one."""
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
    """The value of a field, None for an unset message."""
    singular = message.DESCRIPTOR.fields_by_name[name].has_presence
    return getattr(message, name) if not singular or message.HasField(name) else None


def _fill(target: Message, source: Message) -> None:
    """Copy the fields that `source` sets and `target` does not."""
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
