"""`headrace top`: live activity of a running server, from its metrics.

`parse` reads Prometheus' text format, `activity` compares two scrapes to the document of `--json`,
and `COLUMNS` make the table from that document: as text, or drawn by rich on a terminal.
"""

import argparse
import ipaddress
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.api.operations import Document
from headrace.cli.command import option
from headrace.cli.remote import (
    CommandFailed,
    address,
    connected,
    parse_address,
    parse_positive,
    remote_command,
)
from headrace.cli.text import duration, number, size, table
from headrace.client import AnswerError, ClientError, ConnectionFailed
from headrace.client.address import Address

if TYPE_CHECKING:
    from rich.console import Group

    from headrace.client.blocking import Client

_SAY_WHERE = "--metrics-url says where metrics are"
_SUCCESS = "nv_inference_request_success"
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|Inf)"
_LINE = re.compile(rf"^([a-zA-Z_:][\w:]*)(?:\{{(.*)\}})?[ \t]+({_NUMBER})(?!\S)", re.MULTILINE)
# Values that differ in other labels only, such as those of `metric_tags`, are summed.
_LABELS = "model|version|reason|kind|backend|endpoint|door|operation|status|id|le"
_LABEL = re.compile(rf'\b({_LABELS})="((?:[^"\\]|\\.)*)"')

# By name, model and version, if the metric has these; then by the other labels' values.
Values = dict[tuple[str, ...], dict[str, float]]


class Scrape(NamedTuple):
    """The values at a time, in seconds of a monotonic clock."""

    at: float
    values: Values


def parse(text: str) -> Values:
    """The values in Prometheus' text format; lines of other forms are skipped."""
    found: Values = {}
    for name, inside, value in _LINE.findall(text):
        labels = {label: _plain(text) for label, text in _LABEL.findall(inside)}
        key = name, *(labels.pop(label) for label in ("model", "version") if label in labels)
        values, others = found.setdefault(key, {}), " ".join(labels.values())
        values[others] = values.get(others, 0) + float(value)
    return found


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda escaped: escaped[1].replace("n", "\n"), text)


def _locate(options: argparse.Namespace, server: "Client") -> tuple[Address, str]:
    """The address of the metrics, and the id of the server that has them; "" for any."""
    given: Address | None = options.metrics_url
    if given is not None:
        return replace(given, prefix=given.prefix.removesuffix("/metrics")), ""
    own, told = address(options), server.document("ServerMetadata").get("headrace")
    if told is None:  # Triton does not report it
        return replace(own, port=8002, prefix=""), ""
    try:
        if told["metrics"] is None:
            raise CommandFailed(f"the server at {server.address} has no metrics: --allow-metrics")
        at, identity = told["metrics"], told["id"]
        host, port, scheme = at["address"], int(at["port"]), str(at.get("scheme", "http"))
        listens = ipaddress.ip_address(host)
    except (TypeError, KeyError, ValueError):
        raise AnswerError(f"{server.address}/v2 does not say where metrics are: {told}") from None
    # Metrics on a wildcard or loopback address are on the server's host.
    near = listens.is_unspecified or listens.is_loopback
    return Address(scheme, own.host if near else host, port), str(identity)


def _scrape(options: argparse.Namespace, server: "Client", at: Address, identity: str) -> Scrape:
    """The current values at an address; raises `ClientError` and `CommandFailed`."""
    try:
        with connected(at, options) as connection:
            values = parse(connection.fetch("/metrics").decode("utf-8", "replace"))
    except ConnectionFailed as error:
        raise CommandFailed(f"{error}; {_SAY_WHERE}") from None
    if ("headrace_ready",) not in values and all(key[0] != _SUCCESS for key in values):
        raise AnswerError(f"{at}/metrics are not metrics of headrace")
    if identity and identity not in values.get(("headrace_server_info",), ()):
        message = f"the metrics at {at} are not those of the server at {server.address}"
        raise CommandFailed(f"{message}; {_SAY_WHERE}")
    return Scrape(time.monotonic(), values)


