"""Completion of a configuration from files, the loaded model and GPUs."""

from collections.abc import Sequence

import pytest
from google.protobuf import text_format

from headrace.core.datatypes import CONFIG_NUMBERS, Datatype
from headrace.core.errors import InvalidConfig
from headrace.core.model_spec import TensorInfo
from headrace.placement.backend import Backend
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.completion import (
    batches,
    complete_backend,
    complete_tensors,
    device_problems,
    divides,
    may_use_gpus,
    normalise,
    on_devices,
)
from headrace.repository.config import ConfigFile, parse_config, read_config
from tests.repository.files import config_of


def names(platform: str, *filenames: str, suffixes: tuple[str, ...]) -> Backend:
    backend = Backend()
    backend.platform, backend.default_filename = platform, filenames[0]
    backend.filenames, backend.suffixes = filenames, suffixes
    return backend


BACKENDS: dict[str, Backend] = {
    "onnxruntime": names("onnxruntime_onnx", "model.onnx", suffixes=(".onnx",)),
    "python": names("", "model.py", suffixes=(".py",)),
}
FP32, INT64, BYTES = Datatype.FP32, Datatype.INT64, Datatype.BYTES


def file_of(text: str) -> ConfigFile:
    return parse_config(text, "m/config.pbtxt")


# --- backend and file name


@pytest.mark.parametrize(("text", "model", "filenames", "backend", "filename"), [
    ("", "m", ["model.onnx"], "onnxruntime", "model.onnx"),
    ("", "m", ["model.py"], "python", "model.py"),
    ("", "m", ["model.onnx", "model.py"], "onnxruntime", "model.onnx"),
    ("", "m", ["resnet.onnx", "labels.txt"], "onnxruntime", "resnet.onnx"),
    ("", "m.onnx", [], "onnxruntime", "model.onnx"), ("", "m.python", [], "python", "model.py"),
    ("", "m.onnxruntime", [], "onnxruntime", "model.onnx"),
    ('backend: "python"', "m", ["model.onnx"], "python", "model.py"),
    ('platform: "onnxruntime_onnx"', "m", ["model.py"], "onnxruntime", "model.onnx"),
    ('default_model_filename: "x.onnx"', "m", ["a.py"], "onnxruntime", "x.onnx"),
    ('backend: "onnxruntime" default_model_filename: "a.onnx"', "m", ["model.onnx"], "onnxruntime",
     "a.onnx"),
    ('backend: "onnxruntime"', "m", ["a.onnx", "b.onnx"], "onnxruntime", "model.onnx"),
])  # fmt: skip
def test_backend_and_file_name(
    text: str, model: str, filenames: list[str], backend: str, filename: str
) -> None:
    config = complete_backend(file_of(text), model, filenames, BACKENDS)
    assert (config.backend, config.default_model_filename) == (backend, filename)
    assert config.name == model


MANY = BACKENDS | {
    "many": names("", "model.new", "model.old", "inner/MODEL", suffixes=(".new",)),
}


@pytest.mark.parametrize(("text", "filenames", "backend", "filename"), [
    ("", ["model.old"], "many", "model.old"), ("", ["model.old", "model.new"], "many", "model.new"),
    ("", ["inner", "notes.txt"], "many", "inner/MODEL"),
    ("", ["mine.new", "notes.txt"], "many", "mine.new"),
    # An ambiguous suffix selects a backend only without competition.
    ("", ["mine.old"], "many", "mine.old"),
    ('backend: "many"', ["mine.old", "notes.txt"], "many", "model.new"),
    ('default_model_filename: "mine.old"', ["mine.old", "notes.txt"], "many", "mine.old"),
    # A known name comes before any suffix.
    ("", ["model.old", "prepare.py"], "many", "model.old"),
    ("", ["model.old", "model.py"], "python", "model.py"),
])  # fmt: skip
def test_a_backend_with_several_file_names(
    text: str, filenames: list[str], backend: str, filename: str
) -> None:
    config = complete_backend(file_of(text), "m", filenames, MANY)
    assert (config.backend, config.default_model_filename) == (backend, filename)


def test_a_shared_suffix_selects_no_backend() -> None:
    with pytest.raises(InvalidConfig, match="no file tells"):
        complete_backend(file_of(""), "m", ["mine.old", "notes.txt"], MANY)


