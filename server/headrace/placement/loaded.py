"""Loaded models, as the engine sees them: wherever they run, with their traits as a value.

A backend's `load` makes one `Servable` for each instance: a `LoadedModel` in this process, a worker
process with a model, or a model on upstreams. The engine does not ask for its class: a placement
runs it, and its traits are read while it is loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.core.call import Call
from headrace.core.model_spec import TensorInfo
from headrace.core.signature import Signature
from headrace.core.tensors import TensorArray
from headrace.observability.machine import in_process_estimate
from headrace.placement.choice import AutoChoice, InstanceKind, measure, sizes_of
from headrace.placement.local.instances import LocalPlacement, run_batch
from headrace.placement.placement import ModelServices, Placement, Surroundings
from headrace.placement.warming import Sample, warm_up
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.scheduling.batch import Batch, BatchBuffer, Outcome

DEFAULT_ROWS = "--default-max-batch-size, since its configuration sets no max_batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Properties of a loaded model; defaults are those of a file that is run in this process.

    `file_bytes` is the size of the files loaded into this process, 0 if unknown. The model's code
    declares its tensors if `declared_by_code`, and may read request parameters if
    `reads_parameters`. `loops` is true if values of its inputs may determine the duration of a run,
    `pins_inputs` if inputs are best in page-locked memory, `exact_shapes` if an empty shape means a
    scalar. `max_rows` is the limit of a batch's rows if the configuration sets none, None for the
    server's default; `row_limit` names that limit, "" for the model itself. `quarantine_deaths` is
    the number of workers an input may kill, None without workers. For a model on upstreams,
    `forward_headers` are the client headers to forward, and `alike` returns the key that calls of
    one batch share.
    """

    file_bytes: int = 0
    declared_by_code: bool = False
    reads_parameters: bool = False
    loops: bool = False
    pins_inputs: bool = False
    exact_shapes: bool = False
    max_rows: int | None = None
    row_limit: str = DEFAULT_ROWS
    quarantine_deaths: int | None = None
    forward_headers: Sequence[str] | None = None
    alike: Callable[[Call], object] | None = None


class Servable(ABC):
    """A model as loaded by its backend, for one instance.

    `inputs` and `outputs` are its declared tensors, empty if its code declares them in the
    configuration. `warnings` are tolerated differences from the configuration.
    """

    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[TensorInfo] = ()
    warnings: Sequence[str] = ()
    traits = ModelTraits()

    # --- during the load, on its thread

    def completed(self, config: ModelConfig, auto_complete: bool = True) -> ModelConfig:
        """A copy of `config` completed with the model's own settings besides its tensors.

        Raises `Contradiction` for missing required settings, or `InvalidConfig`.
        """
        return config

    def reported(self, config: ModelConfig) -> tuple[Sequence[TensorInfo], Sequence[TensorInfo]]:
        """The inputs and outputs that a complete configuration must match."""
        return self.inputs, self.outputs

    def begin(  # noqa: B027 - a loaded file can run
        self,
        config: ModelConfig,
        signature: Signature,
        batches: bool,
        host: ModelServices | None = None,
    ) -> None:
        """Start with the complete configuration; `batches` is true if calls share batches.

        `host` provides services to the model, None for none. Raises `LoadFailed` or
        `Contradiction`.
        """

    @abstractmethod
    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """The kind of its instance, by parameters['execution']; `device` is its GPU, if any."""

    @abstractmethod
    def warm_up(self, signature: Signature, version: int, samples: Sequence[Sample]) -> None:
        """Run the configuration's samples; raises `LoadFailed`."""

    def memory(self, growth: int | None) -> int:
        """The bytes that it takes; `growth` is that of this process during the load, if known."""
        return in_process_estimate(self.traits.file_bytes, growth)

    # --- while serving

    @abstractmethod
    def placement(self, name: str, version: Surroundings) -> Placement:
        """The placement for instances like this one, which is named `name`."""

    @abstractmethod
    def close(self) -> None:
        """Release the model, wherever it is."""


class LoadedModel(Servable):
    """A model loaded into this process, used by one thread at a time.

    The base class of backends' own models, which implement `infer`, set `inputs`, `outputs` and
    `traits`, and may implement `rest`, `terminate` and `close`. `any_thread` is true if `infer` may
    be called on any thread.
    """

    any_thread = False

    def infer(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Sequence[TensorArray]:
        """Run the model; returns arrays in the order of `outputs`. May raise anything.

        `inputs` are arrays; those of BYTES may be undecoded.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Release memory cached for further batches, after a while without any."""

    def terminate(self) -> bool:
        """Terminate the current run soon, with any error; thread-safe.

        Returns False if that is impossible. Without a current run, the next one is not affected.
        """
        return False

    def close(self) -> None:
        """Release the model's memory."""

    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """The configured kind, or for `auto` one by the measured cost of a run."""
        if wanted != "auto":
            return InstanceKind(wanted)
        cost = measure(self.infer, signature)
        # Waiting for a GPU must not block the event loop, nor may a request that determines the
        # duration of a run, nor a ragged batch, which has no shape to be measured by.
        if device is not None or self.traits.loops or signature.ragged is not None:
            return InstanceKind.THREAD
        return AutoChoice(cost, sizes=sizes_of(signature, cost))

    def warm_up(self, signature: Signature, version: int, samples: Sequence[Sample]) -> None:
        warm_up(self.batch_function(), signature, str(version), samples)

    def placement(self, name: str, version: Surroundings) -> Placement:
        return LocalPlacement(version)

    def batch_function(self, buffer: BatchBuffer | None = None) -> Callable[[Batch], Outcome]:
        """The function that runs batches, gathered in `buffer`; a failure is an outcome, too."""
        return partial(run_batch, self.infer, buffer=buffer)
