"""perf_analyzer, the load generator of Triton's users, against the server.

The program is taken from the environment variable HEADRACE_PERF_ANALYZER, from the PATH, or from
build/bench, where `scripts/bench_tools` installs it.
"""

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.contract import graphs
from tests.interop.conftest import Served
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import write_model
from tests.models.sequence_models import write_adder
from tests.support.scrape import Scraper
from tests.support.server_process import clean_server

pytestmark = pytest.mark.slow

_NAMED = os.environ.get("HEADRACE_PERF_ANALYZER")
_FETCHED = Path(__file__).parents[2] / "build" / "bench" / "perf_analyzer"
# The shortest measurement; it calls three windows stable, however much they differ.
_SHORT = ("-p", "250", "-r", "10", "-s", "999")


def find_program() -> str:
    """Path of the program, or "". On PyPI a package of its name holds nothing that could be run."""
    for candidate in (_NAMED, shutil.which("perf_analyzer"), str(_FETCHED)):
        if not candidate:
            continue
        try:
            done = subprocess.run([candidate, "--version"], capture_output=True, timeout=30)
        except OSError:
            continue
        if done.returncode == 0 and b"Perf Analyzer Version" in done.stdout + done.stderr:
            return candidate
    return ""


@pytest.fixture(scope="module")
def program() -> str:
    """Path of the program; without it the tests are skipped."""
    found = find_program()
    if not found:
        pytest.skip("perf_analyzer is not here; scripts/bench_tools fetches it")
    return found


def measure(program: str, *arguments: str) -> str:
    """Its output; asserts a stable measurement without errors."""
    status, printed = run(program, *arguments)
    assert status == 0, printed
    throughputs = re.findall(r"Throughput: ([\d.]+) infer/sec", printed)
    assert throughputs, printed
    assert all(float(throughput) > 0 for throughput in throughputs), printed
    return printed


def run(program: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output, without errors."""
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    printed = done.stdout + done.stderr
    assert "rror" not in printed, printed
    return done.returncode, printed


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_simple(program: str, served: Served, protocol: str) -> None:
    address = served.http if protocol == "http" else served.grpc
    printed = measure(program, "-m", "simple", "-i", protocol, "-u", address, *_SHORT)
    # Its own count is of the windows; the server's statistics, read around them, are no lower.
    client, server = (
        int(n) for n in re.findall(r"(?:Request count|Inference count): (\d+)", printed)
    )
    assert server >= client > 0


def test_streaming(program: str, served: Served) -> None:
    measure(program, "-m", "simple", "-i", "grpc", "-u", served.grpc, "--streaming", *_SHORT)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_shared_memory(program: str, served: Served, protocol: str) -> None:
    address = served.http if protocol == "http" else served.grpc
    options = ("--shared-memory", "system", "--output-shared-memory-size", "64")
    measure(program, "-m", "simple", "-i", protocol, "-u", address, *options, *_SHORT)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_asynchronous_with_a_report(
    program: str, served: Served, tmp_path: Path, protocol: str
) -> None:
    address = served.http if protocol == "http" else served.grpc
    report = tmp_path / "report.csv"
    options = ("--async", "--max-threads", "1", "--concurrency-range", "4", "-f", str(report))
    measure(program, "-m", "simple", "-i", protocol, "-u", address, *options, *_SHORT)
    rows = list(csv.DictReader(report.read_text().splitlines()))
    assert float(rows[0]["Inferences/Second"]) > 0
    # Its figures from the server's statistics, in microseconds.
    assert float(rows[0]["Server Compute Infer"]) >= 0


def test_metrics_are_read(program: str, served: Served) -> None:
    options = ("--collect-metrics", "--metrics-url", f"{served.metrics}/metrics", "-u", served.http)
    measure(program, "-m", "simple", *options, *_SHORT)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_defaults(program: str, served: Served, protocol: str) -> None:
    address = served.http if protocol == "http" else served.grpc
    status, printed = run(program, "-m", "simple", "-i", protocol, "-u", address, "-v")
    # Its defaults want three windows of five seconds that agree within 10 %: this judges the
    # machine. The server is judged by windows that all have answers and no error.
    windows = re.findall(r"Pass \[\d+\] throughput: ([\d.]+) infer/sec", printed)
    assert len(windows) >= 3, printed
    assert all(float(throughput) > 0 for throughput in windows), printed
    assert status == 0 or "Failed to obtain stable measurement" in printed, printed


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_ensemble(program: str, tmp_path: Path, protocol: str) -> None:
    x, y = (("x", "FP32", "1"),), (("y", "FP32", "1"),)
    write_model(tmp_path, "plus", graphs.add_constant(1), "max_batch_size: 8")
    first = step("plus", {"INPUT0": "x"}, {"OUTPUT0": "m"})
    second = step("plus", {"INPUT0": "m"}, {"OUTPUT0": "y"})
    write_ensemble(tmp_path, "pair", ensemble(x, y, first, second))
    with clean_server(tmp_path) as server:
        address = server.http if protocol == "http" else server.grpc
        printed = measure(program, "-m", "pair", "-i", protocol, "-u", address, *_SHORT)
    # It reads the configuration, and reports the statistics of the steps' models.
    assert "Composing models:" in printed
    assert re.search(r"plus, version: \S+", printed)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
@pytest.mark.parametrize(
    ("protocol", "options"), [("http", ("--async",)), ("grpc", ("--async", "--streaming"))]
)
def test_sequences(
    program: str, tmp_path: Path, strategy: str, protocol: str, options: tuple[str, ...]
) -> None:
    """A model with sequences is one to it without an option; all of them begin and end well."""
    write_adder(tmp_path, "adder", strategy)
    with clean_server(tmp_path, tracebacks=False) as server, Scraper(server.metrics) as scraper:
        address = server.http if protocol == "http" else server.grpc
        load = ("--concurrency-range", "4", "--sequence-length", "5", "--input-data", "zero")
        measure(program, "-m", "adder", "-i", protocol, "-u", address, *options, *load, *_SHORT)
        metrics = scraper.now()
        ended = {
            reason: metrics.value("headrace_sequences_ended_total", reason=reason)
            for reason in ("end", "idle", "lost", "timeout", "unstarted")
        }
        assert ended.pop("end") > 0
        assert set(ended.values()) == {0}
        assert metrics.value("headrace_sequences_restarted_total", model="adder") == 0
        assert metrics.value("nv_inference_request_failure", reason="OTHER") == 0