def test_the_platform_is_filled_in_from_the_backend() -> None:
    config = complete_backend(file_of(""), "m", ["model.onnx"], BACKENDS)
    assert config.platform == "onnxruntime_onnx"
    own = complete_backend(file_of('backend: "python" platform: "mine"'), "m", [], BACKENDS)
    assert own.platform == "mine"


def test_completion_does_not_modify_its_input() -> None:
    file = file_of("")
    complete_backend(file, "m", ["model.onnx"], BACKENDS)
    complete_tensors(file, file.config, [TensorInfo("x", FP32, (-1,))], [], 4)
    normalise(file.config)
    assert file.config == ModelConfig()


@pytest.mark.parametrize(("text", "says"), [
    ("", "m/config.pbtxt: no backend or platform is named, and no file tells: expected"
     " model.onnx or model.py, found model.plan; backends of this server: onnxruntime, python"),
    ('name: "m"\nbackend: "tensorrt"',
     "m/config.pbtxt:2: backend: 'tensorrt' is not a backend of this server,"
     " which has the backends: onnxruntime, python"),
    ('\nplatform: "tensorflow_graphdef"',
     "m/config.pbtxt:2: platform: 'tensorflow_graphdef' is not a platform of this server,"
     " which has the backends: onnxruntime, python"),
])  # fmt: skip
def test_an_unknown_backend_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        complete_backend(file_of(text), "m", ["model.plan"], BACKENDS)
    assert str(caught.value) == says


# --- tensors


def completed(
    text: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], default: int = 4
) -> ModelConfig:
    file = file_of(text)
    return complete_tensors(file, file.config, inputs, outputs, default)


X = TensorInfo("x", FP32, (-1, 3))
Y = TensorInfo("y", INT64, (-1,))


def test_a_bare_model_with_variable_rows_batches() -> None:
    assert completed("", [X], [Y]) == config_of("""
        max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: 3 }
        output { name: "y" data_type: TYPE_INT64 dims: 1 reshape { } }
    """)  # fmt: skip
    config = completed('backend: "triton"', [X], [Y])  # which has the clients' shape
    assert (config.max_batch_size, list(config.output[0].dims)) == (4, [])
    assert not config.output[0].HasField("reshape")


def test_a_bare_model_with_a_fixed_first_dimension_does_not_batch() -> None:
    for output in (TensorInfo("y", INT64, (2, 3)), TensorInfo("y", INT64, ())):
        config = completed("", [X], [output])
        assert (config.max_batch_size, list(config.input[0].dims)) == (0, [-1, 3])
        assert list(config.output[0].dims) == list(output.shape)
        assert not config.output[0].HasField("reshape")


@pytest.mark.parametrize(("text", "default", "max_batch_size"), [
    ("", 4, 4), ("", 0, 0), ("max_batch_size: 0", 4, 0),  # written out, so it stays
    ("max_batch_size: 16", 4, 16),
    ('input { name: "x" dims: [ -1, 3 ] }', 4, 0),  # the rows are spelled out
    ('input { name: "x" dims: 3 }', 4, 4), ('input { name: "x" }', 4, 4),
    ('output { name: "y" dims: 1 reshape { shape: [ ] } }', 4, 4),
])  # fmt: skip
def test_the_largest_batch(text: str, default: int, max_batch_size: int) -> None:
    assert completed(text, [X], [Y], default).max_batch_size == max_batch_size


def test_declared_fields_are_kept_and_completed() -> None:
    text = 'input { name: "x" dims: 3 } output { name: "y" data_type: TYPE_STRING }'
    config = completed(text, [X, TensorInfo("x2", FP32, (-1,))], [Y, TensorInfo("z", FP32, (-1,))])
    assert [(t.name, t.data_type) for t in config.input] == [("x", CONFIG_NUMBERS[FP32])]
    assert [(t.name, t.data_type) for t in config.output] == [("y", CONFIG_NUMBERS[BYTES])]
    assert list(config.output[0].dims) == [1]


def test_mismatched_tensors_are_not_completed() -> None:
    config = completed('input { name: "other" }', [X], [Y])  # the model does not have it
    assert not config.input[0].data_type
    assert not config.input[0].dims
    sequence = TensorInfo("s", None, (), "seq(tensor(float))")  # the protocol does not have it
    assert [t.name for t in completed("", [X], [sequence, Y]).output] == ["y"]


