"""`headrace completion SHELL`: what has a shell complete the command line."""

import argparse
from collections.abc import Iterator
from typing import Any

from headrace.commands.parser import EXIT_FAILURE, CommandParser, Commands
from headrace.options import Option
from headrace.settings import OPTIONS

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
# Asked each time: the server in the environment has what there is to be completed.
_MODELS = "headrace models list --names --timeout 2 2>/dev/null"
_FILES, _FOLDERS, _NAMES = ("FILE", "PATH", "VALUE"), ("DIR",), ("MODEL",)
_EPILOG = """\
  bash   eval "$(headrace completion bash)"    in ~/.bashrc
  zsh    headrace completion zsh > _headrace   in a directory of $fpath
  fish   headrace completion fish > ~/.config/fish/completions/headrace.fish
"""


def add_completion(commands: Commands, parser: CommandParser) -> None:
    """Declare `headrace completion`, for all that `parser` has."""
    completion = commands.add_parser(
        "completion", help="have a shell complete commands, options and models",
        description="Print a script that has a shell complete commands, options, files, and the"
        " models of the server at $HEADRACE_URL.",
        epilog=_EPILOG,
    )  # fmt: skip
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))

    def run(options: argparse.Namespace) -> int:
        return _print_script(options, parser)

    completion.set_defaults(run=run)


def _print_script(options: argparse.Namespace, parser: CommandParser) -> int:
    try:
        import shtab
    except ImportError:
        options.parser.exit(
            EXIT_FAILURE, f"{options.parser.prog}: needs shtab: pip install 'headrace[cli]'\n"
        )
    kinds: dict[str, Any] = dict.fromkeys(_FILES, shtab.FILE)
    kinds |= dict.fromkeys(_FOLDERS, shtab.DIRECTORY)
    kinds |= dict.fromkeys(_NAMES, shtab.cmd(_MODELS))
    choices = {f"--{option.name}": _choices(option) for option in OPTIONS}
    for action in _actions(parser):
        if action.option_strings and not action.choices:  # which settings have checked on their own
            action.choices = choices.get(action.option_strings[0]) or None
        if isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]  # shtab's own
    print(shtab.complete(parser, options.shell))
    return 0


def _choices(option: Option) -> tuple[str, ...]:
    return ("true", "false") if option.kind is bool else option.choices


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of the parser and of all below it."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _actions(below)
