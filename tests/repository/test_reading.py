"""Values of a completed configuration for other packages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import Call
from headrace.core.datatypes import BY_CONFIG_NUMBER, CONFIG_NUMBERS, NUMPY, Datatype
from headrace.core.errors import InvalidConfig, InvalidOption
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import raw_bytes
from headrace.placement.warming import Sample
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import reading
from headrace.repository.completion import normalise
from headrace.repository.config import parse_config
from headrace.repository.reading import WantedInstance, read_samples
from headrace.scheduling.overload import DelayBound
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction
from tests.repository.files import config_of


def test_signature() -> None:
    config = config_of("""
        name: "m" max_batch_size: 8
        input { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] }
        input { name: "b" data_type: TYPE_STRING dims: 1 reshape { } optional: true }
        input { name: "c" data_type: TYPE_INT8 dims: 6 reshape { shape: [ 2, 3 ] } }
        output { name: "y" data_type: TYPE_BF16 dims: 1 reshape { } }
    """)  # fmt: skip
    inputs = (
        TensorSpec("a", Datatype.FP32, (-1, 3)),
        TensorSpec("b", Datatype.BYTES, (1,), optional=True, reshape=()),
        TensorSpec("c", Datatype.INT8, (6,), reshape=(2, 3)),
    )
    outputs = (TensorSpec("y", Datatype.BF16, (1,), reshape=()),)
    assert reading.signature(config) == Signature("m", 8, inputs, outputs)


def test_every_datatype_has_its_number() -> None:
    config = ModelConfig()
    for datatype in Datatype:
        config.input.add(name="x", data_type=CONFIG_NUMBERS[datatype])
        assert BY_CONFIG_NUMBER[CONFIG_NUMBERS[datatype]] is datatype
    assert [spec.datatype for spec in reading.signature(config).inputs] == list(Datatype)


def test_a_model_that_batches_by_default() -> None:
    policy = reading.scheduling_policy(normalise(config_of("max_batch_size: 8")))
    assert policy == SchedulingPolicy(BatchPolicy(8, 0, frozenset({8}), keeps_deadlines=True))


def test_every_field_of_dynamic_batching() -> None:
    text = """max_batch_size: 8 dynamic_batching {
        preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
        priority_levels: 2 default_priority_level: 1
        default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 5 }
        priority_queue_policy {
          key: 2 value { timeout_action: DELAY allow_timeout_override: true } }
    }"""
    batch, queue = BatchPolicy(8, 100_000, frozenset({4, 8})), QueuePolicy(9, 5_000)
    second = QueuePolicy(0, 0, TimeoutAction.DELAY, True)
    expected = SchedulingPolicy(batch, queue, 2, 1, {2: second})
    assert reading.scheduling_policy(config_of(text)) == expected


def test_a_model_that_does_not_batch_keeps_its_queues_limits() -> None:
    queue = """dynamic_batching {
        preferred_batch_size: 1 max_queue_delay_microseconds: 7 preserve_ordering: true
        default_queue_policy { max_queue_size: 3 }
    }"""
    limited = SchedulingPolicy(BatchPolicy(0), QueuePolicy(3), preserve_ordering=True)
    for text in (
        "",
        'max_batch_size: 8 parameters { key: "batching" value { string_value: "off" } }',
    ):
        assert reading.scheduling_policy(config_of(text)) == SchedulingPolicy(BatchPolicy(0))
        assert reading.scheduling_policy(config_of(text + queue)) == limited


@pytest.mark.parametrize(("text", "placements"), [
    ("", [("m_0", None)]),
    ('instance_group { name: "g" count: 2 }', [("g_0", None), ("g_1", None)]),
    ("instance_group [ { kind: KIND_CPU }, { kind: KIND_MODEL } ]", [("m_0_0", None), ("m_1_0",
     None, 1, True)]),
    ("instance_group { kind: KIND_GPU }", [("m_0_0", 0)]),
    ("instance_group { gpus: [ 2, 3 ] }", [("m_0_0_gpu2", 2), ("m_0_0_gpu3", 3)]),
    ("instance_group { count: 2 gpus: 1 }", [("m_0_0", 1), ("m_0_1", 1)]),
    ("instance_group { count: 2 gpus: [ 1, 0 ] }", [("m_0_0_gpu1", 1), ("m_0_1_gpu1", 1),
     ("m_0_0_gpu0", 0), ("m_0_1_gpu0", 0)]),
])  # fmt: skip
def test_placements(text: str, placements: list[Any]) -> None:
    config = normalise(config_of('name: "m" ' + text))
    assert reading.placements(config) == [WantedInstance(*placement) for placement in placements]


def test_load_spec() -> None:
    config = config_of("""
        name: "m" default_model_filename: "model.onnx"
        parameters { key: "execution_mode" value { string_value: "1" } }
        optimization { graph { level: 2 } execution_accelerators {
          cpu_execution_accelerator { name: "openvino" }
          gpu_execution_accelerator { name: "tensorrt" parameters {
            key: "precision_mode" value: "FP16" } }
          gpu_execution_accelerator { name: "cuda" }
        } }
    """)  # fmt: skip
    root = Path("/models/m")
    on_cpu = reading.load_spec(config, root, 3, WantedInstance("m_0", None), 2)
    assert (on_cpu.model, on_cpu.path, on_cpu.root) == ("m", root / "3" / "model.onnx", root)
    assert on_cpu.parameters == {"execution_mode": "1"}
    assert (on_cpu.graph_level, on_cpu.threads) == (2, 2)
    assert (on_cpu.accelerators, on_cpu.device) == ((("openvino", {}),), None)
    assert on_cpu.group == 0
    on_gpu = reading.load_spec(config, root, 3, WantedInstance("m_0", 1, 4), 2)
    assert on_gpu.accelerators == (("tensorrt", {"precision_mode": "FP16"}), ("cuda", {}))
    assert (on_gpu.device, on_gpu.group) == (1, 4)


def test_execution() -> None:
    config = ModelConfig()
    assert reading.execution(config) == "auto"
    for kind in ("auto", "inline", "thread"):
        config.parameters["execution"].string_value = kind
        assert reading.execution(config) == kind


@pytest.mark.parametrize(("policy", "available", "chosen"), [
    ("", (1, 2, 3), (3,)), ("version_policy { latest { } }", (1, 2, 3), (3,)),
    ("version_policy { latest { num_versions: 2 } }", (1, 2, 3), (2, 3)),
    ("version_policy { latest { num_versions: 9 } }", (1, 2, 3), (1, 2, 3)),
    ("version_policy { all { } }", (1, 2, 3), (1, 2, 3)),
    ("version_policy { specific { versions: [ 3, 1, 7 ] } }", (1, 2, 3), (1, 3)),
    ("version_policy { specific { } }", (1, 2, 3), ()), ("version_policy { all { } }", (), ()),
    ("", (), ()),
])  # fmt: skip
def test_versions(policy: str, available: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    assert reading.chosen_versions(config_of(policy), available) == chosen


# --- warm-up samples


X = TensorSpec("x", Datatype.FP32, (2,))
T = TensorSpec("t", Datatype.BYTES, (-1,))


def read(
    root: Path, config: str, *inputs: TensorSpec, max_batch_size: int = 4
) -> tuple[Sample, ...]:
    """Samples of a configuration with these inputs."""
    signature = Signature("m", max_batch_size, inputs or (X,), ())
    file = parse_config(config, "m/config.pbtxt")
    return read_samples(file, file.config, signature, root)


def value(data: str, kind: str = "FP32", dims: str = "dims: 2", name: str = "x") -> str:
    """One input of a sample."""
    return f'inputs {{ key: "{name}" value {{ data_type: TYPE_{kind} {dims}\n {data} }} }}'


def write(root: Path, name: str, content: bytes) -> None:
    """Write a file of warm-up data."""
    path = root / "warmup" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def requests(sample: Sample) -> list[Call]:
    """The requests of one batch."""
    return [
        Call("m", "1", "", {name: make(index) for name, make in sample.inputs.items()})
        for index in range(sample.batch_size)
    ]


def arrays(sample: Sample, name: str = "x") -> list[list[object]]:
    """Input arrays of each request."""
    return [request.inputs[name].array.tolist() for request in requests(sample)]


def test_no_samples(tmp_path: Path) -> None:
    assert read(tmp_path, "") == ()
    assert read(tmp_path, "model_warmup { batch_size: 0 inputs { key: 'nonsense' } }") == ()


def test_zeros(tmp_path: Path) -> None:
    [sample] = read(
        tmp_path, "model_warmup { name: 'a' batch_size: 2 " + value("zero_data: true") + "}"
    )
    assert (sample.name, sample.batch_size, sample.count) == ("a", 2, 1)
    assert arrays(sample) == [[[0, 0]], [[0, 0]]]


@pytest.mark.parametrize("datatype", Datatype)
def test_zeros_and_random_data_of_every_datatype(tmp_path: Path, datatype: Datatype) -> None:
    kind = "STRING" if datatype is Datatype.BYTES else datatype.value
    spec = TensorSpec("x", datatype, (3, 2))
    for data in ("zero_data: true", "random_data: true"):
        told = value(data, kind, "dims: [ 3, 2 ]")
        [sample] = read(tmp_path, f"model_warmup {{ batch_size: 2 count: 5 {told} }}", spec)
        assert sample.count == 5
        first, second = requests(sample)
        signature = Signature("m", 4, (spec,), ())
        assert signature.check(first) == signature.check(second) == 1
        array = np.asarray(first.inputs["x"].array)
        assert array.dtype == NUMPY[datatype]
        again = requests(sample)[0].inputs["x"].array
        assert again.tolist() == array.tolist()  # every load gives the same
        if data == "zero_data: true":
            assert not array.any()
        elif datatype is not Datatype.BOOL:
            assert array.any()
            assert array.tolist() != second.inputs["x"].array.tolist()


def test_a_model_that_does_not_batch_has_no_rows(tmp_path: Path) -> None:
    config = "model_warmup { batch_size: 1 " + value("zero_data: true") + "}"
    [sample] = read(tmp_path, config, max_batch_size=0)
    assert arrays(sample) == [[0, 0]]


def test_a_file_is_for_each_request_or_for_all_of_them(tmp_path: Path) -> None:
    write(tmp_path, "one", np.array([1, 2], "<f4").tobytes())
    write(tmp_path, "all", np.array([1, 2, 3, 4], "<f4").tobytes())
    one, each = read(
        tmp_path,
        "model_warmup { batch_size: 2 " + value("input_data_file: 'one'") + "}"
        "model_warmup { batch_size: 2 " + value("input_data_file: 'all'") + "}",
    )
    assert arrays(one) == [[[1, 2]], [[1, 2]]]
    assert arrays(each) == [[[1, 2]], [[3, 4]]]


@given(st.lists(st.binary(max_size=9), min_size=4, max_size=4))
def test_strings_are_length_prefixed(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes]
) -> None:
    root = tmp_path_factory.mktemp("texts")
    write(root, "texts", bytes(raw_bytes(np.array(texts, object))))
    told = value("input_data_file: 'texts'", "STRING", "dims: 2", "t")
    [sample] = read(root, f"model_warmup {{ batch_size: 2 {told} }}", T)
    assert arrays(sample, "t") == [[texts[:2]], [texts[2:]]]
    told = told.replace("dims: 2", "dims: 4")
    [sample] = read(root, f"model_warmup {{ batch_size: 2 {told} }}", T)
    assert arrays(sample, "t") == [[texts], [texts]]


def test_an_optional_input_may_be_left_out(tmp_path: Path) -> None:
    extra = TensorSpec("y", Datatype.FP32, (2,), optional=True)
    config = "model_warmup { batch_size: 1 " + value("zero_data: true") + "}"
    [sample] = read(tmp_path, config, X, extra)
    assert list(sample.inputs) == ["x"]


@pytest.mark.parametrize(("config", "told"), [
    ("model_warmup {\n batch_size: 5 " + value("zero_data: true") + "}",
     "m/config.pbtxt:2: model_warmup[0].batch_size: must be at most 4, as max_batch_size has"
     " it, got 5"),
    ("model_warmup {\n batch_size: 1\n " + value("zero_data: true", name="z") + "}",
     "m/config.pbtxt:3: model_warmup[0].inputs['z']: the model has no such input, it has"
     " ['x']\nm/config.pbtxt:3: model_warmup[0].inputs: the model also needs ['x']"),
    ("model_warmup { batch_size: 1 " + value("zero_data: true", "INT32") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value.data_type: must be that of the"
     " input, FP32; got INT32"),
    ("model_warmup { batch_size: 1\ninputs { key: 'x'\n value { dims: 2 zero_data: true } } }",
     "m/config.pbtxt:3: model_warmup[0].inputs['x'].value.data_type: must be that of the"
     " input, FP32; it is missing"),
    ("model_warmup { batch_size: 1 " + value("zero_data: true", dims="dims: -1") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value.dims: every dimension must be"
     " given, got [-1]"),
    ("model_warmup { batch_size: 1 " + value("zero_data: true", dims="dims: [4, 2]") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value.dims: [4,2] do not fit: those of"
     " the input are [2], without that of the batch"),
    ("model_warmup { batch_size: 1 " + value("") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value: one of zero_data, random_data and"
     " input_data_file must be set"),
    ("model_warmup { batch_size: 1 " + value("input_data_file: 'short'") + "}",
     "m/config.pbtxt:2: model_warmup[0].inputs['x'].value.input_data_file: 'short': FP32 of"
     " shape [1,2] takes 8 bytes, the file has 3"),
    ("model_warmup { batch_size: 2 " + value("input_data_file: 'short'") + "}",
     "m/config.pbtxt:2: model_warmup[0].inputs['x'].value.input_data_file: 'short': FP32 of"
     " shape [1,2] takes 8 bytes (or 16 for 2 requests), the file has 3"),
    ("model_warmup { batch_size: 1 " + value("input_data_file: 'none'") + "}",
     "m/config.pbtxt:2: model_warmup[0].inputs['x'].value.input_data_file: 'none' cannot be"
     " read: No such file or directory"),
])  # fmt: skip
def test_errors_name_their_line(tmp_path: Path, config: str, told: str) -> None:
    write(tmp_path, "short", b"123")
    with pytest.raises(InvalidConfig) as caught:
        read(tmp_path, config)
    assert str(caught.value) == told


@pytest.mark.parametrize("name", ["../secret", "link", "linked/secret", "", ".", "a\\0b"])
def test_nothing_outside_of_the_directory_is_read(tmp_path: Path, name: str) -> None:
    root = tmp_path / "m"
    (root / "warmup").mkdir(parents=True)
    (root / "secret").write_bytes(bytes(8))
    (root / "warmup" / "link").symlink_to(root / "secret")
    (root / "warmup" / "linked").symlink_to(root)
    config = "model_warmup { batch_size: 1 " + value(f"input_data_file: '{name}'") + "}"
    with pytest.raises(InvalidConfig, match="cannot be read: ") as caught:
        read(root, config)
    assert str(tmp_path) not in str(caught.value)


def test_truncated_strings(tmp_path: Path) -> None:
    write(tmp_path, "texts", b"\x05\x00\x00\x00ab")
    told = value("input_data_file: 'texts'", "STRING", "dims: 1", "t")
    with pytest.raises(InvalidConfig, match="'texts': incomplete string data, expecting"):
        read(tmp_path, f"model_warmup {{ batch_size: 1 {told} }}", T)


@pytest.mark.parametrize(("text", "delay"), [
    ("", 1_500), ("dynamic_batching {}", 1_500),
    ('parameters { key: "overload_delay_ms" value { string_value: "0" } }', 0),
    ('parameters { key: "overload_delay_ms" value { string_value: "200" } }', 200),
    ("dynamic_batching { default_queue_policy {} }", 0),
    ("dynamic_batching { priority_queue_policy { key: 1 value {} } }", 0),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 1 }", 0),
    ("sequence_batching {}", 0),
    ('dynamic_batching { default_queue_policy {} } parameters { key: "overload_delay_ms"'
     ' value { string_value: "200" } }', 200),
])  # fmt: skip
def test_the_bound_on_the_delay_of_an_overloaded_queue(text: str, delay: int) -> None:
    bound = reading.scheduling_policy(config_of(text), 1_500).overload
    assert bound == (DelayBound(delay * 1_000_000) if delay else None)


@pytest.mark.parametrize("value", ["-1", "1.5", "soon", "99999999999"])
def test_an_invalid_bound_on_the_delay(value: str) -> None:
    text = f'parameters {{ key: "overload_delay_ms" value {{ string_value: "{value}" }} }}'
    with pytest.raises(InvalidOption, match="expected a whole number of milliseconds"):
        reading.scheduling_policy(config_of(text))
