"""Python models over every transport, in workers and in process: the same answers.

Differences of in-process models are in `test_in_process.py`.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import (
    AlreadyExists,
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    ServerError,
    Unavailable,
    Unknown,
    Unsupported,
)
from headrace.protocol.status import STATUS
from tests.contract.conftest import EACH_PROXY, EACH_TRITON
from tests.contract.proxied import TRITONS, behind
from tests.models.python_models import (
    ADD_SUB,
    IDENTITY,
    STRICT,
    execution,
    tensors,
    write_python_model,
)
from tests.support.client import Client, strings
from tests.support.server_process import ServerProcess
from tests.support.triton_server import Triton, real_program

_TYPES = [datatype for datatype in Datatype if datatype is not Datatype.BF16]

# It returns each input as the output of the same datatype.
EVERY = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor(t.name().replace("IN", "OUT", 1), t.as_numpy())
                    for t in request.inputs()
                ])
                for request in requests
            ]
"""

COMPLETED = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(4)
            config.set_dynamic_batching()
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
            config.add_output({"name": "SUM", "data_type": "TYPE_FP32", "dims": [1]})
            return config

        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("SUM", r.inputs()[0].as_numpy().sum(1, keepdims=True))
                ])
                for r in requests
            ]
"""

# It returns its input as JSON; the order of STEPS decides which step fails.
TELLING = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils

    SEEN = {
        "tell": {"seen": 1, "really": True, "name": "x"}, "high": {"high": float("inf")},
        "list": [],
    }


    class TritonPythonModel:
        def initialize(self, args):
            self.args = args
            config = json.loads(args["model_config"])
            assert pb_utils.get_input_config_by_name(config, "STEP")["data_type"] == "TYPE_STRING"
            assert not pb_utils.using_decoupled_model_transaction_policy(config)

        def execute(self, requests):
            return [self.answer(request, len(requests)) for request in requests]

        def answer(self, request, count):
            step = pb_utils.get_input_tensor_by_name(request, "STEP").as_numpy()[0, 0].decode()
            if step.startswith("code "):
                error = pb_utils.TritonError("as asked", getattr(pb_utils.TritonError, step[5:]))
                return pb_utils.InferenceResponse(error=error)
            if step == "raise":
                raise ValueError("a line\\nand another")
            if step == "nothing":
                return None
            if step == "rows":
                return pb_utils.InferenceResponse(
                    [pb_utils.Tensor("TOLD", np.array([[b"a"], [b"b"], [b"c"]], object))]
                )
            if step == "type":
                return pb_utils.InferenceResponse(
                    [pb_utils.Tensor("TOLD", np.zeros((1, 1), np.float32))]
                )
            told = {
                "id": request.request_id(), "parameters": json.loads(request.parameters()),
                "outputs": sorted(request.requested_output_names()), "timeout": request.timeout(),
                "count": count, "args": self.args if step == "args" else None,
            }
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("TOLD", np.array([[json.dumps(told)]], object)),
                 pb_utils.Tensor("MORE", np.zeros((1, 2), np.int8))],
                **({"parameters": SEEN[step]} if step in SEEN else {}),
            )
"""


@pytest.fixture(
    scope="session",
    params=["process", pytest.param("inline", marks=pytest.mark.slow), *EACH_PROXY, *EACH_TRITON],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess | Triton]:
    """A server of Python models, by place of execution."""
    root, front = tmp_path_factory.mktemp("python"), tmp_path_factory.mktemp("front")
    write_models(root, execution("inline" if request.param == "inline" else "process"))
    if request.param in TRITONS:
        with behind(request.param, request.getfixturevalue("triton"), root, front) as server:
            yield server
        return
    with ServerProcess(root, options=["--allow-in-process-python"]) as process:
        with behind(request.param, process, root, front) as server:
            yield server
        assert process.stop() == 0
        assert "bug " not in process.log


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    root = tmp_path_factory.mktemp("triton")
    write_models(root / "models", execution("process"))
    with Triton(real_program(), root / "models", root / "log") as server:
        yield server


