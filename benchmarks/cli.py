"""The command: reads the arguments, starts the server, measures, writes the results."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from benchmarks import profile, remote, tls
from benchmarks.arguments import count, names_of, not_negative, numbers, positive
from benchmarks.hostile import run as hostile
from benchmarks.hostile import search
from benchmarks.hostile.attacks import ATTACKS
from benchmarks.measure import Plan, errors_of, measure
from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, MLP, MLP_UNBATCHED, write_repository
from benchmarks.report import as_json, as_markdown, insert, this_machine
from benchmarks.scorecard import cli as scorecard
from benchmarks.server import BenchmarkError, Target, parse_peer, split_cores, started
from benchmarks.summary import Cell, Repetition

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
# Modules of options of their names, with the rounds (or seconds of one) that they take with
# `--quick`, and without. Imported late, since some import ONNX Runtime or LightGBM.
_BY_ROUNDS = (
    ("embedded", 3, 7), ("ensembles", 3, 12), ("response_cache", 2, 5), ("local", 3, 5),
    ("fair_share", 2.0, 10.0), ("flight", 1, 5), ("stages", 0.005, 0.05), ("round_trip", 1, 7),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a single answer was missing or wrong, or nothing could be measured."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--scorecard" in given:
        given.remove("--scorecard")
        return scorecard.main(given)
    options = _parser().parse_args(given)
    if options.write_models:
        write_repository(options.write_models)
        return 0
    for module, quick, rounds in _BY_ROUNDS:
        if getattr(options, module):
            import_module(f"benchmarks.{module}").main(quick if options.quick else rounds)
            return 0
    if options.tls:
        tls.main(
            options.seconds or (0.5 if options.quick else 2.0),
            options.repetitions or (1 if options.quick else 5),
        )
        return 0
    if options.runner:
        from benchmarks import runner  # late, since it imports pandas and libraries of models

        runner.main(1 if options.quick else 7, 100_000 if options.quick else 1_000_000)
        return 0
    try:
        if options.profile:
            profile.main(options.models[0], options.seconds or (1.0 if options.quick else 5.0))
            return 0
        if options.hostile is not None:
            if options.search:
                return search.main(options.search, options.frontends, options.seed, options.busy)
            front_ends, low = options.frontends or 0, options.low_role
            return hostile.main(options.hostile, front_ends, options.busy, low)
        if options.remote:
            seconds = options.seconds or (1.0 if options.quick else 3.0)
            remote.main(seconds, options.repetitions or (1 if options.quick else 5))
            return 0
        return _run(options)
    except BenchmarkError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    peers = [parse_peer(text) for text in options.peer]
    core, client_cores = split_cores()
    machine = this_machine(core)
    os.sched_setaffinity(0, client_cores)
    with _target(options.url, core, options.server_option, options.models) as target:
        targets = [target, *peers]
        if len({t.name for t in targets}) < len(targets):
            raise BenchmarkError("two servers have the same name")
        cells = plan.cells(targets)
        each = plan.seconds + plan.warm_up
        minutes = len(cells) * plan.repetitions * each / 60
        print(f"{len(cells)} cells, {minutes:.1f} minutes", file=sys.stderr)
        results = measure(plan, targets, _show)
    markdown = as_markdown(plan, machine, results)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(as_json(plan, machine, results), encoding="utf-8")
    (options.output / "results.md").write_text(markdown, encoding="utf-8")
    print(markdown)
    if options.record:
        PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), markdown), encoding="utf-8")
    for text, times in errors_of(results).most_common(10):
        print(f"{times} x {text}", file=sys.stderr)
    return 1 if errors_of(results) else 0


@contextmanager
def _target(
    url: str, core: int | None, server_options: Sequence[str], models: Sequence[str]
) -> Iterator[Target]:
    """The server in question: the one at `url`, or our own, started here."""
    if url:
        yield parse_peer(url if "=" in url else f"server={url}")
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        needed = [*models, *([MLP_UNBATCHED] if MLP in models else [])]
        write_repository(Path(directory), needed)
        with started(Path(directory), core, server_options) as target:
            yield target


def _plan(options: argparse.Namespace) -> Plan:
    seconds, warm_up = (0.3, 0.1) if options.quick else (3.0, 1.0)
    return Plan(
        models=options.models,
        protocols=options.protocols,
        concurrency=options.concurrency,
        seconds=options.seconds or seconds,
        warm_up=warm_up if options.warm_up is None else options.warm_up,
        repetitions=options.repetitions or (1 if options.quick else 5),
        streams=options.streams,
    )


def _show(cell: Cell, repetition: Repetition) -> None:
    print(
        f"{cell.server:10} {cell.model:13} {cell.protocol:11} {cell.concurrency:3}"
        f" {repetition.throughput:9.0f}/s  p50 {repetition.p50 * 1_000:7.3f} ms"
        f"  errors {repetition.failures}",
        file=sys.stderr,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/bench",
        description="Measure the server with one row per request, in a closed loop.",
    )
    models = [name for name in ALL_MODELS if name != MLP_UNBATCHED]
    add = parser.add_argument
    add("--quick", action="store_true", help="a look, not a measurement: 1 repetition of 0.3 s")
    add("--models", type=names_of(models), default=[MLP], metavar="LIST", help=", ".join(models))
    add(
        "--protocols", type=names_of(list(PROTOCOLS)), default=list(PROTOCOLS), metavar="LIST",
        help=", ".join(PROTOCOLS) + " (default: all)",
    )  # fmt: skip
    add(
        "--concurrency", type=numbers, default=[1, 4, 16, 64], metavar="LIST",
        help="requests at once (default: 1,4,16,64)",
    )  # fmt: skip
    add("--seconds", type=positive, metavar="S", help="measured time of a repetition (default: 3)")
    add("--warm-up", type=float, metavar="S", help="time before that (default: 1)")
    add("--repetitions", type=count, metavar="N", help="of each cell (default: 5)")
    add(
        "--streams", type=count, default=1, metavar="N",
        help="concurrent calls on each gRPC connection (default: 1)",
    )  # fmt: skip
    add(
        "--server-option", action="append", default=[], metavar="OPTION",
        help="a further option for the server, as --server-option=--name=value",
    )  # fmt: skip
    add(
        "--url", default="", metavar="HTTP,GRPC",
        help="measure the server at these addresses, host:port each, instead of starting one",
    )  # fmt: skip
    add(
        "--peer", action="append", default=[], metavar="NAME=HTTP,GRPC",
        help="measure this server of the same models too, side by side, and show ratios",
    )  # fmt: skip
    add("--write-models", type=Path, metavar="DIR", help="write the model repository and end")
    add(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR",
        help="where results.json and results.md go (default: benchmarks/results)",
    )  # fmt: skip
    add("--stages", action="store_true", help="print what each stage of a request costs, and end")
    add(
        "--round-trip", action="store_true",
        help="print how long a small batch takes to a worker process and back, and end",
    )  # fmt: skip
    add(
        "--embedded", action="store_true",
        help="print what an engine in the program costs beside ONNX Runtime, and end",
    )  # fmt: skip
    add(
        "--ensembles", action="store_true",
        help="print what a step of an ensemble costs beside a call of its model, and end",
    )  # fmt: skip
    add(
        "--cache", dest="response_cache", action="store_true",
        help="print what hits and misses of the response cache cost, and end",
    )  # fmt: skip
    add(
        "--local", action="store_true",
        help="print how fast large tensors go to a server on this machine, and end",
    )  # fmt: skip
    add(
        "--fair-share", action="store_true",
        help="print what a client waits beside one with 50 times as many requests, and end",
    )  # fmt: skip
    add(
        "--flight", action="store_true",
        help="print the rows/s of a table by Arrow Flight and by gRPC, and end",
    )  # fmt: skip
    add(
        "--tls", action="store_true",
        help="print the requests/s with TLS, and with nginx in front that terminates it, beside"
        " plain text, and end",
    )  # fmt: skip
    add(
        "--runner", action="store_true",
        help="print how fast tables go through a Runner, here and over gRPC, beside loops by hand"
        " over the models' libraries, and end",
    )  # fmt: skip
    add(
        "--remote", action="store_true",
        help="print what the way through this server to a Triton costs and gains, and end",
    )  # fmt: skip
    add(
        "--hostile", nargs="?", type=names_of(list(ATTACKS)), const=list(ATTACKS), metavar="LIST",
        help="attack the server, print what becomes of its health and memory beside their bounds,"
        " and end; with names, only " + ", ".join(ATTACKS),
    )  # fmt: skip
    add(
        "--frontends", type=not_negative, metavar="N",
        help="with --hostile, of the server (default: none; of --search: none, then one)",
    )  # fmt: skip
    add(
        "--search", type=positive, metavar="MINUTES",
        help="with --hostile, look for attacks that are not known for so long, and print those that"
        " exceed a bound as short as they can be",
    )  # fmt: skip
    add("--seed", type=int, default=1, help="of --search (default: 1)")
    add("--low-role", action="store_true", help="with --hostile, clients may change nothing")
    add("--busy", action="store_true", help="with --hostile, allow for a busy machine")
    add(
        "--profile",
        action="store_true",
        help="show where the server's time goes with the first of --models, and end",
    )
    add("--scorecard", action="store_true", help="measure other servers too; has its own --help")
    add("--record", action="store_true", help="put the tables into docs/benchmarks.md")
    return parser
