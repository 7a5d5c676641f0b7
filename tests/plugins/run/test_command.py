"""`headrace run` with real models: files and pipes, bad rows, kills, a server that restarts."""

import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from tests.cli.conftest import Ended
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server, kept_port
from tests.support.template import can_fork, run_forked

ROWS = 20_000
NUMBERS = np.random.default_rng(1).normal(size=(ROWS, 2)).astype(np.float32)
TABLE = pa.table({"id": np.arange(ROWS), "a": NUMBERS[:, 0], "b": NUMBERS[:, 1]})
# The batch with the last row of the table takes as long as there is a file.
SLOW = f"""
    import asyncio
    import os
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        async def execute(self, requests):
            await asyncio.sleep(0.002)
            responses = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
                while (x[:, 0] == np.float32({NUMBERS[-1, 0]!s})).any() and os.path.exists("HOLD"):
                    await asyncio.sleep(0.01)
                if x.min() < -1e6:
                    raise ValueError(f"{{x.min():g}} is too low")
                y = pb_utils.Tensor("Y", x.sum(axis=1, keepdims=True))
                responses.append(pb_utils.InferenceResponse([y]))
            return responses
"""
DECLARED = tensors("input", ("X", "FP32", "2")) + tensors("output", ("Y", "FP32", "1"))
SLOW_CONFIG = f"max_batch_size: 64\n{DECLARED}"


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it exists, no run with the model `slow` ends."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, hold: Path) -> Path:
    """`same` gives the columns of its matrix, `sums` two inputs' sums, `slow` those of rows."""
    root = tmp_path_factory.mktemp("models")
    write_model(root, "same", identity(dims=["rows", 2]))
    write_model(root, "sums", add_sub(width=1))
    write_python_model(root, "slow", SLOW.replace("HOLD", str(hold)), SLOW_CONFIG)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with clean_server(repository) as process:
        yield process


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    parquet.write_table(TABLE, path, row_group_size=6000)
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "headrace", "run", *map(str, words)]


def run(*words: object, given: bytes = b"") -> Ended:
    if given or not can_fork():
        ended = subprocess.run(command(*words), input=given, capture_output=True, timeout=120)
    else:
        ended = run_forked(command(*words)[3:])
    return Ended(ended.returncode, ended.stdout.decode("latin-1"), ended.stderr.decode())


def summary(ended: Ended, status: int = 0) -> Mapping[str, Any]:
    assert ended.status == status, ended.err
    found: Mapping[str, Any] = ended.document
    return found


@pytest.mark.parametrize("place", ["local", "http", "grpc"])
def test_files_through_a_model_here_or_at_a_server(
    place: str, repository: Path, server: ServerProcess, table: Path, tmp_path: Path
) -> None:
    url = server.url if place == "http" else f"grpc://{server.grpc}"
    where = ["--model-repository", repository] if place == "local" else ["--url", url]
    out = tmp_path / "out.parquet"
    told = summary(run("same", table, out, "--keep=id", "--json", *where))
    assert (told["rows"], told["failed"], told["version"]) == (ROWS, 0, "1")
    found = parquet.read_table(out)
    assert found.column_names == ["id", "OUTPUT0"]
    np.testing.assert_array_equal(np.stack(found["OUTPUT0"].to_pylist()), NUMBERS)
    assert found["id"].equals(TABLE["id"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


def test_columns_outputs_and_texts(repository: Path, tmp_path: Path) -> None:
    csv.write_csv(TABLE.slice(0, 500), tmp_path / "in.csv")
    words = ["sums", tmp_path / "in.csv", tmp_path / "out.jsonl", "--model-repository", repository,
             "--columns=INPUT0=a", "--columns=INPUT1=b", "--keep=id,b"]  # fmt: skip
    assert run(*words, "--outputs=OUTPUT0").status == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [*rows[0]] == ["id", "b", "OUTPUT0"]
    expected = NUMBERS[:500, 0] + NUMBERS[:500, 1]
    np.testing.assert_array_equal(np.array([r["OUTPUT0"] for r in rows], np.float32), expected)
    ended = run(*words, "--outputs=OUTPUT7")
    assert (ended.status, "has no output 'OUTPUT7', only OUTPUT0" in ended.err) == (2, True)


@pytest.mark.parametrize(("form", "write"), [
    ("csv", lambda sink: csv.write_csv(TABLE, sink)),
    ("parquet", lambda sink: parquet.write_table(TABLE, sink)),
    ("stream", lambda sink: pa.ipc.new_stream(sink, TABLE.schema).write_table(TABLE)),
])  # fmt: skip
def test_standard_input_and_output(form: str, write: Any, repository: Path) -> None:
    sink = pa.BufferOutputStream()
    write(sink)
    ended = run(
        "same", "-", "-", "--model-repository", repository, "--format", form,
        "--output-format=arrow", "--keep=id", given=sink.getvalue().to_pybytes(),
    )  # fmt: skip
    assert ended.status == 0, ended.err
    assert f"{ROWS:,} rows in " in ended.err
    found = pa.ipc.open_stream(ended.out.encode("latin-1")).read_all()
    assert found["id"].equals(TABLE["id"])


def test_bad_rows_go_to_their_file(repository: Path, tmp_path: Path) -> None:
    lines = [f"{n},{n},1" for n in range(3000)]
    lines[7] = "7,,1"
    lines[2000] = "2000,-2e6,1"
    lines[2001] = "2001,two,1"
    (tmp_path / "in.csv").write_text("\n".join(["id,a,b", *lines]))
    words = ["slow", tmp_path / "in.csv", tmp_path / "out.csv", "--columns=X=a,b", "--keep=id",
             "--model-repository", repository]  # fmt: skip
    ended = run(*words)
    assert ended.status == 1
    assert "in.csv row 8: " in ended.err
    assert "--bad FILE continues" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]
    told = summary(run(*words, "--bad", tmp_path / "bad.jsonl", "--json"), status=1)
    assert (told["rows"], told["failed"]) == (3000, 3)
    bad = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_bytes().splitlines()]
    assert [one["row"] for one in bad] == [8, 2001, 2002]
    assert "null" in bad[0]["reason"]
    assert "-2e+06 is too low" in bad[1]["reason"]
    assert bad[1]["content"] == {"a": -2e6, "b": 1.0, "id": 2000}
    assert bad[2]["content"] == "2001,two,1"
    found = csv.read_csv(tmp_path / "out.csv")
    assert found["id"].to_pylist() == [n for n in range(3000) if n not in (7, 2000, 2001)]


