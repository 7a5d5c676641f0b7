"""The seam of backends: what turns a model's files into something that runs.

A backend is made once by a plugin (`headrace.core.plugins.BACKENDS`), on the event-loop thread; its
models are loaded and used on threads, each by one at a time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.gpus import Gpus
from headrace.core import plugins
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.tensors import TensorArray


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What the server offers to its backends.

    `trust_model_code` is whether files may run code of their authors without saying so. Answers of
    other servers may have `largest_response` bytes, 0 for the usual. `tritons` are the options of
    Triton processes (`headrace.execution.triton.options.TritonOptions`), None if there are none.
    """

    gpus: Gpus = field(default_factory=Gpus)
    trust_model_code: bool = False
    largest_response: int = 0
    tritons: Any = None


class LoadedModel:
    """A model in memory: what backends derive their models from. Used by one thread at a time.

    `inputs` and `outputs` are what it takes and can give,
    `file_bytes` is the size of the files whose content is in this process now, 0 if that is not
    known. `reads_parameters` is whether it may read parameters of requests, and `loops` whether
    values of its inputs may say for how long it runs.
    """

    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[TensorInfo] = ()
    file_bytes: int = 0
    reads_parameters: bool = False
    loops: bool = False

    def infer(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Sequence[TensorArray]:
        """Run the model once; arrays in the order of `outputs`. May raise anything.

        `inputs` are arrays; those of BYTES may be undecoded.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Give back what is kept for further batches, after a while without any."""

    def terminate(self) -> bool:
        """End the run under way soon with whatever error; any thread may call this.

        False if it cannot be ended. Where no run is under way, the next one is not ended by it.
        """
        return False

    def close(self) -> None:
        """Give the memory back."""


class Backend:
    """What a plugin derives its backend from; the attributes are what a class says of itself.

    `filenames` are what a model's file may be called, the best first; a file with one of `suffixes`
    under another name is taken for one, too. Models of an `isolated` backend run in processes of
    their own unless their configuration says otherwise.
    """

    platform: str = ""
    default_filename: str = ""
    filenames: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    isolated: bool = False

    def reads_parameter(self, name: str) -> bool:
        """Whether a parameter of the configuration has a meaning for this backend."""
        return False

    def load(self, spec: LoadSpec) -> LoadedModel:
        """Load one instance; raises `RepositoryError`, for a setting `InvalidOption`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Import what `load` needs, before the memory that models take is measured."""

    def gpu_obstacle(self, count: int) -> str | None:
        """What keeps it from using the `count` GPUs of this machine; "" for nothing.

        For 0, what would keep it from using any. None if its models are never on GPUs unless they
        say so.
        """
        return None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin: whatever it starts belongs to this event loop."""

    def stop(self) -> None:
        """Load nothing more: the server is shutting down."""

    async def close(self) -> None:
        """End all that it has started; nothing is loaded any more."""


def load_backends(context: BackendContext | None = None) -> dict[str, Backend]:
    """All backends by name, in the order in which a model's files are looked at."""
    return plugins.load(plugins.BACKENDS, lambda plugin: make_backend(plugin, context))


def make_backend(plugin: Any, context: BackendContext | None = None) -> Backend:
    """The backend that a plugin makes; raises `TypeError` if that is none."""
    made = plugin(context or BackendContext())
    if not isinstance(made, Backend):
        raise TypeError(f"expected a {Backend.__module__}.Backend, got {made!r}")
    return made
