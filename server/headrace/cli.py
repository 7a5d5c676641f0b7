"""The `headrace` command."""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from headrace import __version__
from headrace.commands.completion import add_completion
from headrace.commands.infer_options import add_infer
from headrace.commands.models import add_models
from headrace.commands.parser import EXIT_INTERRUPTED, EXIT_USAGE, CommandParser
from headrace.commands.plugins import ListPlugins, add_plugins
from headrace.commands.pool_files import take_pools
from headrace.commands.top_options import add_top
from headrace.execution.private_process import make_private
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
from headrace.triton_options import add_triton_options, translate
from headrace.workers.allocation import memory_limit


def main(
    arguments: Sequence[str] | None = None, memory: Callable[[], int] = memory_limit
) -> NoReturn:
    """Run the command; ends with an exit status: 0, 1 for a failure, 2 for wrong usage.

    `memory` tells how many bytes of it a server may use.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = _parser(memory, words).parse_known_args(words)
    if rest:
        options.parser.refuse_rest(rest)
    try:
        sys.exit(options.run(options))
    except KeyboardInterrupt:  # workers end with this process
        sys.exit(EXIT_INTERRUPTED)


def _serve(memory: Callable[[], int], options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        return _serve_within(stack, options, memory())


def _serve_within(stack: ExitStack, options: argparse.Namespace, memory: int) -> int:
    """`stack` removes what lies on disk for this command alone."""
    try:
        brought, without_effect = translate(options.triton_options or ())
        _take_pools(options, stack)
        settings, limits = _settings(options, brought, memory)
    except SettingsError as error:
        options.parser.exit(EXIT_USAGE, f"headrace serve: {error}\n")
    # Before there are threads, of which numeric libraries start some when they are imported.
    problems = [] if settings.allow_debugging else make_private()
    for line in (*without_effect, *problems):
        print(f"headrace serve: {line}", file=sys.stderr)
    # What is imported stays, and the collector would look through it many times: it rests until the
    # doors are open.
    gc.disable()
    try:
        # Imported late: `--help` and usage errors should not wait for ONNX Runtime.
        from headrace.app import run

        return run(settings, limits)
    finally:
        gc.enable()  # whoever has called this goes on


def _take_pools(options: argparse.Namespace, stack: ExitStack) -> None:
    """Have the models of files with pools served, which are no models themselves."""
    options.files, repository = take_pools(options, options.files, stack)
    if repository is not None:
        options.model_repository = [*(options.model_repository or ()), str(repository)]


def _settings(
    options: argparse.Namespace, brought: Mapping[str, str], memory: int
) -> tuple[Settings, str]:
    """Command line, then environment, then settings file, then limits by the `memory` there is.

    And what is to be logged of these. `brought` is what options of Triton's with other names on the
    command line set. Raises `SettingsError`.
    """
    limits, given = limits_by_memory(memory), dict[str, Value]()
    if path := options.config_file or os.environ.get(CONFIG_FILE_ENV):
        given |= from_file(Path(path))
    given |= from_environment(os.environ)
    if options.files:
        options.model_file = [*(options.model_file or ()), *options.files]
    given |= from_command_line(options, brought=brought)
    values = limits | given
    settings = Settings(**values)  # type: ignore[arg-type]  # parsed to each field's own type
    settings.check()
    lowered = {name: value for name, value in limits.items() if name not in given}
    said = ", ".join(f"--{name.replace('_', '-')}={value}" for name, value in lowered.items())
    return settings, f"limits by {memory >> 20} MiB of memory: {said}" if said else ""


def _parser(memory: Callable[[], int], words: Sequence[str]) -> CommandParser:
    parser = CommandParser("headrace", description="Inference server for the KServe V2 protocol.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.add_argument("--list-plugins", action=ListPlugins)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve model repositories",
        description="Serve the models of one or more repositories over HTTP and gRPC.",
        usage="%(prog)s [OPTIONS] [FILE ...]",
        epilog="Each option can also be set as an environment variable, HEADRACE_HTTP_PORT for"
        " --http-port, or in a settings file.",
    )  # fmt: skip
    serve.add_argument("files", nargs="*", metavar="FILE", help="model files to serve as they are")
    serve.add_argument("--config-file", metavar="FILE", help="read settings from this TOML file")
    for section, options in SECTIONS.items():
        group = serve.add_argument_group(section)
        for option in options:
            names, keywords = option.argument()
            group.add_argument(*names, **keywords)
    add_triton_options(serve)
    serve.set_defaults(run=partial(_serve, memory))
    add_infer(commands)
    add_top(commands)
    add_models(commands)
    add_completion(commands, parser)
    add_plugins(commands, words)
    return parser
