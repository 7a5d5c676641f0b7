"""Declaration of commands: name, texts, options and function, and the parser made from them.

A `Command` is the target of an entry point of the group `COMMANDS`. Its options are
declared as for argparse; settings of the server that other commands share are declared there only.
The namespace passed to `run` has the command's parser as `parser`, the top-level parser as `root`.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

from headrace.core.plugins import PluginGroup
from headrace.options import Option, SettingsError
from headrace.settings import Settings, from_command_line, from_environment, unknown

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as for a process ended by SIGINT
_NOTHING = "the following arguments are required"

Run = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class Argument(NamedTuple):
    """An option or a positional argument, in the form of argparse's `add_argument`."""

    names: Sequence[str]
    keywords: dict[str, Any]


class OptionGroup(NamedTuple):
    """Options under a title of their own in the help."""

    title: str
    options: Sequence[Argument]
    description: str | None = None


def option(declared: str, meaning: str = "", *, many: bool = False, **more: Any) -> Argument:
    """Declare an option or positional argument as usage shows it; `more` is as in argparse.

    `--version N` takes a value, `--once` none, and `many` makes a list. A positional argument is
    preceded by its name in the namespace: `paths PATH...`, `data [VALUE]`, `files [FILE...]`.
    """
    name, _, metavar = declared.partition(" ")
    keywords: dict[str, Any] = {"help": meaning or None}
    if name.startswith("-") and not metavar:
        keywords["action"] = "store_true"
    elif name.startswith("-"):
        keywords |= {"metavar": metavar} | ({"action": "append", "default": []} if many else {})
    else:
        shape = "".join(re.findall(r"\[|\.\.\.", metavar))
        keywords["metavar"] = metavar.strip("[].")
        if shape:
            keywords["nargs"] = {"[": "?", "...": "+", "[...": "*"}[shape]
    return Argument((name,), keywords | more)


def settings_as_options(settings: Collection[Option]) -> list[Argument]:
    """Settings of the server as options of another command; see `shared_settings`."""
    return [Argument(*one.argument(switch=True)) for one in settings]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command that calls `run`, or a group of `actions`, each a command."""

    name: str
    help: str
    run: Run | None = None
    options: Sequence[Argument] = ()
    groups: Sequence[OptionGroup] = ()
    actions: Sequence["Command"] = ()
    description: str | None = None
    epilog: str | None = None
    usage: str | None = None

    def __call__(self, commands: Commands) -> None:
        """Add a parser for the command to those of a command line."""
        parser = commands.add_parser(
            self.name, help=self.help, description=self.description, epilog=self.epilog,
            usage=self.usage,
        )  # fmt: skip
        for names, keywords in self.options:
            parser.add_argument(*names, **keywords)
        for title, options, description in self.groups:
            group = parser.add_argument_group(title, description)
            for names, keywords in options:
                group.add_argument(*names, **keywords)
        if self.actions:
            below = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
            for action in self.actions:
                action(below)
        else:
            parser.set_defaults(run=self.run)


COMMANDS: PluginGroup[Command] = PluginGroup("headrace.commands")


def shared_settings(given: argparse.Namespace, options: Collection[Option]) -> Settings:
    """Settings from the command line, then the environment; exits with 2 if they are invalid."""
    names = {one.env for one in options}
    try:
        found = from_environment({n: value for n, value in os.environ.items() if n in names})
        found |= from_command_line(given, tuple(options))
    except SettingsError as error:
        given.parser.exit(EXIT_USAGE, f"{given.parser.prog}: {error}\n")
    return Settings(**found)  # type: ignore[arg-type]  # parsed to their types


TakeSources = Callable[[argparse.Namespace, Sequence[str], ExitStack], tuple[list[str], list[str]]]
SOURCES: PluginGroup[TakeSources] = PluginGroup("headrace.sources")


def take_sources(
    given: argparse.Namespace, files: Sequence[str], stack: ExitStack
) -> tuple[list[str], list[str]]:
    """The model files, and the repositories that plugins have made from the other paths.

    A plugin of `SOURCES` is a function like this one: it may set options for its repositories in
    `given`, and removes them by the `stack`. Raises `SettingsError`.
    """
    rest, repositories = list(files), list[str]()
    for take in SOURCES.load(lambda target: target).values() if files else ():
        rest, written = take(given, rest, stack)
        repositories += written
    return rest, repositories


class _Help(argparse.HelpFormatter):
    """Keeps the line breaks of multi-line texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option; argparse ignores that subcommands are indented once more."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


class CommandParser(argparse.ArgumentParser):
    """Exits with 2 for wrong usage, with one line on the error and one on the help."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=_Help, **options)
        self.set_defaults(parser=self)

    def parse_known_args(  # type: ignore[override]  # the namespace is always argparse's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse, but let optional arguments also follow options.

        argparse takes them as absent once an option follows.
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
        """Exit because of the command line; if it names no command, with the help."""
        if self._subparsers is not None and message.startswith(_NOTHING):
            self.print_help(sys.stderr)
            self.exit(EXIT_USAGE)
        if found := re.match(r"argument (--[\w-]+).*: expected one argument$", message):
            message += f"; write {found[1]}=VALUE if it begins with -"
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nSee '{self.prog} --help'.\n")

    def refuse_rest(self, rest: Sequence[str]) -> NoReturn:
        """Exit because of arguments that match no option and no argument."""
        name = rest[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {rest[0]!r}")
        arguments = {
            a.dest: str(a.metavar or a.dest) for a in self._actions if not a.option_strings
        }
        if told := arguments.get(name.lstrip("-")):
            line = " ".join([self.prog, *arguments.values()])
            self.error(f"unknown option {name!r}; {told} is given without it: {line}")
        known = [text for action in self._actions for text in action.option_strings]
        self.error(unknown("option", name, known))
