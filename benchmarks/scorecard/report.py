"""The scorecard as JSON and as Markdown."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.peers import PEERS
from benchmarks.report import Machine, known, table, thousands
from benchmarks.scorecard.claims import CLAIMS, Claim, Verdict, judge
from benchmarks.scorecard.run import Outcome, Plan
from benchmarks.scorecard.sample import Metric, Sample, Summary, summary
from benchmarks.scorecard.workloads import ORT, Generator, Group, Workload

BEGIN = "<!-- scorecard: begin; written by make scorecard ARGS=--record -->"
END = "<!-- scorecard: end -->"
_LATENCIES = (Metric.P50, Metric.P99, Metric.P999)
THROUGHPUT_PLOT, LATENCY_PLOT = "scorecard-throughput.svg", "scorecard-latency.svg"


@dataclass(frozen=True, slots=True)
class Header:
    """The machine, repetitions and durations of a measurement."""

    machine: Machine
    repetitions: int
    seconds: float


def title_of(peer: str) -> str:
    """The name of a server in tables."""
    return "ONNX Runtime alone" if peer == ORT else PEERS[peer].title


def as_json(header: Header, plan: Plan, outcome: Outcome) -> str:
    """Everything that was measured, each repetition too."""
    cells = []
    for group in plan.groups:
        for workload, peer, samples in _cells(group, outcome):
            cells.append({
                "workload": asdict(workload),
                "server": peer,
                "figures": asdict(summary(samples)),
                "repetitions": [asdict(sample) for sample in samples],
            })  # fmt: skip
    document = {
        "header": asdict(header),
        "figures": [asdict(v) | {"holds": v.holds} for v in _verdicts(outcome)],
        "cells": cells,
        "not measured": {"servers": outcome.absent, "workloads": outcome.skipped},
    }
    return json.dumps(document, indent=1) + "\n"


def as_markdown(header: Header, plan: Plan, outcome: Outcome) -> str:
    """The tables."""
    parts = [_setting(header), "### Figures required and measured", _verdict_table(outcome)]
    if outcome.absent or outcome.skipped:
        parts += ["### Not measured", _missing_table(outcome)]
    for group in plan.groups:
        body = _group_table(group, outcome)
        if body:
            parts += [f"### {group.title}", body]
        if group.name == "mlp":
            parts.append(f"![Requests per second of each server]({THROUGHPUT_PLOT})")
        if group.name == "open":
            parts.append(f"![Latency of each server by rate of arrivals]({LATENCY_PLOT})")
    return "\n\n".join(parts) + "\n"


def _setting(header: Header) -> str:
    machine = header.machine
    pinned = "not pinned" if machine.pinned is None else f"servers on core {machine.pinned}"
    packages = ", ".join(f"{name} {number}" for name, number in machine.packages.items())
    return (
        f"{machine.cores} cores ({machine.processor}), {pinned}, load generators on the others;"
        f" load average {machine.load_average:.1f} before the start. Python {machine.python},"
        f" {packages}. Medians of {header.repetitions} x {header.seconds:g} s, in turn."
    )


def _verdicts(outcome: Outcome) -> list[Verdict]:
    return [judge(claim, outcome.samples) for claim in CLAIMS]


def _verdict_table(outcome: Outcome) -> str:
    rows = []
    for verdict in _verdicts(outcome):
        claim = verdict.claim
        measured = verdict.measured
        between = f"{_value(claim, verdict.least)} - {_value(claim, verdict.largest)}"
        rows.append((
            claim.subject,
            str(claim.metric),
            _compared(claim),
            f"{'≤' if claim.at_most else '≥'} {_value(claim, claim.required)}",
            "not measured" if measured is None else _value(claim, measured),
            "" if measured is None else between,
            {None: "", True: "yes", False: "no"}[verdict.holds],
        ))  # fmt: skip
    header = ("workload", "figure", "relative to", "required", "measured", "range", "reached")
    return table(header, rows, left=3)


def _compared(claim: Claim) -> str:
    if not claim.than:
        return "absolute"
    if claim.other.endswith("-unbatched"):
        return "batching off"
    return title_of(claim.than)


def _value(claim: Claim, value: float) -> str:
    if claim.than:
        return f"{value:.2f} x"
    return f"{value / 1e6:.0f} MB" if claim.metric is Metric.RSS else f"{value:.2f}"


def _missing_table(outcome: Outcome) -> str:
    rows = [(title_of(peer), " ".join(reason.split())) for peer, reason in outcome.absent.items()]
    rows += list(outcome.skipped.items())
    return table(("what", "reason"), [(a, b.replace("|", "/")) for a, b in rows], left=2)


def _cells(group: Group, outcome: Outcome) -> Iterator[tuple[Workload, str, list[Sample]]]:
    for workload in group.workloads:
        for peer in (*PEERS, ORT):
            samples = outcome.samples.get((workload.name, peer))
            if samples:
                yield workload, peer, samples


def _group_table(group: Group, outcome: Outcome) -> str:
    cells = [(w, peer, summary(samples)) for w, peer, samples in _cells(group, outcome)]
    if not cells:
        return ""
    if group.workloads[0].generator is Generator.NONE:
        return _idle_table(cells)
    header = (
        "model, protocol", "load", "server", "requests/s", "rows/s", "spread", "p50 ms", "p99 ms",
        "p99.9 ms", "errors", "CPU s per 1 000", "of it user", "mean batch", "RSS MB", "late ms",
    )  # fmt: skip
    rows = []
    for workload, peer, found in cells:
        rows.append((
            f"{workload.model}, {workload.protocol}",
            _load(workload),
            title_of(peer),
            _figure(found, Metric.THROUGHPUT),
            _figure(found, Metric.ROWS),
            known(found.spread, ".0%"),
            *(_figure(found, metric, 1e3, ".3f") for metric in _LATENCIES),
            str(found.errors),
            _figure(found, Metric.CPU_PER_1000, 1, ".4f"),
            _figure(found, Metric.USER_PER_1000, 1, ".4f"),
            _figure(found, Metric.MEAN_BATCH, 1, ".1f"),
            _figure(found, Metric.RSS, 1e-6),
            _figure(found, Metric.LATE, 1e3, ".3f"),
        ))  # fmt: skip
    filled = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return table([header[i] for i in filled], [[row[i] for i in filled] for row in rows], left=3)


def _idle_table(cells: list[tuple[Workload, str, Summary]]) -> str:
    rows = [
        (title_of(peer), _figure(found, Metric.READY, 1, ".2f"), _figure(found, Metric.RSS, 1e-6))
        for _, peer, found in cells
    ]
    return table(("server", "first right answer after s", "RSS MB"), rows, left=1)


def _load(workload: Workload) -> str:
    if workload.generator is Generator.ARRIVALS:
        return f"{thousands(workload.rate)}/s"
    rows = f" x {workload.rows} rows" if workload.rows > 1 else ""
    return f"{workload.concurrency}{rows}, {workload.generator}"


def _figure(found: Summary, metric: Metric, scale: float = 1.0, form: str = "") -> str:
    value = found.figures.get(metric)
    if value is None:
        return ""
    return format(value * scale, form) if form else thousands(value * scale)
