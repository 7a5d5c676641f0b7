"""The `headrace` command."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from headrace import __version__
from headrace.core.model_spec import EnvironmentOptions
from headrace.environment_options import (
    ENVIRONMENT_OPTIONS,
    add_environment_options,
    add_environments,
    environment_options,
)
from headrace.settings import (
    CONFIG_FILE_ENV,
    OPTIONS,
    Settings,
    SettingsError,
    Value,
    from_environment,
    from_file,
    unknown,
)

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as of a process that SIGINT has ended

_KNOWN_OPTIONS = {
    "models": [
        "--json", "--quiet", "--default-max-batch-size", "--trust-model-code",
        "--allow-in-process-python", *ENVIRONMENT_OPTIONS, "--help",
    ],
    "environments": ["--unused-days", *ENVIRONMENT_OPTIONS, "--help"],
}  # fmt: skip
_SERVE_OPTIONS = ["--config-file", "--help"]
_SERVE_OPTIONS += [f"--{name}" for option in OPTIONS for name in (option.name, *option.aliases)]


# What people bring from Triton's command line, and what to do instead, where there is something.
_TRITONS = dict.fromkeys(
    (
        "--model-control-mode", "--repository-poll-secs", "--load-model",
        "--model-load-retry-count", "--model-namespacing", "--reuse-http-port",
        "--http-header-forward-pattern",
        "--http-restricted-api", "--reuse-grpc-port", "--grpc-infer-allocation-pool-size",
        "--grpc-max-response-pool-size", "--grpc-use-ssl", "--grpc-use-ssl-mutual",
        "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert",
        "--grpc-infer-response-compression-level", "--grpc-keepalive-time",
        "--grpc-keepalive-timeout", "--grpc-keepalive-permit-without-calls",
        "--grpc-http2-max-pings-without-data", "--grpc-http2-max-ping-strikes",
        "--grpc-http2-min-recv-ping-interval-without-data", "--grpc-max-connection-age",
        "--grpc-max-connection-age-grace", "--grpc-header-forward-pattern",
        "--grpc-restricted-protocol", "--allow-gpu-metrics", "--allow-cpu-metrics",
        "--metrics-interval-ms", "--metrics-config", "--trace-config", "--trace-file",
        "--trace-level", "--trace-rate", "--trace-count", "--trace-log-frequency", "--cache-config",
        "--cache-directory", "--response-cache-byte-size", "--rate-limit", "--rate-limit-resource",
        "--backend-directory", "--repoagent-directory", "--host-policy",
        "--pinned-memory-pool-byte-size", "--cuda-memory-pool-byte-size",
        "--cuda-virtual-address-size", "--min-supported-compute-capability",
        "--buffer-manager-thread-count", "--model-load-gpu-limit", "--enable-peer-access",
        "--allow-client-shm", "--allow-sagemaker", "--sagemaker-port", "--allow-vertex-ai",
    ),
    "",
) | {
    "--strict-model-config": "--disable-auto-complete-config does what its value true did",
    "--backend-config": "settings of a backend lie in a model's parameters;"
    " --default-max-batch-size is an option of its own",
    "--http-thread-count": "one event loop answers over HTTP",
    "--grpc-infer-thread-count": "one event loop answers over gRPC",
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Names the nearest known option where one is not known."""

    def error(self, message: str) -> NoReturn:
        prog = self.prog if " " in self.prog else f"{self.prog} serve"
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nSee '{prog} --help'.\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; ends with an exit status: 0, 1 for a failure, 2 for wrong usage."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(words)
    if rest:
        known = _KNOWN_OPTIONS.get(options.command, _SERVE_OPTIONS)
        name = rest[0].partition("=")[0]
        if options.command == "serve" and name in _TRITONS:
            text = f"{name} is an option of Triton's that headrace does not offer"
            parser.error(text + (f"; {_TRITONS[name]}" if _TRITONS[name] else ""))
        parser.error(unknown("option", name, known))
    if options.command == "models":
        environments = environment_options(parser, options)
        try:
            sys.exit(_check(options, environments))
        except KeyboardInterrupt:  # workers end with this process
            sys.exit(EXIT_INTERRUPTED)
    if options.command == "environments":
        from headrace.environments import run_action

        sys.exit(run_action(options, environment_options(parser, options)))
    try:
        settings = _settings(options)
    except SettingsError as error:
        parser.exit(EXIT_USAGE, f"headrace serve: {error}\n")
    from headrace.app import run

    sys.exit(run(settings))


