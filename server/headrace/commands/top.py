"""`headrace top`: what a running server is doing, from its metrics."""

import argparse
import json
import sys
import time
from dataclasses import replace

from headrace.client.address import Address
from headrace.client.connection import Connection
from headrace.client.errors import BadAnswer, ClientError, NotReached
from headrace.client.metrics import parse
from headrace.client.server import Server
from headrace.commands.activity import Scrape, activity
from headrace.commands.remote import CommandFailed, address
from headrace.commands.screen import choose_screen
from headrace.commands.top_table import KEYS, View, document

METRICS_PORT = 8002
_QUIT = ("q", "\x1b")


def top(options: argparse.Namespace, server: Server) -> int:
    """Show a table for every interval, until it is enough."""
    metrics = Connection(_metrics_address(options), dict(options.header), options.timeout)
    live = sys.stdout.isatty() and not (options.once or options.json)
    watch = _Watch(options, server.address, metrics, live)
    try:
        if options.json:
            return watch.lines()
        return watch.tables()
    except KeyboardInterrupt:  # the way to end it
        return 0
    finally:
        metrics.close()


class _Watch:
    """Asks again and again, and shows what has changed."""

    def __init__(
        self, options: argparse.Namespace, title: str, metrics: Connection, live: bool
    ) -> None:
        self._title = title
        self._metrics = metrics
        self._live = live
        self._interval: float = options.interval
        self._once: bool = options.once
        self._order: str = options.sort

    def lines(self) -> int:
        """A line of JSON for every interval."""
        before = self._scrape()
        while True:
            time.sleep(self._interval)
            after = self._scrape()
            print(json.dumps(document(self._view(before, after), time.time())), flush=True)
            if self._once:
                return 0
            before = after

    def tables(self) -> int:
        """A table for every interval; in a terminal in place of the last one."""
        before: Scrape | None = self._scrape()
        view = View(self._title, None, self._order, "looking ...")
        with choose_screen(self._live) as screen:
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
                if self._once:
                    return 0

    def _next(self, before: Scrape | None, view: View) -> tuple[Scrape | None, View]:
        """Scrape again. In a terminal a server that is away is waited for."""
        try:
            after = self._scrape()
        except (ClientError, CommandFailed) as error:
            if not self._live:
                raise
            return None, replace(view, notice=str(error))
        if before is None:
            return after, replace(view, notice="back again")
        return after, self._view(before, after)

    def _scrape(self) -> Scrape:
        try:
            text = self._metrics.get("/metrics").body.decode("utf-8", "replace")
            scrape = Scrape(time.monotonic(), parse(text))
        except NotReached as error:
            raise CommandFailed(f"{error}; --metrics-url says where metrics are") from None
        except ValueError as error:
            raise BadAnswer(f"{self._metrics.address}/metrics: {error}") from None
        if "nv_inference_request_success" not in scrape.samples and (
            "headrace_ready" not in scrape.samples
        ):
            raise BadAnswer(f"{self._metrics.address}/metrics are not metrics of headrace")
        return scrape

    def _view(self, before: Scrape, after: Scrape) -> View:
        return View(self._title, activity(before, after), self._order)


def _metrics_address(options: argparse.Namespace) -> Address:
    given: Address | None = options.metrics_url
    if given is None:
        return replace(address(options), port=METRICS_PORT, prefix="")
    return replace(given, prefix=given.prefix.removesuffix("/metrics"))
