"""The table of `headrace top`: its columns, its order, and as text, JSON or for rich."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.commands.activity import ServerActivity, VersionActivity
from headrace.commands.text import duration, number, size
from headrace.commands.top_options import ORDERS

if TYPE_CHECKING:
    from rich.text import Text

    from headrace.client.server import Document

_ERRORS = 4  # kinds of wrong answers that are named above the table
_LEAST_NAME = 8  # columns that a model's name gets at least


@dataclass(frozen=True, slots=True)
class View:
    """What is to be seen. `notice` stands above the table, if there is something to say."""

    title: str
    activity: ServerActivity | None
    order: str
    notice: str = ""


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    text: Callable[[VersionActivity], str]
    least_width: int = 0  # of the terminal
    alarms: Callable[[VersionActivity], bool] | None = None
    told: Callable[[VersionActivity], object] | None = None  # shown if so of any version


def _rate(value: float) -> str:
    return number(value) if value else "0"


_COLUMNS = (
    _Column("VER", lambda v: v.version),
    _Column("REQ/S", lambda v: _rate(v.requests)),
    _Column("ROWS/S", lambda v: _rate(v.rows), 100),
    _Column("ERR/S", lambda v: _rate(v.failures), alarms=lambda v: v.failures > 0),
    _Column("REASON", lambda v: v.reason or "-", told=lambda v: v.reason),
    _Column("WAIT", lambda v: str(v.waiting)),
    _Column("P50", lambda v: duration(v.latency["p50"])),
    _Column("P90", lambda v: duration(v.latency["p90"]), 100),
    _Column("P99", lambda v: duration(v.latency["p99"])),
    _Column("QUEUE P99", lambda v: duration(v.queue["p99"]), 130),
    _Column("COMPUTE P99", lambda v: duration(v.compute["p99"]), 130),
    _Column("BATCH", lambda v: number(v.batch_rows)),
    _Column("INST", lambda v: str(sum(v.instances.values()) or "-")),
    _Column("KIND", lambda v: ",".join(v.instances) or "-", 110),
    _Column("MEMORY", lambda v: size(v.memory)),
    _Column("BACKEND", lambda v: v.backend or "-", alarms=lambda v: v.detoured,
            told=lambda v: v.backends),
    _Column("SERVERS", lambda v: f"{v.servers_in}/{len(v.servers)}" if v.servers else "-",
            alarms=lambda v: v.servers_in < len(v.servers), told=lambda v: v.servers),
)  # fmt: skip

KEYS = {key: order for order, (key, _) in ORDERS.items()}


def ordered(versions: Sequence[VersionActivity], order: str) -> list[VersionActivity]:
    """The versions, largest first by `order`; those alike by name."""
    value = ORDERS[order][1]
    return sorted(versions, key=lambda v: (-value(v), v.model, _number(v.version), v.version))


def summary(view: View) -> list[str]:
    """The lines above the table."""
    now = view.activity
    if now is None:
        return [view.title, view.notice]
    state = "ready" if now.ready else "NOT READY"
    parts = [f"{_rate(now.requests)} req/s", f"{_rate(now.failures)} err/s"]
    parts.append(f"{_rate(now.refused)} refused/s")
    rest = [f"{now.admitted} of {now.admitted_limit} under way"]
    if now.resident is not None:
        rest.append(f"{size(now.resident)}")
    if now.cpu is not None:
        rest.append(f"{now.cpu:.0%} CPU")
    lines = [f"{view.title}  {state}", "  ".join([*parts, *rest])]
    if errors := now.errors:
        named = [f"{_rate(e.rate)}/s {e.door} {e.operation} {e.status}" for e in errors[:_ERRORS]]
        more = ["..."] if len(errors) > _ERRORS else []
        lines.append("answered with errors: " + ", ".join(named + more))
    return [*lines, view.notice] if view.notice else lines


def plain_lines(view: View, width: int, most: int | None = None) -> list[str]:
    """All as text: `width` characters a line, `most` versions, all for None."""
    lines = [*summary(view), ""]
    if view.activity is None:
        return lines
    rows, left_out = _cells(view, width, most)
    lines += ["  ".join(row) for row in rows]
    return [*lines, left_out] if left_out else lines


def rich_lines(view: View, width: int, most: int | None = None) -> "Text":
    """The same for rich, with colours."""
    from rich.text import Text

    first, *others = summary(view)
    good = view.activity is not None and view.activity.ready
    lines = [Text(first, "bold" if good else "bold red")]
    lines += [Text(line, "red" if line == view.notice else "") for line in others]
    if view.activity is not None:
        (heads, *rows), left_out = _cells(view, width, most)
        columns = _columns(view.activity, width)
        lines += [Text(""), Text("  ".join(heads), "reverse")]
        versions = ordered(view.activity.versions, view.order)
        lines += [_styled(columns, v, row) for v, row in zip(versions, rows, strict=False)]
        lines += [Text(left_out, "dim")] if left_out else []
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _styled(columns: Sequence[_Column], version: VersionActivity, row: Sequence[str]) -> "Text":
    from rich.text import Text

    usual = "" if version.requests else "dim"
    cells = [Text(row[0], usual or "bold")]
    for column, cell in zip(columns, row[1:], strict=True):
        alarm = column.alarms is not None and column.alarms(version)
        cells.append(Text(cell, "bold red" if alarm else usual))
    return Text("  ").join(cells)


def document(view: View, time: float) -> "Document":
    """One line of `--json`; `time` is in seconds since 1970."""
    now = view.activity
    assert now is not None, "no document without two scrapes. This is a bug."
    return {
        "time": time,
        "seconds": now.seconds,
        "server": {
            "ready": now.ready,
            "requests_per_second": now.requests,
            "failures_per_second": now.failures,
            "refused_per_second": now.refused,
            "admitted_requests": now.admitted,
            "admitted_requests_limit": now.admitted_limit,
            "resident_bytes": now.resident,
            "cpu": now.cpu,
            "answers": [
                {
                    "door": answer.door,
                    "operation": answer.operation,
                    "status": answer.status,
                    "per_second": answer.rate,
                }
                for answer in now.answers
            ],
        },
        "models": [_version_document(version) for version in ordered(now.versions, view.order)],
    }


def _version_document(version: VersionActivity) -> "Document":
    return {
        "model": version.model,
        "version": version.version,
        "requests_per_second": version.requests,
        "failures_per_second": version.failures,
        "failures_per_second_by_reason": dict(version.reasons),
        "rows_per_second": version.rows,
        "batches_per_second": version.batches,
        "rows_per_batch": version.batch_rows,
        "waiting_requests": version.waiting,
        "latency_seconds": dict(version.latency),
        "queue_seconds": dict(version.queue),
        "compute_seconds": dict(version.compute),
        "instances": dict(version.instances),
        "backends": dict(version.backends),
        "servers": dict(version.servers),
        "memory_bytes": version.memory,
    }


def _columns(now: ServerActivity, width: int) -> list[_Column]:
    """Those for which there is room and something to say."""
    return [
        column
        for column in _COLUMNS
        if column.least_width <= width
        and (column.told is None or any(map(column.told, now.versions)))
    ]


def _cells(view: View, width: int, most: int | None) -> tuple[list[list[str]], str]:
    """Rows of cells with the width of their columns, the heads first; and what is left out."""
    assert view.activity is not None
    columns = _columns(view.activity, width)
    versions = ordered(view.activity.versions, view.order)
    rows = [["MODEL", *(column.head for column in columns)]]
    rows += [[v.model, *(column.text(v) for column in columns)] for v in versions[:most]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], max(width - sum(widths[1:]) - 2 * len(columns), _LEAST_NAME))
    cells = [
        [_cut(row[0], widths[0]).ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        for row in rows
    ]
    left_out = len(versions) - len(rows) + 1
    return cells, f"and {left_out} more" if left_out else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0