def _check(options: argparse.Namespace, environments: EnvironmentOptions) -> int:
    # Imported late: `--help` and usage errors should not wait for ONNX Runtime.
    from headrace.check import check_models

    return check_models(
        [Path(p) for p in options.paths],
        options.default_max_batch_size,
        options.json,
        options.quiet,
        environments,
        options.trust_model_code,
        options.allow_in_process_python,
    )


def _settings(options: argparse.Namespace) -> Settings:
    """Command line, then environment, then settings file; raises `SettingsError`."""
    given: dict[str, Value] = {}
    if path := options.config_file or os.environ.get(CONFIG_FILE_ENV):
        given |= from_file(Path(path))
    given |= from_environment(os.environ)
    if options.files:
        options.model_file = [*(options.model_file or ()), *options.files]
    for option in OPTIONS:
        value = getattr(options, option.field)
        if value is not None:
            given[option.field] = option.parse(value, f"--{option.name}")
    settings = Settings(**given)  # type: ignore[arg-type]  # parsed to each field's own type
    if not settings.model_repository and not settings.model_file:
        raise SettingsError("give --model-repository DIR, or a model file")
    if not (settings.allow_http or settings.allow_grpc):
        raise SettingsError("--allow-http and --allow-grpc are both false: nothing could be asked")
    return settings


def _parser() -> _Parser:
    parser = _Parser(
        "headrace", description="Inference server for the KServe V2 protocol.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve model repositories", allow_abbrev=False,
        description="Serve the models of one or more repositories over HTTP and gRPC.",
        epilog="Each option can also be set as an environment variable, HEADRACE_HTTP_PORT for"
        " --http-port, or in a settings file.",
    )  # fmt: skip
    serve.add_argument("files", nargs="*", metavar="FILE", help="model files to serve as they are")
    serve.add_argument("--config-file", metavar="FILE", help="read settings from this TOML file")
    for option in OPTIONS:
        flags = [f"--{name}" for name in (option.name, *option.aliases)]
        text = option.meaning.replace("%", "%%")
        if option.choices:
            text += f" ({', '.join(option.choices)})"
        if option.default not in ("", []):
            text += f" (default: {str(option.default).lower()})"
        if option.kind is list:
            metavar = "FILE" if option.field == "model_file" else "DIR"
            serve.add_argument(
                *flags, dest=option.field, nargs="+", action="extend", metavar=metavar, help=text
            )
        elif option.kind is bool:
            serve.add_argument(
                *flags, dest=option.field, nargs="?", const="true", metavar="BOOL", help=text
            )
        else:
            metavar = "N" if option.kind is int else "TEXT"
            serve.add_argument(*flags, dest=option.field, metavar=metavar, help=text)
    models = commands.add_parser("models", help="look at models", allow_abbrev=False)
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check", help="validate repositories without serving them", allow_abbrev=False,
        description="Load every model, report what is wrong, and print complete configurations.",
    )  # fmt: skip
    check.add_argument("paths", nargs="+", metavar="PATH", help="repositories, or model files")
    check.add_argument("--quiet", action="store_true", help="print no configurations")
    check.add_argument(
        "--default-max-batch-size", type=int, metavar="N", help="as of 'serve'",
        default=next(o.default for o in OPTIONS if o.field == "default_max_batch_size"),
    )  # fmt: skip
    check.add_argument("--trust-model-code", action="store_true", help="as of 'serve'")
    check.add_argument("--allow-in-process-python", action="store_true", help="as of 'serve'")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    add_environment_options(check)
    add_environments(commands)
    return parser
