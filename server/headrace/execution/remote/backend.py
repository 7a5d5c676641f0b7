"""Models that another server runs, by the V2 protocol: Triton, or whatever speaks it.

There is nothing to load. What the model takes and gives is asked of the first server that answers;
a server that offers no configuration (an extension of the protocol) is taken by its metadata alone.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from headrace.core.datatypes import BY_NAME, BY_NUMPY
from headrace.core.errors import Contradiction, LoadFailed
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.signature import Signature
from headrace.core.tensors import Array
from headrace.execution.remote.options import (
    REMOTE_PARAMETERS,
    Endpoint,
    RemoteOptions,
)
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.pb.model_config_pb2 import ModelConfig
from headrace.wire.remote_infer import RemoteInput, RemoteMessages, read_answer

if TYPE_CHECKING:
    from headrace.execution.remote.calls import LoadingCalls
    from headrace.execution.remote.pool import RemotePool, Scheduler

_METADATA_SECS = 10.0
_UNIMPLEMENTED = 12
_MOST_CALLS = 64  # under way at a time, unless the configuration says more
_FEW_CALLS = 4  # of a model of which nothing is known


class RemoteBackend:
    """Asks the servers that a model's configuration names."""

    platform = "triton"
    default_filename = ""
    filenames: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    isolated = False

    def reads_parameter(self, name: str) -> bool:
        """Whether it is one of those that the documentation names."""
        return name in REMOTE_PARAMETERS

    def load(self, spec: LoadSpec) -> "RemoteModel":
        """Ask a server about the model; raises `LoadFailed` or `InvalidOption`."""
        directory = spec.version if (spec.root / str(spec.version)).is_dir() else 0
        options = RemoteOptions.of(spec.parameters, spec.model, directory, spec.root)
        from headrace.execution.remote.calls import CallFailed, LoadingCalls

        endpoints = options.resolve()
        problems = []
        for endpoint in endpoints:
            with LoadingCalls(endpoint, options.credentials) as calls:
                try:
                    said = _ask(calls, options)
                except CallFailed as failed:
                    problems.append(f"{endpoint.name}: {failed.text}")
                except DecodeError as error:
                    problems.append(f"{endpoint.name}: does not speak the V2 protocol: {error}")
                else:
                    return RemoteModel(options, endpoints, endpoint, said)
        what = f"no server answers for model '{options.model}'"
        raise LoadFailed(f"{what}: {'; '.join(problems)}", what)


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """What a server says of a model; `config` is None if it does not tell."""

    metadata: pb.ModelMetadataResponse
    config: ModelConfig | None


