"""First batches that wait for a number of requests, for tests, as in Triton."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.scheduling.batch import Instance
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.gates import DELAY
from tests.scheduling.fakes import Bench
from tests.support.grpc_client import GrpcClient
from tests.support.held import write_held_model
from tests.support.server_process import clean_server


def delayed(*arguments: Any) -> Batcher:
    """A batcher each of whose instances first runs when three calls wait for it."""
    batcher = Batcher(*arguments)
    batcher.delay(lambda instance: batcher.waiting_for(instance) >= 3)
    return batcher


def test_the_first_batch_waits() -> None:
    bench = Bench(kind=delayed)
    [instance] = bench.instances
    for name in "abc":
        assert instance.runs == []
        bench.send(name)
    bench.finish_all()
    bench.send("d")
    bench.finish_all()
    assert instance.runs == [["a", "b", "c"], ["d"]]


def test_instances_wait_for_calls_that_they_may_run() -> None:
    bench = Bench(kind=delayed, instances=2)
    first, second = bench.instances
    for name, target in (("a", first), ("b", second), ("c", first), ("d", second), ("e", first)):
        bench.submit(name, target=target)
        bench.clock.settle()
    assert (bench.batcher.pending, bench.batcher.busy) == (2, True)
    bench.submit("f", target=second)
    bench.finish_all()
    assert (first.runs, second.runs) == ([["a", "c", "e"]], [["b", "d", "f"]])


class CountingGate:
    """A gate that lets every instance pass, and counts those that have passed and come back."""

    def __init__(self) -> None:
        self.entered = self.left = self.rests = self.forgotten = 0

    def enter(self, idle: Sequence[Instance]) -> Instance | None:
        self.entered += bool(idle)
        return idle[0] if idle else None

    def leave(self, instance: Instance, again: bool) -> None:
        self.left += 1

    def decline(self, instance: Instance) -> None:
        self.entered -= 1

    def rest(self, waits: bool) -> None:
        self.rests += 1

    def forget(self, instance: Instance) -> None:
        self.forgotten += 1


def test_a_gate_behind_the_delay() -> None:
    gate = CountingGate()

    def limited(*arguments: Any) -> Batcher:
        batcher = Batcher(*arguments)
        batcher.limit(gate)
        batcher.delay(lambda instance: batcher.waiting_for(instance) >= 2)
        return batcher

    bench = Bench(kind=limited)
    bench.send("a")
    assert (gate.entered, bench.batcher.pending) == (0, 1)
    bench.send("b")
    bench.finish_all()
    assert gate.entered == gate.left > 0
    assert gate.rests > 0
    assert bench.instances[0].runs == [["a", "b"]]
    for instance in bench.instances:
        bench.batcher.remove_instance(instance, lambda: None)
    bench.clock.settle()
    assert gate.forgotten == len(bench.instances)


@pytest.mark.slow
def test_the_variable(tmp_path: Path) -> None:
    """A model that does not batch is not delayed."""
    root = tmp_path / "models"
    for name, rows in (("batched", 8), ("plain", 0)):
        write_held_model(root, name, tmp_path, rows=rows)
    with (
        clean_server(
            root, options=["--allow-in-process-python"], environment={DELAY: "3"}
        ) as server,
        GrpcClient(server.grpc) as client, ThreadPoolExecutor() as threads,
    ):  # fmt: skip

        def turn(model: str) -> int:
            value = np.zeros((1, 1) if model == "batched" else 1, np.int64)
            return int(client.infer(model, {"VALUE": value})["TURN"].item())

        assert turn("plain") == 1
        turns = [threads.submit(turn, "batched") for _ in range(3)]
        assert [each.result(60) for each in turns] == [1, 1, 1]
        assert turn("batched") == 2
