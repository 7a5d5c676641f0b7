"""`headrace top`: live activity of a running server, from its status.

`activity` compares two readings of `/v2/status` to the document of `--json`, and `COLUMNS` make the
table from that document: as text, or drawn by rich on a terminal.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import accumulate, pairwise, zip_longest
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.api.operations import Document
from headrace.cli.command import option
from headrace.cli.remote import parse_positive, remote_command
from headrace.cli.text import duration, number, printable, size, table
from headrace.client import ClientError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from headrace.client.blocking import Client

_MOST = 5  # lines of one kind


def more(now: float, before: float) -> float:
    """The growth of a counter; those of a restarted server or a reloaded model begin at 0."""
    return now - before if now >= before else now


def quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """The quantile of a histogram, its cumulative counts by upper bound, linear in each bucket.

    The highest finite bound for values above all of them; None without values.
    """
    wanted = share * counts[-1][1] if counts else 0
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *counts]):
        if up_to >= wanted > 0:
            inside = (wanted - below) / (up_to - below)
            return low if high == inf else low + (high - low) * inside
    return None


def activity(before: Document, after: Document, order: str = "requests") -> Document:
    """The document of `--json`, but for the time."""
    if before["server"]["id"] != after["server"]["id"]:  # started again
        nothing = dict.fromkeys(("models", "answers", "limits", "processes", "downloads"), ())
        before = {"time": after["server"]["started"], **nothing}
    seconds: float = max(after["time"] - before["time"], 1e-9)
    bounds = [*after["bounds_seconds"], inf]
    known = {(m["name"], m["version"]): m for m in before["models"]}

    def model(now: Document) -> Document:
        was = known.get((now["name"], now["version"]), {})

        def rate(name: str) -> float:
            return more(float(now[name]), was.get(name, 0)) / seconds

        def quantiles(name: str) -> dict[str, float | None]:
            pairs = list(zip_longest(now[name], was.get(name, ()), fillvalue=0))
            grown = [count - old for count, old in pairs]
            if any(count < 0 for count in grown):
                grown = [count for count, _ in pairs]
            counts = list(zip(bounds, accumulate(grown), strict=False))
            return {f"p{share}": quantile(counts, share / 100) for share in (50, 90, 99)}

        old = was.get("failures_by_reason", {})
        failures = {
            why: more(count, old.get(why, 0)) / seconds
            for why, count in now["failures_by_reason"].items()
        }
        rows, batches = rate("rows"), rate("batches")
        return {
            "model": now["name"], "version": now["version"],
            "requests_per_second": rate("requests"), "failures_per_second": sum(failures.values()),
            "failures_per_second_by_reason": {why: each for why, each in failures.items() if each},
            "rows_per_second": rows, "batches_per_second": batches,
            "rows_per_batch": rows / batches if batches else None,
            "waiting_requests": now["waiting"], "latency_seconds": quantiles("latency"),
            "queue_seconds": quantiles("queue"), "compute_seconds": quantiles("compute"),
            "memory_bytes": now["memory_bytes"] or None, "instances": now["instances"],
            "backends": now["backends"], "servers": now["servers"],
        }  # fmt: skip

    models = [model(each) for each in after["models"] if each["state"] == "READY"]
    own = after["processes"][0]  # the server's own process
    earlier = {_answer(each): each["count"] for each in before["answers"]}
    answers = [
        {**_answer(each)._asdict(), "per_second": rate}
        for each in after["answers"]
        if (rate := more(each["count"], earlier.get(_answer(each), 0)) / seconds)
    ]
    fetched = {(e["model"], e["store"]): e["fetched_bytes"] for e in before["downloads"]}

    def download(now: Document) -> Document:
        was = fetched.get((now["model"], now["store"]))
        rate = None if was is None else more(now["fetched_bytes"], was) / seconds
        return {**now, "bytes_per_second": rate}

    [limit] = (each for each in after["limits"] if each["name"] == "requests")
    refused = next((each["refused"] for each in before["limits"] if each["name"] == "requests"), 0)
    cpu = next((each["cpu_seconds"] for each in before["processes"]), 0.0)
    server = {
        "ready": after["server"]["ready"],
        "requests_per_second": sum(each["requests_per_second"] for each in models),
        "failures_per_second": sum(each["failures_per_second"] for each in models),
        "refused_per_second": more(limit["refused"], refused) / seconds,
        "admitted_requests": limit["used"], "admitted_requests_limit": limit["limit"],
        "resident_bytes": own["resident_bytes"],
        "cpu": more(own["cpu_seconds"], cpu) / seconds,
        "answers": sorted(answers, key=lambda answer: -answer["per_second"]),
        "downloads": [*map(download, after["downloads"])], "degraded": after["degraded"],
    }  # fmt: skip
    return {"seconds": seconds, "server": server, "models": ordered(models, order)}


class _Answered(NamedTuple):
    door: str
    operation: str
    status: str


def _answer(each: Document) -> _Answered:
    return _Answered(each["door"], each["operation"], each["status"])


class TopColumn(NamedTuple):
    """A column of the table; one without an `order` to sort by is left out while it is empty.

    One without a `head` is only sorted by.
    """

    head: str
    value: Callable[[Document], Any]
    text: Callable[[Any], str] = str
    order: str = ""
    alarms: Callable[[Document], bool] = lambda model: False


COLUMNS = (
    TopColumn("VER", lambda m: m["version"]),
    TopColumn("REQ/S", lambda m: m["requests_per_second"], number, "requests"),
    TopColumn("", lambda m: m["rows_per_second"], order="rows"),
    TopColumn("ERR/S", lambda m: m["failures_per_second"], number, "errors",
              lambda m: m["failures_per_second"] > 0),
    TopColumn("REASON", lambda m: m["failures_per_second_by_reason"],
              lambda rates: max(rates, key=rates.get, default="-")),
    TopColumn("WAIT", lambda m: m["waiting_requests"], order="waiting"),
    TopColumn("P50", lambda m: m["latency_seconds"]["p50"], duration, "p50"),
    TopColumn("P99", lambda m: m["latency_seconds"]["p99"], duration, "p99"),
    TopColumn("BATCH", lambda m: m["rows_per_batch"], number, "batch"),
    TopColumn("INST", lambda m: sum(m["instances"].values()), lambda count: str(count or "-")),
    TopColumn("MEMORY", lambda m: m["memory_bytes"], size, "memory"),
    TopColumn("", lambda m: 0, order="name"),
    TopColumn("BACKEND", lambda m: m["backends"],
              lambda backends: next((name for name, active in backends.items() if active), "-"),
              alarms=lambda m: not next(iter(m["backends"].values()), True)),
    TopColumn("SERVERS", lambda m: m["servers"],
              lambda servers: f"{sum(servers.values())}/{len(servers)}" if servers else "-",
              alarms=lambda m: not all(m["servers"].values())),
)  # fmt: skip
ORDERS = {column.order: column.value for column in COLUMNS if column.order}


def ordered(models: Sequence[Document], order: str) -> list[Document]:
    """The models, largest first by `order`; equal ones by name and version."""
    by = ORDERS[order]
    return sorted(models, key=lambda m: (-(by(m) or 0), m["model"], m["version"].zfill(20)))


def summary(title: str, now: Document) -> list[str]:
    """The lines above the table."""
    if "notice" in now:
        return [title, now["notice"]]
    server = now["server"]
    rates = (("requests", "req"), ("failures", "err"), ("refused", "refused"))
    parts = [f"{number(server[f'{name}_per_second'])} {unit}/s" for name, unit in rates]
    limit = server["admitted_requests_limit"]
    parts += [f"{server['admitted_requests']}{f' of {limit}' if limit else ''} under way"]
    parts += [size(server["resident_bytes"]), f"{server['cpu']:.0%} CPU"]
    lines = [f"{title}  {'ready' if server['ready'] else 'NOT READY'}", "  ".join(parts)]
    errors = [
        "{}/s {door} {operation} {status}".format(number(answer["per_second"]), **answer)
        for answer in server["answers"]
        if not re.match("[123]|OK$", answer["status"])
    ]
    lines += [f"answered with errors: {', '.join(errors)}"] if errors else []
    lines += _first("downloading", [
        f"{each['model']}, {size(each['fetched_bytes'])} of {size(each['bytes'])},"
        f" {size(each['bytes_per_second'])}/s" for each in server["downloads"]
    ])  # fmt: skip
    lines += _first("degraded", [
        f"{' '.join(filter(None, (each['kind'], each['name'], each['version'])))}:"
        f" {each['reason']}" for each in server["degraded"]
    ])  # fmt: skip
    return [printable(line) for line in lines]


def _first(what: str, found: Sequence[str]) -> list[str]:
    """Lines of the first ones, and one with the number of all if there are more."""
    lines = [f"{what}: {each}" for each in found[:_MOST]]
    more = [f"{what}: {len(found)} in all, see headrace status"] if len(found) > _MOST else []
    return lines + more


def _columns(models: Sequence[Document]) -> list[TopColumn]:
    return [c for c in COLUMNS if c.head and (c.order or any(map(c.value, models)))]


def plain(title: str, now: Document) -> list[str]:
    """The lines of the view without rich."""
    columns = _columns(now["models"])
    rows = [[m["model"], *(c.text(c.value(m)) for c in columns)] for m in now["models"]]
    heads = [column.head for column in columns]
    return [*summary(title, now), "", *table(["MODEL", *heads], rows, right=" ".join(heads))]


class TopView:
    """The view by rich: as many models as the terminal has lines for, and how many more."""

    def __init__(self, title: str, now: Document) -> None:
        self._title = title
        self._now = now

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        above, models = summary(self._title, self._now), self._now["models"]
        yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in above)
        yield Text()
        columns = _columns(models)
        grid = Table("MODEL", box=None, padding=(0, 2, 0, 0), pad_edge=False,
                     header_style="reverse")  # fmt: skip
        for column in columns:
            grid.add_column(column.head, justify="right")
        room = max(options.max_height - len(above) - 3, 1)
        shown = models if len(models) <= room + 1 else models[:room]
        for m in shown:
            cells = [Text(c.text(c.value(m)), "b red not dim" if c.alarms(m) else "")
                     for c in columns]  # fmt: skip
            grid.add_row(Text(m["model"]), *cells, style="" if m["requests_per_second"] else "dim")
        yield grid
        if len(shown) < len(models):
            yield Text(f"and {len(models) - len(shown)} more", "dim")


def _top(options: argparse.Namespace, server: "Client") -> int:
    """Show a table or a document per interval, until interrupted."""
    title, live = str(server.address), sys.stdout.isatty() and not (options.once or options.json)
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        before: Mapping[str, Any] = server.document("ServerStatus")
        screen = None
        if live and find_spec("rich"):
            from rich.live import Live

            screen = stack.enter_context(Live(title, screen=True, auto_refresh=False))
        while True:
            time.sleep(options.interval)
            try:
                after = server.document("ServerStatus")
                now, before = activity(dict(before), after, options.sort), after
            except ClientError as error:
                if not live:
                    raise
                now = {"notice": str(error), "models": []}
            if options.json:
                print(json.dumps({"time": time.time()} | now), flush=True)
            elif screen is None:
                print(*plain(title, now), sep="\n", flush=True)
            else:
                screen.update(TopView(title, now), refresh=True)
            if options.once or not (live or options.json):
                return 0
    return 0


TOP = remote_command(
    "top", _top,
    option("--interval SECS", "seconds between tables, which each covers (default: 2)",
           type=parse_positive, default=2.0),
    option("--sort BY", f"order, largest first: {', '.join(ORDERS)} (default: requests)",
           choices=tuple(ORDERS), default="requests"),
    option("--once", "print one table and exit"),
    as_json="print a line of JSON per interval",
    help="show live load and latency of a running server",
    description="Show rates, queues, latencies, batch sizes, instances and memory of the models"
    " of a running server, until Ctrl-C; without a terminal, print one table.",
)  # fmt: skip
