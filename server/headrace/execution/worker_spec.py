"""How a worker process is started: interpreter, threads, environment."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from headrace.workers.limits import Limits

# What a model may see of the server's environment; other variables may be secrets.
_PASSED = frozenset(
    {
        "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
        "VIRTUAL_ENV", "ORT_DISABLE_TELEMETRY", "GLIBC_TUNABLES",
    }
)  # fmt: skip
_PASSED_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "HF_", "TRANSFORMERS_", "TORCH_", "OMP_", "MKL_", "MALLOC_",
)  # fmt: skip
_OWN = "HEADRACE_"  # settings of the server, keys among them
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def passed_environment(*prefixes: str, variables: Sequence[str] = ()) -> dict[str, str]:
    """What of the server's environment is no secret, and variables with further `prefixes`.

    Also those that one of the names or patterns in `variables` fits, but for the server's own.
    """
    every = _PASSED_PREFIXES + prefixes
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED
        or name.startswith(every)
        or (not name.startswith(_OWN) and any(fnmatchcase(name, v) for v in variables))
    }


@dataclass(frozen=True, slots=True)
class Ways:
    """How a model runs its batches, as it has said when it was started, and its configuration.

    `concurrency` is how many a coroutine runs at a time, 0 for one after the other; `asks` whether
    the model is to be asked if it is ready.
    """

    concurrency: int = 0
    asks: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a worker is started, and whose it is, for the log.

    `threads` is for numeric libraries. `prefix` is the directory of the model's own environment.
    `variables` are further ones of the server's that it sees, by name or pattern.
    """

    model: str
    version: str
    instance: str
    python: str = sys.executable
    threads: int = 1
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)
    variables: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """The environment variables that the process gets."""
        passed = passed_environment(variables=self.variables)
        threads = {name: str(self.threads) for name in _THREADS if name not in passed}
        return {**passed, **threads, **self._own(), "PYTHONUNBUFFERED": "1"}

    def _own(self) -> dict[str, str]:
        """What a shell sets where an environment is activated, for programs that a model starts."""
        if not self.prefix:
            return {}
        kind = "CONDA_PREFIX" if os.path.isdir(f"{self.prefix}/conda-meta") else "VIRTUAL_ENV"
        path = os.pathsep.join([f"{self.prefix}/bin", os.environ.get("PATH", os.defpath)])
        return {
            "VIRTUAL_ENV": self.prefix,
            kind: self.prefix,
            "PATH": path,
            "PYTHONNOUSERSITE": "1",
        }
