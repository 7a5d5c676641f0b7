"""The ONNX Runtime backend on tiny models: signatures, results, options and errors."""

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidOption, InvalidRequest, LoadFailed
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.tensors import Array
from headrace.placement.local.onnx import MAX_TEXTS, OnnxBackend, OnnxModel
from headrace.placement.local.onnx_options import run_options
from tests.contract.graphs import spin
from tests.models import onnx_graphs

BF16 = np.dtype(ml_dtypes.bfloat16)
NO_PARAMETERS: Mapping[str, str] = {}
_ACCELERATOR = "optimization.execution_accelerators.%s_execution_accelerator"


def spec_of(
    directory: Path,
    model: bytes,
    *,
    parameters: Mapping[str, str] = NO_PARAMETERS,
    graph_level: int = 0,
    accelerators: tuple[tuple[str, Mapping[str, str]], ...] = (),
    device: int | None = None,
) -> LoadSpec:
    """Write `model` to a version directory; its specification."""
    root = onnx_graphs.write_model(directory, "m", model)
    path = root / "1" / "model.onnx"
    return LoadSpec("m", path, root, parameters, graph_level, accelerators, device)


def load(directory: Path, model: bytes) -> OnnxModel:
    return OnnxBackend().load(spec_of(directory, model))


def array_of(dtype: type[np.generic], values: object) -> Array:
    array: Array = np.array(values, dtype)
    return array


def text(*elements: bytes, shape: tuple[int, ...]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


# --- computing


@pytest.mark.parametrize("datatype", list(Datatype))
def test_identity_in_every_datatype(tmp_path: Path, datatype: Datatype) -> None:
    model = load(tmp_path, onnx_graphs.identity(datatype))
    assert [info.datatype for info in (*model.inputs, *model.outputs)] == [datatype, datatype]
    values: Array = np.arange(6).reshape(3, 2)
    array = values.astype(NUMPY[datatype])
    if datatype is Datatype.BYTES:
        array = text(b"", b"a", "é€".encode(), b"a\0b", b"\0", b"long" * 99, shape=(3, 2))
    (result,) = model.infer({"INPUT0": array}, ["OUTPUT0"])
    assert (result.dtype, result.shape) == (NUMPY[datatype], (3, 2))
    assert result.tolist() == array.tolist()


@pytest.mark.parametrize("datatype", [d for d in Datatype if d is not Datatype.BYTES])
@pytest.mark.parametrize("rows", [0, 2])
def test_views_into_received_bytes_are_not_copied(
    tmp_path: Path, datatype: Datatype, rows: int
) -> None:
    model = load(tmp_path, onnx_graphs.identity(datatype))
    raw = bytes(2 * rows * NUMPY[datatype].itemsize)
    array = np.frombuffer(raw, NUMPY[datatype]).reshape(rows, 2)
    assert not array.flags.writeable
    (result,) = model.infer({"INPUT0": array}, ["OUTPUT0"])
    assert (result.dtype, result.shape) == (NUMPY[datatype], (rows, 2))
    assert result.tolist() == array.tolist()


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BF16, Datatype.BYTES])
def test_parts_of_larger_arrays_are_accepted(tmp_path: Path, datatype: Datatype) -> None:
    model = load(tmp_path, onnx_graphs.identity(datatype))
    whole: Array = np.arange(12).reshape(4, 3).astype(NUMPY[datatype])
    if datatype is Datatype.BYTES:
        whole = text(*(b"%d" % n for n in range(12)), shape=(4, 3))
    (result,) = model.infer({"INPUT0": whole[::2, 1:]}, ["OUTPUT0"])
    assert result.tolist() == whole[::2, 1:].tolist()


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.add_sub())
    a, b = array_of(np.float32, [[1, 2, 3, 4]]), array_of(np.float32, [[4, 3, 2, 1]])
    inputs: dict[str, Array] = {"INPUT1": b, "INPUT0": a}
    total, difference = model.infer(inputs, ["OUTPUT0", "OUTPUT1"])
    assert (total.tolist(), difference.tolist()) == ([[5, 5, 5, 5]], [[-3, -1, 1, 3]])
    (difference,) = model.infer(inputs, ["OUTPUT1"])
    assert difference.tolist() == [[-3, -1, 1, 3]]
    difference, total = model.infer(inputs, ["OUTPUT1", "OUTPUT0"])  # in the order asked for
    assert total.tolist() == [[5, 5, 5, 5]]