class RemoteModel:
    """A model elsewhere, as one of its servers has described it."""

    file_bytes = 0

    def __init__(
        self,
        options: RemoteOptions,
        endpoints: Sequence[Endpoint],
        answered: Endpoint,
        said: RemoteDescription,
    ) -> None:
        """`answered` is that of the endpoints which has `said` what the model is."""
        self.options = options
        self.endpoints = list(endpoints)
        self.answered = answered
        self.config = said.config
        optional = {i.name for i in said.config.input if i.optional} if said.config else set()
        self.inputs = [_info(tensor, optional) for tensor in said.metadata.inputs]
        self.outputs = [_info(tensor, set()) for tensor in said.metadata.outputs]
        self.messages = RemoteMessages(options.model, options.version)
        self._signature: Signature | None = None
        self._batches = False

    @property
    def max_batch_size(self) -> int | None:
        """The most rows of a request there; None if that is not known."""
        return None if self.config is None else self.config.max_batch_size

    @property
    def max_in_flight(self) -> int:
        """How many calls may be under way at a time.

        For batches, one more than there are instances on all servers, so that each has its next
        batch when it ends one, and what waits grows a larger one here.
        """
        if self.options.max_in_flight:
            return self.options.max_in_flight
        if not self._batches:
            return _MOST_CALLS
        if self.config is None:
            return _FEW_CALLS
        instances = sum(
            max(group.count, 1) * max(len(group.gpus), 1) for group in self.config.instance_group
        )
        servers = len({endpoint.target for endpoint in self.endpoints})
        return min((max(instances, 1) + 1) * servers, _MOST_CALLS)

    def declared(self, config: ModelConfig) -> ModelConfig:
        """A copy of a configuration with the inputs that the servers take, unless it has its own.

        Optional ones are among them, which could not be told apart later.
        """
        result = ModelConfig()
        result.CopyFrom(config)
        if not result.input:
            for info in self.inputs:
                if info.datatype is not None:
                    result.input.add(name=info.name, optional=info.optional)
        return result

    def begin(self, config: ModelConfig, signature: Signature, batches: bool) -> None:
        """Take the complete configuration; `batches` is whether requests run together here.

        Raises `Contradiction` where the servers say something else.
        """
        problems = list(self._problems(config))
        if problems:
            raise Contradiction(problems)
        self._signature, self._batches = signature, batches

    def pool(
        self,
        name: str,
        scheduler: "Scheduler",
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
    ) -> "RemotePool":
        """The servers, behind a scheduler from now on; after `begin`."""
        # Not with the other imports: gRPC's library takes memory and time, which servers without
        # such models need not spend.
        from headrace.execution.remote.pool import RemotePool

        assert self._signature is not None
        return RemotePool(name, self, self._signature, scheduler, loop, changed)

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        """One call on this thread, of which samples are warmed up."""
        from headrace.execution.remote.calls import CallFailed, LoadingCalls

        tensors = [
            RemoteInput(name, BY_NUMPY[array.dtype], array.shape, [array])
            for name, array in inputs.items()
        ]
        message = self.messages.request(tensors, outputs, {})
        with LoadingCalls(self.answered, self.options.credentials) as calls:
            try:
                answer = read_answer(calls.call("ModelInfer", message, self.options.timeout))
            except CallFailed as failed:
                raise failed.failure(self.options.model).error from None
        return [answer.outputs[name] for name in outputs]

    def close(self) -> None:
        """There is nothing to give back."""

    def _problems(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        most = self.max_batch_size
        if most is not None and config.max_batch_size > most:
            yield (
                "max_batch_size",
                f"the remote model takes {most or 'no'} rows in a batch, not"
                f" {config.max_batch_size}",
            )
        remote = self.config or ModelConfig()
        if remote.model_transaction_policy.decoupled or config.model_transaction_policy.decoupled:
            yield (
                "model_transaction_policy.decoupled",
                "decoupled models cannot be forwarded by this server",
            )
        if remote.WhichOneof("scheduling_choice") == "sequence_batching":
            yield (
                "backend",
                "the remote model wants sequences (sequence_batching), which cannot be forwarded by"
                " this server",
            )


def _ask(calls: "LoadingCalls", options: RemoteOptions) -> RemoteDescription:
    from headrace.execution.remote.calls import CallFailed

    asked = pb.ModelMetadataRequest(name=options.model, version=options.version)
    answer = calls.call("ModelMetadata", asked.SerializeToString(), _METADATA_SECS)
    metadata = pb.ModelMetadataResponse.FromString(answer)
    wanted = pb.ModelConfigRequest(name=options.model, version=options.version)
    try:
        answer = calls.call("ModelConfig", wanted.SerializeToString(), _METADATA_SECS)
    except CallFailed as failed:
        if failed.status != _UNIMPLEMENTED:
            raise
        return RemoteDescription(metadata, None)
    return RemoteDescription(metadata, pb.ModelConfigResponse.FromString(answer).config)


def _info(tensor: pb.ModelMetadataResponse.TensorMetadata, optional: set[str]) -> TensorInfo:
    return TensorInfo(
        tensor.name,
        BY_NAME.get(tensor.datatype),
        tuple(tensor.shape),
        tensor.datatype,
        tensor.name in optional,
    )
