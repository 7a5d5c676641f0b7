"""One batch through one loaded model, timed. Called on whatever thread the instance has chosen."""

from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any, Protocol

from headrace.core.model_spec import TensorInfo
from headrace.core.tensors import TensorArray
from headrace.scheduling.batch import Batch, Outcome, Room


class LoadedModel(Protocol):
    """A model in memory, as a backend gives it. Used by one thread at a time."""

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What the model takes."""

    @property
    def outputs(self) -> Sequence[TensorInfo]:
        """What the model can give."""

    @property
    def file_bytes(self) -> int:
        """Size of the files whose content is in this process now; 0 if that is not known."""

    @property
    def reads_parameters(self) -> bool:
        """Whether it may read parameters of requests, and not only their inputs."""

    @property
    def loops(self) -> bool:
        """Whether values of its inputs may say for how long it runs, as far as that is known."""

    def infer(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Sequence[TensorArray]:
        """Run the model once; arrays in the order of `outputs`. May raise anything.

        `inputs` are arrays; those of BYTES may be undecoded.
        """

    def rest(self) -> None:
        """Give back what is kept for further batches, after a while without any."""

    def terminate(self) -> bool:
        """Have the run under way end soon with whatever error; any thread may call this.

        False if it cannot be ended. Where no run is under way, the next one is not ended by it.
        """

    def close(self) -> None:
        """Give the memory back."""


def run(model: LoadedModel, batch: Batch, room: Room | None = None) -> Outcome:
    """Gather the inputs of `batch` and run them. Never raises: a failure is an outcome too."""
    started = gathered = monotonic_ns()
    arrays: Sequence[TensorArray] = ()
    error: Exception | None = None
    try:
        inputs = batch.gather(room)
        gathered = monotonic_ns()
        arrays = model.infer(inputs, batch.names)
    except Exception as raised:  # whatever a backend raises belongs to this batch alone
        error = raised
    return Outcome(arrays, error, started, gathered, monotonic_ns())
