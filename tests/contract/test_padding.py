"""Padding to buckets over every transport: requests of different lengths in one run."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.contract.together import THREE, check_shapes, together
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import masked_mean, write_model
from tests.models.python_models import (
    SHAPES,
    execution,
    in_config,
    tensors,
    write_python_model,
)
from tests.support.client import Answer, Client, strings
from tests.support.grpc_client import GrpcClient
from tests.support.memory_client import HttpMemory, Place
from tests.support.remote import write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server
from tests.support.shared_memory import SharedFile

LARGE = 200_000  # elements of a request that is padded on a thread


def padding(**dims: object) -> str:
    return in_config({"pad_to_buckets": json.dumps(dims).replace('"', '\\"')})


TOKENS = {
    "buckets": [4, 8, LARGE + 1],
    "inputs": {"X": {"value": -7}},
    "mask": "MASK",
    "lengths": "LENGTH",
    "outputs": {"DOUBLED": {}},
}
TEXTS = {
    "buckets": [4],
    "inputs": {"X": {}, "NOTE": {"value": "<pad>"}},
    "outputs": {"Y": {"axis": 0}},
}
# Samples are given as they are: one for each bucket, with what is filled for requests.
WARM = """
    model_warmup {
      name: "four" batch_size: 2
      inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 random_data: true } }
      inputs { key: "MASK" value { data_type: TYPE_FP32 dims: 4 random_data: true } }
      inputs { key: "LENGTH" value { data_type: TYPE_INT32 dims: 1 random_data: true } }
    }
