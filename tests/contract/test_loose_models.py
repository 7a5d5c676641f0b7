"""Models that declare no inputs, no outputs, or other outputs than they give."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Array
from tests.contract.conftest import EACH_PROXY, FRONT_ENDS
from tests.contract.proxied import behind
from tests.models.onnx_graphs import without_inputs, write_model
from tests.models.python_models import STRICT, execution, tensors, write_python_model
from tests.support.client import Client
from tests.support.server_process import ServerProcess

# It has no inputs.
SOURCE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            given = np.arange(6, dtype=np.int32).reshape(3, 2)
            tensors = [pb_utils.Tensor("GIVEN", given)]
            return [pb_utils.InferenceResponse(tensors) for request in requests]
"""
# It has no outputs, and reports its inputs in its response's parameters.
SINK = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            sums = [int(request.inputs()[0].as_numpy().sum()) for request in requests]
            return [pb_utils.InferenceResponse([], parameters={"sum": n}) for n in sums]
"""
# Its outputs differ from its configuration in datatypes and shapes. Proxies batch requests of
# several kinds, for which it raises; then they are run again in halves.
OTHER = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                [kind] = set(request.inputs()[0].as_numpy().ravel().tolist())
                rows = len(request.inputs()[0].as_numpy())
                other = {
                    0: np.full((rows, 2), 7, np.float32),
                    1: np.full((rows, 3), 7, np.int16),
                    2: np.full((rows,), 7.5, np.float64),
                    3: np.full((rows, 1), b"seven", object),
                    4: np.full((rows + 1, 2), 7, np.float32),
                    5: np.full((1,), 7, np.float32),
                }[kind]
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", other)]))
            return responses
"""
COMPLETES = """
        @staticmethod
        def auto_complete_config(config):
            config.{}
            return config
"""
# It answers each request with a single number.
ONE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            one = pb_utils.Tensor("OTHER", np.array([7], np.float32))
            return [pb_utils.InferenceResponse([one]) for request in requests]
