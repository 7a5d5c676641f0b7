"""The `headrace` command: its parser, and the end of the process."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from headrace import __version__
from headrace.commands.command import EXIT_INTERRUPTED, CommandParser
from headrace.commands.plugins import ListPlugins, add_commands
from headrace.workers.allocation import memory_limit


def main(
    arguments: Sequence[str] | None = None, memory: Callable[[], int] = memory_limit
) -> NoReturn:
    """Run the command; ends with an exit status: 0, 1 for a failure, 2 for wrong usage.

    `memory` tells how many bytes of it a server may use.
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
