"""`headrace completion SHELL`: prints a script for shell completion."""

import argparse
from collections.abc import Iterator
from typing import Any

from headrace.cli.command import EXIT_FAILURE, Command, option
from headrace.settings import OPTIONS

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
# Run for each completion: the server named by the environment lists its models.
_MODELS = "headrace models list --names --timeout 2 2>/dev/null"
_FILES, _FOLDERS, _NAMES = ("FILE", "PATH", "VALUE"), ("DIR",), ("MODEL",)


def _print_script(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        options.parser.exit(
            EXIT_FAILURE, f"{options.parser.prog}: needs shtab: pip install 'headrace[cli]'\n"
        )
    kinds: dict[str, Any] = dict.fromkeys(_FILES, shtab.FILE)
    kinds |= dict.fromkeys(_FOLDERS, shtab.DIRECTORY)
    kinds |= dict.fromkeys(_NAMES, shtab.cmd(_MODELS))
    # Settings validate their choices themselves.
    choices = {
        f"--{one.name}": ("true", "false") if one.kind is bool else one.choices for one in OPTIONS
    }
    for action in _actions(options.root):
        if action.option_strings and not action.choices:
            action.choices = choices.get(action.option_strings[0]) or None
        if isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]  # shtab's own
    print(shtab.complete(options.root, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of the parser and of all its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _actions(below)


COMPLETION = Command(
    name="completion",
    help="print a script for shell completion",
    description="Print a script that completes commands, options, files, and the models of the"
    " server at $HEADRACE_URL in a shell.",
    epilog="""\
  bash   eval "$(headrace completion bash)"    in ~/.bashrc
  zsh    headrace completion zsh > _headrace   in a directory of $fpath
  fish   headrace completion fish > ~/.config/fish/completions/headrace.fish
""",
    options=[option("shell SHELL", ", ".join(SHELLS), choices=SHELLS)],
    run=_print_script,
)
