"""What `headrace top` takes on its command line."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.commands.parser import Commands
from headrace.commands.remote import add_json, add_remote, parse_address, parse_positive

if TYPE_CHECKING:
    from headrace.client.server import Server
    from headrace.commands.activity import VersionActivity

_EPILOG = """\
Keys in a terminal: r requests, o rows, e errors, w waiting, 5 p50, 9 p99,
b batch, m memory, n name: order by it; q: quit.

REQ/S     requests answered a second       WAIT    requests that wait now
ERR/S     requests failed a second         BATCH   rows of a batch, on average
P50, P99  half of the requests, and all    INST    instances that run the model
          but one in a hundred, were       MEMORY  that the model takes
          answered in less
"""

# By the key that chooses them: largest first, but names.
ORDERS: Mapping[str, tuple[str, "Callable[[VersionActivity], Any]"]] = {
    "requests": ("r", lambda v: v.requests),
    "rows": ("o", lambda v: v.rows),
    "errors": ("e", lambda v: v.failures),
    "waiting": ("w", lambda v: v.waiting),
    "p50": ("5", lambda v: v.latency["p50"] or 0),
    "p99": ("9", lambda v: v.latency["p99"] or 0),
    "batch": ("b", lambda v: v.batch_rows or 0),
    "memory": ("m", lambda v: v.memory or 0),
    "name": ("n", lambda v: 0),
}


def add_top(commands: Commands) -> None:
    """Declare `headrace top`."""
    parser = commands.add_parser(
        "top", help="what a running server is doing",
        description="Show rates, queues, latencies, batch sizes, instances and memory of the models"
        " of a running server, and go on until q or Ctrl-C; one table if this is no terminal.",
        epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=parse_positive, default=2.0, metavar="SECS",
        help="how long each table looks back (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--sort", choices=tuple(ORDERS), default="requests", metavar="BY",
        help=f"largest first: {', '.join(ORDERS)} (default: requests)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="one table of one interval")
    add_json(parser, "print a JSON document on a line for each interval")
    parser.add_argument(
        "--metrics-url", type=parse_address, metavar="URL",
        help="where metrics are (default: where the server says)",
    )  # fmt: skip
    add_remote(parser, _run)


def _run(options: argparse.Namespace, server: "Server") -> int:
    # Imported late: `--help` should not wait for it.
    from headrace.commands.top import top

    return top(options, server)
