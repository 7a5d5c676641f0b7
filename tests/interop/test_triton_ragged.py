"""The same ragged Python models on a real Triton and on this server: the same batches and answers.

With `allow_ragged_batch`, requests of different shapes share an execution, each in its own shape;
computed inputs and cut outputs of the configuration are checked, and have no effect.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ServerError
from tests.models.python_models import SHAPES, tensors, write_python_model
from tests.support.grpc_client import GrpcClient
from tests.support.server_process import ServerProcess
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

# Three requests run together: the delay is longer than a test may take.
_LONG = "max_queue_delay_microseconds: 50000000"
# Those of different shapes do not: a batch waits no longer for a request that has to stay out.
_SHORT = "max_queue_delay_microseconds: 500000"
_HEAD = "max_batch_size: 3\ndynamic_batching { preferred_batch_size: 3 %s }\n"
_X = 'input { name: "X" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }\n'
_Z = tensors("input", ("Z", "FP32", "-1"))
_OUT = tensors("output", ("Y", "FP32", "-1"), ("SEEN", "STRING", "1"))
_COUNT = (
    'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_FP32'
    ' source_input: "X" }\n'
)
_CUT = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" }\n'
MODELS = {
    "plain": _HEAD % _LONG + _X + _OUT,
    "counted": _HEAD % _LONG + _X + _OUT + _COUNT,
    "onto_an_input": _HEAD % _LONG + _X + _OUT + _COUNT.replace('"N"', '"X"'),
    "cut": _HEAD % _LONG + _X + _OUT + _CUT,
    "beside": _HEAD % _LONG + _X + _Z + _OUT,
    "apart": _HEAD % _SHORT + _X.replace("allow_ragged_batch: true", "") + _OUT,
    "beside_another": _HEAD % _SHORT + _X + _Z + _OUT,
}
REFUSED = {
    "source": _HEAD % _LONG + _X + _OUT + _COUNT.replace('source_input: "X"', 'source_input: "Q"'),
    "datatype": _HEAD % _LONG + _X + _OUT + _COUNT.replace("FP32", "FP64"),
    "target": _HEAD % _LONG + _X + _OUT + _CUT.replace('"Y"', '"Q"'),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in (MODELS | REFUSED).items():
        write_python_model(root, name, SHAPES, config)
    return root


@pytest.fixture(scope="module")
def servers(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, GrpcClient]]:
    log = tmp_path_factory.mktemp("log") / "triton.log"
    options = ("--exit-on-error=false", "--strict-readiness=false")
    with (
        Triton(real_program(), models, log, options) as triton,
        ServerProcess(models, options=("--exit-on-error=false",)) as ours,
        GrpcClient(triton.grpc) as real,
        GrpcClient(ours.grpc) as client,
    ):
        yield {"triton": real, "headrace": client}
        assert ours.stop() == 0
        assert "bug " not in ours.log


def executions(client: GrpcClient, model: str) -> set[str]:
    """The inputs of the requests of each execution, for three requests at once."""

    def ask(place: int) -> str:
        x = np.arange(place + 3, dtype=np.float32).reshape(1, -1)
        inputs = {"X": x}
        if model.startswith("beside"):
            inputs["Z"] = np.zeros((1, 2 if model == "beside" else 2 + place), np.float32)
        answer = client.infer(model, inputs)
        np.testing.assert_array_equal(answer["Y"], 2 * x)
        return str(sorted(json.loads(answer["SEEN"][0, 0]), key=str))

    with ThreadPoolExecutor(3) as threads:
        return set(threads.map(ask, range(3)))


@pytest.mark.parametrize("model", MODELS)
def test_the_same_requests_share_an_execution(servers: dict[str, GrpcClient], model: str) -> None:
    found = {name: executions(client, model) for name, client in servers.items()}
    assert found["headrace"] == found["triton"]
    together = model not in ("apart", "beside_another")
    assert len(found["triton"]) == (1 if together else 3)


@pytest.mark.parametrize("model", REFUSED)
def test_the_same_configurations_are_refused(servers: dict[str, GrpcClient], model: str) -> None:
    for client in servers.values():
        assert not client.model_ready(model)
        with pytest.raises(ServerError):
            client.infer(model, {"X": np.zeros((1, 3), np.float32)})
