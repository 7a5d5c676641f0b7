"""What `headrace models traffic` takes."""

import argparse
from typing import TYPE_CHECKING

from headrace.commands.parser import Commands
from headrace.commands.remote import add_json, add_remote

if TYPE_CHECKING:
    from headrace.client.server import Server

_SET = """\
  headrace models traffic set m 1=90 2=10
  headrace models traffic set m '{"split": {"1": 1, "2": 1}, "sticky": {"header": "x-user"}}'
  headrace models traffic set m rules.json
"""


def add_traffic(actions: Commands) -> None:
    """Declare `headrace models traffic` and its actions."""
    parser = actions.add_parser(
        "traffic", help="how requests are divided between versions",
        description="Show and change which versions answer requests that name none.",
    )  # fmt: skip
    parts = parser.add_subparsers(dest="traffic", required=True, metavar="ACTION")
    texts = {
        "show": ("the rules, and what they do", "Print the rules, and what each version gets."),
        "set": ("replace the rules", "Replace all rules until the server ends."),
        "promote": ("give a version all requests", "Give a version all requests; others stay."),
        "rollback": (
            "give its requests to the baseline again",
            "Give the requests of a version to the baseline, or undo a promotion.",
        ),
        "reset": ("go back to the configuration's rules", "Drop rules that were set by a call."),
    }
    for name, (text, description) in texts.items():
        action = parts.add_parser(
            name, help=text, description=description, epilog=_SET if name == "set" else None
        )
        action.add_argument("model", metavar="MODEL")
        if name == "set":
            action.add_argument(
                "rules", nargs="+", metavar="RULES",
                help="JSON, a file with it, or weights by version as VERSION=WEIGHT",
            )  # fmt: skip
        if name in ("promote", "rollback"):
            action.add_argument(
                "version", nargs="?", metavar="VERSION",
                help="its number; without it the only one that it can be",
            )  # fmt: skip
            action.add_argument("--reason", metavar="TEXT", help="why, for the log")
        add_json(action)
        add_remote(action, _run)


def _run(options: argparse.Namespace, server: "Server") -> int:
    # Imported late: `--help` should not wait for it.
    from headrace.commands.traffic import traffic

    return traffic(options, server)