def write_models(root: Path, where: str) -> None:
    """Models of this suite, with `where` in their configurations."""
    names = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    both = [(name, "INT32", "16") for name in names[0]], [(n, "INT32", "16") for n in names[1]]
    config = (
        f"{where}max_batch_size: 8\n" + tensors("input", *both[0]) + tensors("output", *both[1])
    )
    write_python_model(root, "py_simple", ADD_SUB, config)
    config = f"{where}max_batch_size: 8\n"
    for datatype in _TYPES:
        kind = "STRING" if datatype is Datatype.BYTES else datatype.value
        given = f'name: "IN_{datatype}" data_type: TYPE_{kind} dims: [ -1 ] optional: true'
        config += f"input {{ {given} }}\n" + tensors("output", (f"OUT_{datatype}", kind, "-1"))
    write_python_model(root, "py_every", EVERY, config)
    config = tensors("input", ("INPUT0", "FP32", "-1, -1"))
    config += tensors("output", ("OUTPUT0", "FP32", "-1, -1"))
    write_python_model(root, "py_unbatched", IDENTITY, where + config)
    write_python_model(root, "py_completed", COMPLETED, where)
    config = f"{where}max_batch_size: 8\n" + tensors("input", ("STEP", "STRING", "1"))
    config += tensors("output", ("TOLD", "STRING", "1"), ("MORE", "INT8", "2"))
    write_python_model(root, "py_telling", TELLING, config + STRICT)


def tell(client: Client, step: str = "", **options: object) -> dict[str, object]:
    """Answer of the model `py_telling` for a request."""
    inputs = {"STEP": strings([step.encode()], [1, 1])}
    answer = client.infer("py_telling", inputs, **options)  # type: ignore[arg-type]
    told: dict[str, object] = json.loads(answer["TOLD"][0, 0])
    return told


def test_a_model_for_triton(client: Client) -> None:
    left = np.arange(32, dtype=np.int32).reshape(2, 16)
    answer = client.infer("py_simple", {"INPUT0": left, "INPUT1": left * 3})
    np.testing.assert_array_equal(answer["OUTPUT0"], left * 4)
    np.testing.assert_array_equal(answer["OUTPUT1"], left * -2)


@pytest.mark.parametrize("shape", [(2, 3), (1, 0), (3, 1), (2, 50_000)])
def test_every_datatype(client: Client, shape: tuple[int, int]) -> None:
    random, inputs = np.random.default_rng(5), {}
    for datatype in filter(client.carries, _TYPES):
        if datatype is Datatype.BYTES:
            rows, length = shape[0], min(shape[1], 10_000)
            values = strings([b"%d \xc3\xa4" % n for n in range(rows * length)], [rows, length])
        else:
            values = random.integers(0, 2, shape).astype(NUMPY[datatype])
        inputs[datatype] = values
    outputs = [f"OUT_{datatype}" for datatype in inputs]
    answer = client.infer("py_every", {f"IN_{d}": v for d, v in inputs.items()}, outputs=outputs)
    assert answer.datatypes == {f"OUT_{datatype}": datatype.value for datatype in inputs}
    for datatype, values in inputs.items():
        found = answer[f"OUT_{datatype}"]
        assert found.shape == values.shape
        assert found.tolist() == values.tolist()


def test_a_model_without_batches(client: Client) -> None:
    for shape in ((2, 3), (1, 1), (7, 11)):
        values = np.random.default_rng(3).random(shape, np.float32)
        answer = client.infer("py_unbatched", {"INPUT0": values})
        np.testing.assert_array_equal(answer["OUTPUT0"], values)


def test_a_model_that_completes_its_configuration(client: Client) -> None:
    answer = client.infer("py_completed", {"X": np.array([[1, 2, 3.5]], np.float32)})
    assert answer["SUM"].tolist() == [[6.5]]
    with pytest.raises(InvalidRequest, match="batch-size must be <= 4"):
        client.infer("py_completed", {"X": np.zeros((5, 1), np.float32)})


def test_properties_of_a_request(client: Client) -> None:
    told = tell(client, id="seven", parameters={"own": "x", "timeout": 5_000_000})
    assert told == {
        "id": "seven", "parameters": {"own": "x"}, "outputs": ["MORE", "TOLD"],
        "timeout": 5_000_000, "count": 1, "args": None,
    }  # fmt: skip
    assert tell(client, outputs=["TOLD"])["outputs"] == ["TOLD"]


