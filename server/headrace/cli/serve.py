"""`headrace serve`: runs the server with settings from command line, environment and file."""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from headrace.cli.command import EXIT_USAGE, Argument, Command, OptionGroup, option, take_sources
from headrace.core.process import make_private
from headrace.options import SettingsError, Value
from headrace.settings import (
    CONFIG_FILE_ENV,
    SECTIONS,
    Settings,
    from_command_line,
    from_environment,
    from_file,
    limits_by_memory,
)

_LOOP = "one event loop answers all connections"
_NO_POOL = "messages are not pooled"
_GPU_MEMORY = "a model's GPU memory is limited by gpu_mem_limit in its configuration"
_NO_DOOR = "there is no door of this kind"

# Triton's options that are accepted and have no effect, with the reason.
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
    "--cache-directory": "the response cache is part of this server",
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


def _door(name: str, value: str) -> tuple[dict[str, str], str]:
    if value.lower() in _TRUE:
        raise SettingsError(f"{name} is an option of Triton's that headrace does not offer")
    return {}, _NO_DOOR


def _strict(_name: str, value: str) -> tuple[dict[str, str], str]:
    return {"disable_auto_complete_config": value}, ""


def _backend(name: str, value: str) -> tuple[dict[str, str], str]:
    setting, equals, given = value.rpartition(",")[2].partition("=")
    if not equals:
        raise SettingsError(f"{name} must be BACKEND,SETTING=VALUE, got {value!r}")
    if setting == "default-max-batch-size":
        return {"default_max_batch_size": given}, ""
    return {}, f"{setting}: settings of a backend lie in a model's parameters"


# Triton's options with an effect here, by name and value: settings by field, or the reason why they
# have no effect.
BY_VALUE: Mapping[str, Callable[[str, str], tuple[dict[str, str], str]]] = {
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


def translate(given: Iterable[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Convert Triton's options to settings by field, and to messages about those without effect.

    `given` are the options with their values. Raises `SettingsError` for unsupported ones.
    """
    settings: dict[str, str] = {}
    lines: dict[str, None] = {}
    for name, value in given:
        means = BY_VALUE.get(name)
        found, reason = means(name, value) if means else ({}, WITHOUT_EFFECT[name])
        settings |= found
        if reason:
            lines[f"{name} has no effect: {reason}"] = None
    return settings, list(lines)


def example_repository(stack: ExitStack) -> str:
    """The directory of the example models that need no packages of their own.

    In a source tree, which has others beside them, a directory that the `stack` removes.
    """
    package = Path(__file__).parents[1]
    shipped = package / "example_models"
    if shipped.is_dir():
        return str(shipped)
    # Imported late: users have an installed package.
    from tempfile import TemporaryDirectory

    directory = stack.enter_context(TemporaryDirectory(prefix="headrace-examples-"))
    for model in (package.parents[1] / "model_repository").iterdir():
        if not (model / "requirements.txt").exists():
            (Path(directory) / model.name).symlink_to(model)
    return directory


def _serve(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        try:
            brought, without_effect = translate(options.triton_options or ())
            options.files, written = take_sources(options, options.files, stack)
            if options.example:
                written = [*written, example_repository(stack)]
            if written:
                options.model_repository = [*(options.model_repository or ()), *written]
            if options.files:
                options.model_file = [*(options.model_file or ()), *options.files]
            settings, limits = _settings(options, brought, options.memory())
            # Before any thread exists: numeric libraries start threads when imported, and the check
            # imports them.
            problems = [] if settings.allow_debugging else make_private()
            settings.check()
        except SettingsError as error:
            options.parser.exit(EXIT_USAGE, f"{options.parser.prog}: {error}\n")
        for line in (*without_effect, *problems):
            print(f"{options.parser.prog}: {line}", file=sys.stderr)
        # Imported modules stay, and the garbage collector would visit them many times: it is
        # disabled until the doors are open.
        gc.disable()
        try:
            # Imported late, so that `--help` and usage errors do not wait for ONNX Runtime.
            from headrace.app import run

            again = partial(_read_again, options, brought)
            return run(settings, limits, again, options.parser.prog)
        finally:
            gc.enable()  # for callers that continue


def _settings(
    options: argparse.Namespace, brought: Mapping[str, str], memory: int
) -> tuple[Settings, str]:
    """Settings from command line, environment, settings file and limits by `memory`, in that order.

    Also returns a line for the log; the settings are not checked yet. `brought` are settings from
    Triton's options with other names. Raises `SettingsError`.
    """
    limits, given = limits_by_memory(memory), dict[str, Value]()
    if path := options.config_file or os.environ.get(CONFIG_FILE_ENV):
        given |= from_file(Path(path))
    given |= from_environment(os.environ)
    given |= from_command_line(options, brought=brought)
    values = limits | given
    settings = Settings(**values)  # type: ignore[arg-type]  # parsed to each field's own type
    lowered = {name: value for name, value in limits.items() if name not in given}
    said = ", ".join(f"--{name.replace('_', '-')}={value}" for name, value in lowered.items())
    return settings, f"limits by {memory >> 20} MiB of memory: {said}" if said else ""


def _read_again(options: argparse.Namespace, brought: Mapping[str, str]) -> Settings:
    """The current settings of a server that was started with `options`.

    Raises `SettingsError`.
    """
    settings, _ = _settings(options, brought, options.memory())
    settings.check()
    return settings


SERVE = Command(
    name="serve",
    help="serve model repositories",
    description="Serve the models of one or more repositories over HTTP and gRPC.",
    usage="%(prog)s [OPTIONS] [FILE ...]",
    epilog="Each option can also be set as an environment variable, HEADRACE_HTTP_PORT for"
    " --http-port, or in a settings file.",
    options=(
        option("files [FILE...]", "model files to serve without a repository"),
        option("--example", "serve the example models", action="store_true"),
        option("--config-file FILE", "read settings from this TOML file"),
        *(
            option(
                f"{name} VALUE", argparse.SUPPRESS, dest="triton_options", nargs="?", const="true",
                action=_Given,
            )
            for name in (*WITHOUT_EFFECT, *BY_VALUE)
        ),
    ),
    groups=[
        OptionGroup(title, [Argument(*setting.argument()) for setting in settings])
        for title, settings in SECTIONS.items()
    ],
    run=_serve,
)  # fmt: skip
