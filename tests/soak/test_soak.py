"""Many clients for a long time, some of them rude: each answer is its own and none is lost.

HEADRACE_SOAK_REQUESTS is the number of requests of the longer case. `pytest -s` shows figures.
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.soak.caller import Plan, Report
from tests.support.server_process import ServerProcess, examples
from tests.support.watching import Resources, admitted, failures, statistics, until

REQUESTS = int(os.environ.get("HEADRACE_SOAK_REQUESTS", "40000"))
CALLERS = 64
PROTOCOLS = ("http", "grpc")
SHARE = 0.01  # of malformed requests, and of clients that disconnect
_ROOT = Path(__file__).parents[2]
_GROWTH_MB = 48
_TIME_SECS = 900  # for a very slow machine


def drive(server: ServerProcess, first: int, count: int) -> dict[str, Report]:
    """Send `count` requests, half of them over each protocol."""
    processes = {}
    for index, over in enumerate(PROTOCOLS):
        share = count // 2
        plan = Plan(
            over, getattr(server, over), CALLERS // 2, first + index * share, share, SHARE, SHARE
        )
        command = [sys.executable, "-m", "tests.soak.caller", json.dumps(asdict(plan))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
        processes[over] = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
    reports = {}
    for over, process in processes.items():
        printed, _ = process.communicate(timeout=_TIME_SECS)
        assert process.returncode == 0, over
        reports[over] = Report(**json.loads(printed))
    return reports


@pytest.mark.slow
@pytest.mark.timeout(2 * _TIME_SECS)
@pytest.mark.parametrize("requests", [16_000, pytest.param(REQUESTS, marks=pytest.mark.whole)])
def test_every_answer_is_its_own_and_none_is_lost(tmp_path: Path, requests: int) -> None:
    warm = min(5_000, requests) // 2 * 2
    with ServerProcess(examples(tmp_path)) as server:
        before = drive(server, 0, warm)
        quiet = asyncio.run(at_rest(server))
        begun = monotonic()
        after = drive(server, warm, requests)
        seconds = monotonic() - begun
        end = asyncio.run(at_rest(server))

        for over in PROTOCOLS:
            assert before[over].wrong == []
            assert after[over].wrong == []
        check_nothing_lost(after, requests)
        reports = [*before.values(), *after.values()]
        counted = asyncio.run(check_statistics(server, reports))
        assert end.files <= quiet.files + 2
        assert end.threads <= quiet.threads + 2
        growth = (end.resident - quiet.resident) / (1 << 20)
        assert growth < _GROWTH_MB
        assert server.stop() == 0
        assert "bug" not in server.log, server.log

    print(f"\n{requests} requests in {seconds:.1f} s: {requests / seconds:.0f} a second")
    for over, report in after.items():
        rate = (report.answered + report.refused + report.left) / report.seconds
        print(
            f"{over}: {report.answered} answered with {report.answered_rows} rows,"
            f" {report.refused} refused, {report.left} left; {rate:.0f} a second"
        )
    print(f"statistics: {counted}")
    print(f"resident memory {quiet.resident >> 20} MiB, then {growth:+.1f} MiB; files {end.files}")


async def at_rest(server: ServerProcess) -> Resources:
    """Resources of the server once it is idle and its connections are closed."""
    await until(lambda: admitted(server), lambda found: found == (0, 0))

    async def files() -> int:
        await admitted(server)
        return Resources.of(server.pid).files

    seen = await files()
    for _ in range(50):  # until it does not fall any more
        now = await files()
        seen = min(seen, now)
    return Resources.of(server.pid)


def check_nothing_lost(reports: dict[str, Report], requests: int) -> None:
    """Every request has its expected outcome."""
    ends = [report.answered + report.refused + report.left for report in reports.values()]
    assert ends == [requests // 2] * len(PROTOCOLS)
    for report in reports.values():
        assert report.refused > 0
        assert report.left > 0


async def check_statistics(server: ServerProcess, reports: list[Report]) -> dict[str, Any]:
    """The server's counters agree with those of its clients."""
    found = await statistics(server, "simple")
    answered = sum(report.answered for report in reports)
    rows = sum(report.answered_rows for report in reports)
    left = sum(report.left for report in reports)
    left_rows = sum(report.left_rows for report in reports)
    success = found["inference_stats"]["success"]["count"]
    # A disconnected client's request may have been answered, dropped, or never fully sent.
    assert answered <= success <= answered + left
    assert rows <= found["inference_count"] <= rows + left_rows
    cancelled = await failures(server, "simple", "CANCELED")
    assert success + cancelled <= answered + left
    assert found["inference_stats"]["fail"]["count"] == cancelled
    batches = found["batch_stats"]
    assert sum(batch["compute_infer"]["count"] for batch in batches) == found["execution_count"]
    executed = sum(batch["batch_size"] * batch["compute_infer"]["count"] for batch in batches)
    assert found["inference_count"] <= executed <= rows + left_rows
    assert max(batch["batch_size"] for batch in batches) <= 8
    return {
        "success": success, "cancelled": cancelled, "rows": found["inference_count"],
        "executions": found["execution_count"],
    }  # fmt: skip
