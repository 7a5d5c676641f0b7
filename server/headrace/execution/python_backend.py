"""Python models under Triton's API, each instance in a worker process of its own.

What has to do with workers is imported when the first model is loaded, on its loading thread.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backends.backend import Backend, BackendContext
from headrace.core.model_spec import LoadSpec
from headrace.execution.worker_options import WORKER_PARAMETERS

if TYPE_CHECKING:
    from headrace.execution.in_process import LoadedInProcess
    from headrace.execution.loaded_worker import LoadedWorker

# All that have a meaning for the server; what others mean, a model knows.
PARAMETERS = WORKER_PARAMETERS | {
    "batching", "execution", "function", "max_concurrency", "split_requests", "strict_outputs",
}  # fmt: skip


class PythonBackend(Backend):
    """Has workers load models, by one of the modules in `headrace.workers.loaders`."""

    isolated = True

    def __init__(
        self, loader: str = "python", platform: str = "python", default_filename: str = "model.py"
    ) -> None:
        self.platform = platform
        self.default_filename = default_filename
        self.filenames: tuple[str, ...] = (default_filename,)
        self.suffixes: tuple[str, ...] = (Path(default_filename).suffix,)
        self._loader = loader

    @classmethod
    def of(cls, context: BackendContext) -> "PythonBackend":
        """Make the backend of a server."""
        return cls()

    def reads_parameter(self, name: str) -> bool:
        """Every parameter may be read by the model itself."""
        return True

    def load(self, spec: LoadSpec) -> "LoadedWorker":
        """Start a worker and have it import the model; raises `LoadFailed`."""
        from headrace.execution.loaded_worker import LoadedWorker

        return LoadedWorker(spec, self._loader)

    def prepare(self) -> None:
        """Import what `load_here` needs."""
        from headrace.execution import in_process  # noqa: F401

    def load_here(self, spec: LoadSpec) -> "LoadedInProcess":
        """Import the model in this process; raises `LoadFailed` or `InvalidOption`."""
        from headrace.execution.in_process import LoadedInProcess

        return LoadedInProcess(spec, self._loader)
