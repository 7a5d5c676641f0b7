"""The parser of every command: messages that name the command and the nearest known option.

A command's parser is in its namespace as `parser`, and what runs the command as `run`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from headrace.settings import unknown

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as of a process that SIGINT has ended

Run = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class CommandParser(argparse.ArgumentParser):
    """Ends with 2 for wrong usage, saying in one line what was wrong, and where help is."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """End because of the command line."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nSee '{self.prog} --help'.\n")

    def refuse_rest(self, rest: Sequence[str]) -> NoReturn:
        """End because of what no option and no argument has taken."""
        name = rest[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {rest[0]!r}")
        known = [text for action in self._actions for text in action.option_strings]
        self.error(unknown("option", name, known))