def test_different_datatypes_and_ranks_in_one_model(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.mixed())
    assert model.inputs == [
        TensorInfo("NUMBERS", Datatype.FP32, (-1, -1), "tensor(float)"),
        TensorInfo("TEXT", Datatype.BYTES, (-1, 1), "tensor(string)"),
        TensorInfo("FLAG", Datatype.BOOL, (-1,), "tensor(bool)"),
    ]
    inputs: dict[str, Array] = {
        "NUMBERS": np.ones((2, 5), np.float32),
        "TEXT": text(b"x", b"y", shape=(2, 1)),
        "FLAG": np.array([True, False]),
    }
    flag, words = model.infer(inputs, ["FLAG_OUT", "TEXT_OUT"])
    assert (flag.tolist(), words.tolist()) == ([True, False], [[b"x"], [b"y"]])


def test_bf16_beside_other_datatypes(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.bf16_and_others())
    half: Array = np.array([[1.5, -2.0]], BF16)
    inputs = {"HALF": half, "WHOLE": array_of(np.int64, [[7]])}
    words, whole, same = model.infer(inputs, ["TEXT_OUT", "WHOLE_OUT", "HALF_OUT"])
    assert (words.tolist(), whole.tolist()) == ([[b"7"]], [[7]])
    assert (same.dtype, same.tolist()) == (BF16, [[1.5, -2.0]])
    with pytest.raises(LoadFailed, match="both BF16 tensors and text inputs"):
        load(tmp_path, onnx_graphs.bf16_and_text_input())


def test_an_output_without_dimensions(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.total())
    assert model.outputs[0].shape == ()
    (result,) = model.infer({"INPUT0": np.ones(3, np.float32)}, ["OUTPUT0"])
    assert result.dtype == np.float32
    assert (result.shape, result.tolist()) == ((), 3.0)


def test_an_input_with_a_default_value_is_optional(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.with_default())
    assert [(info.name, info.optional) for info in model.inputs] == [
        ("INPUT0", False),
        ("SCALE", True),
    ]
    ones: Array = np.ones((1, 2), np.float32)
    (result,) = model.infer({"INPUT0": ones}, ["OUTPUT0"])
    assert result.tolist() == [[2, 2]]
    (result,) = model.infer({"INPUT0": ones, "SCALE": array_of(np.float32, [5])}, ["OUTPUT0"])
    assert result.tolist() == [[5, 5]]


def test_metadata_of_tensors(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.sequence_output())
    sequence, tensor = model.outputs
    assert (sequence.datatype, sequence.type_name) == (None, "seq(tensor(float))")
    assert tensor.datatype is Datatype.FP32
    model = load(tmp_path, onnx_graphs.fixed_shape(3, 2))
    assert model.inputs[0].shape == (3, 2)


def test_strings_that_cannot_be_run(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.identity(Datatype.BYTES))
    with pytest.raises(InvalidRequest, match="'INPUT0' holds an element that is not UTF-8"):
        model.infer({"INPUT0": text(b"ok", b"\xff", shape=(1, 2))}, ["OUTPUT0"])
    model = load(tmp_path, onnx_graphs.identity(Datatype.BYTES))
    count = MAX_TEXTS + 1
    many = BytesArray(bytes(4 * count), (1, count))
    with pytest.raises(InvalidRequest, match=f"may have {MAX_TEXTS} elements at once, got {count}"):
        model.infer({"INPUT0": many}, ["OUTPUT0"])


def test_a_run_that_fails_raises_and_the_next_one_works(tmp_path: Path) -> None:
    model = load(tmp_path, onnx_graphs.lookup(3))
    with pytest.raises(Exception, match="out of data bounds"):
        model.infer({"INPUT0": array_of(np.int64, [[0], [7]])}, ["OUTPUT0"])
    (result,) = model.infer({"INPUT0": array_of(np.int64, [[0], [2]])}, ["OUTPUT0"])
    assert result.tolist() == [[0], [20]]