def test_an_input_with_a_default_value_is_only_offered_if_declared() -> None:
    weights = TensorInfo("w", FP32, (64, 3), optional=True)
    config = completed("", [X, weights], [Y])
    assert (config.max_batch_size, [t.name for t in config.input]) == (4, ["x"])
    declared = completed('input { name: "w" optional: true }', [X, weights], [Y])
    assert declared.input[0].data_type == CONFIG_NUMBERS[FP32]


def test_a_model_without_a_file_is_completed_too() -> None:
    config = complete_tensors(read_config(None, "m"), ModelConfig(name="m"), [X], [Y], 4)
    assert (config.max_batch_size, config.input[0].name) == (4, "x")


# --- defaults


def test_defaults() -> None:
    defaults = """name: "m" version_policy { latest { num_versions: 1 } }
        instance_group { name: "m" kind: KIND_CPU count: 1 } """
    assert normalise(config_of('name: "m"')) == config_of(defaults)
    batching = "max_batch_size: 8 dynamic_batching { preferred_batch_size: 8 }"
    assert normalise(config_of('name: "m" max_batch_size: 8')) == config_of(defaults + batching)


def test_explicit_settings_are_kept() -> None:
    config = config_of("""
        name: "m" max_batch_size: 8 version_policy { all { } }
        dynamic_batching { preferred_batch_size: 4 }
        instance_group { name: "own" kind: KIND_MODEL count: 3 }
    """)  # fmt: skip
    assert normalise(config) == config
    assert normalise(normalise(config)) == normalise(config)


def test_instance_groups_get_names_counts_and_kinds() -> None:
    config = normalise(
        config_of('name: "m" instance_group [ { gpus: 1 }, { count: 2 }, { kind: KIND_GPU } ]')
    )
    groups = [(g.name, g.count, g.Kind.Name(g.kind)) for g in config.instance_group]
    assert groups == [("m_0", 1, "KIND_GPU"), ("m_1", 2, "KIND_CPU"), ("m_2", 1, "KIND_GPU")]


@pytest.mark.parametrize(("text", "answer"), [
    ("", False), ("max_batch_size: 1", True), ("max_batch_size: 4 dynamic_batching { }", True),
    ("max_batch_size: 4 sequence_batching { }", False),
    ("max_batch_size: 4 ensemble_scheduling { }", False),
    ('max_batch_size: 4 parameters { key: "batching" value { string_value: "on" } }', True),
    ('max_batch_size: 4 parameters { key: "batching" value { string_value: "off" } }', False),
    ("dynamic_batching { }", False),
])  # fmt: skip
def test_models_that_batch(text: str, answer: bool) -> None:
    config = config_of(text)
    assert batches(config) is answer
    assert len(config.parameters) == ("parameters" in text)  # asking adds nothing


@pytest.mark.parametrize(("text", "of_this_server", "of_others"), [
    ("max_batch_size: 4", True, False), ("", False, False),
    ("max_batch_size: 4 dynamic_batching { preserve_ordering: true }", False, False),
    ("max_batch_size: 4 sequence_batching { }", False, False),
    ('max_batch_size: 4 parameters { key: "split_requests" value { string_value: "on" } }',
     True, True),
    ('max_batch_size: 4 parameters { key: "split_requests" value { string_value: "off" } }',
     False, False),
])  # fmt: skip
def test_models_with_divided_requests(text: str, of_this_server: bool, of_others: bool) -> None:
    config = config_of(text)
    assert divides(config, completed=True) is of_this_server
    assert divides(config, completed=False) is of_others
    assert len(config.parameters) == ("parameters" in text)


# --- instances on GPUs


# Whether they are preferred, and why they cannot be used.
NO, BY_DEFAULT, OBSTACLE = (False, ""), (True, ""), (True, "it has no CUDA")
GPU, CPU, MODEL = "kind: KIND_GPU", "kind: KIND_CPU", "kind: KIND_MODEL"


def grouped(groups: str) -> ModelConfig:
    return text_format.Parse(f'name: "m" {groups}', ModelConfig())


def described(config: ModelConfig) -> list[str]:
    return [
        f"{group.Kind.Name(group.kind)} {group.count} {list(group.gpus)}"
        for group in config.instance_group
    ]


