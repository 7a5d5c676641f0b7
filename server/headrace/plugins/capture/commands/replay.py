"""`headrace replay FILE...`: sends captured requests to a server again."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.command import option
from headrace.cli.remote import CommandFailed, print_json, remote_command

if TYPE_CHECKING:
    from headrace.client.blocking import Client

_MOST_AT_ONCE = 1024


def _replay(options: argparse.Namespace, server: "Client") -> int:
    # Imported late: help and usage errors need no numpy.
    from headrace.plugins.capture.commands.replaying import ReplayReport, read, replay

    report = ReplayReport()
    requests = read(options.files, options.model)
    given = options.speed, options.concurrency, options.compare
    replaying = server.begin(lambda client: replay(requests, client, report, *given))
    try:
        replaying.result()
    except (OSError, ValueError) as error:
        raise CommandFailed(str(error)) from None
    finally:  # what was sent is told after any error, and if the user interrupts
        replaying.cancel()
        if options.json:
            print_json(report.document())
        else:
            print(report.text(), flush=True)
    return 1 if report.failed or report.differing else 0


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return value


def _at_once(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) <= _MOST_AT_ONCE:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number from 1 to {_MOST_AT_ONCE}, got {text!r}")


REPLAY = remote_command(
    "replay", _replay,
    option("files FILE...", "files of --capture: JSON lines, or Parquet"),
    option("--model NAME", "only requests to this model", default=""),
    option("--speed X", "times as fast as they came; 0: as fast as possible (default: 1)",
           type=_speed, default=1.0),
    option("--concurrency N", "requests at once, at most (default: 16)", type=_at_once, default=16),
    option("--compare", "compare the outputs with those that were captured"),
    help="send captured requests to a server again",
    epilog="""\
Requests whose data were redacted, or left out for their size, are skipped. The
exit status is 1 if a request fails that had not failed, or outputs differ.

  headrace replay capture.jsonl --url http://localhost:8000 --speed 2 --compare
""",
)  # fmt: skip
