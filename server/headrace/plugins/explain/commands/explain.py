"""`headrace explain MODEL`: how a model's batches were formed, and what would be better."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.api.operations import Document
from headrace.cli.command import option
from headrace.cli.remote import parse_model, parse_version, print_json, remote_command
from headrace.cli.text import duration, fitted_table, number, printable

if TYPE_CHECKING:
    from headrace.client.blocking import Client

_PARTS = ("ARRIVE", "QUEUE", "GATHER", "RUN", "REST", "ANSWER", "TOTAL")
_OF_LEVEL = ("LEVEL", "REQUESTS", "MEAN", "P99")
_RESULTS = ("BATCHES", "ROWS/BATCH", "MEAN", "P99")


def lines(found: Document) -> Iterator[str]:
    """The explanation as text."""
    settings, cost = found["settings"], found["cost"]
    given = ", ".join(f"{name} {value}" for name, value in settings.items() if value or value == 0)
    yield printable(f"{found['name']} version {found['version']}: {given}")
    yield ""
    since, logged = found["since_load"], found["logged"]
    rows = [
        (f"{part['requests']} {what}", *_times(part["request"]))
        for what, part in (("since the load", since), ("logged", logged))
    ]
    yield from fitted_table(("REQUESTS, ON AVERAGE", *_PARTS), rows, " ".join(_PARTS))
    yield ""
    if found["last_batches"]:
        closed = ", ".join(f"{count} {reason}" for reason, count in logged["closed"].items())
        lasted = duration(found["logged_ns"] / 1e9)
        yield printable(f"{logged['batches']} batches in {lasted}: {closed}")
        yield ""
        rows = [
            (str(each["rows"]), str(each["requests"]), each["closed"], *_times(each))
            for each in found["last_batches"]
        ]
        yield from fitted_table(
            ("ROWS", "REQUESTS", "CLOSED", *_PARTS), rows, " ".join(("ROWS", "REQUESTS", *_PARTS))
        )
        yield ""
    if cost:
        fixed, row, error = (_time(cost[f"{name}_ns"]) for name in ("fixed", "row", "error"))
        yield f"a batch costs {fixed} + {row} per row, ± {error} ({cost['batches']} batches)"
        yield ""
    if found["what_if"]:
        rows = [("as it was", *_result(logged), "-")]
        rows += [
            (_change(each["change"]), *_result(each), f"{each['busy']:.0%}")
            for each in found["what_if"]
        ]
        yield from fitted_table(("WHAT IF", *_RESULTS, "BUSY"), rows, f"{' '.join(_RESULTS)} BUSY")
    named = [("as it was", logged)]
    named += [(_change(each["change"]), each) for each in found["what_if"]]
    rows = [
        (name, str(of["level"]), str(of["requests"]), _time(of["mean_ns"]), _time(of["p99_ns"]))
        for name, each in named
        for of in each["levels"]
    ]
    if rows:
        yield ""
        yield from fitted_table(("BY PRIORITY", *_OF_LEVEL), rows, " ".join(_OF_LEVEL))
    if found["obstacle"]:
        yield printable(f"nothing else is replayed: {found['obstacle']}")


def _change(change: Document) -> str:
    return ", ".join(f"{name}: {value}" for name, value in change.items()) or "replayed as it is"


def _result(of: Document) -> tuple[str, ...]:
    return (
        str(of["batches"]),
        number(of["rows_per_batch"]),
        _time(of["mean_ns"]),
        _time(of["p99_ns"]),
    )


def _times(of: Document) -> tuple[str, ...]:
    return tuple(_time(of[f"{part.lower()}_ns"]) for part in _PARTS)


def _time(ns: int | None) -> str:
    return duration(None if ns is None else ns / 1e9)


def _explain(options: argparse.Namespace, server: "Client") -> int:
    named = {"name": options.model, "version": options.version or ""}
    found = server.document("ModelExplain", **named)
    if options.json:
        print_json(found)
    else:
        print(*lines(found), sep="\n")
    return 0


EXPLAIN = remote_command(
    "explain", _explain,
    option("model MODEL", type=parse_model),
    option("--version N", "version of the model", type=parse_version),
    help="show how a model's batches are formed, and what other settings would do",
    description="Show how the last batches of a model were formed, where its requests' time goes,"
    " what a batch costs, and what other settings would have done. The log of batches begins with"
    " the first question: send requests, and ask again.",
)  # fmt: skip