@pytest.mark.parametrize(("groups", "count", "use", "placed"), [
    # A model that says nothing.
    ("", 0, BY_DEFAULT, []), ("", 2, NO, []), ("", 2, OBSTACLE, []),
    ("", 2, BY_DEFAULT, ["KIND_GPU 1 [0, 1]"]),
    # A group that leaves it to the server.
    ("instance_group { count: 3 }", 0, BY_DEFAULT, ["KIND_CPU 3 []"]),
    ("instance_group { count: 3 }", 2, NO, ["KIND_CPU 3 []"]),
    ("instance_group { count: 3 }", 2, OBSTACLE, ["KIND_CPU 3 []"]),
    ("instance_group { count: 3 }", 2, BY_DEFAULT, ["KIND_GPU 3 [0, 1]"]),
    # A group that also lists GPUs: all of them have to exist.
    ("instance_group { gpus: 1 }", 2, BY_DEFAULT, ["KIND_GPU 0 [1]"]),
    ("instance_group { gpus: 1 }", 2, NO, ["KIND_GPU 0 [1]"]),
    ("instance_group { gpus: 1 }", 2, OBSTACLE, ["KIND_CPU 0 []"]),
    ("instance_group { gpus: [ 1, 2 ] }", 2, BY_DEFAULT, ["KIND_CPU 0 []"]),
    ("instance_group { gpus: -1 }", 2, BY_DEFAULT, ["KIND_CPU 0 []"]),
    ("instance_group { gpus: 0 }", 0, NO, ["KIND_CPU 0 []"]),
    # A group on GPUs, and the others.
    (f"instance_group {{ {GPU} }}", 3, NO, ["KIND_GPU 0 [0, 1, 2]"]),
    (f"instance_group {{ {GPU} gpus: [ 2, 0 ] }}", 3, NO, ["KIND_GPU 0 [2, 0]"]),
    (f"instance_group {{ {GPU} }}", 0, NO, ["KIND_GPU 0 []"]),
    (f"instance_group [ {{ {CPU} }}, {{ {MODEL} }} ]", 2, BY_DEFAULT, ["KIND_CPU 0 []",
     "KIND_MODEL 0 []"]),
])  # fmt: skip
def test_instance_placement(
    groups: str, count: int, use: tuple[bool, str], placed: list[str]
) -> None:
    config = grouped(groups)
    result = on_devices(config, count, *use)
    assert described(result) == placed
    assert config == grouped(groups)
    assert on_devices(result, count, *use) == result


@pytest.mark.parametrize(("groups", "preferred", "answer"), [
    ("", True, True), ("", False, False), ("instance_group { }", True, True),
    ("instance_group { }", False, False), ("instance_group { gpus: 0 }", False, True),
    (f"instance_group {{ {GPU} }}", False, True),
    (f"instance_group [ {{ {CPU} }}, {{ {MODEL} }} ]", True, False),
])  # fmt: skip
def test_gpus_are_counted_only_if_needed(groups: str, preferred: bool, answer: bool) -> None:
    assert may_use_gpus(grouped(groups), preferred) is answer


@pytest.mark.parametrize(("groups", "machine", "use", "says"), [
    (f"instance_group {{ {GPU} }}", (2, ""), NO, []),
    (f"instance_group {{ {CPU} }}", (0, "no driver"), OBSTACLE, []),
    (f"instance_group [ {{ {CPU} }}, {{ {GPU} }} ]", (0, "no driver"), NO,
     ["instance_group[1].kind: instance group m_1 of model m has kind KIND_GPU but no"
     " GPUs are available: no driver"]),
    (f'instance_group {{ name: "g" {GPU} gpus: 5 }}', (0, "no driver"), OBSTACLE,
     ["instance_group[0].kind: instance group g of model m has kind KIND_GPU but no GPUs"
     " are available: no driver; besides, it has no CUDA"]),
    (f"instance_group {{ {GPU} }}", (1, ""), OBSTACLE,
     ["instance_group[0].kind: instance group m_0 of model m has kind KIND_GPU, but it"
     " has no CUDA"]),
    (f"instance_group {{ {GPU} gpus: [ 0, 2, -1 ] }}", (2, ""), NO,
     ["instance_group[0].gpus: instance group m_0 of model m specifies invalid or"
     f" unsupported gpu id {gpu}. GPUs are: 0, 1" for gpu in (2, -1)]),
])  # fmt: skip
def test_problems(
    groups: str, machine: tuple[int, str], use: tuple[bool, str], says: list[str]
) -> None:
    config = on_devices(grouped(groups), machine[0], *use)
    found = [f"{p.path}: {p.text}" for p in device_problems(config, *machine, use[1])]
    assert found == says
