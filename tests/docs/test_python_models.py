"""Examples of docs/python-models.md run on a server."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.docs.pages import ROOT, blocks
from tests.models.python_models import tensors
from tests.support.client import Input
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.grpc_stream import Stream
from tests.support.server_process import ServerProcess

PAGE = (ROOT / "docs" / "python-models.md").read_text(encoding="utf-8")


def write(root: Path, name: str, source: str, config: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(source)
    (root / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcClient]:
    root = tmp_path_factory.mktemp("page")
    scale, count = (block for block in blocks(PAGE, "python") if "class Triton" in block)
    write(root, "scale", scale, blocks(PAGE, "protobuf")[0])
    config = 'backend: "python"\nmax_batch_size: 8\nmodel_transaction_policy { decoupled: true }\n'
    config += tensors("input", ("COUNT", "INT32", "1")) + tensors(
        "output", ("NUMBER", "INT32", "1")
    )
    write(root, "count", count, config)
    with ServerProcess(root) as server, GrpcClient(server.grpc) as client:
        yield client


@pytest.mark.slow
def test_the_model_for_triton(client: GrpcClient) -> None:
    answer = client.infer("scale", {"X": np.array([[1, 2]], np.float32)})
    assert answer["Y"].tolist() == [[2, 4]]


@pytest.mark.slow
def test_the_model_that_counts(client: GrpcClient) -> None:
    with Stream(client) as stream:
        stream.send(infer_message("count", [Input("COUNT", np.array([[3]], np.int32))]))
        stream.half_close()
        found = [read_answer(message.infer_response)["NUMBER"] for message in stream.rest()]
    assert [number.tolist() for number in found] == [[[0]], [[1]], [[2]]]