def test_closing_frees_the_session(tmp_path: Path) -> None:
    session = ort.InferenceSession(onnx_graphs.identity())
    gone = weakref.ref(session)
    model = OnnxModel(session)
    del session
    model.close()
    model.close()  # twice is no harm
    gc.collect()
    assert gone() is None
    with pytest.raises(AssertionError, match="infer after close"):
        model.infer({}, [])


# --- options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intra_op_thread_count", "2"), ("intra_op_thread_count", "0"),
        ("inter_op_thread_count", "1"), ("execution_mode", "1"), ("enable_mem_arena", "0"),
        ("enable_mem_pattern", "false"), ("memory.enable_memory_arena_shrinkage", "cpu:0"),
        ("memory.enable_memory_arena_shrinkage", ""), ("session.disable_prepacking", "1"),
        ("optimization.enable_gelu_approximation", "1"), ("of no meaning here", "whatever"),
    ],
)  # fmt: skip
def test_good_parameters(tmp_path: Path, name: str, value: str) -> None:
    spec = spec_of(tmp_path, onnx_graphs.identity(), parameters={name: value})
    OnnxBackend().load(spec).close()
    assert OnnxBackend().reads_parameter(name) is (name != "of no meaning here")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("intra_op_thread_count", "two", "a number of threads"),
        ("intra_op_thread_count", "-1", "a number of threads"),
        ("intra_op_thread_count", "²", "a number of threads"),
        ("inter_op_thread_count", "9" * 20, "a number of threads"),
        ("execution_mode", "2", r"0 \(sequential\) or 1 \(parallel\)"),
        ("enable_mem_arena", "maybe", "0 or 1"),
        ("enable_mem_pattern", "", "0 or 1"),
        ("memory.enable_memory_arena_shrinkage", "tpu:0", "devices such as 'cpu:0'"),
        ("memory.enable_memory_arena_shrinkage", "cpu:0,gpu:0", "devices such as 'cpu:0'"),
        (
            "memory.enable_memory_arena_shrinkage",
            "cpu:0;gpu:0",
            "no memory arena on gpu:0; .* cpu:0",
        ),
        ("memory.enable_memory_arena_shrinkage", "cpu:1", "no memory arena on cpu:1"),
        ("session." + "x" * 2_000, "1", "maximum length"),
    ],
)
def test_bad_parameters_are_named(tmp_path: Path, name: str, value: str, expected: str) -> None:
    spec = spec_of(tmp_path, onnx_graphs.identity(), parameters={name: value})
    with pytest.raises(InvalidOption, match=rf"parameters\['{name}'\]: .*{expected}"):
        OnnxBackend().load(spec)


SHRINKAGE = "memory.enable_memory_arena_shrinkage"


@pytest.mark.parametrize(
    ("value", "devices"), [("cpu:0", "cpu:0"), ("cpu", "cpu:0"), ("gpu:1;cpu:0", "gpu:1;cpu:0")]
)
def test_memory_is_released_after_each_run_if_configured(
    tmp_path: Path, value: str, devices: str
) -> None:
    spec = spec_of(tmp_path, onnx_graphs.identity(), parameters={SHRINKAGE: value}, device=1)
    assert run_options(spec).get_run_config_entry(SHRINKAGE) == devices
    with pytest.raises(RuntimeError, match=SHRINKAGE):
        run_options(replace(spec, parameters={})).get_run_config_entry(SHRINKAGE)


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES, Datatype.BF16])
def test_options_of_runs_reach_every_run(datatype: Datatype) -> None:
    options = ort.RunOptions()
    options.add_run_config_entry(SHRINKAGE, "gpu:7")
    model = OnnxModel(ort.InferenceSession(onnx_graphs.identity(datatype)), lambda: options)
    array: Array = np.ones((1, 2)).astype(NUMPY[datatype])
    if datatype is Datatype.BYTES:
        array = text(b"a", b"b", shape=(1, 2))
    with pytest.raises(Exception, match="memory arena shrink list: gpu:7"):
        model.infer({"INPUT0": array}, ["OUTPUT0"])


def test_releasing_memory_needs_an_arena(tmp_path: Path) -> None:
    shrinking = {SHRINKAGE: "cpu:0", "enable_mem_arena": "0"}
    spec = spec_of(tmp_path, onnx_graphs.identity(), parameters=shrinking)
    with pytest.raises(InvalidOption, match="none, as enable_mem_arena is 0"):
        OnnxBackend().load(spec)


