"""Options of models that this server has others load, and of the Tritons that it starts for them.

They come from the operator and from models' configurations. `LoadCounts` counts the models that
servers have loaded for this one. All of it is here since a backend has it from before its first
model, when nothing else of other servers is imported.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from headrace.core.errors import InvalidOption
from headrace.core.texts import whole_number

BACKEND, PLATFORM = "remote_backend", "remote_platform"
MANAGED_PARAMETERS = frozenset({BACKEND, PLATFORM})
# What is read of a model's parameters here.
TRITON_PARAMETERS = MANAGED_PARAMETERS | {
    "remote_load", "remote_unload", "remote_drift", "drift_interval_secs"
}  # fmt: skip
# What is about servers that somebody else has started.
_ELSEWHERE = (
    "endpoints", "remote_model", "remote_version", "remote_load", "remote_unload", "tls_root_cert",
    "tls_cert", "tls_key", "authorization_file", "protocol", "host", "http_tensors",
)  # fmt: skip
PER_GPU = "per-gpu"
_DAY = 86_400
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """How Triton's processes are started; times are in seconds.

    `program` is a path, or a name that is looked up in PATH. `processes` is a number, or "per-gpu"
    for one for each GPU. `gpus` are what the processes may see, as CUDA names them; empty for all.
    `arguments` are further ones for the program, `passed` the names of further environment
    variables. A process may take `start_secs` until it is live and `exit_secs` to end; one that
    says nothing for `hang_secs` is killed, unless that is 0.
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
class ControlOptions:
    """Loading of a model where others run it, as its configuration wants it.

    `load` is whether this server has it loaded there, and `unload` whether it has it unloaded in
    the end. What a server reports is held against what was asked for when the model is loaded and
    every `drift_secs`, 0 for never; a model that is not as it was asked for is served all the same
    unless `strict`.
    """

    load: bool
    unload: bool
    strict: bool
    drift_secs: float

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "ControlOptions":
        """From a model's parameters; raises `InvalidOption`."""
        load, unload = (_flag(parameters, name) for name in ("remote_load", "remote_unload"))
        if unload and not load:
            raise InvalidOption(
                "parameters['remote_unload']", "unloads what remote_load has loaded; set that, too"
            )
        drift = parameters.get("remote_drift", "warn")
        if drift not in ("warn", "refuse"):
            raise InvalidOption(
                "parameters['remote_drift']", f"expected warn or refuse, got {drift!r}"
            )
        text = parameters.get("drift_interval_secs", "60")
        if whole_number(text, 0, _DAY) is None:
            raise InvalidOption(
                "parameters['drift_interval_secs']",
                f"expected whole seconds, at most a day, got {text!r}",
            )
        return cls(load, unload, drift == "refuse", float(text))


@dataclass(frozen=True, slots=True)
class Place:
    """One process of Triton: the `index`-th of `count`.

    `visible` are the GPUs that it sees, as in CUDA_VISIBLE_DEVICES; None for what the server's own
    environment says. `own_gpu` is whether that is one of its own, whose number among those of all
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


def _flag(parameters: Mapping[str, str], name: str) -> bool:
    text = parameters.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidOption(f"parameters['{name}']", f"expected true or false, got {text!r}")
    return text == "true"


def is_managed(parameters: Mapping[str, str]) -> bool:
    """True if a model with these parameters is for a Triton that this server starts."""
    return any(parameters.get(name) for name in MANAGED_PARAMETERS)


def check_managed(parameters: Mapping[str, str]) -> None:
    """Raise `InvalidOption` for what has no meaning for such a model."""
    for name in _ELSEWHERE:
        if parameters.get(name):
            raise InvalidOption(
                f"parameters['{name}']",
                f"is for servers that others have started; {BACKEND} and {PLATFORM} are for a"
                " Triton that this server starts",
            )


def places(options: TritonOptions, environment: Mapping[str, str], found: int) -> list[Place]:
    """The processes to start; `found` is how many GPUs the machine has.

    Raises `InvalidOption` if there is to be one for each GPU and there is none.
    """
    gpus = list(options.gpus)
    if options.processes == PER_GPU:
        inherited = environment.get("CUDA_VISIBLE_DEVICES", "")
        gpus = gpus or [part.strip() for part in inherited.split(",") if part.strip()]
        gpus = gpus or [str(number) for number in range(found)]
        if not gpus:
            raise InvalidOption(
                "--triton-processes",
                "is per-gpu, and this machine has no GPU; --triton-gpus names some",
            )
        return [Place(index, len(gpus), gpu, True) for index, gpu in enumerate(gpus)]
    count = int(options.processes)
    visible = ",".join(gpus) if gpus else None
    return [Place(index, count, visible) for index in range(count)]


def gpu_count(devices: Path = Path("/dev")) -> int:
    """How many GPUs the machine has, by their device files."""
    try:
        return sum(_DEVICE.fullmatch(name) is not None for name in os.listdir(devices))
    except OSError:
        return 0


class LoadCounts:
    """How many users of this server each model has that other servers have loaded for it.

    A version that is replaced has its model unloaded only if its successor has no use for the same
    one. Any thread may call this.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[object, int] = {}

    def take(self, key: object) -> None:
        """One user more."""
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def give_back(self, key: object) -> bool:
        """One user less; whether that was the last one."""
        with self._lock:
            self._counts[key] -= 1
            last = not self._counts[key]
            if last:
                del self._counts[key]
            return last
