"""`headrace stubs`: files that mypy accepts, and that say what a model takes and gives."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.datatypes import Datatype
from tests.cli.conftest import Headrace
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.models.python_models import write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.support.server_process import clean_server

PROGRAM = """
import headrace
from models import AddSub, Model8bitBf16, Names

model: AddSub = headrace.Runner("models", "add_sub")
found = model(INPUT0=[[1]], INPUT1=[[2]])
reveal_type(found["OUTPUT0"].dtype)
reveal_type(model({"INPUT0": [1], "INPUT1": [2]}))
names: Names = headrace.Runner("models", "names")
reveal_type(names("x")["OUTPUT0"].dtype)
other: Model8bitBf16 = headrace.Runner("models", "8bit-bf16")
model(INPUT0=[[1]])
found["OUTPUT1"].dtype.nothing
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stubs")
    write_model(root, "add_sub", add_sub(Datatype.INT32, 1), "max_batch_size: 8")
    write_model(root, "names", identity(Datatype.BYTES, ["rows", 1]), "max_batch_size: 8")
    write_model(root, "8bit-bf16", identity(Datatype.BF16, ["rows", 1]), "max_batch_size: 8")
    write_python_model(root, "teller", TELLER, TELLER_CONFIG)
    return root


def test_stubs_are_the_same_of_directories_and_servers(
    repository: Path, headrace: Headrace, tmp_path: Path
) -> None:
    directory = headrace("stubs", str(repository))
    assert (directory.status, directory.err) == (0, "")
    assert "# Model teller may answer any number of times" in directory.out
    with clean_server(repository) as server:
        for url in (server.url, f"grpc://{server.grpc}"):
            file = tmp_path / "models.pyi"
            assert headrace("stubs", url, "--output", str(file)).status == 0
            text = file.read_text()
            assert text.partition("\n")[2] == directory.out.partition("\n")[2]
            compile(text, str(file), "exec")


@pytest.mark.slow
def test_mypy_uses_the_types(repository: Path, headrace: Headrace, tmp_path: Path) -> None:
    assert headrace("stubs", str(repository), "--output", str(tmp_path / "models.pyi")).status == 0
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
         "program.py", "models.pyi"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    lines = [line for line in checked.stdout.splitlines() if "note: Possible" not in line]
    shown = [line for line in lines if "Revealed" in line]
    for word, line in zip(("32Bit", "dict", "object"), shown, strict=True):
        assert word in line
    errors = [line.partition(":")[2].partition(":")[0] for line in lines if ": error: " in line]
    assert errors == ["12", "13"], checked.stdout


def test_places_that_are_none(headrace: Headrace, tmp_path: Path) -> None:
    ended = headrace("stubs", str(tmp_path / "nowhere"))
    assert ended.status == 1
    assert "is neither a directory nor a URL such as grpc://host:8001" in ended.err
    assert "no server at" in headrace("stubs", "http://127.0.0.1:1").err
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    ended = headrace("stubs", str(tmp_path))
    assert ended.status == 1
    assert "model 'broken' is left out" in ended.err
