"""Results as JSON and as Markdown."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import Plan, Results
from benchmarks.models import MLP, MLP_UNBATCHED
from benchmarks.summary import Cell, Figures, Repetition, figures, ratio

BEGIN = "<!-- results: begin; written by scripts/bench --record -->"
END = "<!-- results: end -->"
_PACKAGES = ("headrace", "onnxruntime", "numpy", "uvloop", "grpcio", "protobuf")


# What is shown of two servers as a ratio; 0 stands for what is not known.
_COMPARED: Mapping[str, Callable[[Repetition], float]] = {
    "requests/s": lambda r: r.throughput,
    "CPU per request": lambda r: r.cost or 0.0,
    "p50": lambda r: r.p50,
    "p99": lambda r: r.p99,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement; `pinned` is the server's core, None if not pinned."""

    processor: str
    cores: int
    pinned: int | None
    load_average: float
    python: str
    packages: Mapping[str, str]


def this_machine(pinned: int | None) -> Machine:
    """Look around, before the load begins."""
    packages: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue  # run from the source tree
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    return Machine(_processor(), cores, pinned, load, platform.python_version(), packages)


def as_json(plan: Plan, machine: Machine, results: Results) -> str:
    """Everything that was measured, each repetition too."""
    cells: list[dict[str, Any]] = []
    for cell, repetitions in results.items():
        runs = [asdict(r) | {"throughput": r.throughput} for r in repetitions]
        cells.append(asdict(cell) | {"figures": asdict(figures(repetitions)), "repetitions": runs})
    document = {"machine": asdict(machine), "plan": asdict(plan), "cells": cells}
    return json.dumps(document, indent=1) + "\n"


def as_markdown(plan: Plan, machine: Machine, results: Results) -> str:
    """The tables."""
    summary = {cell: figures(repetitions) for cell, repetitions in results.items()}
    servers = list(dict.fromkeys(cell.server for cell in results))
    parts = [_setting(plan, machine)]
    for server in servers:
        for model in plan.models:
            chosen = {c: f for c, f in summary.items() if (c.server, c.model) == (server, model)}
            if chosen:
                parts += [f"### {server}: `{model}`", _main_table(chosen)]
    if plan.compared is not None:
        parts += _batching(plan.compared, servers[0], plan.protocols, summary)
    for peer in servers[1:]:
        parts += [f"### {servers[0]} / {peer}", _ratio_table(servers[0], peer, results)]
    return "\n\n".join(parts) + "\n"


def insert(page: str, text: str, begins: str = BEGIN, ends: str = END) -> str:
    """`page` with `text` between two markers; raises `ValueError` if it has none."""
    before, begin, rest = page.partition(begins)
    _, end, after = rest.partition(ends)
    if not begin or not end:
        raise ValueError(f"the page has no place for results: '{begins}' and '{ends}'")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _setting(plan: Plan, machine: Machine) -> str:
    core = machine.pinned
    pinned = "not pinned" if core is None else f"the server on core {core} alone"
    packages = ", ".join(f"{name} {number}" for name, number in machine.packages.items())
    return (
        f"{machine.cores} cores ({machine.processor}), {pinned};"
        f" load average {machine.load_average:.1f} before the start."
        f" Python {machine.python}, {packages}. Medians of {plan.repetitions} x"
        f" {plan.seconds:g} s, each after {plan.warm_up:g} s of warm-up;"
        f" {_count(plan.streams, 'gRPC stream')} a connection."
    )


def _main_table(summary: Mapping[Cell, Figures]) -> str:
    header = (
        "protocol", "concurrent", "requests/s", "spread", "p50 ms", "p99 ms", "errors",
        "server CPU", "CPU s per 1 000", "mean batch", "RSS MB", "client CPU",
    )  # fmt: skip
    rows = [
        (
            cell.protocol, str(cell.concurrency), thousands(f.throughput), f"{f.spread:.0%}",
            ms(f.p50), ms(f.p99), str(f.errors), known(f.server_cpu, ".0%"),
            known(f.cpu_per_1000, ".4f"), known(f.mean_batch, ".1f"),
            "" if f.rss is None else f"{f.rss / 1e6:.0f}", f"{f.client_cpu:.0%}",
        )
        for cell, f in summary.items()
    ]  # fmt: skip
    return table(header, rows, left=1)


def _batching(
    concurrency: int, server: str, protocols: Sequence[str], summary: Mapping[Cell, Figures]
) -> list[str]:
    rows = []
    for protocol in protocols:
        for model, state in ((MLP, "on"), (MLP_UNBATCHED, "off")):
            f = summary.get(Cell(server, model, protocol, concurrency))
            if f is not None:
                rate, batch = thousands(f.throughput), known(f.mean_batch, ".1f")
                rows.append((protocol, state, rate, batch, ms(f.p50), ms(f.p99)))
    header = ("protocol", "batching", "requests/s", "mean batch", "p50 ms", "p99 ms")
    title = f"### Batching on and off, {_count(concurrency, 'concurrent request')}"
    return [title, table(header, rows, left=2)]


def _ratio_table(server: str, peer: str, results: Results) -> str:
    rows = []
    for cell, ours in results.items():
        theirs = results.get(Cell(peer, cell.model, cell.protocol, cell.concurrency))
        if cell.server == server and theirs is not None:
            ratios = [
                known(ratio(list(map(value, ours)), list(map(value, theirs))), ".2f")
                for value in _COMPARED.values()
            ]
            rows.append((cell.model, cell.protocol, str(cell.concurrency), *ratios))
    return table(("model", "protocol", "concurrent", *_COMPARED), rows, left=2)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    """A Markdown table; the first `left` columns are aligned to the left, others to the right."""
    rule = ["---" if column < left else "--:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def thousands(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ms(seconds: float) -> str:
    return f"{seconds * 1_000:.3f}"


def known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