def test_arguments_of_initialize(client: Client) -> None:
    args = tell(client, "args")["args"]
    assert isinstance(args, dict)
    assert all(isinstance(value, str) for value in args.values())
    assert args["model_name"] == "py_telling"
    assert args["model_version"] == "1"
    assert args["model_instance_kind"] == "CPU"
    assert Path(args["model_repository"]).name == "py_telling"
    assert json.loads(args["model_config"])["max_batch_size"] == 8


def test_parameters_of_a_response(client: Client) -> None:
    answer = client.infer("py_telling", {"STEP": strings([b"tell"], [1, 1])})
    assert answer.parameters == {"seen": 1, "really": True, "name": "x"}


@pytest.mark.parametrize(("step", "says"), [
    # Triton 24.10 has no parameters of responses yet.
    ("high", "Expect parameters values to have type bool/int/str, found type <class 'float'>"
             "|incompatible constructor arguments"),
    ("list", ", got <class 'list'>"),
])  # fmt: skip
def test_parameters_that_a_response_cannot_have(client: Client, step: str, says: str) -> None:
    with pytest.raises(ExecutionFailed, match=says):
        client.infer("py_telling", {"STEP": strings([step.encode()], [1, 1])})


def test_parameters_that_json_has_no_numbers_for(client: Client) -> None:
    told = tell(client, "go", parameters={"high": float("inf")})
    assert told["parameters"] == {"high": float("inf")}


@pytest.mark.parametrize(("code", "error"), [
    ("UNKNOWN", Unknown), ("INTERNAL", ExecutionFailed), ("NOT_FOUND", NotFound),
    ("INVALID_ARG", InvalidRequest), ("UNAVAILABLE", Unavailable), ("UNSUPPORTED", Unsupported),
    ("ALREADY_EXISTS", AlreadyExists),
])  # fmt: skip
def test_errors_by_code(client: Client, code: str, error: type[ServerError]) -> None:
    with pytest.raises(ServerError, match="as asked") as raised:
        tell(client, f"code {code}")
    # Over HTTP several kinds share a status.
    found, wanted = STATUS[type(raised.value)], STATUS[error]
    assert found.grpc == wanted.grpc or (found.http, wanted.http) == (400, 400)


@pytest.mark.parametrize(("step", "says"), [
    ("raise", r"message: ValueError: a line and another"),
    ("nothing", "execute returned no response to it|found type 'NoneType'"),
    ("rows", r"shape \[3,1\] for a batch of 1 rows"),
    ("type", "'TOLD' as float32, its configuration says BYTES"),
])  # fmt: skip
def test_invalid_responses_of_a_model(client: Client, step: str, says: str) -> None:
    with pytest.raises(ExecutionFailed, match=says):
        tell(client, step)
    assert tell(client)["count"] == 1


def test_a_traceback_is_in_the_log(server: ServerProcess, client: Client) -> None:
    with pytest.raises(ExecutionFailed):
        tell(client, "raise")
    server.await_logged("in answer")
    server.await_logged("py_telling/1/model.py")


def test_other_requests_of_a_failed_batch_succeed(client: Client) -> None:
    def ask(number: int) -> str:
        step = "raise" if number % 8 == 3 else "code NOT_FOUND" if number % 8 == 5 else ""
        try:
            return str(tell(client, step, id=str(number))["id"])
        except ExecutionFailed:
            return "raised"
        except NotFound:
            return "not found"

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(160)))
    assert answers == [
        {3: "raised", 5: "not found"}.get(number % 8, str(number)) for number in range(160)
    ]


def test_each_caller_gets_its_own_rows(client: Client) -> None:
    def ask(number: int) -> bool:
        rows = 1 + number % 3
        left = np.full((rows, 16), number, np.int32)
        answer = client.infer("py_simple", {"INPUT0": left, "INPUT1": left})
        return bool((answer["OUTPUT0"] == 2 * number).all()) and len(answer["OUTPUT0"]) == rows

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(300)))
