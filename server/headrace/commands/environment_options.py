"""What `headrace environments` takes on its command line."""

import argparse

from headrace.commands.parser import Commands
from headrace.commands.shared_settings import ENVIRONMENTS, add_settings, shared_settings

_UNUSED_DAYS = 30


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
        add_settings(action, ENVIRONMENTS)
        action.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    options = shared_settings(given, ENVIRONMENTS).environments
    # Imported late: `--help` and usage errors should not wait for ONNX Runtime.
    from headrace.commands.environments import run_action

    return run_action(given, options)
