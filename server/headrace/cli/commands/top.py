"""`headrace top`: live activity of a running server, from its metrics."""

import argparse
import ipaddress
import json
import select
import shutil
import sys
import termios
import time
import tty
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from headrace.cli.command import option
from headrace.cli.commands.top_table import (
    KEYS,
    ORDERS,
    Scrape,
    View,
    activity,
    document,
    parse,
    plain_lines,
    rich_lines,
)
from headrace.cli.remote import (
    CommandFailed,
    address,
    connected,
    parse_address,
    parse_positive,
    remote_command,
)
from headrace.client import AnswerError, ClientError, ConnectionFailed
from headrace.client.address import Address

if TYPE_CHECKING:
    from headrace.client.blocking import Client

METRICS_PORT = 8002
_SAY_WHERE = "--metrics-url says where metrics are"
_QUIT = ("q", "\x1b")


def _top(options: argparse.Namespace, server: "Client") -> int:
    """Show a table per interval, until interrupted."""
    live = sys.stdout.isatty() and not (options.once or options.json)
    metrics = _Metrics(options, server)
    watch = _Watch(options, str(server.address), metrics, live)
    try:
        if options.json:
            return watch.lines()
        return watch.tables()
    except KeyboardInterrupt:  # the way to end it
        return 0
    finally:
        metrics.close()


class _Metrics:
    """The metrics of a server, at the address that it reports.

    Another server may listen there, so the server's identity is checked, unless the user has given
    the address.
    """

    def __init__(self, options: argparse.Namespace, server: "Client") -> None:
        self._options = options
        self._server = server
        self._found: tuple[Client, str] | None = None  # with the server's id; "" for any

    def scrape(self) -> Scrape:
        """The current values; raises `ClientError` and `CommandFailed`."""
        known = self._found is not None
        scrape = self._scrape()
        if scrape is None and known:  # it may have been restarted
            self.close()
            scrape = self._scrape()
        if scrape is None:
            raise CommandFailed(
                f"the metrics at {self._connection().address} are not those of the server at"
                f" {self._server.address}; {_SAY_WHERE}"
            )
        return scrape

    def close(self) -> None:
        """Close the connection; the next scrape locates the metrics again."""
        if self._found is not None:
            self._found[0].close()
            self._found = None

    def _connection(self) -> "Client":
        return self._locate()[0]

    def _locate(self) -> "tuple[Client, str]":
        if self._found is None:
            at, identity = _where(self._options, self._server)
            self._found = connected(at, self._options), identity
        return self._found

    def _scrape(self) -> Scrape | None:
        """The current values; None if they are another server's."""
        connection, identity = self._locate()
        at = connection.address
        try:
            text = connection.fetch("/metrics").decode("utf-8", "replace")
            samples = parse(text)
        except ConnectionFailed as error:
            self.close()
            raise CommandFailed(f"{error}; {_SAY_WHERE}") from None
        except ValueError as error:
            raise AnswerError(f"{at}/metrics: {error}") from None
        if "nv_inference_request_success" not in samples and "headrace_ready" not in samples:
            raise AnswerError(f"{at}/metrics are not metrics of headrace")
        ids = [sample.labels.get("id") for sample in samples.get("headrace_server_info", ())]
        return Scrape(time.monotonic(), samples) if identity in ("", *ids) else None


class _Watch:
    """Scrapes repeatedly, and shows the changes."""

    def __init__(
        self, options: argparse.Namespace, title: str, metrics: _Metrics, live: bool
    ) -> None:
        self._title = title
        self._metrics = metrics
        self._live = live
        self._interval: float = options.interval
        self._once: bool = options.once
        self._order: str = options.sort

    def lines(self) -> int:
        """Print a line of JSON per interval."""
        before = self._metrics.scrape()
        while True:
            time.sleep(self._interval)
            after = self._metrics.scrape()
            print(json.dumps(document(self._view(before, after), time.time())), flush=True)
            if self._once:
                return 0
            before = after

    def tables(self) -> int:
        """Show a table per interval on a terminal, replacing the last one; otherwise print one."""
        before: Scrape | None = self._metrics.scrape()
        view = View(self._title, None, self._order, "looking ...")
        with _screen(self._live) as screen:
            if self._live:
                screen.show(view)
            until = time.monotonic() + self._interval
            while True:
                key = screen.key(max(until - time.monotonic(), 0))
                if key in _QUIT:
                    return 0
                if key in KEYS:
                    self._order = KEYS[key]
                    view = replace(view, order=self._order)
                    screen.show(view)
                if time.monotonic() < until:
                    continue
                until = time.monotonic() + self._interval
                before, view = self._next(before, view)
                screen.show(view)
                if not self._live:
                    return 0

    def _next(self, before: Scrape | None, view: View) -> tuple[Scrape | None, View]:
        """Scrape again; on a terminal, wait for a server that is down."""
        try:
            after = self._metrics.scrape()
        except (ClientError, CommandFailed) as error:
            if not self._live:
                raise
            return None, replace(view, notice=str(error))
        if before is None:
            return after, replace(view, notice="back again")
        return after, self._view(before, after)

    def _view(self, before: Scrape, after: Scrape) -> View:
        return View(self._title, activity(before, after), self._order)


