"""In-process Python models: imports, start and execution."""

import importlib
import logging
import sys
import threading
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from headrace.core.call import Call
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import (
    ExecutionFailed,
    InvalidOption,
    InvalidRequest,
    LoadFailed,
    ServerError,
)
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.placement.worker.python_backend import PythonBackend
from headrace.placement.worker.python_options import CODE_ROWS
from headrace.plugins.in_process import LoadedInProcess, ModelImports
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import reading
from headrace.scheduling.batch import Batch, Outcome, Part
from tests.scheduling.fakes import Bench, entered

HEAD = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
"""
# `execute` runs the test's code.
BODY = """
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            x = request.inputs()[0].as_numpy()
"""


def load(root: Path, source: str, config: str = "{}", **parameters: str) -> LoadedInProcess:
    """A model on disk, imported."""
    folder = root / "m" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(dedent(source))
    spec = LoadSpec(
        "m", folder / "model.py", root / "m", {"execution": "inline", **parameters}, version=1,
        instance="m_0", as_json=lambda: config, auto_complete=True,
    )  # fmt: skip
    loaded = PythonBackend().load_here(spec)
    assert isinstance(loaded, LoadedInProcess)
    return loaded


def started(root: Path, answer: str) -> LoadedInProcess:
    """A model that answers each request with an expression over `x` and `request`."""
    model = load(root, f"{HEAD}{BODY}            return {answer}\n")
    model.begin(ModelConfig(name="m"), reading.signature(ModelConfig(name="m")), False)
    return model


def batch_of(*arrays: Array, datatype: Datatype = Datatype.FP32, **spec: object) -> Batch:
    """A batch with a request for each array."""
    tensors = [TensorSpec(name, datatype, (-1,), **spec) for name in ("X", "Y")]  # type: ignore[arg-type]
    signature = Signature("m", 8, (tensors[0],), (tensors[1],))
    calls = []
    for number, array in enumerate(arrays):
        inputs = {"X": Tensor("X", datatype, array)}
        request = Call("m", "", f"r{number}", inputs)
        calls.append(entered(request, len(array), None, 0, Bench().batcher))
    return Batch(signature, calls)


def arrays_of(outcome: Outcome) -> list[Array]:
    """The one output of each request."""
    assert outcome.error is None
    assert outcome.parts is not None
    found = []
    for part in outcome.parts:
        assert isinstance(part, Part)
        found.append(np.asarray(part.arrays["Y"]))
    return found


def rows(*values: float) -> Array:
    return np.array([values], np.float32)


def test_life_cycle_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    source = (
        HEAD
        + """
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(8)
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
            config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
            return config

        def initialize(self, args):
            from factor import FACTOR
            self.factor = FACTOR
            print("started", args["model_name"], args["model_version"])

        def execute(self, requests):
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("Y", r.inputs()[0].as_numpy() * np.float32(self.factor))],
                    parameters={"id": r.request_id()},
                )
                for r in requests
            ]

        def finalize(self):
            print("ended")
    """
    )
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "factor.py").write_text("FACTOR = 3")
    model = load(tmp_path, source)
    assert model.traits.declared_by_code
    assert model.traits.reads_parameters
    assert model.traits.row_limit == CODE_ROWS
    config = model.completed(ModelConfig(name="m"))
    assert config.max_batch_size == 8
    assert [list(tensor.dims) for tensor in config.input] == [[-1]]
    assert [tensor.name for tensor in config.output] == ["Y"]
    model.begin(config, reading.signature(config), False)
    outcome = model.batch_function()(batch_of(rows(1, 2), rows(3)))
    assert [array.tolist() for array in arrays_of(outcome)] == [[[3, 6]], [[9]]]
    assert [p.parameters for p in outcome.parts or () if isinstance(p, Part)] == [
        {"id": "r0"}, {"id": "r1"}
    ]  # fmt: skip
    assert 0 < outcome.started <= outcome.gathered <= outcome.computed
    model.close()
    assert capsys.readouterr().out == "started m 1\nended\n"
    left = {name for name in set(sys.modules) - before if "m_0" in name or name == "factor"}
    assert not left


def test_two_models_are_two_modules(tmp_path: Path) -> None:
    models = [
        load(tmp_path / name, f"{HEAD}        NAME = '{name}'{BODY}            return __name__")
        for name in ("a", "b")
    ]
    found = {name for name in sys.modules if name.startswith("m_0_v1")}
    assert {sys.modules[name].TritonPythonModel.NAME for name in found} >= {"a", "b"}
    for model in models:
        model.close()
    assert not [name for name in sys.modules if name.startswith("m_0_v1")]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("", "has neither a class TritonPythonModel"),
        (HEAD + "        async def execute(self, requests): ...", "worker process only"),
        (HEAD + "        async def execute(self, requests): yield", "worker process only"),
    ],
)
def test_models_that_cannot_be_loaded(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(LoadFailed, match=says):
        load(tmp_path, source)
    assert not [name for name in sys.modules if name.startswith("m_0_v1")]


@pytest.mark.parametrize("name", ["python", "execution_limit_secs", "EXECUTION_ENV_PATH"])
def test_parameters_of_workers_alone(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOption, match="is for worker processes; with execution 'inline'"):
        load(tmp_path, HEAD + BODY + "pass", **{name: "1"})


def test_a_missing_file(tmp_path: Path) -> None:
    spec = LoadSpec("m", tmp_path / "1" / "model.py", tmp_path, {"execution": "thread"})
    with pytest.raises(LoadFailed, match=r"there is no model file 1/model\.py"):
        PythonBackend().load_here(spec)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("def initialize(self, args): args['nothing']", "KeyError: 'nothing'"),
        ("def initialize(self, args): raise SystemExit(1)", "SystemExit: 1"),
        ("NAME = ''", "has no method execute"),
    ],
)
def test_models_that_cannot_be_started(tmp_path: Path, method: str, says: str) -> None:
    model = load(tmp_path, f"{HEAD}        {method}")
    with pytest.raises(LoadFailed, match=says):
        model.begin(ModelConfig(name="m"), reading.signature(ModelConfig(name="m")), False)


def test_a_decoupled_model(tmp_path: Path) -> None:
    model = load(tmp_path, f"{HEAD}{BODY}            pass")
    config = ModelConfig(name="m")
    config.model_transaction_policy.decoupled = True
    with pytest.raises(LoadFailed, match="a decoupled model runs in a worker process only"):
        model.begin(config, reading.signature(config), False)
    model.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("1 / 0", "Failed .* for model 'm_0', message: ZeroDivisionError: division by zero"),
        ("__import__('sys').exit(2)", "message: SystemExit: 2"),
        ("None", "Expected an 'InferenceResponse' object .* found type 'NoneType'"),
    ],
)
def test_invalid_responses_of_a_model(
    tmp_path: Path, answer: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = started(tmp_path, answer)
    outcome = model.run(batch_of(rows(1)))
    assert isinstance(outcome.error, ExecutionFailed)
    with pytest.raises(ExecutionFailed, match=says):
        raise outcome.error
    traces = [getattr(record, "trace", "") for record in caplog.records]
    assert any("in answer" in trace for trace in traces) == (answer != "None")
    caplog.clear()
    assert model.run(batch_of(rows(1), rows(2))).error is not None
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]  # it is run again
    model.close()


def test_each_request_has_its_own_error(tmp_path: Path) -> None:
    error = "pb_utils.TritonError('as asked', pb_utils.TritonError.INVALID_ARG)"
    model = started(
        tmp_path,
        f"pb_utils.InferenceResponse(error={error}) if x[0, 0] < 0 else"
        " pb_utils.InferenceResponse([], parameters={'n': 2 ** 70}) if x[0, 0] > 9 else"
        " pb_utils.InferenceResponse([pb_utils.Tensor('Y', x), pb_utils.Tensor('Z', x)])",
    )
    parts = model.run(batch_of(rows(-1), rows(1), rows(10))).parts
    model.close()
    assert parts is not None
    first, second, third = parts
    assert isinstance(first, InvalidRequest)
    assert str(first) == "as asked"
    assert isinstance(second, Part)
    assert list(second.arrays) == ["Y"]  # Z is not requested
    assert isinstance(third, ServerError)
    assert "response parameter 'n'" in str(third)


def test_inputs_are_read_only_and_aligned(tmp_path: Path) -> None:
    model = started(
        tmp_path,
        "pb_utils.InferenceResponse([pb_utils.Tensor('Y',"
        " np.array([[x.flags.writeable, x.flags.aligned, *x.shape]], np.float32))])",
    )
    odd = np.frombuffer(b"\0" + rows(1, 2).tobytes(), np.float32, offset=1).reshape(1, 2)
    assert not odd.flags.aligned
    outcome = model.run(batch_of(rows(1, 2), odd))
    assert [array.tolist() for array in arrays_of(outcome)] == [[[0, 1, 1, 2]]] * 2
    (array,) = arrays_of(model.run(batch_of(rows(1), reshape=(-1, 1))))
    assert array.tolist() == [[0, 1, 1, 1, 1]]
    model.close()


def test_outputs_stay_unchanged(tmp_path: Path) -> None:
    """A model may overwrite its arrays for the next batch, before the answer is sent."""
    model = started(
        tmp_path,
        "(vars(self).setdefault('mine', np.zeros((1, 2), np.float32)).__setitem__(..., x),"
        " pb_utils.InferenceResponse([pb_utils.Tensor('Y', self.mine)]))[1]",
    )
    (first,) = arrays_of(model.run(batch_of(rows(1, 2))))
    (second,) = arrays_of(model.run(batch_of(rows(3, 4))))
    assert (first.tolist(), second.tolist()) == ([[1, 2]], [[3, 4]])
    model.close()


def test_an_output_of_its_own_is_not_copied(tmp_path: Path) -> None:
    model = started(tmp_path, "pb_utils.InferenceResponse([pb_utils.Tensor('Y', x)])")
    given = rows(1, 2)
    (array,) = arrays_of(model.run(batch_of(given)))
    assert np.shares_memory(array, given)
    model.close()
    code = "self.seen.append(y.ctypes.data)"
    source = f"""{HEAD}        seen = []

        def execute(self, requests):
            y = np.full((1, 2), 5, np.float32)
            {code}
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])]
    """
    model = load(tmp_path, source)
    (name,) = [name for name in sys.modules if name.startswith("m_0_v1")]
    seen = sys.modules[name].TritonPythonModel.seen
    model.begin(ModelConfig(name="m"), reading.signature(ModelConfig(name="m")), False)
    (array,) = arrays_of(model.run(batch_of(rows(1, 2))))
    assert seen == [array.ctypes.data]
    model.close()


@pytest.mark.parametrize("answer", ["'\u00e4'", "b'\\xc3\\xa4'", "np.str_('\u00e4')"])
def test_strings_reach_the_server_as_bytes(tmp_path: Path, answer: str) -> None:
    model = started(
        tmp_path, f"pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.array([[{answer}]]))])"
    )
    batch = batch_of(np.array([[b"x"]], object), datatype=Datatype.BYTES)
    (array,) = arrays_of(model.run(batch))
    assert array.dtype == object
    assert array.tolist() == [[b"\xc3\xa4"]]
    model.close()


def test_bfloat16_round_trip(tmp_path: Path) -> None:
    source = f"""{HEAD}
        def execute(self, requests):
            found = requests[0].inputs()[0]
            assert found.datatype() == "BF16"
            found._name = "Y"
            return [pb_utils.InferenceResponse([found])]
    """
    model = load(tmp_path, source)
    model.begin(ModelConfig(name="m"), reading.signature(ModelConfig(name="m")), False)
    given = np.array([[1, 2]], NUMPY[Datatype.BF16])
    (array,) = arrays_of(model.run(batch_of(given, datatype=Datatype.BF16)))
    assert array.dtype == given.dtype
    assert array.tolist() == [[1, 2]]
    model.close()


def test_finalize_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(tmp_path, f"{HEAD}{BODY}            pass\n\n        def finalize(self): 1 / 0")
    model.begin(ModelConfig(name="m"), reading.signature(ModelConfig(name="m")), False)
    model.close()
    model.close()
    assert caplog.text.count("finalize: ZeroDivisionError") == 1


def imports(root: Path, name: str, **files: str) -> ModelImports:
    """Imports of a model with some files beside it; `a__b` is `a/b.py`."""
    folder = root / name / "1"
    for file, text in files.items():
        path = folder / f"{file.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ModelImports(name, [str(folder), str(root / name)])


def test_models_with_files_of_one_name(tmp_path: Path) -> None:
    first = imports(tmp_path, "first", beside="WHOSE = 'first'")
    second = imports(tmp_path, "second", beside="WHOSE = 'second'")
    found = []
    for model in (first, second, first):
        with model.lent():
            found.append(importlib.import_module("beside"))
    assert [module.WHOSE for module in found] == ["first", "second", "first"]
    assert found[0] is found[2]  # it is imported once


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = dict(sys.modules), list(sys.path), list(sys.meta_path)
    model = imports(tmp_path, "m", beside="import json", package__part="X = 1", fails="1 / 0")
    with model.lent():
        assert importlib.import_module("package.part").X == 1  # without an __init__.py
        importlib.import_module("beside")
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("fails")
    with pytest.raises(KeyError), model.lent():
        raise KeyError
    assert (dict(sys.modules), list(sys.path), list(sys.meta_path)) == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("beside")


def test_other_threads_are_not_affected(tmp_path: Path) -> None:
    model = imports(tmp_path, "m", lonely="")
    caught: list[Exception] = []

    def attempt() -> None:
        try:
            importlib.import_module("lonely")
        except ModuleNotFoundError as error:
            caught.append(error)

    with model.lent():
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        importlib.import_module("lonely")
    assert len(caught) == 1


def test_a_directory_or_a_module_of_the_server_is_not_hidden(tmp_path: Path) -> None:
    model = imports(tmp_path, "m", json="FOREIGN = True")
    with model.lent():
        assert not hasattr(importlib.import_module("json"), "FOREIGN")
    (tmp_path / "m" / "1" / "wave").mkdir(parents=True)  # of the standard library
    with imports(tmp_path, "m").lent():
        assert importlib.import_module("wave").__file__


def test_a_model_is_forgotten(tmp_path: Path) -> None:
    model = imports(tmp_path, "forgotten")
    sys.modules["forgotten"] = sys
    model.forget()
    model.forget()
    assert "forgotten" not in sys.modules