_RESTING = """
import sys
import numpy as np
import onnxruntime as ort
from headrace.placement.local.onnx import OnnxModel

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

model = OnnxModel(ort.InferenceSession(sys.argv[1]))
small = {"INPUT0": np.ones((1, 2), np.float32)}
model.infer(small, ["OUTPUT0"])  # memory of the first run is kept
large = {"INPUT0": np.ones((16 << 20, 2), np.float32)}
before = resident()
model.infer(large, ["OUTPUT0"])
after = resident()
model.rest()
print(after - before, after - resident())
assert model.infer(small, ["OUTPUT0"])[0].tolist() == [[1, 1]]
"""


@pytest.mark.slow
def test_an_arena_releases_the_memory_of_a_large_batch(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(onnx_graphs.identity())
    command = [sys.executable, "-c", _RESTING, str(tmp_path / "model.onnx")]
    told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    kept, given_back = map(int, told.split())
    assert kept > 100 << 20
    assert given_back > 0.9 * kept


_SHARING = """
import sys
from pathlib import Path
import numpy as np
from headrace.core.model_spec import LoadSpec
from headrace.placement.local.onnx import OnnxBackend
from tests.models import onnx_graphs

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

models = []
for folder, own in zip(sys.argv[1:], [{}, {"session.use_env_allocators": sys.argv[3]}]):
    root = onnx_graphs.write_model(Path(folder), "m", onnx_graphs.identity())
    models.append(OnnxBackend().load(LoadSpec("m", root / "1" / "model.onnx", root, own)))
first, second = models
for model in models:
    model.infer({"INPUT0": np.ones((1, 2), np.float32)}, ["OUTPUT0"])
first.infer({"INPUT0": np.ones((16 << 20, 2), np.float32)}, ["OUTPUT0"])
before = resident()
second.rest()
print(before - resident())
"""


@pytest.mark.parametrize("shared", [True, False])
def test_small_models_share_an_arena_unless_told_otherwise(tmp_path: Path, shared: bool) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", _SHARING, *map(str, folders), str(int(shared))]
    told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert (int(told) > 100 << 20) is shared


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES, Datatype.BF16])
def test_a_model_of_any_datatype_can_release_memory(datatype: Datatype) -> None:
    model = OnnxModel(ort.InferenceSession(onnx_graphs.identity(datatype)))
    model.rest()
    model.close()
    model.rest()


@pytest.mark.parametrize("level", [-1, 0, 1, 2])
def test_graph_levels(tmp_path: Path, level: int) -> None:
    OnnxBackend().load(spec_of(tmp_path, onnx_graphs.add_sub(), graph_level=level)).close()


def test_an_unknown_graph_level_and_the_cpu_as_a_provider(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidOption, match=r"optimization\.graph\.level: must be one of -1, 0, 1, 2, got 3"
    ):
        OnnxBackend().load(spec_of(tmp_path, onnx_graphs.identity(), graph_level=3))
    named = (("CPUExecutionProvider", NO_PARAMETERS),)
    OnnxBackend().load(spec_of(tmp_path, onnx_graphs.identity(), accelerators=named)).close()


@pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(), reason="the provider is there"
)
@pytest.mark.parametrize(
    ("accelerators", "device", "provider", "path"),
    [
        ((), 0, "CUDAExecutionProvider", "instance_group[2].kind"),
        ((("tensorrt", {}),), 0, "TensorrtExecutionProvider", f"{_ACCELERATOR % 'gpu'}[0].name"),
        ((("OpenVINO", {}),), None, "OpenVINOExecutionProvider", f"{_ACCELERATOR % 'cpu'}[0].name"),
        (
            (("QNNExecutionProvider", {}),), None, "QNNExecutionProvider",
            f"{_ACCELERATOR % 'cpu'}[0].name",
        ),
        (
            (("CPUExecutionProvider", {}), ("nonsense", {})), None, "nonsense",
            f"{_ACCELERATOR % 'cpu'}[1].name",
        ),
    ],
)  # fmt: skip
def test_a_provider_that_is_not_installed_is_named(
    tmp_path: Path,
    accelerators: tuple[tuple[str, Mapping[str, str]], ...],
    device: int | None,
    provider: str,
    path: str,
) -> None:
    spec = spec_of(tmp_path, onnx_graphs.identity(), accelerators=accelerators, device=device)
    says = f"execution provider {provider} is not in .*KIND_GPU"
    with pytest.raises(InvalidOption, match=says) as caught:
        OnnxBackend().load(replace(spec, group=2))
    assert caught.value.path == path


