"""The parser of every command: messages that name the command and the nearest known option.

A command's parser is in its namespace as `parser`, and what runs the command as `run`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from headrace.settings import unknown

EXIT_FAILURE = 1
EXIT_USAGE = 2
_NOTHING = "the following arguments are required"
EXIT_INTERRUPTED = 130  # as of a process that SIGINT has ended

Run = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class _Help(argparse.HelpFormatter):
    """Leaves texts of several lines as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def add_argument(self, action: argparse.Action) -> None:
        """As argparse, which forgets that subcommands are indented once more."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


class CommandParser(argparse.ArgumentParser):
    """Ends with 2 for wrong usage, saying in one line what was wrong, and where help is."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=_Help, **options)
        self.set_defaults(parser=self)

    def parse_known_args(  # type: ignore[override]  # the namespace is always argparse's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse, but arguments that need not be there may also follow options.

        argparse takes it that they are not there as soon as an option comes.
        """
        found, rest = super().parse_known_args(args, namespace)
        arguments = [action for action in self._actions if not action.option_strings]
        while arguments and rest and not (rest[0].startswith("-") and len(rest[0]) > 1):
            last = arguments[-1]
            if last.nargs == argparse.OPTIONAL and getattr(found, last.dest) is None:
                setattr(found, last.dest, rest.pop(0))
            elif last.nargs in (argparse.ZERO_OR_MORE, argparse.ONE_OR_MORE):
                setattr(found, last.dest, [*getattr(found, last.dest), rest.pop(0)])
            else:
                break
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End because of the command line; where it names no command, with the help."""
        if self._subparsers is not None and message.startswith(_NOTHING):
            self.print_help(sys.stderr)
            self.exit(EXIT_USAGE)
        if found := re.match(r"argument (--[\w-]+).*: expected one argument$", message):
            message += f"; write {found[1]}=VALUE if it begins with -"
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nSee '{self.prog} --help'.\n")

    def _line(self) -> str:
        """The command with all that is an argument and no option."""
        arguments = [a for a in self._actions if not a.option_strings]
        return " ".join([self.prog, *(str(a.metavar or a.dest) for a in arguments)])

    def refuse_rest(self, rest: Sequence[str]) -> NoReturn:
        """End because of what no option and no argument has taken."""
        name = rest[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {rest[0]!r}")
        for action in self._actions:
            if not action.option_strings and action.dest == name.lstrip("-"):
                told = str(action.metavar or action.dest)
                self.error(f"unknown option {name!r}; {told} is given without it: {self._line()}")
        known = [text for action in self._actions for text in action.option_strings]
        self.error(unknown("option", name, known))
