"""What `headrace triton` takes on its command line."""

import argparse

from headrace.commands.parser import Commands


def add_triton_pools(commands: Commands) -> None:
    """Declare `headrace triton` and its actions."""
    parser = commands.add_parser("triton", help="write and check models that run on Tritons")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    write = actions.add_parser(
        "write", help="write the model repository that a Python file describes",
        description="Write the model repository of the pools (headrace.triton.Pool) of a Python"
        " file, and print the options of `headrace serve` that go with it.",
    )  # fmt: skip
    write.add_argument("file", metavar="FILE", help="Python file with a pool")
    write.add_argument("directory", metavar="DIR", help="where the repository is written to")
    drift = actions.add_parser(
        "drift", help="show what servers have otherwise than asked for",
        description="Ask the servers of models what they have, and show what is otherwise than the"
        " configuration asks for. The exit status is 1 if anything is.",
    )  # fmt: skip
    drift.add_argument(
        "paths", nargs="+", metavar="PATH", help="model repositories, or Python files with pools"
    )
    drift.add_argument("--json", action="store_true", help="print JSON")
    drift.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS",
        help="how long a server may take for an answer (default: 10)",
    )  # fmt: skip
    for action in (write, drift):
        action.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    # Imported late: `--help` and usage errors should not wait for what it takes.
    from headrace.commands.triton_pools import run_action

    return run_action(given)
