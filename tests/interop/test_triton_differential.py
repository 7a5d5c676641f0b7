"""The same requests to a real Triton and through this server: the same answers.

The models use Triton's Python backend; every protocol to the upstream, and every form of
requests.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, InvalidRequest, ServerError
from headrace.core.tensors import Array
from headrace.protocol.pb.grpc_service_pb2 import ModelMetadataResponse
from tests.contract.conftest import CLIENTS
from tests.contract.proxied import PROXIES, write_proxies
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Answer, Client, Input, strings
from tests.support.server_process import ServerProcess, clean_server
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

_HEAD = """
    import json

    import numpy as np
    import triton_python_backend_utils as pb_utils


    def response(**arrays):
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in arrays.items()])


    class TritonPythonModel:
        def initialize(self, args):
            self.version = int(args["model_version"])

        def execute(self, requests):
            return [
                self.answer(r, **{t.name(): t.as_numpy() for t in r.inputs()}) for r in requests
            ]
"""
_SUM = (
    "        def answer(self, request, A, B):\n            return response(SUM=A + B, LESS=A - B)\n"
)
_SAME = "        def answer(self, request, X):\n            return response(Y=X)\n"
_UPPER = """
        def answer(self, request, TEXT):
            upper = [text.upper() for text in TEXT.ravel()]
            return response(UPPER=np.array(upper, object).reshape(TEXT.shape))
"""
_BIASED = """
        def answer(self, request, X, BIAS=None):
            given = BIAS is not None
            return response(Y=X + BIAS if given else X, GIVEN=np.full((len(X), 1), given))
"""
_TOLD = """
        def answer(self, request, X):
            told = json.dumps([
                request.request_id(), json.loads(request.parameters()),
                sorted(request.requested_output_names()), request.model_name(),
            ])
            return response(TOLD=np.array([[told.encode()]] * len(X), object), X=X)
"""
_VERSION = """
        def answer(self, request, X):
            return response(Y=X + self.version)
"""
_WRONG = """
        def answer(self, request, STEP):
            step = STEP.ravel()[0].decode()
            if step == "raise":
                raise ValueError("it goes wrong")
            if step:
                error = pb_utils.TritonError("as asked", getattr(pb_utils.TritonError, step))
                return pb_utils.InferenceResponse(error=error)
            return response(DONE=STEP)
