"""What people bring from Triton's command line, and this server has no setting for.

An option about Triton's own threads, pools, caches, backends or GPU memory is taken, and said to be
without effect: what clients see is the same. One that means a setting of this server under another
name sets that. What would open another door is refused.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.options import SettingsError

_LOOP = "one event loop answers all connections"
_NO_POOL = "messages are not pooled"
_GPU_MEMORY = "a model's GPU memory is limited by gpu_mem_limit in its configuration"
_NO_CACHE = "responses are not cached"
_NO_LIMIT = "an instance runs as soon as it is free"
_NO_DOOR = "there is no door of this kind"

# By option, why it has no effect.
WITHOUT_EFFECT = {
    "--http-thread-count": _LOOP,
    "--grpc-infer-thread-count": _LOOP,
    "--grpc-infer-allocation-pool-size": _NO_POOL,
    "--grpc-max-response-pool-size": _NO_POOL,
    "--buffer-manager-thread-count": "tensors are not copied by threads",
    "--host-policy": "cores are divided over models by the CPU limit",
    "--cuda-memory-pool-byte-size": _GPU_MEMORY,
    "--cuda-virtual-address-size": _GPU_MEMORY,
    "--min-supported-compute-capability": "CUDA_VISIBLE_DEVICES says which GPUs are used",
    "--model-load-gpu-limit": _GPU_MEMORY,
    "--enable-peer-access": "tensors do not go from one GPU to another",
    "--cache-config": _NO_CACHE,
    "--cache-directory": _NO_CACHE,
    "--response-cache-byte-size": _NO_CACHE,
    "--rate-limit": _NO_LIMIT,
    "--rate-limit-resource": _NO_LIMIT,
    "--backend-directory": "backends are part of this server",
    "--repoagent-directory": "there are no repository agents",
    "--sagemaker-port": _NO_DOOR,
    "--sagemaker-safe-port-range": _NO_DOOR,
    "--sagemaker-thread-count": _NO_DOOR,
    "--vertex-ai-port": _NO_DOOR,
    "--vertex-ai-thread-count": _NO_DOOR,
    "--vertex-ai-default-model": _NO_DOOR,
}
_TRUE = ("true", "1", "yes", "on")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an option with its value means here: settings by field, or why it has no effect."""

    settings: Mapping[str, str]
    without_effect: str = ""


def _door(name: str, value: str) -> Meaning:
    if value.lower() in _TRUE:
        raise SettingsError(f"{name} is an option of Triton's that headrace does not offer")
    return Meaning({}, _NO_DOOR)


def _strict(_name: str, value: str) -> Meaning:
    return Meaning({"disable_auto_complete_config": value})


def _backend(name: str, value: str) -> Meaning:
    setting, equals, given = value.rpartition(",")[2].partition("=")
    if not equals:
        raise SettingsError(f"{name} must be BACKEND,SETTING=VALUE, got {value!r}")
    if setting == "default-max-batch-size":
        return Meaning({"default_max_batch_size": given})
    return Meaning({}, f"{setting}: settings of a backend lie in a model's parameters")


# By option, what its value means.
BY_VALUE: Mapping[str, Callable[[str, str], Meaning]] = {
    "--allow-sagemaker": _door,
    "--allow-vertex-ai": _door,
    "--strict-model-config": _strict,
    "--backend-config": _backend,
}


class _Given(argparse.Action):
    """Collects options with their values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given: list[tuple[str | None, object]] = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*given, (option_string, values)])


def add_triton_options(parser: argparse.ArgumentParser) -> None:
    """Have a parser take them, as `triton_options`: what `translate` reads."""
    for name in (*WITHOUT_EFFECT, *BY_VALUE):
        parser.add_argument(
            name, dest="triton_options", nargs="?", const="true", action=_Given,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def translate(given: Iterable[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Settings by field, and lines for people on what has no effect, each once.

    Raises `SettingsError` for what is not offered.
    """
    settings: dict[str, str] = {}
    lines: dict[str, None] = {}
    for name, value in given:
        if name in WITHOUT_EFFECT:
            meaning = Meaning({}, WITHOUT_EFFECT[name])
        else:
            meaning = BY_VALUE[name](name, value)
        settings |= meaning.settings
        if meaning.without_effect:
            lines[f"{name} has no effect: {meaning.without_effect}"] = None
    return settings, list(lines)
