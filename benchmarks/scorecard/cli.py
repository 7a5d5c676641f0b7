"""The command `scripts/bench --scorecard`, or `make scorecard`."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.arguments import count, names_of, positive
from benchmarks.peers import PEERS
from benchmarks.report import insert, this_machine
from benchmarks.scorecard.cell import Setting
from benchmarks.scorecard.environments import ROOT
from benchmarks.scorecard.plot import write_plots
from benchmarks.scorecard.report import BEGIN, END, Header, as_json, as_markdown
from benchmarks.scorecard.run import Plan, run
from benchmarks.scorecard.sample import Metric, Sample
from benchmarks.scorecard.workloads import (
    GROUPS,
    HEADRACE,
    HEADRACE_PYTHON,
    ORT,
    Group,
    Workload,
)
from benchmarks.server import split_cores

PAGE = ROOT / "docs" / "benchmarks.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if our own server gave a single wrong answer, or none at all."""
    options = _parser().parse_args(arguments)
    plan = _plan(options)
    core, client_cores = split_cores()
    machine = this_machine(core)
    os.sched_setaffinity(0, client_cores)
    seconds, warm_up = (1.0, 0.2) if options.quick else (3.0, 0.7)
    # Servers that are stopped in their tracks would stay for ever: end them on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="headrace-scorecard-") as folder:
        setting = Setting(
            core, sorted(client_cores), options.seconds or seconds, warm_up, Path(folder)
        )
        outcome = run(plan, setting, _show)
    header = Header(machine, plan.repetitions, setting.seconds)
    options.output.mkdir(parents=True, exist_ok=True)
    markdown = as_markdown(header, plan, outcome)
    (options.output / "scorecard.json").write_text(as_json(header, plan, outcome), "utf-8")
    (options.output / "scorecard.md").write_text(markdown, encoding="utf-8")
    write_plots(outcome, options.output)
    print(markdown)
    if options.record:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(insert(page, markdown, BEGIN, END), encoding="utf-8")
        write_plots(outcome, PAGE.parent)
    return _status(outcome.samples)


def _status(samples: dict[tuple[str, str], list[Sample]]) -> int:
    """1 if our own server made an error; those of others are in the tables."""
    own = (HEADRACE, HEADRACE_PYTHON)
    ours = [each for (_, peer), found in samples.items() if peer in own for each in found]
    for sample in ours:
        for text, times in sample.errors.items():
            print(f"headrace: {times} x {text}", file=sys.stderr)
    return 1 if any(sample.failures for sample in ours) or not samples else 0


def _plan(options: argparse.Namespace) -> Plan:
    repetitions = options.repetitions or (1 if options.quick else 5)
    peers = [PEERS[name] for name in options.peers if name != ORT]
    groups = [_narrow(GROUPS[name], options.workloads) for name in options.groups]
    return Plan([g for g in groups if g.workloads], peers, repetitions, ORT in options.peers)


def _narrow(group: Group, patterns: Sequence[str]) -> Group:
    """The group with the chosen workloads alone."""
    chosen = [
        w for w in group.workloads if not patterns or any(fnmatchcase(w.name, p) for p in patterns)
    ]
    return replace(group, workloads=chosen)


def _show(workload: Workload, peer: str, sample: Sample) -> None:
    shown = ", ".join(
        f"{metric} {_human(metric, value)}" for metric, value in sample.figures.items()
    )
    print(f"{workload.name:18} {peer:10} {shown}", file=sys.stderr)
    for text, times in list(sample.errors.items())[:3]:
        print(f"{'':18} {times} x {text[:300]}", file=sys.stderr)


def _human(metric: Metric, value: float) -> str:
    if metric is Metric.RSS:
        return f"{value / 1e6:.0f} MB"
    if metric in (Metric.P50, Metric.P99, Metric.P999, Metric.LATE):
        return f"{value * 1e3:.3f} ms"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _parser() -> argparse.ArgumentParser:
    names = [*PEERS, ORT]
    parser = argparse.ArgumentParser(
        "make scorecard",
        description="Measure this server beside others, in turn, and write tables and plots.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a look, not a measurement: 1 repetition of 1 s")
    add(
        "--peers", type=names_of(names), default=names, metavar="LIST",
        help=f"servers to measure: {', '.join(names)} (default: all)",
    )  # fmt: skip
    add(
        "--groups", type=names_of(list(GROUPS)), default=list(GROUPS), metavar="LIST",
        help=f"groups of workloads: {', '.join(GROUPS)} (default: all)",
    )  # fmt: skip
    add(
        "--workloads", type=lambda text: text.split(","), default=[], metavar="LIST",
        help="only workloads with these names; * stands for anything (default: all)",
    )  # fmt: skip
    add("--repetitions", type=count, metavar="N", help="of each cell (default: 5)")
    add("--seconds", type=positive, metavar="S", help="measured time of a repetition (default: 3)")
    add(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR",
        help="where scorecard.json, .md and the plots go (default: benchmarks/results)",
    )  # fmt: skip
    add("--record", action="store_true", help="put tables and plots into docs/")
    return parser