def _where(options: argparse.Namespace, server: "Client") -> tuple[Address, str]:
    """The address of the metrics, and the id of the expected server; "" for any."""
    given: Address | None = options.metrics_url
    if given is not None:
        identity = ""
        with suppress(ConnectionFailed):  # possibly only the metrics can be reached from here
            identity = str((server.document("ServerMetadata").get("headrace") or {}).get("id", ""))
        return replace(given, prefix=given.prefix.removesuffix("/metrics")), identity
    own = address(options)
    told = server.document("ServerMetadata").get("headrace")
    if told is None:  # Triton does not report it
        return replace(own, port=METRICS_PORT, prefix=""), ""
    try:
        if told["metrics"] is None:
            raise CommandFailed(f"the server at {server.address} has no metrics: --allow-metrics")
        host, port, identity = told["metrics"]["address"], int(told["metrics"]["port"]), told["id"]
        listens = ipaddress.ip_address(host)
    except (TypeError, KeyError, ValueError):
        raise AnswerError(f"{server.address}/v2 does not say where metrics are: {told}") from None
    # Metrics on a wildcard or loopback address are on the server's host.
    if listens.is_unspecified or listens.is_loopback:
        host = own.host
    return Address("http", host, port), str(identity)


# --- screens

_ABOVE = 6  # lines above the versions
_CLEAR = "\x1b[H\x1b[J"
# The cursor and the alternate screen.
_HIDE, _UNHIDE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class TextScreen:
    """Prints tables one after the other, for files and pipes.

    A context manager like all screens.
    """

    def __init__(self) -> None:
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        return None

    def show(self, view: View) -> None:
        """Print the whole table."""
        width = shutil.get_terminal_size((100, 0)).columns
        print("\n" * self._shown + "\n".join(plain_lines(view, width)), flush=True)
        self._shown = True

    def key(self, seconds: float) -> str:
        """The key pressed within that time; "" for none, as always here."""
        time.sleep(seconds)
        return ""


class PlainScreen(TextScreen):
    """A terminal that is redrawn; reads keys if standard input is one, too."""

    def __init__(self) -> None:
        super().__init__()
        self._state: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._state = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)  # unbuffered keys without echo
        self.begin()
        return self

    def __exit__(self, *ended: object) -> None:
        self.end()
        if self._state is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._state)

    def begin(self) -> None:
        """Switch the terminal to the alternate screen."""
        print(_HIDE, end="", flush=True)

    def end(self) -> None:
        """Restore the terminal."""
        print(_UNHIDE, end="", flush=True)

    def show(self, view: View) -> None:
        """Redraw the screen."""
        size = shutil.get_terminal_size()
        lines = plain_lines(view, size.columns, max(size.lines - _ABOVE, 1))
        print(_CLEAR + "\n".join(line[: size.columns] for line in lines), end="", flush=True)

    def key(self, seconds: float) -> str:
        if self._state is None:
            time.sleep(seconds)
            return ""
        pressed, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if pressed else ""


class RichScreen(PlainScreen):
    """A coloured terminal by rich; raises `ImportError` if that is not installed."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def begin(self) -> None:
        """Start the live display."""
        self._live.start()

    def end(self) -> None:
        """End the live display."""
        self._live.stop()

    def show(self, view: View) -> None:
        """Update the live display."""
        size = self._console.size
        self._live.update(rich_lines(view, size.width, max(size.height - _ABOVE, 1)), refresh=True)


def _screen(live: bool) -> TextScreen:
    """The screen: a terminal if `live`, by rich if installed."""
    if not live:
        return TextScreen()
    try:
        return RichScreen()
    except ImportError:
        return PlainScreen()


TOP = remote_command(
    "top", _top,
    option(
        "--interval SECS", "seconds between tables, which each covers (default: 2)",
        type=parse_positive, default=2.0,
    ),
    option(
        "--sort BY", f"order, largest first: {', '.join(ORDERS)} (default: requests)",
        choices=tuple(ORDERS), default="requests",
    ),
    option("--once", "print one table and exit"),
    option(
        "--metrics-url URL", "address of the metrics (default: as reported by the server)",
        type=parse_address,
    ),
    as_json="print a line of JSON per interval",
    help="show live load and latency of a running server",
    description="Show rates, queues, latencies, batch sizes, instances and memory of the models"
    " of a running server, until q or Ctrl-C; without a terminal, print one table.",
    epilog="""\
Keys in a terminal: sort by r requests, o rows, e errors, w waiting, 5 p50,
9 p99, b batch, m memory, n name; q quits.

REQ/S     requests answered per second     BATCH   mean rows per batch
ERR/S     requests failed per second       INST    instances that run the model
WAIT      requests in the queue            MEMORY  memory of the model
P50, P99  median and 99th percentile of the latency
""",
)  # fmt: skip
