"""A model in memory, and where that is, told without importing what loads models there.

A server imports what runs models in workers, in itself or on other servers when the first of them
is loaded. Each of these classes has one that is derived from it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from headrace.core.model_spec import TensorInfo
from headrace.core.tensors import TensorArray

if TYPE_CHECKING:
    from headrace.execution.in_process import LoadedInProcess
    from headrace.execution.loaded_worker import LoadedWorker
    from headrace.execution.remote.model import RemoteModel


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


class _KeepsNothing:
    """What keeps no memory for further batches, or elsewhere, and whose runs nothing here ends."""

    def rest(self) -> None:
        """See `LoadedModel`."""

    def terminate(self) -> bool:
        """See `LoadedModel`."""
        return False


class InWorker(_KeepsNothing):
    """A model in a worker process: `LoadedWorker`."""


class InServer(_KeepsNothing):
    """A Python model in the server's own process: `LoadedInProcess`."""


class Elsewhere(_KeepsNothing):
    """A model that other servers run: `RemoteModel`."""


def in_worker(model: LoadedModel) -> "TypeGuard[LoadedWorker]":
    """Whether it is in a worker process."""
    return isinstance(model, InWorker)


def in_server(model: LoadedModel) -> "TypeGuard[LoadedInProcess]":
    """Whether it is a Python model in the server's own process."""
    return isinstance(model, InServer)


def is_elsewhere(model: LoadedModel) -> "TypeGuard[RemoteModel]":
    """Whether other servers run it."""
    return isinstance(model, Elsewhere)
