"""The interface of backends, which load a model's files as something that runs.

A backend is created once by a plugin (`BACKENDS`), on the event-loop thread; its models are loaded
and used on threads, each by one at a time.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from headrace.core.model_spec import LoadSpec, Used
from headrace.core.plugins import PluginGroup
from headrace.core.ragged import RaggedForm
from headrace.core.signature import Signature
from headrace.placement.choice import InstanceKind
from headrace.placement.loaded import Servable
from headrace.protocol.pb.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Options and devices of the server for its backends.

    `gpus` are the `placement.local.gpus.Gpus` of this process, None for all existing ones.
    `trust_model_code` is true if all files may run their authors' code. Responses of upstreams may
    have `largest_response` bytes, 0 for the default. `tritons` are the `TritonOptions` of managed
    Triton processes, None if there are none.
    """

    gpus: Any = None
    trust_model_code: bool = False
    largest_response: int = 0
    tritons: Any = None


class Backend:
    """The base class of backends; its attributes are constants of each class.

    `filenames` are the possible names of a model's file, the preferred one first; a file with one
    of `suffixes` under another name is accepted, too. Models of an `isolated` backend run in
    processes of their own by default. `places_instances` is true if this server decides on instance
    groups, devices and cores; otherwise upstreams do, which may be absent. `decoupled` is true if
    models may be decoupled. `ragged` is the form in which its models get inputs of different shapes
    in one batch, None if they get none. `parameters` are the known configuration parameters that
    the backend reads.
    """

    platform: str = ""
    default_filename: str = ""
    filenames: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    isolated: bool = False
    places_instances: bool = True
    decoupled: bool = False
    ragged: RaggedForm | None = None

    @property
    def parameters(self) -> Set[str]:
        """The names of the parameters that it reads, to detect misspelt ones."""
        return frozenset()

    def reads_parameter(self, name: str) -> bool:
        """True if the backend reads this parameter of the configuration."""
        return name in self.parameters

    def reads_everything(self, parameters: Mapping[str, str]) -> bool:
        """True if a model with these parameters passes its whole configuration on."""
        return False

    def version_without_files(self, parameters: Mapping[str, str]) -> int | None:
        """The version of a model without version directories; None if it needs one."""
        return None

    def execution_problems(
        self, config: ModelConfig, wanted: str, in_process: bool
    ) -> Iterator[str]:
        """The reasons why a model cannot run as parameters['execution'] asks.

        `in_process` is true if models' own code may run in the server's process.
        """
        if wanted == InstanceKind.PROCESS and not self.isolated:
            yield (
                f"'process' is for Python models; those of {config.backend} run inline or in"
                " threads"
            )
        on_gpu = any(group.kind == group.KIND_GPU for group in config.instance_group)
        if wanted == InstanceKind.INLINE and on_gpu:
            yield "'inline' is for the CPU; instances on a GPU run in threads"

    def uses(self, config: ModelConfig) -> Collection[Used]:
        """The models that a model runs; raises `Contradiction` if it cannot run any such."""
        return ()

    def use_problems(
        self, config: ModelConfig, used: Mapping[Used, Signature]
    ) -> Iterator[tuple[str, str]]:
        """Fields that do not fit the models that it runs, with the problem; see `uses`."""
        return iter(())

    def idle_parameters(self, parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Parameters without effect beside these others, with the reason."""
        return iter(())

    def load(self, spec: LoadSpec) -> Servable:
        """Load one instance; raises `RepositoryError`, for an invalid option `InvalidOption`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Import the dependencies of `load`, before models' memory is measured."""

    def gpu_obstacle(self, count: int) -> str | None:
        """The reason why it cannot use the `count` GPUs of this machine; "" if it can.

        For 0, the reason why it could not use any. None if its models are only on GPUs when they
        ask for it.
        """
        return None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start; anything started belongs to this event loop."""

    def stop(self) -> None:
        """Start no more loads: the server is shutting down."""

    async def close(self) -> None:
        """End everything that was started; no loads follow."""


MakeBackend = Callable[[BackendContext], Backend]
BACKENDS: PluginGroup[MakeBackend] = PluginGroup("headrace.backends")


def load_backends(context: BackendContext | None = None) -> dict[str, Backend]:
    """All backends by name, in the order in which they examine a model's files."""
    return BACKENDS.load(lambda plugin: make_backend(plugin, context))


def make_backend(plugin: MakeBackend, context: BackendContext | None = None) -> Backend:
    """The backend made by a plugin; raises `TypeError` if it makes something else."""
    made: object = plugin(context or BackendContext())
    if not isinstance(made, Backend):
        raise TypeError(f"expected a {Backend.__module__}.Backend, got {made!r}")
    return made


def stop_backends(backends: Mapping[str, Backend]) -> None:
    """Stop all backends; a failing one is logged and does not affect the others."""
    for name, backend in backends.items():
        try:
            backend.stop()
        except Exception:  # a bug in a plugin must not disturb the shutdown
            log.exception("bug while stopping the backend %s", name)


async def close_backends(backends: Mapping[str, Backend]) -> None:
    """Close all backends; a failing one is logged and does not affect the others."""
    for name, backend in backends.items():
        try:
            await backend.close()
        except Exception:  # likewise: processes of the others would be left behind
            log.exception("bug while closing the backend %s", name)