"""
UNBATCHED = 'parameters { key: "batching" value { string_value: "off" } }\n'
GIVEN = ("GIVEN", "INT32", "2")
TAKEN = ("TAKEN", "INT64", "-1")


def completing(source: str, call: str) -> str:
    """Source of a model that completes its configuration by a call."""
    return source + COMPLETES.format(call)


# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loose")
    added = 'add_output({"name": "GIVEN", "data_type": "TYPE_INT32", "dims": [3, 2]})'
    taken = 'add_input({"name": "TAKEN", "data_type": "TYPE_INT64", "dims": [-1]})'
    write_python_model(root, "source", SOURCE, tensors("output", ("GIVEN", "INT32", "3,2")))
    batching = "max_batch_size: 8\n" + tensors("output", GIVEN)
    write_python_model(root, "batching_source", SOURCE, batching)
    write_python_model(root, "completed_source", completing(SOURCE, added))
    write_python_model(root, "sink", SINK, "max_batch_size: 8\n" + tensors("input", TAKEN))
    write_python_model(root, "completed_sink", completing(SINK, taken))
    other = "max_batch_size: 8\n" + tensors("input", ("KIND", "INT32", "1"))
    other += tensors("output", ("OTHER", "FP32", "2"))
    write_python_model(root, "other", OTHER, other)
    write_python_model(root, "other_strict", OTHER, other + STRICT)
    write_python_model(root, "other_inline", OTHER, other + execution("inline"))
    write_python_model(root, "unbatched", OTHER, other + UNBATCHED)
    write_python_model(root, "unbatched_inline", OTHER, other + UNBATCHED + execution("inline"))
    write_python_model(root, "unbatched_strict", OTHER, other + UNBATCHED + STRICT)
    single = tensors("input", ("KIND", "INT32", "-1")) + tensors("output", ("OTHER", "FP32", "1"))
    write_python_model(root, "no_rows", ONE, single)
    write_model(root, "onnx_source", without_inputs())
    return root


@pytest.fixture(scope="module", params=["default", FRONT_ENDS, *EACH_PROXY])
def server(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    front = tmp_path_factory.mktemp("front")
    options = ["--frontends=2"] if request.param == "front ends" else []
    options.append("--allow-in-process-python")
    with ServerProcess(root, options=options) as process:
        with behind(request.param, process, root, front) as server:
            yield server
        assert process.stop() == 0
        assert "bug " not in process.log, process.log


# --- no inputs


@pytest.mark.parametrize("model", ["source", "batching_source", "completed_source", "onnx_source"])
def test_a_model_without_inputs(client: Client, model: str) -> None:
    assert client.infer(model, {})["GIVEN"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(client.model_metadata(model).inputs) == 0
    with pytest.raises(InvalidRequest, match="'X'"):
        client.infer(model, {"X": np.zeros(1, np.float32)})


# --- no outputs


@pytest.mark.parametrize(("model", "rows"), [("sink", [[2, 3], [4, 5]]), ("completed_sink", [14])])
def test_a_model_without_outputs(client: Client, model: str, rows: list[object]) -> None:
    answer = client.infer(model, {"TAKEN": np.array(rows, np.int64)})
    assert answer.outputs == {}
    assert answer.parameters["sum"] == 14
    assert len(client.model_metadata(model).outputs) == 0


# --- other outputs

GIVES: dict[int, Array] = {
    0: np.full((2, 2), 7, np.float32), 1: np.full((2, 3), 7, np.int16),
    2: np.full((2,), 7.5, np.float64), 3: np.full((2, 1), b"seven", object),
}  # fmt: skip


def kinds(kind: int) -> dict[str, Array]:
    return {"KIND": np.full((2, 1), kind, np.int32)}


@pytest.mark.parametrize("model", ["other", "other_inline"])
@pytest.mark.parametrize("kind", GIVES)
def test_outputs_that_differ_from_the_declaration(client: Client, model: str, kind: int) -> None:
    given = client.infer(model, kinds(kind))["OTHER"]
    assert given.dtype == GIVES[kind].dtype
    assert given.tolist() == GIVES[kind].tolist()


def test_requests_of_a_batch_get_their_own(client: Client) -> None:
    """Queued requests form one batch: the model gives them outputs of several kinds."""
    with ThreadPoolExecutor(8) as pool:
        asked = [(kind, pool.submit(client.infer, "other", kinds(kind))) for kind in [*GIVES] * 4]
        for kind, answer in asked:
            assert answer.result()["OTHER"].tolist() == GIVES[kind].tolist()


@pytest.mark.parametrize("model", ["other", "other_strict", "other_inline"])
def test_a_wrong_number_of_rows(client: Client, model: str) -> None:
    with pytest.raises(ExecutionFailed, match=r"shape \[3,2\] for a batch of 2 rows"):
        client.infer(model, kinds(4))


@pytest.mark.parametrize("model", ["unbatched", "unbatched_inline"])
def test_any_number_of_rows_without_batching(
    client: Client, model: str, pool: ThreadPoolExecutor
) -> None:
    """Triton's behaviour: no other request's rows can be mistaken for these."""
    asked = [pool.submit(client.infer, model, kinds(kind)) for kind in (4, 5, 0) * 4]
    shapes = [answer.result()["OTHER"].shape for answer in asked]
    assert shapes == [(3, 2), (1,), (2, 2)] * 4
    with pytest.raises(ExecutionFailed, match=r"shape \[3,2\] for a batch of 2 rows"):
        client.infer("unbatched_strict", kinds(4))


def test_a_model_without_rows(client: Client) -> None:
    given = client.infer("no_rows", {"KIND": np.zeros(2, np.int32)})["OTHER"]
    assert given.tolist() == [7]


def test_strict_outputs(client: Client) -> None:
    assert client.infer("other_strict", kinds(0))["OTHER"].tolist() == GIVES[0].tolist()
    with pytest.raises(ExecutionFailed, match="as int16, its configuration says FP32"):
        client.infer("other_strict", kinds(1))
    with pytest.raises(ExecutionFailed, match=r"of shape \[2\]|as float64"):
        client.infer("other_strict", kinds(2))


def test_each_differing_output_is_logged_once(client: Client, server: ServerProcess) -> None:
    for _ in range(2):
        client.infer("other", kinds(1))
    server.await_logged("model 'other' gave output 'OTHER' ")
    assert len(re.findall("model 'other' gave output 'OTHER' .* as it is", server.log)) == 1
