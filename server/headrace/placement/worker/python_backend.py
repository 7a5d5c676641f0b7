"""The backend of Python models with Triton's API, each instance in a worker process.

Modules for workers are imported when the first model is loaded, on its loading thread.
"""

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import InvalidOption
from headrace.core.model_spec import LoadSpec
from headrace.core.plugins import OptionalPart
from headrace.core.ragged import RaggedForm
from headrace.placement.backend import Backend, BackendContext
from headrace.placement.choice import IN_PROCESS
from headrace.placement.loaded import Servable
from headrace.placement.worker.python_options import WORKER_PARAMETERS
from headrace.protocol.pb.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from headrace.placement.worker.loaded_worker import LoadedWorker

# Makes a model in this process, from its files and the module of its loader.
IN_PROCESS_MODELS: OptionalPart[Callable[[LoadSpec, str], Servable]] = OptionalPart("in_process")
# The loader of Python files in a worker, in place of `headrace.workers.python_loader:load`.
FUNCTIONS: OptionalPart[Callable[[dict[str, Any]], Any]] = OptionalPart("functions")

# Parameters read by the server; the model itself may read any.
PARAMETERS = WORKER_PARAMETERS | {
    "batching", "execution", "fair_share", "function", "max_concurrency", "overload_delay_ms",
    "split_requests", "strict_outputs",
}  # fmt: skip


class PythonBackend(Backend):
    """Python models with Triton's API, and classes of the same form made by loader modules."""

    isolated = True
    decoupled = True
    ragged: RaggedForm | None = RaggedForm.APART

    def __init__(
        self,
        loader: str = "",
        platform: str = "python",
        default_filename: str = "model.py",
    ) -> None:
        """`loader` is the module whose `load` makes the model's class in the worker.

        By default that of functions, or else Triton's.
        """
        self.platform = platform
        self.default_filename = default_filename
        self.filenames: tuple[str, ...] = (default_filename,)
        self.suffixes: tuple[str, ...] = (Path(default_filename).suffix,)
        target = FUNCTIONS.target or "headrace.workers.python_loader"
        self._loader = loader or target.partition(":")[0]

    @classmethod
    def of(cls, context: BackendContext) -> "PythonBackend":
        """Make the backend of a server."""
        return cls()

    @property
    def parameters(self) -> Set[str]:
        return PARAMETERS

    def reads_parameter(self, name: str) -> bool:
        """Always True: the model itself may read any parameter."""
        return True

    def execution_problems(
        self, config: ModelConfig, wanted: str, in_process: bool
    ) -> Iterator[str]:
        yield from super().execution_problems(config, wanted, in_process)
        if wanted in IN_PROCESS and not in_process:
            yield (
                f"'{wanted}' runs the model's code in the server's own process, which has to be"
                " allowed by --allow-in-process-python; without this parameter it runs in a worker"
                " process"
            )

    def load(self, spec: LoadSpec) -> Servable:
        """Import the model in a worker, or in this process if configured.

        Raises `LoadFailed` or `InvalidOption`.
        """
        here = spec.parameters.get("execution") in IN_PROCESS
        if here and spec.isolation is not None and spec.isolation.confines(spec.parameters):
            text = "a model in the server's process cannot be isolated from it"
            raise InvalidOption("parameters['execution']", text)
        return self.load_here(spec) if here else self.load_apart(spec)

    def load_apart(self, spec: LoadSpec) -> "LoadedWorker":
        """Start a worker that imports the model; raises `LoadFailed`."""
        from headrace.placement.worker.loaded_worker import LoadedWorker

        return LoadedWorker(spec, self._loader)

    def prepare(self) -> None:
        """Import the dependencies of `load_here`."""
        IN_PROCESS_MODELS.load()

    def load_here(self, spec: LoadSpec) -> Servable:
        """Import the model in this process; raises `LoadFailed` or `InvalidOption`."""
        return IN_PROCESS_MODELS.load()(spec, self._loader)