def activity(before: Scrape, after: Scrape, order: str = "requests") -> Document:
    """The document of `--json`, but for the time."""
    seconds = max(after.at - before.at, 1e-9)
    now, rates = after.values, Values()
    for key, series in now.items():
        old = before.values.get(key, {})
        rates[key] = {
            # Counters of a restarted server or a reloaded model begin at 0.
            labels: (value - was if value >= (was := old.get(labels, 0)) else value) / seconds
            for labels, value in series.items()
        }

    def of(found: Values, *key: str) -> Mapping[str, float]:
        return found.get(key, {})

    def total(found: Values, *key: str) -> float:
        return sum(of(found, *key).values())

    def quantiles(kind: str, *version: str) -> dict[str, float | None]:
        buckets = of(rates, f"headrace_{kind}_duration_seconds_bucket", *version)
        counts = sorted((float(bound), count) for bound, count in buckets.items())
        return {f"p{share}": quantile(counts, share / 100) for share in (50, 90, 99)}

    def model(*key: str) -> Document:
        rows = total(rates, "nv_inference_count", *key)
        batches = total(rates, "nv_inference_exec_count", *key)
        failures = of(rates, "nv_inference_request_failure", *key)
        return {
            "model": key[0], "version": key[1],
            "requests_per_second": total(rates, _SUCCESS, *key),
            "failures_per_second": sum(failures.values()),
            "failures_per_second_by_reason": {why: rate for why, rate in failures.items() if rate},
            "rows_per_second": rows, "batches_per_second": batches,
            "rows_per_batch": rows / batches if batches else None,
            "waiting_requests": int(total(now, "nv_inference_pending_request_count", *key)),
            "latency_seconds": quantiles("request", *key),
            "queue_seconds": quantiles("queue", *key),
            "compute_seconds": quantiles("compute", *key),
            "memory_bytes": total(now, "headrace_model_memory_bytes", *key) or None,
            "instances": {k: int(n) for k, n in of(now, "headrace_model_instances", *key).items()},
            "backends": {k: n > 0 for k, n in of(now, "headrace_backend_active", *key).items()},
            "servers": {k: n > 0 for k, n in of(now, "headrace_endpoint_healthy", *key).items()},
        }  # fmt: skip

    models = [model(*key) for name, *key in now if name == _SUCCESS and len(key) == 2]
    answers: list[Document] = [
        {"door": door, "operation": operation, "status": status, "per_second": rate}
        for labels, rate in of(rates, "headrace_requests_total").items() if rate
        for door, operation, status in [labels.rsplit(" ", 2)]
    ]  # fmt: skip
    cpu = of(rates, "process_cpu_seconds_total")
    server = {
        "ready": total(now, "headrace_ready") > 0,
        "requests_per_second": sum(model["requests_per_second"] for model in models),
        "failures_per_second": sum(model["failures_per_second"] for model in models),
        "refused_per_second": total(rates, "headrace_overloaded_total"),
        "admitted_requests": int(total(now, "headrace_admitted_requests")),
        "admitted_requests_limit": int(total(now, "headrace_admitted_requests_limit")),
        "resident_bytes": total(now, "process_resident_memory_bytes") or None,
        "cpu": sum(cpu.values()) if cpu else None,
        "answers": sorted(answers, key=lambda answer: -answer["per_second"]),
    }
    return {"seconds": seconds, "server": server, "models": ordered(models, order)}


def quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """The quantile of a histogram, its cumulative counts by upper bound, linear in each bucket.

    The highest finite bound for values above all of them; None without values.
    """
    wanted = share * counts[-1][1] if counts else 0
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *counts]):
        if up_to >= wanted > 0:
            inside = (wanted - below) / (up_to - below)
            return low if high == float("inf") else low + (high - low) * inside
    return None


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
    parts += [f"{server['admitted_requests']} of {server['admitted_requests_limit']} under way"]
    parts += [size(server["resident_bytes"])] if server["resident_bytes"] else []
    parts += [f"{server['cpu']:.0%} CPU"] if server["cpu"] is not None else []
    lines = [f"{title}  {'ready' if server['ready'] else 'NOT READY'}", "  ".join(parts)]
    errors = [
        "{}/s {door} {operation} {status}".format(number(answer["per_second"]), **answer)
        for answer in server["answers"]
        if not re.match("[123]|OK$", answer["status"])
    ]
    return [*lines, f"answered with errors: {', '.join(errors)}"] if errors else lines


def _columns(models: Sequence[Document]) -> list[TopColumn]:
    return [c for c in COLUMNS if c.head and (c.order or any(map(c.value, models)))]


def plain(title: str, now: Document) -> list[str]:
    """The lines of the view without rich."""
    columns = _columns(now["models"])
    rows = [[m["model"], *(c.text(c.value(m)) for c in columns)] for m in now["models"]]
    heads = [column.head for column in columns]
    return [*summary(title, now), "", *table(["MODEL", *heads], rows, right=" ".join(heads))]


def drawn(title: str, now: Document) -> "Group":
    """The view by rich, which fits the table to the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = _columns(now["models"])
    grid = Table("MODEL", box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="reverse")
    for column in columns:
        grid.add_column(column.head, justify="right")
    for m in now["models"]:
        cells = [Text(c.text(c.value(m)), "b red not dim" if c.alarms(m) else "") for c in columns]
        grid.add_row(Text(m["model"]), *cells, style="" if m["requests_per_second"] else "dim")
    return Group(Text("\n".join(summary(title, now))), "", grid)


def _top(options: argparse.Namespace, server: "Client") -> int:
    """Show a table or a document per interval, until interrupted."""
    title, live = str(server.address), sys.stdout.isatty() and not (options.once or options.json)
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        place: tuple[Address, str] | None
        before = _scrape(options, server, *(place := _locate(options, server)))
        screen = None
        if live and find_spec("rich"):
            from rich.live import Live

            screen = stack.enter_context(Live(title, screen=True, auto_refresh=False))
        while True:
            time.sleep(options.interval)
            try:
                place = _locate(options, server) if place is None else place
                after = _scrape(options, server, *place)
                now = activity(before, after, options.sort)
                before = after
            except (ClientError, CommandFailed) as error:
                if not live:
                    raise
                place = None  # a restarted server may have them elsewhere
                now = {"notice": str(error), "models": []}
            if options.json:
                print(json.dumps({"time": time.time()} | now), flush=True)
            elif screen is None:
                print(*plain(title, now), sep="\n", flush=True)
            else:
                screen.update(drawn(title, now), refresh=True)
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
    option("--metrics-url URL", "address of the metrics (default: as reported by the server)",
           type=parse_address),
    as_json="print a line of JSON per interval",
    help="show live load and latency of a running server",
    description="Show rates, queues, latencies, batch sizes, instances and memory of the models"
    " of a running server, until Ctrl-C; without a terminal, print one table.",
)  # fmt: skip