"""


def _write(root: Path, name: str, code: str, config: str, rows: int = 8) -> None:
    write_python_model(
        root, name, _HEAD + code,
        f"max_batch_size: {rows}\ninstance_group {{ count: 1 kind: KIND_CPU }}\n{config}",
    )  # fmt: skip


def write_models(root: Path) -> None:
    ints = tensors("input", ("A", "INT32", "4"), ("B", "INT32", "4"))
    ints += tensors("output", ("SUM", "INT32", "4"), ("LESS", "INT32", "4"))
    _write(root, "sum", _SUM, ints)
    _write(root, "sum_batched", _SUM, ints + "dynamic_batching { }")
    plane = tensors("input", ("X", "FP32", "2, -1")) + tensors("output", ("Y", "FP32", "2, -1"))
    _write(root, "single", _SAME, plane, 0)
    text = tensors("input", ("TEXT", "STRING", "-1")) + tensors("output", ("UPPER", "STRING", "-1"))
    _write(root, "upper", _UPPER, text)
    _write(
        root, "biased", _BIASED,
        tensors("input", ("X", "FP32", "-1"))
        + 'input { name: "BIAS" data_type: TYPE_FP32 dims: [ 1 ] optional: true }\n'
        + tensors("output", ("Y", "FP32", "-1"), ("GIVEN", "BOOL", "1")),
    )  # fmt: skip
    _write(
        root, "ranked", _SAME,
        tensors("input", ("X", "FP32", "4"))
        + 'output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "names.txt" }\n',
    )  # fmt: skip
    (root / "ranked" / "names.txt").write_text("zero\none\ntwo\nthree\n")
    _write(
        root, "shaped", _SAME,
        'input { name: "X" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: [ 4, 1 ] reshape { shape: [ 4 ] } }\n',
    )  # fmt: skip
    outputs = tensors("output", ("TOLD", "STRING", "1"), ("X", "INT8", "1"))
    _write(root, "told", _TOLD, tensors("input", ("X", "INT8", "1")) + outputs)
    floats = tensors("input", ("X", "FP64", "1")) + tensors("output", ("Y", "FP64", "1"))
    _write(root, "versions", _VERSION, floats + "version_policy { all { } }\n")
    (root / "versions" / "3").mkdir()
    code = (root / "versions" / "1" / "model.py").read_text()
    (root / "versions" / "3" / "model.py").write_text(code)
    steps = tensors("input", ("STEP", "STRING", "1")) + tensors("output", ("DONE", "STRING", "1"))
    _write(root, "wrong", _WRONG, steps)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


@pytest.fixture(scope="module")
def triton(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    log = tmp_path_factory.mktemp("log") / "log"
    with Triton(real_program(), models, log) as server:
        yield server


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def front(
    proxy: str, models: Path, triton: Triton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("front")
    write_proxies(models, root, triton, PROXIES[proxy])
    with clean_server(root, tracebacks=False) as process:
        yield process


@pytest.fixture(scope="module", params=CLIENTS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(form: str, triton: Triton, front: ServerProcess) -> Iterator[tuple[Client, Client]]:
    make = CLIENTS[form]
    with make(triton) as direct, make(front) as through:
        yield direct, through


A = np.arange(8, dtype=np.int32).reshape(2, 4)
X = np.array([[1, 2.5, -3, 4]], np.float32)
BYTE = np.array([[1], [2]], np.int8)
ONE = np.array([[1.5]])


def _infer(model: str, inputs: Any, **more: Any) -> Callable[[Client], object]:
    return lambda client: client.infer(model, inputs, **more)


def _step(step: str) -> Callable[[Client], object]:
    return _infer("wrong", {"STEP": strings([step.encode()], [1, 1])}, id="8")


def _tensors(metadata: ModelMetadataResponse) -> Answer:
    """Metadata of inputs and outputs in the form of an answer."""
    tensors = {t.name: np.array(t.shape) for t in (*metadata.inputs, *metadata.outputs)}
    datatypes = {t.name: t.datatype for t in (*metadata.inputs, *metadata.outputs)}
    return Answer(metadata.name, "", "", {}, dict(tensors), datatypes)


def _as(name: str, array: Array, datatype: str = "", shape: Any = None) -> Input:
    return Input(name, array, datatype, shape)


ANSWERS: Mapping[str, Callable[[Client], object]] = {
    "rows": _infer("sum", {"A": A, "B": A}),
    "one row, with an id": _infer("sum", {"A": A[:1], "B": A[:1]}, id="an id"),
    "as many as there may be": _infer("sum", {"A": np.tile(A, (4, 1)), "B": np.tile(A, (4, 1))}),
    "an output": _infer("sum", {"A": A, "B": A}, outputs=["LESS"]),
    "outputs in another order": _infer("sum", {"A": A, "B": A}, outputs=["LESS", "SUM"]),
    "inputs in another order": _infer("sum", {"B": A, "A": A}),
    "batched there": _infer("sum_batched", {"A": A, "B": A}),
    "a version": _infer("sum", {"A": A, "B": A}, version="1"),
    "without batches": _infer("single", {"X": X.reshape(2, 2)}),
    "no elements": _infer("single", {"X": np.zeros((2, 0), np.float32)}),
    "text": _infer("upper", {"TEXT": strings([b"a", "ä".encode(), b"", b"a b"], [2, 2])}),
    "long text": _infer("upper", {"TEXT": strings([b"x" * 100_000], [1, 1])}),
    "without what is optional": _infer("biased", {"X": X}),
    "with it": _infer("biased", {"X": X, "BIAS": np.array([[10]], np.float32)}),
    "classes": _infer("ranked", {"X": X}, classes={"Y": 2}),
    "classes of rows": _infer("ranked", {"X": np.concatenate([X, X + 1])}, classes={"Y": 9}),
    "reshaped": _infer("shaped", {"X": X.reshape(1, 2, 2)}),
    "what the model sees": _infer("told", {"X": BYTE}, id="7"),
    "of an output": _infer("told", {"X": BYTE}, id="7", outputs=["TOLD"]),
    "parameters": _infer(
        "told", {"X": BYTE}, id="7", parameters={"n": 3, "on": True, "text": "ä", "none": ""}
    ),
    "the last version": _infer("versions", {"X": ONE}),
    "the first version": _infer("versions", {"X": ONE}, version="1"),
    # the model's text
    "nothing wrong": _step(""),
    "metadata": lambda client: _tensors(client.model_metadata("shaped")),
    **{
        f"an error of the model: {code}": _step(code)
        for code in (
            "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED",
            "ALREADY_EXISTS",
        )
    },
    "an exception of the model": _step("raise"),
}  # fmt: skip
REFUSALS: Mapping[str, Callable[[Client], object]] = {
    "no such model": _infer("nope", {"X": ONE}),
    "no such version": _infer("versions", {"X": ONE}, version="2"),
    "no such input": _infer("versions", {"Z": ONE}),
    "an input too few": _infer("sum", {"A": A}),
    "an input too many": _infer("versions", {"X": ONE, "Z": ONE}),
    "no such output": _infer("versions", {"X": ONE}, outputs=["Z"]),
    "another datatype": _infer("versions", {"X": ONE.astype(np.float32)}),
    "another shape": _infer("sum", {"A": A[:, :3], "B": A[:, :3]}),
    "another rank": _infer("sum", {"A": A.ravel(), "B": A.ravel()}),
    "too many rows": _infer("versions", {"X": np.zeros((9, 1))}),
    "different rows": _infer("sum", {"A": A, "B": A[:1]}),
    "without batches, another shape": _infer("single", {"X": X.reshape(4, 1)}),
    "fewer elements than the shape says": _infer("versions", [_as("X", ONE, "FP64", [2, 1])]),
    "a negative dimension": _infer("versions", [_as("X", ONE, "FP64", [-1, 1])]),
    "no datatype": _infer("versions", [_as("X", ONE, "FP65")]),
}
MALFORMED = {"fewer elements than the shape says", "a negative dimension"}
# gRPC statuses without an HTTP status of their own.
MERGED = {"UNKNOWN", "ALREADY_EXISTS"}


def outcome(client: Client, ask: Callable[[Client], Any]) -> tuple[object, ...]:
    """An answer in a comparable form."""
    try:
        answer = ask(client)
    except ServerError as error:
        return type(error), str(error)
    return (
        answer.model_name, answer.model_version, answer.id, answer.parameters, answer.datatypes,
        {name: (array.shape, array.tolist()) for name, array in answer.outputs.items()},
    )  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_are_the_same(
    pair: tuple[Client, Client], proxy: str, form: str, case: str
) -> None:
    direct, through = pair
    told, there = outcome(through, ANSWERS[case]), outcome(direct, ANSWERS[case])
    if form == "grpc" and proxy.endswith("http") and case.rpartition(" ")[2] in MERGED:
        assert told[1:] == there[1:] == ("as asked",)
    else:
        assert told == there


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_of_the_same_kind(
    pair: tuple[Client, Client], proxy: str, form: str, case: str
) -> None:
    direct, through = pair
    told, there = outcome(through, REFUSALS[case]), outcome(direct, REFUSALS[case])
    if there[0] is ExecutionFailed:  # Triton's status of malformed HTTP requests
        assert case in MALFORMED
        assert told[0] is InvalidRequest
    else:
        assert told[0] is there[0], (told, there)
