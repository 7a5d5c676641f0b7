"""What the commands that make or list environments take on their command lines.

The same settings as of `headrace serve`, which may also stand in the environment, so that both find
the same environments.
"""

import argparse
import os

from headrace.commands.parser import Commands
from headrace.core.model_spec import EnvironmentOptions
from headrace.options import SettingsError
from headrace.settings import OPTIONS, Settings, from_environment

_SHARED = tuple(
    option
    for option in OPTIONS
    if option.field in ("environment_cache", "wheelhouse", "environment_build_timeout_secs")
)
_UNUSED_DAYS = 30


def add_environment_options(parser: argparse.ArgumentParser) -> None:
    """Have a command take the settings of environments."""
    for option in _SHARED:
        metavar = "N" if option.kind is int else "DIR"
        parser.add_argument(
            f"--{option.name}", dest=option.field, metavar=metavar, help=option.meaning
        )


def environment_options(given: argparse.Namespace) -> EnvironmentOptions:
    """The settings from the command line, then the environment; ends with 2 if they are wrong."""
    names = {option.env for option in _SHARED}
    try:
        found = from_environment({n: value for n, value in os.environ.items() if n in names})
        for option in _SHARED:
            if (value := getattr(given, option.field)) is not None:
                found[option.field] = option.parse(value, f"--{option.name}")
    except SettingsError as error:
        given.parser.exit(2, f"headrace {given.command}: {error}\n")
    return Settings(**found).environments  # type: ignore[arg-type]  # parsed to their types


def add_environments(commands: Commands) -> None:
    """Declare `headrace environments` and its actions."""
    parser = commands.add_parser("environments", help="build, list and remove models' environments")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build", help="build what models need, without loading them",
        description="Build the environments of Python models, so that serving finds them.",
    )  # fmt: skip
    build.add_argument("paths", nargs="+", metavar="PATH", help="repositories, or model files")
    listing = actions.add_parser("list", help="print what is there")
    prune = actions.add_parser(
        "prune", help="remove what has not been used for long",
        description="Remove environments that no model was loaded with for some time, unless one"
        " is using them, and what builds that crashed have left.",
    )  # fmt: skip
    prune.add_argument(
        "--unused-days", type=float, default=_UNUSED_DAYS, metavar="N",
        help=f"remove what was not used for so many days (default: {_UNUSED_DAYS}); 0 for all",
    )  # fmt: skip
    for action in (build, listing, prune):
        add_environment_options(action)
        action.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    options = environment_options(given)
    # Imported late: `--help` and usage errors should not wait for ONNX Runtime.
    from headrace.commands.environments import run_action

    return run_action(given, options)
