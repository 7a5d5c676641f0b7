"""Options of models loaded on upstreams by this server, and of managed Tritons.

They come from the operator and from models' configurations. `LoadCounts` counts the models that
upstreams have loaded for this server. They are separate since a backend has them before its first
model, when the other upstream modules are not imported yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from headrace.core.texts import flag, invalid, unexpected, whole

BACKEND, PLATFORM = "remote_backend", "remote_platform"
MANAGED_PARAMETERS = frozenset({BACKEND, PLATFORM})
# Parameters parsed here.
TRITON_PARAMETERS = MANAGED_PARAMETERS | {
    "remote_load", "remote_unload", "remote_drift", "drift_interval_secs"
}  # fmt: skip
# Parameters about servers started by others.
_ELSEWHERE = (
    "endpoints", "remote_model", "remote_version", "remote_load", "remote_unload", "tls_root_cert",
    "tls_cert", "tls_key", "authorization_file", "protocol", "host", "http_tensors",
)  # fmt: skip
PER_GPU = "per-gpu"
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """Options of managed Triton processes; times are in seconds.

    `program` is a path, or a name to be found in PATH. `processes` is a number, or "per-gpu" for
    one per GPU. `gpus` are the visible GPUs, as CUDA names them; empty for all. `arguments` are
    further ones for the program, `passed` the names of further environment variables. A process may
    take `start_secs` until it is live and `exit_secs` to end; one that is silent for `hang_secs` is
    killed, unless 0.
    """

    program: str = "tritonserver"
    processes: str = "1"
    gpus: Sequence[str] = ()
    arguments: Sequence[str] = ()
    passed: Sequence[str] = ()
    start_secs: float = 120.0
    exit_secs: float = 10.0
    hang_secs: float = 60.0


@dataclass(frozen=True, slots=True)
class TritonControl:
    """Control of a model on upstreams, according to its configuration.

    `load` makes this server load it there, and `unload` unload it in the end. The reported state is
    compared with the configuration on load and every `drift_secs`, 0 for never; a model with
    differences is served all the same unless `strict`.
    """

    load: bool
    unload: bool
    strict: bool
    drift_secs: float

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "TritonControl":
        """Parse a model's parameters; raises `InvalidOption`."""
        load, unload = (flag(parameters, name) for name in ("remote_load", "remote_unload"))
        if unload and not load:
            raise invalid("remote_unload", "unloads what remote_load has loaded; set that, too")
        drift = parameters.get("remote_drift", "warn")
        if drift not in ("warn", "refuse"):
            raise unexpected(parameters, "remote_drift", "warn or refuse")
        expected = "whole seconds, at most a day"
        interval = whole(parameters, "drift_interval_secs", 60, most=_DAY, expected=expected)
        return cls(load, unload, drift == "refuse", interval)


@dataclass(frozen=True, slots=True)
class NumberedProcess:
    """One process of Triton: number `index` of `count`.

    `visible` are its visible GPUs, as in CUDA_VISIBLE_DEVICES; None for those of the server's own
    environment. `own_gpu` is true if it has one GPU of its own, whose number among those of all
    processes is `index`.
    """

    index: int
    count: int
    visible: str | None = None
    own_gpu: bool = False

    @property
    def label(self) -> str:
        """Name of the process in logs and metrics."""
        return f"triton-{self.index}"


def is_managed(parameters: Mapping[str, str]) -> bool:
    """True if a model with these parameters is for a managed Triton."""
    return any(parameters.get(name) for name in MANAGED_PARAMETERS)


def check_managed(parameters: Mapping[str, str]) -> None:
    """Raise `InvalidOption` for parameters without meaning for such a model."""
    for name in _ELSEWHERE:
        if parameters.get(name):
            raise invalid(
                name,
                f"is for servers that others have started; {BACKEND} and {PLATFORM} are for a"
                " Triton that this server starts",
            )


class LoadCounts:
    """Counts users in this server of each model that upstreams have loaded for it.

    A replaced version unloads its model only if its successor does not use the same one.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[object, int] = {}

    def take(self, key: object) -> None:
        """Add a user."""
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def give_back(self, key: object) -> bool:
        """Remove a user; True if it was the last one."""
        with self._lock:
            self._counts[key] -= 1
            last = not self._counts[key]
            if last:
                del self._counts[key]
            return last
