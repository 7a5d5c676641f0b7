"""Profile of a request's time in the running server, transports included: `--profile`.

The server runs under `benchmarks.sampler` on its core while requests come in a closed loop. Shares
of its CPU time times CPU time per request give microseconds per request, by part of the server.
"""

import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import uvloop

from benchmarks.load import Load, drive
from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, write_repository
from benchmarks.report import table
from benchmarks.sampler import LOOP
from benchmarks.server import BenchmarkError, cpu_secs, split_address, split_cores, started

_MANY, _FEW = 16, 2  # requests at once; few, where a request is large
_LARGE = 1_000_000
_WARM_UP = 1.0
_FUNCTIONS = 15  # that are shown

Counts = Mapping[tuple[str, str], int]


def main(model: str, seconds: float) -> None:
    """Measure a model over each protocol and print."""
    core, client_cores = split_cores()
    os.sched_setaffinity(0, client_cores)
    parts: dict[str, dict[str, float]] = {}
    functions: list[str] = []
    large = sum(a.nbytes for a in ALL_MODELS[model].cases()[0].inputs.values()) >= _LARGE
    for protocol in PROTOCOLS:
        if large and protocol == "http-json":
            continue  # nobody sends megabytes as decimal numbers
        counts, micros = _measure(model, protocol, core, seconds)
        parts[protocol] = by_part(counts, micros)
        functions.append(
            f"`{model}` over {protocol}, by function:\n\n{by_function(counts, micros)}"
        )
    print("Microseconds of CPU per request, by part of the server:\n")
    print(part_table(parts))
    print()
    print("\n\n".join(functions))


def _measure(
    model: str, protocol: str, core: int | None, seconds: float
) -> tuple[Counter[tuple[str, str]], float]:
    """Samples by place, and the server's microseconds of CPU per request."""
    wire = PROTOCOLS[protocol]
    with tempfile.TemporaryDirectory(prefix="headrace-profile-") as folder:
        repository, samples = Path(folder) / "models", Path(folder) / "samples"
        write_repository(repository, [model])
        program = ("-m", "benchmarks.sampler", str(samples))
        with started(repository, core, program=program) as target:
            host = target.address(wire.transport)
            processes = target.processes()
            assert target.pid is not None
            pid = target.pid

            exchanges = wire.exchanges(host, ALL_MODELS[model])
            concurrency = _FEW if len(exchanges[0].message) >= _LARGE else _MANY
            marks: list[float] = []

            def probe() -> tuple[float, ...]:
                if not marks:
                    os.kill(pid, signal.SIGUSR1)  # what warm-up took does not count
                marks.append(cpu_secs(processes))
                return (marks[-1],)

            observed = uvloop.run(
                drive(
                    split_address(host),
                    lambda calls: wire.wire(host, calls),
                    exchanges,
                    Load(concurrency, 1, _WARM_UP, seconds),
                    probe,
                )
            )
        found = json.loads(samples.read_text(encoding="utf-8"))
    if not observed.latencies:
        raise BenchmarkError(f"no right answer over {protocol}: {dict(observed.errors)}")
    micros = (observed.after[0] - observed.before[0]) / len(observed.latencies) * 1e6
    return Counter({(module, function): count for module, function, count in found}), micros


def by_part(counts: Counts, micros: float) -> dict[str, float]:
    """Microseconds per request of each package of the server, and of each library."""
    total = sum(counts.values())
    parts: Counter[str] = Counter()
    for (module, _), count in counts.items():
        parts[_part(module)] += count
    return {part: count / total * micros for part, count in parts.items()}


def _part(module: str) -> str:
    names = module.split(".")
    if names[0] != "headrace":
        return module if module in (LOOP, "other") else names[0]
    return ".".join(names[1 : 3 if names[1] in ("doors", "placement", "plugins") else 2])


def part_table(parts: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each part, a column for each protocol."""
    names = {name for found in parts.values() for name in found}
    order = sorted(names, key=lambda name: -sum(found.get(name, 0.0) for found in parts.values()))
    rows = [
        (name, *(f"{found[name]:.2f}" if name in found else "" for found in parts.values()))
        for name in order
    ]
    rows.append(("all", *(f"{sum(found.values()):.2f}" for found in parts.values())))
    return table(("part", *parts), rows, left=1)


def by_function(counts: Counts, micros: float) -> str:
    """The functions that take most."""
    total = sum(counts.values())
    rows = [
        (f"{module}: {function}" if function else module, f"{count / total * micros:.2f}")
        for (module, function), count in Counter(counts).most_common(_FUNCTIONS)
    ]
    return table(("function", "us per request"), rows, left=1)
