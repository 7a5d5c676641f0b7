"""Measures cells: all of them in turn, several times over, so that slow drifts hit all alike."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import process_time

import uvloop

from benchmarks.load import Load, drive
from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, MLP, MLP_UNBATCHED
from benchmarks.server import Target, cpu_secs, resident, split_address
from benchmarks.summary import Cell, Repetition, percentile

_COMPARED = 16  # concurrent requests at which batching on and off are compared

Results = dict[Cell, list[Repetition]]
Progress = Callable[[Cell, Repetition], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement. Times in seconds a repetition; `streams` a gRPC connection."""

    models: Sequence[str]
    protocols: Sequence[str]
    concurrency: Sequence[int]
    seconds: float
    warm_up: float
    repetitions: int
    streams: int

    @property
    def compared(self) -> int | None:
        """The concurrency at which batching is compared; None if the plan has no MLP."""
        if MLP not in self.models:
            return None
        return _COMPARED if _COMPARED in self.concurrency else max(self.concurrency)

    def cells(self, targets: Sequence[Target]) -> list[Cell]:
        """All cells in the order of measurement; what is compared lies side by side."""
        cells: list[Cell] = []
        for model in self.models:
            for protocol in self.protocols:
                able = [t.name for t in targets if t.address(PROTOCOLS[protocol].transport)]
                for n in self.concurrency:
                    cells += [Cell(name, model, protocol, n) for name in able]
                    if model == MLP and n == self.compared:
                        cells += [Cell(targets[0].name, MLP_UNBATCHED, protocol, n)]
        return cells


def measure(plan: Plan, targets: Sequence[Target], progress: Progress) -> Results:
    """Measure every cell of the plan; `progress` hears of each repetition."""
    cells = plan.cells(targets)
    by_name = {target.name: target for target in targets}
    results: Results = {cell: [] for cell in cells}
    for _ in range(plan.repetitions):
        for cell in cells:
            repetition = measure_cell(plan, cell, by_name[cell.server])
            results[cell].append(repetition)
            progress(cell, repetition)
    return results


def measure_cell(plan: Plan, cell: Cell, target: Target) -> Repetition:
    """Measure a cell once."""
    protocol = PROTOCOLS[cell.protocol]
    host = target.address(protocol.transport)
    streams = plan.streams if protocol.multiplexes else 1
    load = Load(cell.concurrency, streams, plan.warm_up, plan.seconds)
    processes = target.processes()
    counted = target.counts(cell.model)
    try:
        observed = uvloop.run(
            drive(
                split_address(host),
                lambda calls: protocol.wire(host, calls),
                protocol.exchanges(host, ALL_MODELS[cell.model]),
                load,
                lambda: (process_time(), cpu_secs(processes)),
                target.tls,
            )
        )
    except (OSError, TimeoutError) as error:  # a cell that fails is a result too
        reason = f"no connection: {str(error) or type(error).__name__}"
        return Repetition(0.0, 0, 0.0, 0.0, {reason: 1}, 0.0)
    latencies = observed.latencies
    client, server = (b - a for a, b in zip(observed.before, observed.after, strict=True))
    return Repetition(
        seconds=observed.seconds,
        answers=len(latencies),
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
        errors=dict(observed.errors),
        client_cpu=client,
        server_cpu=server if processes else None,
        rss=resident(processes) if processes else None,
        mean_batch=mean_batch(counted, target.counts(cell.model)),
    )


def mean_batch(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Rows per execution between two looks at `Target.counts`, if any was seen."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def errors_of(results: Mapping[Cell, Sequence[Repetition]]) -> Counter[str]:
    """All errors by text."""
    total: Counter[str] = Counter()
    for repetitions in results.values():
        for repetition in repetitions:
            total.update(repetition.errors)
    return total
