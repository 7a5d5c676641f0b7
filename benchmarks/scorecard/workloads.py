"""Workloads of the scorecard: each is one description, measured for all its servers in
turn.

A group of workloads is measured with the same servers running; they serve the group's models and
nothing else, so that memory can be compared too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.models import ECHO_1M, ECHO_16M, MLP, MLP_UNBATCHED, MLP_WIDE, RESNET50
from benchmarks.scorecard.peer import BINARY, GRPC, JSON

HEADRACE, TRITON, BARE_ASGI, GRPC_AIO = "headrace", "triton", "bare_asgi", "grpc_aio"
HEADRACE_PYTHON = "headrace_python"  # our own, with the models that Triton gets
MLSERVER, KSERVE = "mlserver", "kserve"
PLAIN = "plain"  # the plain request path alone
ORT = "ort"  # no server: the model alone, in a process of its own
CONCURRENCY = (1, 16, 64)
RATES = (1_000, 2_500, 5_000, 10_000, 20_000)


class Generator(StrEnum):
    """Load generator of a workload; `LOAD` and `ARRIVALS` are this project's own generator."""

    WRK = "wrk"
    H2LOAD = "h2load"
    PERF_ANALYZER = "perf_analyzer"
    LOAD = "closed loop"
    ARRIVALS = "open loop"
    NONE = "none"  # nothing is sent: a start is measured


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a protocol, and a load. `rate` is that of arrivals per second, in open loop.

    `peers` limits the servers; empty, it is every one that can answer. `rows` are of one request.
    `stretch` is how many times longer than others it is measured, where requests are few.
    """

    name: str
    group: str
    model: str
    protocol: str
    generator: Generator
    concurrency: int
    rows: int = 1
    rate: int = 0
    peers: tuple[str, ...] = ()
    stretch: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Workloads with the same servers: `models` are what each of them loads, if it can."""

    name: str
    title: str
    models: frozenset[str]
    workloads: Sequence[Workload]


_CLOSED = (("json", JSON, Generator.WRK), ("grpc", GRPC, Generator.H2LOAD))


def _mlp() -> list[Workload]:
    group: list[Workload] = []
    for n in CONCURRENCY:
        for short, protocol, generator in _CLOSED:
            if n == 16:  # right before the one with batching, to be compared with it
                group.append(
                    Workload(
                        f"{short}-{n}-unbatched", "mlp", MLP_UNBATCHED, protocol, generator, n,
                        peers=(HEADRACE,),
                    )
                )  # fmt: skip
            group.append(Workload(f"{short}-{n}", "mlp", MLP, protocol, generator, n))
    ours = (HEADRACE, TRITON)
    for n in CONCURRENCY[1:]:
        perf = Generator.PERF_ANALYZER
        group.append(Workload(f"grpc-perf-{n}", "mlp", MLP, GRPC, perf, n, peers=ours))
    group += [
        Workload("binary-perf-16", "mlp", MLP, BINARY, Generator.PERF_ANALYZER, 16, peers=ours),
        Workload("binary-16", "mlp", MLP, BINARY, Generator.WRK, 16),
        Workload(
            "rows-64", "mlp", MLP, BINARY, Generator.WRK, 16, rows=64, peers=(HEADRACE, ORT, TRITON)
        ),
    ]
    return group


def _arrivals() -> list[Workload]:
    return [
        Workload(
            f"open-{protocol.removeprefix('http-')}-{rate}", "open", MLP, protocol,
            Generator.ARRIVALS, 64, rate=rate,
        )
        for protocol in (JSON, GRPC)
        for rate in RATES
    ]  # fmt: skip


def _large() -> list[Workload]:
    group = []
    for size, model, n in (("1m", ECHO_1M, 4), ("16m", ECHO_16M, 2)):
        for short, protocol, generator in (
            ("binary", BINARY, Generator.WRK),
            ("grpc", GRPC, Generator.H2LOAD),
        ):
            peers = (HEADRACE, TRITON)
            group.append(
                Workload(
                    f"{short}-{size}",
                    "large",
                    model,
                    protocol,
                    generator,
                    n,
                    peers=peers,
                    stretch=2,
                )
            )
    return group


def _python() -> list[Workload]:
    peers = (HEADRACE_PYTHON, TRITON)
    group = [
        Workload(f"python-{short}-{n}", "python", MLP, protocol, generator, n, peers=peers)
        for n in CONCURRENCY
        for short, protocol, generator in _CLOSED
    ]
    group += [
        Workload(name, "python", model, BINARY, Generator.WRK, 16, rows=64, peers=peers)
        for name, model in (("python-rows-64", MLP), ("python-rows-64-batched", MLP_WIDE))
    ]
    group += [
        replace(workload, name=f"python-{workload.name}", group="python", peers=peers)
        for workload in _large()
    ]
    return group


def _cnn() -> list[Workload]:
    peers = (HEADRACE, ORT)
    return [
        Workload("cnn-1", "cnn", RESNET50, BINARY, Generator.LOAD, 1, peers=peers, stretch=5),
        Workload("cnn-4", "cnn", RESNET50, BINARY, Generator.LOAD, 4, peers=peers, stretch=5),
    ]


GROUPS: Mapping[str, Group] = {
    group.name: group
    for group in (
        Group("mlp", "The MLP in closed loop", frozenset({MLP, MLP_UNBATCHED}), _mlp()),
        Group("open", "The MLP in open loop", frozenset({MLP}), _arrivals()),
        Group("large", "Large tensors", frozenset({ECHO_1M, ECHO_16M}), _large()),
        Group("python", "Python models", frozenset({MLP, MLP_WIDE, ECHO_1M, ECHO_16M}), _python()),
        Group("cnn", "A CNN of ResNet-50's size", frozenset({RESNET50}), _cnn()),
        Group(
            "idle", "Start and memory without load", frozenset({MLP, "simple", "echo_4k"}),
            [Workload("start", "idle", MLP, "", Generator.NONE, 0)],
        ),
    )
}  # fmt: skip
WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload for group in GROUPS.values() for workload in group.workloads
}
