"""`headrace triton`, and `headrace serve` with a file that defines a pool."""

from pathlib import Path

import pytest

from headrace.plugins.triton.command import describes_pool, write_apart
from tests.cli.conftest import Headrace
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.managed import write_program, write_version
from tests.support.server_process import ServerProcess

POOL = """
from headrace.triton import Group, Model, Pool

other = 1
pool = Pool([Model("simple", [Group({count}, kind="cpu")], {rows})], endpoints=["grpc://{there}"])
"""


@pytest.mark.parametrize(("text", "expected"), [
    ("from headrace.triton import Pool", True), ("import headrace.triton as t", True),
    ("from headrace import triton", True), ("from headrace import model", False),
    ("def f():\n    import headrace.triton", False), ("not python", False), ("", False),
])  # fmt: skip
def test_files_that_describe_a_pool(text: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(text)
    assert describes_pool(path) is expected
    assert not describes_pool(tmp_path / "nowhere.py")


def test_drift(server: ServerProcess, headrace: Headrace, tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(POOL.format(count=1, rows=4, there=server.grpc))
    ended = headrace("triton", "drift", str(path))
    assert (ended.status, ended.out) == (0, "1 model as asked for\n"), ended.err
    path.write_text(POOL.format(count=2, rows=64, there=server.grpc))
    ended = headrace("triton", "drift", str(path))
    assert ended.status == 1
    assert "instance_group  2 x CPU    1 x CPU" in ended.out
    root = tmp_path / "models"
    ended = headrace("triton", "write", str(path), str(root))
    assert ended.status == 0
    assert ended.out == f"headrace serve --model-repository {root}\n"
    ended = headrace("triton", "drift", str(root), "--json")
    assert [one["field"] for one in ended.document] == ["max_batch_size", "instance_group"]
    ended = headrace("triton", "drift", str(tmp_path / "nowhere"))
    assert ended.status == 1
    assert "nowhere cannot be read" in ended.err


@pytest.mark.parametrize(("text", "says"), [
    ("from headrace.triton import Pool", "has no headrace.triton.Pool"),
    ("import headrace.triton\nraise ValueError('broken')", "broken"),
    ("import headrace.triton\n1 / 0", "ZeroDivisionError"),
    ("import headrace.triton, sys\nsys.exit()", "SystemExit"),
])  # fmt: skip
def test_files_that_cannot_be_served(
    text: str, says: str, headrace: Headrace, tmp_path: Path
) -> None:
    path = tmp_path / "pool.py"
    path.write_text(text)
    ended = headrace("serve", str(path))
    assert ended.status == 2
    assert ended.err.startswith(f"headrace serve: {path} ")
    assert says in ended.err
    assert "plugins/triton/" not in ended.err
    for words in (["triton", "drift"], ["models", "check"]):
        ended = headrace(*words, str(path))
        assert ended.status in (1, 2)
        assert says in ended.err
        assert "plugins/triton/" not in ended.err


def test_output_of_a_file_is_not_an_option(tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(POOL.format(count=1, rows=4, there="gpu-1") + "print('half a line', end='')")
    assert write_apart(path, tmp_path / "models") == []


@pytest.mark.slow
def test_a_pool_is_served(tmp_path: Path) -> None:
    """With the processes that it describes."""
    files = tmp_path / "files"
    write_version(files, 1, 3, "times")
    program = write_program(tmp_path)
    path = tmp_path / "pool.py"
    path.write_text(f"""
from headrace.triton import Group, Model, Pool

tensor = '{{kind}} {{{{ name: "{{name}}" data_type: {{type}} dims: [ -1 ] }}}}'
config = "".join([
    tensor.format(kind="input", name="INPUT0", type="TYPE_FP32"),
    tensor.format(kind="output", name="OUTPUT0", type="TYPE_FP32"),
    tensor.format(kind="output", name="SEEN", type="TYPE_STRING"),
])
model = Model(
    "times", [Group(2, kind="cpu")], 8, backend="python", files={str(files / "times")!r},
    config=config,
)
pool = Pool([model], processes="per-gpu", gpus=[7], program={str(program)!r})
""")
    import numpy as np

    (tmp_path / "empty").mkdir()
    with ServerProcess(tmp_path / "empty", options=(str(path),)) as server:
        client: Client
        with GrpcClient(server.grpc) as client:
            answer = client.infer("times", {"INPUT0": np.array([[2]], np.float32)})
        assert (answer["OUTPUT0"].tolist(), answer["SEEN"].tolist()) == ([[6]], [[b"7"]])
        assert server.stop() == 0