# --- files


def test_a_directory_that_holds_the_model(tmp_path: Path) -> None:
    inner = tmp_path / "1" / "model.onnx"
    inner.mkdir(parents=True)
    spec = LoadSpec("m", inner, tmp_path)
    with pytest.raises(LoadFailed, match=r"model\.onnx is a directory without a file model\.onnx"):
        OnnxBackend().load(spec)
    (inner / "model.onnx").write_bytes(onnx_graphs.external_weight("weights.bin"))
    (inner / "weights.bin").write_bytes(array_of(np.float32, [10, 20]).tobytes())
    (result,) = (
        OnnxBackend().load(spec).infer({"INPUT0": array_of(np.float32, [[1, 2]])}, ["OUTPUT0"])
    )
    assert result.tolist() == [[11, 22]]


def test_a_missing_file_is_not_named_to_clients(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"there is no model file 1/model\.onnx"):
        OnnxBackend().load(LoadSpec("m", tmp_path / "1" / "model.onnx", tmp_path))
    with pytest.raises(LoadFailed, match="ONNXRuntimeError") as caught:
        load(tmp_path, b"\x08\x07")  # a model, of format 7, without a graph
    told = "ONNX Runtime cannot load m/1/model.onnx; the server's log says why"
    assert caught.value.public == told
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"), (b"this is no model", "is not a valid ONNX model|cannot load"),
        (b"\x3a\xff\x01", "longer than its message"),
        (onnx_graphs.identity()[:-5], "longer than its message"), (b"\x08", "cut off"),
    ],
)  # fmt: skip
def test_a_damaged_file(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        load(tmp_path, content)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, onnx_graphs.identity())
    spec.path.chmod(0)
    with pytest.raises(LoadFailed, match=r"^m/1/model\.onnx cannot be read: Permission denied$"):
        OnnxBackend().load(spec)


INTACT = onnx_graphs.external_weight_in_branch("w.bin")
ALLOWED = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@ALLOWED
@given(content=st.binary(max_size=200))
def test_random_bytes_fail_to_load_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(LoadFailed):
        load(tmp_path, content)


@ALLOWED
@given(length=st.integers(0, len(INTACT) - 1))
def test_a_truncated_file_fails_to_load_and_nothing_else(tmp_path: Path, length: int) -> None:
    with pytest.raises(LoadFailed):
        load(tmp_path, INTACT[:length])


@ALLOWED
@given(position=st.integers(0, len(INTACT) - 1), value=st.integers(0, 255))
@example(position=0, value=INTACT[0])
@example(position=INTACT.index(onnx_graphs.ROWS.encode()), value=0x80)
def test_a_file_with_one_wrong_byte_loads_or_fails_to(
    tmp_path: Path, position: int, value: int
) -> None:
    changed = bytearray(INTACT)
    changed[position] = value
    spec = spec_of(tmp_path, bytes(changed))
    (spec.path.parent / "w.bin").write_bytes(bytes(8))
    with contextlib.suppress(LoadFailed):
        OnnxBackend().load(spec).close()


def test_a_run_can_be_terminated_without_affecting_the_next() -> None:
    model = OnnxModel(ort.InferenceSession(spin()))

    def run(rounds: int) -> Array:
        [array] = model.infer({"ROUNDS": np.array([[rounds]])}, ["OUTPUT0"])
        return np.asarray(array)

    raised: list[Exception] = []

    def endless() -> None:
        try:
            run(1 << 40)
        except Exception as error:
            raised.append(error)

    thread = Thread(target=endless)
    thread.start()
    while thread.is_alive():  # it may not have begun
        assert model.terminate()
        thread.join(0.01)
    [error] = raised
    assert "terminate flag" in str(error)
    assert model.terminate()  # after its end
    assert run(3).tolist() == [[3]]