def killed_and_resumed(
    words: Sequence[object], out: Path, seed: int, kills: int
) -> tuple[bytes, int]:
    """The result after `kills` deaths, each once the log has grown, and how many there were."""
    chance = random.Random(seed)
    log, size, done = Path(f"{out}.run"), 0, 0
    while True:
        process = subprocess.Popen(command(*words, "--resume", "--quiet"))
        size += chance.randrange(40_000)
        if done < kills:
            while process.poll() is None and size_of(log) <= size:
                time.sleep(0.001)  # often: the log grows within a fraction of a second
            process.send_signal(signal.SIGKILL)
        status = process.wait(120)
        if status != -signal.SIGKILL:
            assert status in (0, 1)
            return out.read_bytes(), done
        done += 1
        size = size_of(log)


def size_of(log: Path) -> int:
    """Bytes of the log of a run, which is removed at the run's end."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


WHOLE = (pytest.mark.slow, pytest.mark.whole)


@pytest.mark.parametrize(("form", "seeds"), [
    ("parquet", 1), pytest.param("parquet", 3, marks=pytest.mark.slow),
    pytest.param("jsonl", 2, marks=WHOLE), pytest.param("arrow", 2, marks=WHOLE),
    pytest.param("csv", 2, marks=WHOLE),
])  # fmt: skip
def test_a_run_killed_anywhere_continues_to_the_same_bytes(
    form: str, seeds: int, repository: Path, tmp_path: Path
) -> None:
    words = ["same", tmp_path / "in", "--model-repository", repository, "--keep=id", "--bad"]
    (tmp_path / "in").mkdir()
    gaps = pa.array([n % 9973 == 1 for n in range(ROWS)])
    holed = TABLE.set_column(1, "a", pa.array(NUMBERS[:, 0], mask=gaps.to_numpy(False)))
    for part in range(4):
        parquet.write_table(
            holed.slice(part * 5000, 5000), tmp_path / "in" / f"{part}.parquet", row_group_size=700
        )
    whole, bad = tmp_path / f"whole.{form}", tmp_path / "whole.bad"
    assert run(*words, bad, whole).status == 1
    for seed in range(seeds):
        out, later = tmp_path / f"out{seed}.{form}", tmp_path / f"{seed}.bad"
        found, kills = killed_and_resumed([*words, later, out], out, seed, 3 if seeds == 1 else 8)
        assert found == whole.read_bytes()
        assert later.read_bytes() == bad.read_bytes()
        assert kills


def reach(log: Path) -> None:
    """Wait for a part of a run."""
    until(lambda: size_of(log) > 20_000, "a log")


def test_runs_that_are_not_resumed(
    repository: Path, hold: Path, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    words = ["slow", table, out, "--model-repository", repository, "--columns=X=a,b"]
    hold.touch()
    with subprocess.Popen(command(*words)) as process:
        log = Path(f"{out}.run")
        try:
            reach(log)
            process.send_signal(signal.SIGSTOP)
            ended = run(*words, "--resume")
            assert (ended.status, "another process is writing it" in ended.err) == (2, True)
        finally:
            process.kill()
    hold.unlink()
    assert not out.exists()
    ended = run(*words)
    assert (ended.status, "--resume continues it" in ended.err) == (2, True)
    ended = run(*words, "--resume", "--keep=id")
    assert (ended.status, "its columns was ['a', 'b'], not" in ended.err) == (2, True)
    told = summary(run(*words, "--resume", "--json"))
    assert (told["rows"], told["resumed_rows"] > 0) == (ROWS, True)
    assert not log.exists()


def test_a_server_that_restarts(repository: Path, hold: Path, table: Path, tmp_path: Path) -> None:
    words = ["slow", table, tmp_path / "out.csv", "--columns=X=a,b", "--keep=id", "--json"]
    log = tmp_path / "out.csv.run"
    hold.touch()
    with kept_port() as options:
        with ServerProcess(repository, options=options) as first:
            process = subprocess.Popen(command(*words, "--url", first.url), stdout=subprocess.PIPE)
            reach(log)
            first.stop(signal.SIGKILL)
        hold.unlink()
        with ServerProcess(repository, options=options):
            document, _ = process.communicate(timeout=120)
    assert (process.returncode, json.loads(document)["rows"]) == (0, ROWS)
    found = csv.read_csv(tmp_path / "out.csv")
    assert found["id"].equals(TABLE["id"])
    np.testing.assert_allclose(found["Y"].to_numpy(), NUMBERS.sum(axis=1), rtol=1e-4, atol=1e-6)


def test_a_server_that_stays_away(server: ServerProcess, table: Path, tmp_path: Path) -> None:
    ended = run("same", table, tmp_path / "o.csv", "--url=http://127.0.0.1:1", "--patience=0.1")
    assert (ended.status, "model same: " in ended.err) == (4, True)
    ended = run("nothing", table, tmp_path / "o.csv", "--url", server.url)
    assert (ended.status, "nothing" in ended.err) == (4, True)


@pytest.mark.parametrize(("words", "status", "says"), [
    (["a.csv", "o.csv"], 2, "where is the model?"),
    (["a.csv", "o.csv", "--url=http://x", "--model-repository=."], 2, "exclude each other"),
    (["a.csv", "-", "--output-format=csv", "--json", "--url=http://x"], 2, "standard output"),
    (["-", "o.csv", "--format=csv", "--resume", "--url=http://x"], 2, "are files"),
    (["absent.csv", "o.csv", "--url=http://x"], 3, "absent.csv: cannot be read"),
    (["a.csv", "o.txt", "--url=http://x"], 3, "o.txt: its name tells no format"),
    (["a.csv", ".", "--output-format=csv", "--url=http://x"], 2, ". is a directory"),
    (["a.csv", "o.csv", "--url=ftp://x"], 2, "ftp"),
    (["a.csv", "o.csv", "--columns=a", "--url=http://x"], 2, "expected INPUT=COLUMN"),
    (["a.csv", "o.csv", "--keep=z", "REPOSITORY"], 3, "it lacks the column 'z'"),
    (["a.csv", "o.csv", "--types=a=real", "REPOSITORY"], 2, "'real' is no name of a type of Arrow"),
    (["a.csv", "o.csv", "--columns=INPUT9=a,b", "REPOSITORY"], 4, "INPUT9"),
])  # fmt: skip
def test_errors(
    words: list[str], status: int, says: str, repository: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 20)
    given = [f"--model-repository={repository}" if w == "REPOSITORY" else w for w in words]
    ended = run("same", *given)
    assert (ended.status, says in ended.err) == (status, True), ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", pytest.param("csv", marks=WHOLE)])
def test_memory_is_bounded_whatever_the_size(form: str, repository: Path, tmp_path: Path) -> None:
    """A file of more than 400 MiB adds less than 150 MB to what one of 1 % of it takes."""
    most = []
    for count in (1, 100):
        path, numbers = tmp_path / f"{count}.{form}", np.arange(200_000, dtype=np.float32)
        part = pa.table({"id": numbers.astype(np.int64), "a": numbers, "b": numbers})
        wide = part.append_column("c", pa.array(["x" * 14] * len(numbers)))
        writer = (
            parquet.ParquetWriter(path, wide.schema, compression="none", use_dictionary=False)
            if form == "parquet" else csv.CSVWriter(path, wide.schema)
        )  # fmt: skip
        with writer:
            for _ in range(count):
                writer.write_table(wide)
        subprocess.run(
            command("same", path, tmp_path / f"o.{form}", "--model-repository", repository,
                    "--columns=INPUT0=a,b", "--keep=id,c", "--quiet"), check=True,
        )  # fmt: skip
        most.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
    assert path.stat().st_size > 400 << 20
    assert most[1] - most[0] < 150
