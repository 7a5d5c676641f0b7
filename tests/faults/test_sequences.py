"""Many sequences while workers are killed: each answer is right, or says to begin again."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Lock

import numpy as np
import psutil
import pytest

from headrace.core.errors import SequenceLost
from tests.models.python_models import in_config
from tests.models.sequence_models import write_adder
from tests.support.client import Parameter
from tests.support.grpc_client import GrpcClient
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess

CONNECTIONS, SEQUENCES, STEPS = 64, 1_024, 6
EACH = SEQUENCES // CONNECTIONS  # sequences of a connection
BASE = 10_000  # of the numbers, above those that mean something to the model
KILLS = (1_000, 2_500, 4_000)  # numbers of answers after which a worker is killed


class Killer:
    """Kills workers after some numbers of answers, of all connections together."""

    def __init__(self, server: ServerProcess) -> None:
        self.killed: list[int] = []
        self._server = psutil.Process(server.pid)
        self._answers = count(1)
        self._lock = Lock()

    def answered(self) -> None:
        with self._lock:
            if next(self._answers) in KILLS:
                alive = [p.pid for p in self._server.children() if p.pid not in self.killed]
                pid = alive[len(self.killed) % len(alive)]
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)


@pytest.fixture
def server(strategy: str, tmp_path: Path) -> Iterator[ServerProcess]:
    unblamed = in_config({"quarantine_deaths": 0})  # they are killed from outside
    write_adder(
        tmp_path, "adder", strategy, rows=128, instances=2, idle_us=300_000_000, more=unblamed
    )
    with ServerProcess(tmp_path) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log


def drive(server: ServerProcess, killer: Killer, connection: int, together: int) -> int:
    """Run the sequences of a connection, some of them interleaved; the number of lost ones."""
    lost = 0
    with GrpcClient(server.grpc) as client:
        for first in range(0, EACH, together):
            ids = [1 + connection * EACH + first + n for n in range(together)]
            steps = dict.fromkeys(ids, 0)
            while steps:
                for id, step in list(steps.items()):
                    parameters: dict[str, Parameter] = {
                        "sequence_id": id, "sequence_start": not step,
                        "sequence_end": step == STEPS - 1,
                    }  # fmt: skip
                    given = {"NUMBER": np.array([[BASE + id + step]], np.int32)}
                    try:
                        answer = client.infer("adder", given, parameters=parameters)
                    except SequenceLost:
                        lost += 1
                        steps[id] = 0
                        continue
                    killer.answered()
                    assert answer["SUM"].item() == (step + 1) * (BASE + id) + sum(range(step + 1))
                    steps[id] += 1
                    if steps[id] == STEPS:
                        del steps[id]
    return lost


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "together"), [("oldest { max_candidate_sequences: 512 }", EACH), ("direct { }", 2)]
)
def test_a_thousand_sequences_and_killed_workers(server: ServerProcess, together: int) -> None:
    """No more at once than one worker has seats for: a connection waits for each answer."""
    killer = Killer(server)
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        driven = [
            threads.submit(drive, server, killer, number, together) for number in range(CONNECTIONS)
        ]
        lost = sum(each.result() for each in driven)
    assert len(killer.killed) == len(KILLS)
    assert lost > 0
    with Scraper(server.metrics) as scraper:
        metrics = scraper.now()
    assert metrics.value("headrace_sequences", model="adder") == 0
    assert metrics.value("headrace_sequences_ended_total", reason="end") >= SEQUENCES
    assert metrics.value("headrace_sequences_ended_total", reason="lost") > 0
    assert metrics.value("headrace_sequences_ended_total", reason="idle") == 0
