"""Round-trip time of a small batch to a worker process: `scripts/bench --round-trip`.

One request of one row at a time, an identity model, a worker that waits: from an instance's
`execute` to its report, with everything that the server does for it but the scheduler. Beside it a
bare socket pair that echoes as many bytes: less than that it cannot be. With two cores, both with
the worker on the server's core and on another one.
"""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import uvloop

from benchmarks.report import table
from benchmarks.summary import percentile
from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.observability.statistics import VersionStatistics, WorkerCounters
from headrace.placement.placement import Surroundings
from headrace.placement.worker.loaded_worker import LoadedWorker
from headrace.placement.worker.python_backend import PythonBackend
from headrace.placement.worker.worker_instance import WorkerInstance
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import reading
from headrace.scheduling.batch import Answer, Batch, Instance, Outcome
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import LoopClock
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy

_MODEL = Path(__file__).parent / "peers" / "triton" / "identity.py"
_ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(65536):
    sock.sendall(data)
"""
_WIDTH = 16  # elements of the tensor, of 4 bytes each
_SIGNATURE = Signature(
    "identity",
    8,
    (TensorSpec("input", Datatype.FP32, (_WIDTH,)),),
    (TensorSpec("output", Datatype.FP32, (_WIDTH,)),),
)
_TRIPS = 2_000  # of a round
_WARM = 500

Trips = Callable[[int], Sequence[int]]


def main(rounds: int) -> None:
    """Measure and print; the fastest round counts: other work on the machine only adds to it."""
    cores = sorted(os.sched_getaffinity(0))
    places = {"one core": (cores[0], cores[0])}
    if len(cores) > 1:
        places["across cores"] = (cores[0], cores[1])
    ways = {"a bare socket pair": _bare, "a worker": _worker}
    rows = []
    for name, way in ways.items():
        figures = []
        for own, other in places.values():
            with _pinned(own), way(other) as trips:
                trips(_WARM)
                measured = [sorted(trips(_TRIPS)) for _ in range(rounds)]
            best = min(measured, key=lambda times: percentile(times, 0.5))
            figures += [f"{percentile(best, share) / 1000:.1f}" for share in (0.5, 0.99)]
        rows.append((name, *figures))
    titles = [f"{place}, {share}" for place in places for share in ("p50", "p99")]
    print("Microseconds there and back, of one small tensor:\n")
    print(table(("through", *titles), rows, left=1))


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Run on one core meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _bare(core: int) -> Iterator[Trips]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _ECHO, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        theirs.close()
        os.sched_setaffinity(process.pid, {core})
        data = bytes(4 * _WIDTH)

        def trips(count: int) -> list[int]:
            times = []
            for _ in range(count):
                begun = perf_counter_ns()
                ours.sendall(data)
                ours.recv(65536)
                times.append(perf_counter_ns() - begun)
            return times

        yield trips
        ours.close()


@contextmanager
def _worker(core: int) -> Iterator[Trips]:
    with tempfile.TemporaryDirectory(prefix="headrace-trip-") as directory:
        root = Path(directory) / "identity"
        (root / "1").mkdir(parents=True)
        (root / "1" / "model.py").write_text(_MODEL.read_text())
        spec = LoadSpec("identity", root / "1" / "model.py", root, version=1, instance="i")
        loaded = PythonBackend().load_apart(spec)
        loaded.begin(
            ModelConfig(name="identity"), reading.signature(ModelConfig(name="identity")), False
        )
        for thread in Path(f"/proc/{loaded.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
        loop = uvloop.new_event_loop()
        try:
            instance = _instance(loaded, loop)
            yield lambda count: loop.run_until_complete(_trips(instance, count))
            instance.close()
            loop.run_until_complete(instance.closed())
        finally:
            with suppress(ProcessLookupError):
                loaded.process.kill()
            loop.close()


def _instance(loaded: LoadedWorker, loop: asyncio.AbstractEventLoop) -> WorkerInstance:
    scheduler: Any = _Scheduler()
    version = Surroundings(_SIGNATURE, scheduler, _NOBODY, loop, lambda: None)
    return WorkerInstance(
        "i", loaded.process, loaded.again, loaded.options, loaded.run_options, version,
        WorkerCounters(), lambda: None,
    )  # fmt: skip


async def _trips(instance: WorkerInstance, count: int) -> list[int]:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[list[int]] = loop.create_future()
    slot = instance.slots[0]
    policy = SchedulingPolicy(BatchPolicy(1))
    queue = Batcher(_SIGNATURE, "1", policy, LoopClock(loop), VersionStatistics(), _NOBODY)
    times: list[int] = []
    begun = 0

    def go() -> None:
        nonlocal begun
        begun = perf_counter_ns()
        slot.execute(_batch(queue), done)

    def done(by: Instance, batch: Batch, outcome: Outcome) -> None:
        times.append(perf_counter_ns() - begun)
        if outcome.error is not None:
            ended.set_exception(outcome.error)
        elif len(times) < count:
            loop.call_soon(go)
        else:
            ended.set_result(times)

    loop.call_soon(go)
    return await ended


# Nothing here is ever answered or cancelled, and nobody is asked for anything.
_NOBODY: Any = None


class _Scheduler:
    """A scheduler that ignores all reports."""

    def suspend(self, instance: Instance) -> None:
        """Ignore the instance."""

    resume = suspend

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Ignore the answer."""


def _batch(queue: Batcher) -> Batch:
    array = np.zeros((1, _WIDTH), np.float32)
    request = Call("identity", "", "", {"input": Tensor("input", Datatype.FP32, array)})
    request.rows = 1
    queue.submit(request)
    return Batch(_SIGNATURE, [request])