"""
SEEN = (
    tensors("input", ("X", "FP32", "-1"), ("NOTE", "STRING", "-1"))
    + tensors("output", ("Y", "FP32", "-1"), ("SEEN", "STRING", "1"))
)  # fmt: skip
WRONG_OUTPUT = SEEN.replace('"SEEN" data_type: TYPE_STRING dims: [ 1 ]',
                            '"SEEN" data_type: TYPE_STRING dims: [ -1 ]')  # fmt: skip
GRAPH = ensemble(
    (("x", "FP32", "-1"),), (("mean", "FP32", "1"), ("doubled", "FP32", "-1")),
    step("mean", {"X": "x"}, {"MEAN": "mean", "DOUBLED": "doubled"}),
    rows=3,
)  # fmt: skip


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("padding")
    split = in_config({"split_requests": "on"})
    write_model(
        root, "mean", masked_mean(), f"max_batch_size: 3\n{padding(tokens=TOKENS)}{split}{WARM}"
    )
    write_model(root, "three", masked_mean(), f"max_batch_size: 3\n{THREE}{padding(tokens=TOKENS)}")
    texts = f"max_batch_size: 3\n{THREE}{SEEN}{padding(words=TEXTS)}"
    write_python_model(root, "texts", SHAPES, texts)
    write_python_model(root, "here", SHAPES, texts + execution("thread"))
    wrong = TEXTS | {"outputs": {"SEEN": {}}}
    write_python_model(
        root, "wrong", SHAPES, f"max_batch_size: 3\n{WRONG_OUTPUT}{padding(words=wrong)}"
    )
    write_ensemble(root, "graph", GRAPH)
    options = (*CARRIERS[request.param], "--allow-in-process-python")
    with clean_server(root, options=options) as running:
        yield running


def row(length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.arange(1, length + 1, dtype=np.float32).reshape(1, length)


def test_requests_of_one_bucket_run_together(client: Client) -> None:
    rows = [row(n) for n in (1, 3, 4)]
    answers = together(client, "three", lambda x: client.infer("three", {"X": x}), rows)
    for x, answer in zip(rows, answers, strict=True):
        np.testing.assert_array_equal(answer["DOUBLED"], 2 * x)
        np.testing.assert_array_equal(answer["MEAN"], [[x.mean()]])
        padded = np.pad(x, [(0, 0), (0, 4 - x.shape[1])], constant_values=-7)
        np.testing.assert_array_equal(answer["RAW"], padded)


@pytest.mark.parametrize("model", ["texts", "here"])
def test_texts_are_padded_for_python_models(client: Client, model: str) -> None:
    def ask(length: int) -> Answer:
        note = strings([b"w%d" % n for n in range(length)], (1, length))
        return client.infer(model, {"X": row(length), "NOTE": note})

    expected = [
        {"X": [1, 4], "NOTE": [[f"w{n}" for n in range(length)] + ["<pad>"] * (4 - length)]}
        for length in range(3)
    ]
    check_shapes(together(client, model, ask, range(3)), [row(n) for n in range(3)], expected)


def test_outputs_are_padded_to_the_bucket_unless_they_follow(client: Client) -> None:
    for length, bucket in ((0, 4), (4, 4), (5, 8), (8, 8)):
        answer = client.infer("mean", {"X": row(length)}, outputs=("RAW", "DOUBLED"))
        assert answer["RAW"].shape == (1, bucket)
        assert answer["DOUBLED"].shape == (1, length)


def test_a_large_request_is_padded_on_a_thread(client: Client) -> None:
    x = row(LARGE)
    answer = client.infer("mean", {"X": x}, outputs=("DOUBLED",))
    np.testing.assert_array_equal(answer["DOUBLED"], 2 * x)


def test_a_divided_request(client: Client) -> None:
    x = np.arange(35, dtype=np.float32).reshape(7, 5)
    answer = client.infer("mean", {"X": x})
    np.testing.assert_array_equal(answer["DOUBLED"], 2 * x)
    np.testing.assert_allclose(answer["MEAN"], x.mean(axis=1, keepdims=True))
    assert answer["RAW"].shape == (7, 8)


def test_clients_may_send_what_is_filled(client: Client) -> None:
    mask = np.array([[1, 0, 1]], np.float32)
    length = np.array([[2]], np.int32)
    answer = client.infer("mean", {"X": row(3), "MASK": mask, "LENGTH": length})
    assert answer["MEAN"].tolist() == [[2]]  # (1 + 3) / 2


def test_a_step_of_an_ensemble(client: Client) -> None:
    answer = client.infer("graph", {"x": row(3)})
    assert answer["mean"].tolist() == [[2]]
    np.testing.assert_array_equal(answer["doubled"], 2 * row(3))


def test_requests_that_cannot_be_padded(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="input 'X' has 200002 elements in dimension 'tokens',"
                                             " whose largest bucket is 200001"):  # fmt: skip
        client.infer("mean", {"X": row(LARGE + 2)})
    with pytest.raises(InvalidRequest, match="input 'MASK' has 2 elements in dimension 'tokens',"
                                             " and input 'X' has 3"):  # fmt: skip
        client.infer("mean", {"X": row(3), "MASK": row(2)})
    with pytest.raises(InvalidRequest, match="missing required input"):
        client.infer("mean", {"MASK": row(3)})


def test_an_output_that_does_not_follow_its_dimension(client: Client) -> None:
    note = strings([b"a", b"b"], (1, 2))
    problem = (
        r"'SEEN' of shape \[1,1\]: its axis 0 follows dimension 'words', which was padded to 4"
    )
    with pytest.raises(ExecutionFailed, match=problem):
        client.infer("wrong", {"X": row(2), "NOTE": note})


def test_metrics(client: Client, server: ServerProcess) -> None:
    client.infer("mean", {"X": np.zeros((2, 5), np.float32)})  # there is no sample before
    with Scraper(server.metrics) as metrics:
        before = metrics.now()
        client.infer("mean", {"X": np.zeros((2, 5), np.float32)})
        after = metrics.now()

    def more(name: str, **labels: str) -> float:
        told = {"model": "mean", "version": "1", "dimension": "tokens", **labels}
        return after.value(name, **told) - before.value(name, **told)

    assert more("headrace_padded_requests_total", bucket="8") == 1
    assert more("headrace_padding_positions_total", kind="own") == 10
    assert more("headrace_padding_positions_total", kind="added") == 6


def test_metadata_has_the_inputs_that_are_filled(client: Client) -> None:
    names = [tensor.name for tensor in client.model_metadata("mean").inputs]
    assert names == ["X", "MASK", "LENGTH"]


PROBLEMS = {
    "nonsense": "must be JSON of dimensions by name",
    json.dumps({"t": TOKENS | {"inputs": {"Y": {}}}}): (
        "t.inputs['Y']: there is no such input, but ['X','MASK','LENGTH']"
    ),
    json.dumps({"t": TOKENS | {"inputs": {"X": {"value": "a"}}}}): (
        "t.inputs['X'].value: must be a value of FP32, got 'a'"
    ),
    json.dumps({"t": TOKENS | {"mask": "LENGTH"}}): (
        "t.mask: 'LENGTH' must have dims [-1], and neither reshape nor allow_ragged_batch; got [1]"
    ),
}


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    for number, text in enumerate(PROBLEMS):
        config = in_config({"pad_to_buckets": text.replace('"', '\\"')})
        write_model(tmp_path, f"m{number}", masked_mean(), f"max_batch_size: 3\n{config}")
    cold = WARM.replace('key: "MASK"', 'key: "X"')
    config = f"max_batch_size: 3\n{padding(tokens=TOKENS)}{cold}"
    write_model(tmp_path, "cold", masked_mean(), config)
    with clean_server(tmp_path, options=("--exit-on-error=false",)) as server:
        server.await_logged("model_warmup[0].inputs: the model also needs ['MASK']")
        for number, problem in enumerate(PROBLEMS.values()):
            server.await_logged(f"failed to load m{number}")
            assert f"parameters['pad_to_buckets']: {problem}" in server.log, problem


@pytest.mark.slow
def test_models_on_other_servers_and_with_caches(tmp_path: Path) -> None:
    """Padded requests are what another server gets, and answers are cached as they were cut."""
    there, here = tmp_path / "there", tmp_path / "here"
    write_model(there, "far", masked_mean(), "max_batch_size: 3\n")
    config = f"max_batch_size: 3\n{padding(tokens=TOKENS)}"
    write_model(here, "kept", masked_mean(), f"{config}response_cache {{ enable: true }}\n")
    with clean_server(there) as upstream:
        write_remote(here, "far", upstream.grpc, more=config)
        options = ("--cache-config=local,size=1048576",)
        with clean_server(here, options=options) as front, GrpcClient(front.grpc) as client:
            for model in ("far", "kept", "kept"):
                for length, bucket in ((3, 4), (4, 4), (6, 8)):
                    answer = client.infer(model, {"X": row(length)})
                    assert answer["RAW"].shape == (1, bucket)
                    np.testing.assert_array_equal(answer["DOUBLED"], 2 * row(length))
                    np.testing.assert_array_equal(answer["MEAN"], [[row(length).mean()]])
            assert client.statistics("kept")[0].execution_count == 3


@pytest.mark.slow
def test_shared_memory_has_what_was_cut(tmp_path: Path) -> None:
    write_model(tmp_path, "m", masked_mean(), f"max_batch_size: 3\n{padding(tokens=TOKENS)}")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    options = ("--allow-client-shm",)
    with clean_server(tmp_path, options=options) as server, SharedFile(100) as file:
        memory = HttpMemory(server.http)
        memory.register("r", file.key, 0, 100)
        file.put(x.tobytes())
        given = {"X": Place("r", 0, x.nbytes, Datatype.FP32, (2, 3))}
        target = {"DOUBLED": Place("r", 50, x.nbytes), "MEAN": None}
        answer = memory.infer("m", given, target)
        assert answer["DOUBLED"] is None
        assert np.asarray(answer["MEAN"]).tolist() == [[1], [4]]
        assert file.get(x.nbytes, 50) == (2 * x).tobytes()
        assert file.get(26, 74) == bytes(26)
        memory.unregister()
