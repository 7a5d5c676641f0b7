"""`headrace top`: live activity of a running server, from its status.

`activity` compares two readings of `/v2/status` to the document of `--json`, and `COLUMNS` make the
table from that document: as text, or drawn by rich on a terminal.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    from rich.console import Group

    from headrace.client.blocking import Client

_MOST = 5  # lines of one kind


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
        nothing = dict.fromkeys(("models", "answers", "limits", "downloads"), ())
        own = {"cpu_seconds": 0.0}
        before = {"time": after["server"]["started"], "processes": [own], **nothing}
    seconds: float = max(after["time"] - before["time"], 1e-9)
    bounds = [*after["bounds_seconds"], inf]

    def rate(now: Document, was: Document, name: str) -> float:
        """The growth of a counter; those of a reloaded model begin at 0."""
        count, old = float(now[name]), float(was.get(name, 0))
        return (count - old if count >= old else count) / seconds

    def matched(kind: str, *names: str) -> Iterator[tuple[Document, Document]]:
        """Documents of both readings with the same values of `names`; the earlier one may be {}."""
        known = {tuple(each[name] for name in names): each for each in before[kind]}
        return ((e, known.get(tuple(e[name] for name in names), {})) for e in after[kind])

    def model(now: Document, was: Document) -> Document:
        def quantiles(name: str) -> dict[str, float | None]:
            grown = [c - old for c, old in zip_longest(now[name], was.get(name, ()), fillvalue=0)]
            totals = accumulate(now[name] if min(grown, default=0) < 0 else grown)
            counts = list(zip(bounds, totals, strict=False))
            return {f"p{share}": quantile(counts, share / 100) for share in (50, 90, 99)}

        reasons, old = now["failures_by_reason"], was.get("failures_by_reason", {})
        failed = {why: each for why in reasons if (each := rate(reasons, old, why))}
        rows, batches = rate(now, was, "rows"), rate(now, was, "batches")
        return {
            "model": now["name"], "version": now["version"],
            "requests_per_second": rate(now, was, "requests"),
            "failures_per_second": sum(failed.values()), "failures_per_second_by_reason": failed,
            "rows_per_second": rows, "batches_per_second": batches,
            "rows_per_batch": rows / batches if batches else None,
            "waiting_requests": now["waiting"], "latency_seconds": quantiles("latency"),
            "queue_seconds": quantiles("queue"), "compute_seconds": quantiles("compute"),
            "memory_bytes": now["memory_bytes"] or None, "instances": now["instances"],
            "backends": now["backends"], "servers": now["servers"],
        }  # fmt: skip

    models = [model(*p) for p in matched("models", "name", "version") if p[0]["state"] == "READY"]
    names = ("door", "operation", "status")
    answers = [{name: now[name] for name in names} | {"per_second": each}
               for now, was in matched("answers", *names)
               if (each := rate(now, was, "count"))]  # fmt: skip
    downloads = [{**now, "bytes_per_second": rate(now, was, "fetched_bytes") if was else None}
                 for now, was in matched("downloads", "model", "store")]  # fmt: skip
    [(limit, earlier)] = (p for p in matched("limits", "name") if p[0]["name"] == "requests")
    process = after["processes"][0]  # the server's own
    server = {
        "ready": after["server"]["ready"],
        "requests_per_second": sum(each["requests_per_second"] for each in models),
        "failures_per_second": sum(each["failures_per_second"] for each in models),
        "refused_per_second": rate(limit, earlier, "refused"), "admitted_requests": limit["used"],
        "admitted_requests_limit": limit["limit"], "resident_bytes": process["resident_bytes"],
        "cpu": rate(process, before["processes"][0], "cpu_seconds"),
        "answers": sorted(answers, key=lambda answer: -answer["per_second"]),
        "downloads": downloads, "degraded": after["degraded"],
    }  # fmt: skip
    return {"seconds": seconds, "server": server, "models": ordered(models, order)}


class TopColumn(NamedTuple):
    """A column; left out while it is empty if it has no `order`, and always without a `head`."""

    head: str
    value: Callable[[Document], Any]
    text: Callable[[Any], str] = str
    order: str = ""
    alarms: Callable[[Any], bool] = lambda value: False


COLUMNS = (
    TopColumn("VER", lambda m: m["version"]),
    TopColumn("REQ/S", lambda m: m["requests_per_second"], number, "requests"),
    TopColumn("", lambda m: m["rows_per_second"], order="rows"),
    TopColumn("ERR/S", lambda m: m["failures_per_second"], number, "errors", bool),
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
              alarms=lambda backends: not next(iter(backends.values()), True)),
    TopColumn("SERVERS", lambda m: m["servers"],
              lambda servers: f"{sum(servers.values())}/{len(servers)}" if servers else "-",
              alarms=lambda servers: not all(servers.values())),
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
    errors = ["{}/s {door} {operation} {status}".format(number(each["per_second"]), **each)
              for each in server["answers"]
              if not re.match("[123]|OK$", each["status"])]  # fmt: skip
    lines += [f"answered with errors: {', '.join(errors)}"] if errors else []
    told = {
        "downloading": [f"{e['model']}, {size(e['fetched_bytes'])} of {size(e['bytes'])},"
                        f" {size(e['bytes_per_second'])}/s" for e in server["downloads"]],
        "degraded": [f"{' '.join(filter(None, (e['kind'], e['name'], e['version'])))}:"
                     f" {e['reason']}" for e in server["degraded"]],
    }  # fmt: skip
    for what, found in told.items():
        lines += [f"{what}: {each}" for each in found[:_MOST]]
        lines += [f"{what}: {len(found)} in all, see headrace status"] if found[_MOST:] else []
    return [printable(line) for line in lines]


def _columns(models: Sequence[Document]) -> list[TopColumn]:
    return [c for c in COLUMNS if c.head and (c.order or any(map(c.value, models)))]


def plain(title: str, now: Document) -> list[str]:
    """The lines of the view without rich."""
    columns = _columns(now["models"])
    rows = [[m["model"], *(c.text(c.value(m)) for c in columns)] for m in now["models"]]
    heads = [column.head for column in columns]
    return [*summary(title, now), "", *table(["MODEL", *heads], rows, right=" ".join(heads))]


def drawn(title: str, now: Document, height: int) -> "Group":
    """The view by rich: as many models as fit in `height` lines, and how many more."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    above, models, columns = summary(title, now), now["models"], _columns(now["models"])
    heads = (Column(column.head, justify="right") for column in columns)
    grid = Table("MODEL", *heads, box=None, padding=(0, 2, 0, 0), pad_edge=False,
                 header_style="reverse")  # fmt: skip
    room = max(height - len(above) - 3, 1)
    shown = models if len(models) <= room + 1 else models[:room]
    for m in shown:
        values = [(column, column.value(m)) for column in columns]
        cells = [Text(printable(c.text(v)), "b red not dim" * c.alarms(v)) for c, v in values]
        name, style = Text(printable(m["model"])), "" if m["requests_per_second"] else "dim"
        grid.add_row(name, *cells, style=style)
    rest = [Text(f"and {len(models) - len(shown)} more", "dim")] if len(shown) < len(models) else []
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in [*above, ""]]
    return Group(*lines, grid, *rest)


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
                screen.update(drawn(title, now, screen.console.height), refresh=True)
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
