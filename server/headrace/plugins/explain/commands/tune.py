"""`headrace tune MODEL --p99 20ms`: the settings that carry the most requests/s within a latency.

With `--clients N`, those that answer the most to so many clients that wait; with `--rate N`, those
with the lowest latency of N requests/s that arrive. Settings are loaded into
a server as overrides: one of its own, or a running one, which gets its model back at the end.
"""

import argparse
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.command import EXIT_FAILURE, EXIT_INTERRUPTED, option
from headrace.cli.remote import (
    CommandFailed,
    complain,
    parse_model,
    parse_positive,
    print_json,
    remote_command,
    tls_files,
)

if TYPE_CHECKING:
    from headrace.client.blocking import Client
    from headrace.plugins.explain.commands.tuning import Tuning

_TIMEOUT_SECS = 600.0  # models may take long to load
_UNITS = {"us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}


def _tune(options: argparse.Namespace, server: "Client") -> int:
    if not options.model_repository:
        if options.write:
            options.parser.error("--write needs --model-repository: it changes config.pbtxt there")
        return _of_server(options, server, own=False)
    if options.url or options.header or tls_files(options):
        options.parser.error(
            "--url, --header and --tls-... are for a running server, and --model-repository for"
            " one of this command"
        )
    # Imported late: help and usage errors need no numpy.
    from headrace.client.blocking import Client
    from headrace.serving.server import serve
    from headrace.serving.sources import ServeError

    root = Path(options.model_repository)
    if not (root / options.model).is_dir():
        raise CommandFailed(f"{root}: there is no directory of a model '{options.model}'")
    explicit: dict[str, Any] = {"model_control_mode": "explicit", "load_model": options.model}
    try:
        with (
            serve(root, **explicit) as own,
            Client(own.url, timeout=options.timeout) as client,
        ):
            return _of_server(options, client, own=True)
    except ServeError as error:
        raise CommandFailed(str(error)) from None


def _of_server(options: argparse.Namespace, server: "Client", own: bool) -> int:
    """Search, and report; 0 if settings keep the target."""
    from headrace.plugins.explain.commands.tuning import Tuning

    tuning = Tuning(options, server)
    interrupted = False
    with _restored(tuning, own):
        try:
            tuning.run()
        except KeyboardInterrupt:
            interrupted = True
    kept, written = tuning.kept, ""
    if options.plot and tuning.search.trials:
        try:
            Path(options.plot).write_text(tuning.plot(), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"{options.plot}: {error.strerror}") from None
    if options.write and kept and not interrupted:
        written = tuning.write(Path(options.model_repository, options.model, "config.pbtxt"))
    if options.json:
        print_json({**tuning.document(), "interrupted": interrupted, "written": written})
    else:
        print(*tuning.lines(), sep="\n")
        if options.write and kept and not interrupted:
            print(f"wrote {written}" if written else "nothing to write: the present settings stay")
    if interrupted:
        complain(options, "interrupted")
        return EXIT_INTERRUPTED
    return 0 if kept else EXIT_FAILURE


@contextmanager
def _restored(tuning: "Tuning", own: bool) -> Iterator[None]:
    """Give a running server its model back, also after an interrupt."""
    try:
        yield
    finally:
        if not own:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                tuning.restore()
            finally:
                signal.signal(signal.SIGINT, before)


def _nanoseconds(text: str) -> int:
    """A latency on the command line in nanoseconds; raises `argparse.ArgumentTypeError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|µs|ms|s)", text)
    if found and (value := round(float(found[1]) * _UNITS[found[2]])):
        return value
    raise argparse.ArgumentTypeError(f"expected a time such as 20ms, 500us or 1.5s, got {text!r}")


def _number(most: int) -> Callable[[str], int]:
    """A type of options: whole numbers from 1 on."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and 0 < int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {most}, got {text!r}")

    return parse


TUNE = remote_command(
    "tune", _tune,
    option("model MODEL", type=parse_model),
    option("--p99 TIME", "the 99th percentile of latencies to keep, such as 20ms", required=True,
           type=_nanoseconds),
    option("--model-repository DIR", "start a server with the model of this repository, instead of"
           " asking a running one", default=""),
    option("--write", "write the best settings into the model's config.pbtxt in the repository"),
    option("--input FILE", "the inputs of a request, as the VALUE of headrace infer (default:"
           " generated ones)"),
    option("--rows N", "rows to generate (default: 1)", type=_number(1 << 20), default=1),
    option("--seed N", "seed of generated inputs (default: 0)", type=int, default=0),
    option("--clients N", "up to so many clients, which wait for an answer before they send again,"
           " instead of a search for the highest rate", type=_number(1024), default=0),
    option("--rate N", "requests per second that arrive, whether or not others are answered,"
           " instead of that search", type=_number(1 << 20), default=0),
    option("--instances N", "instances to try, at most (default: the cores of this machine)",
           type=_number(64), default=0),
    option("--trials N", "settings to try, at most (default: 8)", type=_number(1000), default=8),
    option("--seconds S", "seconds for each rate or number of clients (default: 2)",
           type=parse_positive, default=2.0),
    option("--plot FILE", "draw requests/s and latencies of all settings as an SVG picture"),
    timeout=_TIMEOUT_SECS,
    help="find the settings of a model with the most requests/s within a latency",
    description="Send requests to a model with other settings, as far as they promise more by the"
    " learned cost of a batch, and say which carry the most requests per second while the 99th"
    " percentile of latencies is within a target, or, with --rate, which have the lowest one. A"
    " running server needs --model-control-mode=explicit, and gets its model back at the end.",
    epilog="""\
The exit status is 1 if no settings keep the target, and 130 after an interrupt.

  headrace tune digits --p99 20ms --model-repository models --write
""",
)  # fmt: skip
