"""`headrace models graph`: the graph of an ensemble that a server has."""

from collections.abc import Iterator

import pytest

from tests.cli.conftest import Headrace
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import identity, write_model
from tests.support.server_process import clean_server

ROWS = (("x", "FP32", "2"),), (("y", "FP32", "2"),)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("graphs")
    write_model(root, "same", identity(), "max_batch_size: 8")
    config = ensemble(*ROWS, step("same", {"INPUT0": "x"}, {"OUTPUT0": "y"}))
    write_ensemble(root, "once", config)
    with clean_server(root) as process:
        yield process.url


def test_graphs(command: Headrace, url: str) -> None:
    words = ("models", "graph", "once", f"--url={url}")
    text = command(*words).out
    assert text.startswith("flowchart LR\n")
    assert '  step0["same"]\n' in text
    assert command(*words, "--json").document == {
        "model": "once", "format": "mermaid", "graph": text
    }  # fmt: skip
    assert command(*words, "--format=svg").out.startswith("<svg ")


def test_a_model_without_a_graph(command: Headrace, url: str) -> None:
    ended = command("models", "graph", "same", f"--url={url}")
    assert ended.status == 1
    assert "model 'same' is no ensemble: it has no steps" in ended.err
