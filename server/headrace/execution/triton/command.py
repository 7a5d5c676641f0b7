"""How a process of Triton is started: arguments and environment, as values."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.execution.triton.options import Place, TritonOptions

# What Triton sees of the server's environment; other variables may be secrets.
_PASSED = frozenset({"PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"})
_PASSED_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "TRITON", "HF_", "TRANSFORMERS_", "TORCH_", "TF_", "OMP_",
    "MKL_", "OPENBLAS_", "XDG_CACHE_",
)  # fmt: skip
_PROTOCOLS = (
    "health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging"
)
_KEY = "headrace-key"


@dataclass(frozen=True, slots=True)
class Secret:
    """What calls to Tritons of this server have to bring along, so that no others can be made."""

    value: str

    @property
    def argument(self) -> str:
        """What has Triton ask for it."""
        return f"--grpc-restricted-protocol={_PROTOCOLS}:{_KEY}={self.value}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What calls have."""
        return ((f"triton-grpc-protocol-{_KEY}", self.value),)


def arguments(
    program: str, options: TritonOptions, models: Path, port: int, region: str, secret: Secret
) -> list[str]:
    """The command; `region` is what names of shared memory of its Python models begin with.

    It listens on one port of this machine, which the server holds for it. Models are only loaded
    when that is asked for. What the operator has added comes last.
    """
    return [
        program,
        f"--model-repository={models}",
        "--model-control-mode=explicit",
        "--exit-on-error=false",
        f"--exit-timeout-secs={max(int(options.exit_secs), 1)}",
        "--allow-http=false",
        "--allow-metrics=false",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--reuse-grpc-port=true",
        f"--backend-config=python,shm-region-prefix-name={region}",
        secret.argument,
        *options.arguments,
    ]


def environment(own: Mapping[str, str], options: TritonOptions, place: Place) -> dict[str, str]:
    """The environment variables of a process, of the server's `own`."""
    found = {
        name: value
        for name, value in own.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES) or name in options.passed
    }
    if place.visible is not None:
        # Otherwise CUDA may number GPUs by their speed, and so by another order than the operator.
        found.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        found["CUDA_VISIBLE_DEVICES"] = place.visible
    found.setdefault("PATH", os.defpath)
    return found
