"""`headrace activator`: holds the first requests while a server starts."""

import argparse
import re

from headrace.cli.command import EXIT_FAILURE, EXIT_USAGE, Command, option
from headrace.cli.remote import complain

_FORWARD = re.compile(
    r"(?:(?P<address>[^:=]+|\[[^]=]+\]):)?(?P<port>\d+)=(?P<host>[^:]+|\[[^]]+\]):(?P<to>\d+)"
)


def _run(options: argparse.Namespace) -> int:
    # Here, since every command line imports this module.
    from headrace.plugins.activator.relay import Forward, serve

    forwards = []
    for text in options.forwards:
        if (found := _FORWARD.fullmatch(text)) is None:
            complain(options, f"expected [ADDRESS:]PORT=HOST:PORT, got {text!r}")
            return EXIT_USAGE
        address = (found["address"] or "127.0.0.1").strip("[]")
        forwards.append(
            Forward(address, int(found["port"]), found["host"].strip("[]"), int(found["to"]))
        )
    if options.ready and not options.ready.startswith("http://"):
        complain(options, f"--ready: expected http://HOST:PORT/PATH, got {options.ready!r}")
        return EXIT_USAGE
    try:
        serve(
            forwards, options.ready, options.wait_secs, options.max_connections,
            (options.metrics_address, options.metrics_port), options.exit_timeout_secs,
        )  # fmt: skip
    except OSError as error:
        complain(options, str(error))
        return EXIT_FAILURE
    return 0


ACTIVATOR = Command(
    name="activator",
    help="hold requests while a server starts",
    description="Take connections for servers that may be scaled to zero. From the first byte of a"
    " request, a connection waits for a ready server, and is then passed on to it.",
    options=(
        option("forwards FORWARD...", "[ADDRESS:]PORT=HOST:PORT, a port to listen on and a port of"
               " the servers"),
        option("--ready URL", "a server is ready if this is answered with 200, such as"
               " http://HOST:8000/v2/health/ready; by default, if it takes a connection",
               default=""),
        option("--wait-secs SECS", "how long a connection waits (default: 300)", type=float,
               default=300.0),
        option("--max-connections N", "connections at a time; further ones are closed"
               " (default: 10000)", type=int, default=10_000),
        option("--metrics-address ADDRESS", "address for metrics (default: 127.0.0.1)",
               default="127.0.0.1"),
        option("--metrics-port PORT", "port for metrics (default: 8002)", type=int, default=8002),
        option("--exit-timeout-secs SECS", "how long connections may go on after SIGTERM"
               " (default: 30)", type=float, default=30.0),
    ),
    run=_run,
)  # fmt: skip
