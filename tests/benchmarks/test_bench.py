"""The benchmark's command against a real server, and its report; never its speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import MODELS, write_repository
from benchmarks.report import BEGIN, END, insert
from benchmarks.server import BenchmarkError, parse_peer

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
QUICK = ["--quick", "--seconds=0.1", "--warm-up=0.05"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments], capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
def test_every_cell_is_measured_without_errors(tmp_path: Path) -> None:
    done = bench(*QUICK, f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "results.json").read_text())
    cells = {
        (cell["model"], cell["protocol"], cell["concurrency"]): cell for cell in document["cells"]
    }
    protocols = ("http-json", "http-binary", "grpc")
    expected = {("mlp", protocol, n) for protocol in protocols for n in (1, 4, 16, 64)}
    assert set(cells) == expected | {("mlp_unbatched", protocol, 16) for protocol in protocols}
    for cell in cells.values():
        assert cell["repetitions"][0]["answers"] > 0
        assert cell["figures"]["errors"] == 0
        assert cell["figures"]["rss"] > 0
        assert cell["figures"]["mean_batch"] >= 1
    assert cells["mlp_unbatched", "grpc", 16]["figures"]["mean_batch"] == 1
    markdown = (tmp_path / "results.md").read_text()
    assert done.stdout.strip() == markdown.strip()
    for _, protocol, n in expected:
        assert f"| {protocol} | {n} |" in markdown
    assert "### Batching on and off, 16 concurrent requests" in markdown


@pytest.mark.slow
@pytest.mark.whole
def test_other_models_and_many_calls_on_one_connection(tmp_path: Path) -> None:
    done = bench(
        *QUICK, "--models=simple,echo_4k,echo_1m", "--concurrency=4", "--streams=4",
        "--seconds=1",  # a megabyte as JSON takes its time on a busy machine
        f"--output={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert len(cells) == 9
    assert all(cell["repetitions"][0]["answers"] > 0 for cell in cells)


@pytest.mark.slow
def test_a_missing_server_is_an_error(tmp_path: Path) -> None:
    done = bench(
        *QUICK, "--url=127.0.0.1:9,127.0.0.1:9", "--peer=nobody=127.0.0.1:9,",
        "--protocols=http-json", "--concurrency=2", f"--output={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 1
    assert "no connection" in done.stderr
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [cell["figures"]["errors"] for cell in cells] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "rows"), [
    ("--stages --quick",
     ("decode HTTP JSON", "check", "gather", "run", "take outputs", "encode gRPC")),
    ("--round-trip --quick", ("a bare socket pair", "a worker")),
    ("--runner --quick", ("Runner, in process", "Runner, gRPC")),
    ("--tls --quick", ("HTTP JSON, 16 connections", "gRPC, 64 connections")),
    ("--ensembles --quick", ("1 step, 1 caller", "8 steps, 16 callers")),
    ("--embedded --quick", ("engine, from a thread", "engine, 64 threads")),
])  # fmt: skip
def test_tables_of_parts(option: str, rows: tuple[str, ...]) -> None:
    done = bench(*option.split())
    assert done.returncode == 0, done.stderr
    assert [row for row in rows if f"| {row} |" not in done.stdout] == []


def test_the_models_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_repository(tmp_path / name)
    for model in MODELS:
        first, second = (tmp_path / name / model / "1" / "model.onnx" for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()


def test_results_replace_the_text_between_the_markers() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = insert(page, "new\n")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert insert(once, "new\n") == once
    with pytest.raises(ValueError, match="no place for results"):
        insert("before", "new")
    insert((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), "")


def test_refuses_a_peer_without_name_or_address() -> None:
    for text in ("", "name", "name=", "name=host", "=h:1,h:2", "name=h:x,"):
        with pytest.raises(BenchmarkError):
            parse_peer(text)
