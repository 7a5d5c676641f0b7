"""The `headrace` command: its parser, commands from entry points, and `--list-plugins`."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from headrace import __version__
from headrace.cli.command import (
    COMMANDS,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    Command,
    CommandParser,
    Commands,
)
from headrace.cli.text import fitted_table
from headrace.core.plugins import all_plugins
from headrace.ipc.allocation import memory_limit


def main(
    arguments: Sequence[str] | None = None, memory: Callable[[], int] = memory_limit
) -> NoReturn:
    """Run the command; exits with status 0, 1 for a failure, 2 for wrong usage.

    `memory` returns the bytes of memory that a server may use.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = CommandParser("headrace", description="Inference server for the KServe V2 protocol.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.add_argument("--list-plugins", action=ListPlugins)
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"), words)
    parser.set_defaults(root=parser, memory=memory)
    options, rest = parser.parse_known_args(words)
    if rest:
        options.parser.refuse_rest(rest)
    try:
        sys.exit(options.run(options))
    except KeyboardInterrupt:  # workers end with this process
        sys.exit(EXIT_INTERRUPTED)


_ALL_COMMANDS = ("completion",)  # completion needs every command


def add_commands(commands: Commands, words: Sequence[str]) -> None:
    """Declare the commands needed for this command line, so that no other is imported.

    Installed packages are only scanned for an unknown command, or for all commands.
    """
    name = next((word for word in words if not word.startswith("-")), "")
    found = COMMANDS.own()
    if name in found and name not in _ALL_COMMANDS:
        found = {name: found[name]}
    else:
        found = COMMANDS.installed()
    for plugin in found.values():
        plugin.try_to(lambda add: add(commands))


class ListPlugins(argparse.Action):
    """`--list-plugins`: print every plugin with what it offers.

    Exits with 1 if one cannot be loaded.
    """

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(
            option_strings, dest, nargs=0, default=argparse.SUPPRESS,
            help="list plugins of installed packages, and whether they can be loaded",
        )  # fmt: skip

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        rows = []
        for plugin in all_plugins():
            offered = plugin.try_to(partial(_offered, plugin.kind))
            failed = isinstance(offered, Exception)
            text = f"{type(offered).__name__}: {offered}" if failed else str(offered)
            state = "failed" if failed else "loaded"
            rows.append((plugin.kind, plugin.name, plugin.package, state, text))
        print(*fitted_table(("kind", "name", "package", "state", "offers"), rows), sep="\n")
        parser.exit(EXIT_FAILURE if any(row[3] == "failed" for row in rows) else 0)


def _offered(kind: str, target: Any) -> str:
    """The file names of a backend; the summary of any other plugin."""
    if kind == "backend":
        # Imported late: other command lines do not need the dependencies of backends.
        from headrace.placement.backend import make_backend

        made = make_backend(target)
        return ", ".join(made.filenames) or f"platform {made.platform}"
    if kind == "stage":
        from headrace.engine.chain import make_stage

        target = type(make_stage(target))
    if isinstance(target, Command):
        return target.help
    if not callable(target):
        raise TypeError(f"expected something to call, got {target!r}")
    return (inspect.getdoc(target) or "").partition("\n")[0]
