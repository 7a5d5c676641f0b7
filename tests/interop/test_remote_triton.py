"""Models that a real Triton runs, with its Python backend: through this server as from Triton."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from tests.contract.conftest import CLIENTS
from tests.support.client import Client
from tests.support.remote import values, write_remote
from tests.support.server_process import ServerProcess, clean_server
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if array.dtype == np.int64 and (array < 0).any():
                error = pb_utils.TritonError("negative numbers are not for this model")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses
"""
# What Triton's Python backend has no numpy type for is left out.
DATATYPES = [d for d in Datatype if d is not Datatype.BF16]


def _type(datatype: Datatype) -> str:
    return "TYPE_STRING" if datatype is Datatype.BYTES else f"TYPE_{datatype}"


def _write(root: Path, datatype: Datatype, rows: int = 8) -> str:
    name = f"echo_{datatype}_{rows}"
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_MODEL)
    (root / name / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: {rows}'
        f' input {{ name: "INPUT0" data_type: {_type(datatype)} dims: [ -1 ] }}'
        f' output {{ name: "OUTPUT0" data_type: {_type(datatype)} dims: [ -1 ] }}'
        " instance_group { kind: KIND_CPU count: 1 }"
    )
    return name


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A Triton with the models; without the program the tests are skipped."""
    program = real_program()
    root = tmp_path_factory.mktemp("triton")
    for datatype in DATATYPES:
        _write(root / "models", datatype)
    _write(root / "models", Datatype.FP32, 0)
    with Triton(program, root / "models", root / "log") as server:
        yield server


@pytest.fixture(scope="module")
def front(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """This server, in front of it."""
    root = tmp_path_factory.mktemp("front")
    for datatype in DATATYPES:
        write_remote(root, f"echo_{datatype}_8", triton.grpc)
    write_remote(root, "echo_FP32_0", triton.grpc)
    for datatype in DATATYPES:
        name = f"echo_{datatype}_8"
        write_remote(root, f"{name}_http", f"http://{triton.http}", remote_model=name)
    with clean_server(root) as process:
        yield process


@pytest.fixture(scope="module", params=["http-binary", "grpc"])
def pair(
    request: pytest.FixtureRequest, triton: Triton, front: ServerProcess
) -> Iterator[tuple[Client, Client]]:
    """Triton itself, and this server."""
    make = CLIENTS[request.param]
    with make(triton) as direct, make(front) as through:
        yield direct, through


@pytest.mark.parametrize("over", ["", "_http"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_answers_are_triton_s(pair: tuple[Client, Client], datatype: Datatype, over: str) -> None:
    direct, through = pair
    for shape in ((1, 3), (8, 2)):
        sent = {"INPUT0": values(datatype, shape)}
        expected = direct.infer(f"echo_{datatype}_8", sent, id="7")
        answer = through.infer(f"echo_{datatype}_8{over}", sent, id="7")
        assert (answer.model_name, answer.model_version, answer.id) == (
            expected.model_name + over, expected.model_version, expected.id,
        )  # fmt: skip
        assert answer.datatypes == expected.datatypes
        np.testing.assert_array_equal(answer["OUTPUT0"], expected["OUTPUT0"])


def test_a_model_without_batches(pair: tuple[Client, Client]) -> None:
    for client in pair:
        sent = np.arange(5, dtype=np.float32)
        np.testing.assert_array_equal(
            client.infer("echo_FP32_0", {"INPUT0": sent})["OUTPUT0"], sent
        )


def test_metadata_are_triton_s(pair: tuple[Client, Client]) -> None:
    direct, through = pair
    for name in ("echo_FP32_8", "echo_FP32_0", "echo_BYTES_8"):
        there, here = direct.model_metadata(name), through.model_metadata(name)
        assert (list(here.inputs), list(here.outputs)) == (list(there.inputs), list(there.outputs))


def test_what_the_model_says_reaches_the_client(pair: tuple[Client, Client]) -> None:
    direct, through = pair
    told = []
    for client, name in (
        (direct, "echo_INT64_8"), (through, "echo_INT64_8"), (through, "echo_INT64_8_http")
    ):  # fmt: skip
        with pytest.raises(ServerError, match="negative numbers are not for this model") as error:
            client.infer(name, {"INPUT0": np.array([[-1]], np.int64)})
        told.append(type(error.value))
    assert told[0] is told[1] is told[2]
