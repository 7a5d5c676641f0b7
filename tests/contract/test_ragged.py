"""Ragged batches over every transport: requests of different shapes in one run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.contract.together import THREE, check_shapes, together
from tests.models.onnx_graphs import identity, ragged_sums, write_model
from tests.models.python_models import SHAPES, execution, tensors, write_python_model
from tests.models.warmup_models import sample
from tests.support.client import Answer, Client, strings
from tests.support.server_process import ServerProcess, clean_server

RAGGED = 'input { name: "INPUT" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }\n'
INDEX = (
    'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX"'
    ' data_type: TYPE_FP32 source_input: "INPUT" }\n'
)
SCATTER = (
    'batch_output { target_name: "DOUBLED" kind: BATCH_SCATTER_WITH_INPUT_SHAPE'
    ' source_input: "INPUT" }\n'
)
SUMS = (
    f"max_batch_size: 3\n{THREE}{RAGGED}{INDEX}{SCATTER}"
    + tensors("output", ("SUM", "FP32", "1"), ("DOUBLED", "FP32", "-1"))
)  # fmt: skip
ROWS_ALONE = (
    f"max_batch_size: 3\n{THREE}{RAGGED}{INDEX}" + tensors("output", ("SUM", "FP32", "1"))
)  # fmt: skip
APART = (
    f'max_batch_size: 6\n{THREE.replace("size: 3", "size: 6")}{RAGGED.replace("INPUT", "X")}'
    + tensors("input", ("NOTE", "STRING", "-1")).replace(
        "dims", "allow_ragged_batch: true optional: true dims"
    )
    + tensors("output", ("Y", "FP32", "-1"), ("SEEN", "STRING", "1"))
    + INDEX.replace('"INPUT"', '"X"')
)  # fmt: skip


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("ragged")
    warm = sample("zeros", "zero_data: true", 3).replace("INPUT0", "INPUT")
    write_model(root, "sums", ragged_sums(), SUMS + warm)
    write_model(root, "rows", ragged_sums(), ROWS_ALONE)
    write_python_model(root, "apart", SHAPES, APART)
    write_python_model(root, "here", SHAPES, APART + execution("thread"))
    options = (*CARRIERS[request.param], "--allow-in-process-python")
    with clean_server(root, options=options) as running:
        yield running


ROWS = [np.arange(n, dtype=np.float32).reshape(1, n) for n in (3, 4, 5)]


def test_requests_of_different_shapes_run_together(client: Client) -> None:
    answers = together(client, "sums", lambda row: client.infer("sums", {"INPUT": row}), ROWS)
    for row, answer in zip(ROWS, answers, strict=True):
        np.testing.assert_array_equal(answer["SUM"], [[row.sum()]])
        np.testing.assert_array_equal(answer["DOUBLED"], 2 * row)


def test_outputs_with_a_row_for_each_request(client: Client) -> None:
    answers = together(client, "rows", lambda row: client.infer("rows", {"INPUT": row}), ROWS)
    for row, answer in zip(ROWS, answers, strict=True):
        np.testing.assert_array_equal(answer["SUM"], [[row.sum()]])


def test_outputs_by_name(client: Client) -> None:
    names: list[tuple[str, ...]] = [("SUM",), ("DOUBLED",), ()]

    def ask(place: int) -> Answer:
        return client.infer("sums", {"INPUT": ROWS[place]}, outputs=names[place])

    found = [sorted(answer.outputs) for answer in together(client, "sums", ask, range(3))]
    assert found == [["SUM"], ["DOUBLED"], ["DOUBLED", "SUM"]]


# Beside small requests, one whose data is received in memory that the worker maps.
@pytest.mark.parametrize("size", [5, 200_000])
@pytest.mark.parametrize("model", ["apart", "here"])
def test_a_python_model_gets_each_request_in_its_own_shape(
    client: Client, model: str, size: int
) -> None:
    given = [np.arange(2 * n, dtype=np.float32).reshape(2, n) for n in (3, 0, size)]
    notes: list[list[list[str]]]
    notes = [[["a", "bcd"], ["", "e"]], [["f"], ["g"]], [[], []]]

    def ask(place: int) -> Answer:
        if size > 5:  # texts are always copied
            return client.infer(model, {"X": given[place]})
        elements = [text.encode() for row in notes[place] for text in row]
        note = strings(elements, (2, len(elements) // 2))
        return client.infer(model, {"X": given[place], "NOTE": note})

    expected: list[dict[str, object]] = [{"X": list(array.shape)} for array in given]
    if size == 5:
        expected = [each | {"NOTE": n} for each, n in zip(expected, notes, strict=True)]
    check_shapes(together(client, model, ask, range(3)), given, expected)


def test_computed_inputs_of_python_models_have_no_effect(server: ServerProcess) -> None:
    text = "batch_input[0]: has no effect: the model gets each request in its own shape"
    server.await_logged(text)
    assert "allow_ragged_batch: has no effect" not in server.log


def test_computed_inputs_are_not_sent(client: Client) -> None:
    names = [tensor.name for tensor in client.model_metadata("sums").inputs]
    assert names == ["INPUT"]
    with pytest.raises(InvalidRequest, match="INDEX"):
        client.infer("sums", {"INPUT": ROWS[0], "INDEX": np.ones((1, 1), np.float32)})


PROBLEMS = {
    SUMS.replace("max_batch_size: 3", "max_batch_size: 0").replace(THREE, ""): (
        "input[0].allow_ragged_batch: needs a max_batch_size"
    ),
    SUMS.replace("TYPE_FP32 source", "TYPE_FP64 source"): (
        "batch_input[0].data_type: must be TYPE_INT32 or TYPE_FP32"
    ),
    SUMS.replace("TYPE_FP32 source", "TYPE_INT32 source"): (
        "batch_input[0].target_name: the model's input 'INDEX' is FP32"
    ),
    SUMS.replace('"INDEX"', '"NONE"'): (
        "batch_input[0].target_name: the model has no input 'NONE'"
    ),
    SUMS.replace('source_input: "INPUT" }\nbatch_output', 'source_input: "X" }\nbatch_output'): (
        "batch_input[0].source_input: there is no input 'X', but ['INPUT']"
    ),
    SUMS.replace('target_name: "DOUBLED"', 'target_name: "X"'): (
        "batch_output[0].target_name: there is no output 'X'"
    ),
    SUMS.replace(INDEX, ""): "input: the model also needs the inputs ['INDEX']",
}


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    for number, config in enumerate(PROBLEMS):
        write_model(tmp_path, f"m{number}", ragged_sums(), config)
    agents = 'model_repository_agents { agents [ { name: "checksum" } ] }'
    write_model(tmp_path, "agents", identity(), agents)
    with clean_server(tmp_path, options=("--exit-on-error=false",)) as server:
        for number, problem in enumerate(PROBLEMS.values()):
            server.await_logged(f"failed to load m{number}")
            assert problem in server.log, problem
        server.await_logged("model_repository_agents: is not supported: agents are libraries")
