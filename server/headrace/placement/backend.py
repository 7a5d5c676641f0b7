"""The seam of backends: what turns a model's files into something that runs.

A backend is made once by a plugin (`headrace.core.plugins.BACKENDS`), on the event-loop thread; its
models are loaded and used on threads, each by one at a time.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from headrace.core import plugins
from headrace.core.model_spec import LoadSpec
from headrace.placement.choice import InstanceKind
from headrace.placement.local.instances import LoadedModel
from headrace.protocol.pb.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Options and devices of the server, for its backends.

    `gpus` are the `placement.local.gpus.Gpus` of this process, None for all that there are.
    `trust_model_code` is whether files may run code of their authors without saying so. Answers of
    other servers may have `largest_response` bytes, 0 for the usual. `tritons` are the
    `TritonOptions` of processes of Triton, None if there are none.
    """

    gpus: Any = None
    trust_model_code: bool = False
    largest_response: int = 0
    tritons: Any = None


class Backend:
    """The base class of backends; its attributes are constants of each class.

    `filenames` are what a model's file may be called, the best first; a file with one of `suffixes`
    under another name is taken for one, too. Models of an `isolated` backend run in processes of
    their own unless their configuration says otherwise. `places_instances` is whether instance
    groups, devices and cores are up to this server, and not to those that run the models, which may
    be absent. `decoupled` is whether models may answer a call any number of times. `parameters` are
    those of configurations that have a meaning for it, as far as they are known.
    """

    platform: str = ""
    default_filename: str = ""
    filenames: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    isolated: bool = False
    places_instances: bool = True
    decoupled: bool = False

    @property
    def parameters(self) -> Set[str]:
        """The names of parameters that have a meaning for it, to know misspelt ones by."""
        return frozenset()

    def reads_parameter(self, name: str) -> bool:
        """True if a parameter of the configuration has a meaning for this backend."""
        return name in self.parameters

    def reads_everything(self, parameters: Mapping[str, str]) -> bool:
        """True if somebody else reads the whole configuration of a model with these parameters."""
        return False

    def version_without_files(self, parameters: Mapping[str, str]) -> int | None:
        """The version of a model that has no version directory; None if it needs one."""
        return None

    def execution_problems(
        self, config: ModelConfig, wanted: str, in_process: bool
    ) -> Iterator[str]:
        """Why a model cannot run where parameters['execution'] wants it.

        `in_process` is whether models' own code may run in the server's process.
        """
        if wanted == InstanceKind.PROCESS and not self.isolated:
            yield (
                f"'process' is for Python models; those of {config.backend} run inline or in"
                " threads"
            )
        on_gpu = any(group.kind == group.KIND_GPU for group in config.instance_group)
        if wanted == InstanceKind.INLINE and on_gpu:
            yield "'inline' is for the CPU; instances on a GPU run in threads"

    def idle_parameters(self, parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """The names of parameters that change nothing beside these others, and why."""
        return iter(())

    def load(self, spec: LoadSpec) -> LoadedModel:
        """Load one instance; raises `RepositoryError`, for a setting `InvalidOption`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Import what `load` needs, before the memory that models take is measured."""

    def gpu_obstacle(self, count: int) -> str | None:
        """Why it cannot use the `count` GPUs of this machine; "" if it can.

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


def stop_backends(backends: Mapping[str, Backend]) -> None:
    """Stop all backends; one that fails is logged, and keeps no other from being stopped."""
    for name, backend in backends.items():
        try:
            backend.stop()
        except Exception:  # a bug in somebody else's code: the server is to end in good order
            log.exception("bug while stopping the backend %s", name)


async def close_backends(backends: Mapping[str, Backend]) -> None:
    """Close all backends; one that fails is logged, and keeps no other from being closed."""
    for name, backend in backends.items():
        try:
            await backend.close()
        except Exception:  # likewise: what the others have started would be left behind
            log.exception("bug while closing the backend %s", name)
