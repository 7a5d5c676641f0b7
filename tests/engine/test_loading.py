"""Loading of models: results, errors and changes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidConfig, LoadFailed
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.ragged import RaggedForm
from headrace.core.tensors import Array, Tensor
from headrace.engine.loading import (
    LoadedVersion,
    Step,
    adjusted,
    load_instances,
    load_version,
    resize,
    step,
)
from headrace.engine.opening import LoadOptions, Opened, open_model
from headrace.placement.backend import Backend
from headrace.placement.loaded import LoadedModel
from headrace.placement.local.onnx import OnnxBackend, OnnxModel
from headrace.placement.worker.python_backend import PythonBackend
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from headrace.repository.layout import read_model_directory
from headrace.repository.model_files import Origin, fingerprint, origins
from headrace.repository.reading import WantedInstance
from headrace.scheduling.batch import Batch
from headrace.scheduling.policy import TimeoutAction
from tests.models import onnx_graphs
from tests.models.python_models import IDENTITY as IDENTITY_MODEL
from tests.models.python_models import execution, tensors, write_python_model
from tests.models.warmup_models import RECORDER, RECORDER_CONFIG, sample

OPTIONS = LoadOptions(cores=1)
IDENTITY = onnx_graphs.identity()


def opened(root: Path, config: str, model: bytes = IDENTITY) -> Opened:
    """A model `m` of this configuration, read."""
    directory = onnx_graphs.write_model(root, "m", model, config)
    return open_model(read_model_directory(directory), {"onnxruntime": OnnxBackend()}, OPTIONS)


def loaded(root: Path, config: str, model: bytes = IDENTITY) -> LoadedVersion:
    """A model `m` of this configuration, loaded."""
    return load_version(opened(root, config, model), 1, OPTIONS)


def opened_python(root: Path, options: LoadOptions = OPTIONS) -> Opened:
    """The existing Python model `m`, read."""
    return open_model(read_model_directory(root / "m"), {"python": PythonBackend()}, options)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            "optimization {\n graph { level: 77 } }",
            "m/config.pbtxt:2: optimization.graph.level: must be one of -1, 0, 1, 2, got 77",
        ),
        (
            'max_batch_size: 8\nparameters { key: "enable_mem_arena"\n value { } }',
            "m/config.pbtxt:2: parameters['enable_mem_arena']: expected 0 or 1, got ''",
        ),
        (
            "optimization { execution_accelerators {\n"
            ' cpu_execution_accelerator [ {\n name: "nonsense" } ] } }',
            "m/config.pbtxt:3: optimization.execution_accelerators.cpu_execution_accelerator[0]"
            ".name: execution provider nonsense is not in the installed ONNX Runtime",
        ),
        (
            "max_batch_size: 4\ninput {\n name: 'INPUT0'\n optional: true }",
            "m/config.pbtxt:4: input[0].optional: the model needs 'INPUT0'",
        ),
        (
            "input {\n name: 'INPUT0'\n data_type: 99 }",
            "m/config.pbtxt:3: input[0].data_type: must be one of TYPE_INVALID, TYPE_BOOL, ",
        ),
        (
            "dynamic_batching { default_queue_policy {\n timeout_action: 7 } }",
            "m/config.pbtxt:2: dynamic_batching.default_queue_policy.timeout_action:"
            " must be one of REJECT, DELAY, got 7",
        ),
        (
            "max_batch_size: 4\nsequence_batching { oldest { } }",
            "m/config.pbtxt:2: sequence_batching.oldest.max_candidate_sequences: must be at least"
            " 1, got 0",
        ),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, config: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match="^" + re.escape(told)):
        loaded(tmp_path, config)


def test_an_input_with_a_default_value_may_be_optional(tmp_path: Path) -> None:
    config = 'input [ { name: "INPUT0" }, { name: "SCALE" optional: true } ] max_batch_size: 0'
    version = loaded(tmp_path, config, onnx_graphs.with_default())
    assert [spec.optional for spec in version.signature.inputs] == [False, True]


def test_clients_see_another_signature_than_the_model_is_given(tmp_path: Path) -> None:
    """Requests of many batches are divided before the scheduler."""
    split = 'parameters { key: "split_requests" value { string_value: "on" } }'
    version = loaded(tmp_path, f"max_batch_size: 4 {split}")
    assert version.signature.parts > version.given.parts == 1
    assert version.signature.max_batch_size == version.given.max_batch_size == 4
    assert version.signature.outputs is version.given.outputs


class Unragged(OnnxBackend):
    """ONNX models whose requests of different shapes run apart."""

    ragged = None


def test_ragged_inputs_of_a_backend_without_them(tmp_path: Path) -> None:
    config = 'input {\n name: "INPUT0"\n allow_ragged_batch: true }\nmax_batch_size: 8'
    directory = onnx_graphs.write_model(tmp_path, "m", IDENTITY, config)
    backends = {"onnxruntime": Unragged()}
    model = open_model(read_model_directory(directory), backends, OPTIONS)
    assert model.warnings == (
        "m/config.pbtxt:3: input[0].allow_ragged_batch: has no effect for the backend"
        " 'onnxruntime': shapes run apart",
    )
    version = load_version(model, 1, OPTIONS)
    assert version.given.ragged is version.signature.ragged is None


class Totals(LoadedModel):
    """Each request's total, from all elements and where those of each request begin."""

    inputs = (TensorInfo("x", Datatype.FP32, (-1,)), TensorInfo("starts", Datatype.INT32, (-1,)))
    outputs = (TensorInfo("y", Datatype.FP32, (-1, 1)),)

    def infer(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Sequence[Array]:
        ends = zip(inputs["starts"], inputs["starts"][1:], strict=False)
        totals = [inputs["x"][start:end].sum() for start, end in ends]
        return [np.array(totals, np.float32).reshape(-1, 1)]


class TotalsBackend(Backend):
    """A backend of a package, whose models get ragged batches in one axis."""

    platform, default_filename, filenames = "totals", "model.total", ("model.total",)
    ragged = RaggedForm.FLAT

    def load(self, spec: LoadSpec) -> Totals:
        return Totals()


def test_any_backend_may_have_ragged_batches(tmp_path: Path) -> None:
    computed = "kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO data_type: TYPE_INT32"
    config = (
        'max_batch_size: 8\ninput { name: "x" data_type: TYPE_FP32 dims: -1'
        f' allow_ragged_batch: true }}\nbatch_input {{ {computed} target_name: "starts"'
        ' source_input: "x" }'
    )
    directory = onnx_graphs.write_model(tmp_path, "m", b"", config, filename="model.total")
    backends = {"totals": TotalsBackend()}
    model = open_model(read_model_directory(directory), backends, OPTIONS)
    assert model.warnings == ()
    version = load_version(model, 1, OPTIONS)
    [instance] = version.instances
    assert isinstance(instance.model, Totals)
    calls = [
        Call("m", "", "", {"x": Tensor("x", Datatype.FP32, np.full(shape, 2, np.float32))})
        for shape in ((1, 3), (1, 0), (1, 5))
    ]
    for call in calls:
        call.rows = version.signature.check(call)
    assert len({version.given.batch_key(call) for call in calls}) == 1
    outcome = instance.model.batch_function()(Batch(version.given, calls))
    assert outcome.error is None
    assert [array.tolist() for array in outcome.arrays] == [[[6], [0], [10]]]


def test_the_scheduling_policy_comes_with_the_version(tmp_path: Path) -> None:
    version = loaded(
        tmp_path, "dynamic_batching { default_queue_policy { timeout_action: DELAY } }"
    )
    assert version.scheduling.batch.max_rows == 64
    assert version.scheduling.queue.action is TimeoutAction.DELAY


def test_restrictions_of_a_decoupled_model_are_logged(tmp_path: Path) -> None:
    (warning,) = opened(tmp_path, "model_transaction_policy {\n decoupled: true }").warnings
    assert warning.startswith("m/config.pbtxt:2: model_transaction_policy.decoupled: requests are")
    assert "only taken over ModelStreamInfer" in warning
    assert opened(tmp_path, "model_transaction_policy { }").warnings == ()


def test_buckets_of_a_metric_without_buckets(tmp_path: Path) -> None:
    own = "model_metrics { metric_control {\n metric_identifier { family: 'x' }\n %s } }"
    (warning,) = opened(tmp_path, own % "histogram_options { buckets: [1, 2] }").warnings
    assert warning.startswith("m/config.pbtxt:2: model_metrics.metric_control[0].metric_identifier")
    assert "has no effect: only 'nv_inference_first_response_histogram_ms'" in warning
    with pytest.raises(InvalidConfig, match=r"buckets: must be numbers, each greater"):
        opened(tmp_path, own % "histogram_options { buckets: [2, 1] }")
    found = opened(tmp_path, own % "histogram_options { buckets: [ -1, 0.0, 1, 2.5 ] }")
    [control] = found.config.model_metrics.metric_control
    assert list(control.histogram_options.buckets) == [-1, 0, 1, 2.5]


def test_every_instance_is_warmed_up_also_an_added_one(tmp_path: Path) -> None:
    config = f"{RECORDER_CONFIG}{sample('s', 'zero_data: true')}instance_group {{ count: 2 }}"
    write_python_model(tmp_path, "m", RECORDER, config)
    model = opened_python(tmp_path)
    version = load_version(model, 1, OPTIONS)
    more = load_instances(model, 1, version.config, [WantedInstance("m_0_2", None)], False, OPTIONS)
    instances = [*version.instances, *more]
    for instance in instances:
        instance.model.close()
    lines = (tmp_path / "m" / "seen").read_text().splitlines()
    pids = [instance.model.process.pid for instance in instances]  # type: ignore[attr-defined]
    assert [json.loads(line) for line in lines] == [[pid, [[[0, 0]]]] for pid in pids]
    assert all(instance.memory > 1 << 20 for instance in instances)


SAMPLE_FILE = 'input_data_file: "rows"'


class Consumed(OnnxBackend):
    """ONNX models whose sample file is gone once two instances were loaded."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._loaded = file, 0

    def load(self, spec: LoadSpec) -> OnnxModel:
        self._loaded += 1
        if self._loaded == 3:
            self._file.unlink()
        return super().load(spec)


def test_samples_are_read_once_for_all_added_instances(tmp_path: Path) -> None:
    config = f"max_batch_size: 8 {sample('s', SAMPLE_FILE)}"
    directory = onnx_graphs.write_model(tmp_path, "m", IDENTITY, config)
    file = directory / "warmup" / "rows"
    file.parent.mkdir()
    file.write_bytes(bytes(8))
    backends = {"onnxruntime": Consumed(file)}
    model = open_model(read_model_directory(directory), backends, OPTIONS)
    complete = load_version(model, 1, OPTIONS).config
    more = [WantedInstance(f"m_0_{n}", None) for n in (1, 2)]
    assert len(load_instances(model, 1, complete, more, True, OPTIONS)) == 2
    assert not file.exists()


def test_a_failing_sample_leaves_nothing_behind(tmp_path: Path) -> None:
    bad = sample("bad", 'input_data_file: "rows"')
    write_python_model(tmp_path, "m", RECORDER, RECORDER_CONFIG + bad)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "rows").write_bytes(b"\0\0\x80\xbf" * 2)
    model = opened_python(tmp_path)
    children = set(psutil.Process().children())  # those of earlier tests may end
    with pytest.raises(LoadFailed, match=r"failed to run warmup sample 'bad': .*below zero"):
        load_version(model, 1, OPTIONS)
    assert not set(psutil.Process().children()) - children


LABELS = 'output { name: "OUTPUT0" label_filename: "labels.txt" }'


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ("", ()),
        ("\n", ("",)),
        ("zero\none", ("zero", "one")),
        ("zero\r\none\r\n", ("zero", "one")),
        ("\ufeffzero\n\nthree\n", ("zero", "", "three")),
        ("a\x0bb\nc\x85d\ne\u2028f\ng\x1ch\ni\rj\n", ("a\x0bb", "c\x85d", "e\u2028f", "g\x1ch",
                                                       "i\rj")),
    ],
)  # fmt: skip
def test_a_label_is_a_line(tmp_path: Path, content: str, labels: tuple[str, ...]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "labels.txt").write_bytes(content.encode())
    assert loaded(tmp_path, LABELS).labels == {"OUTPUT0": labels}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("labels.txt", "No such file or directory"),
        ("../labels.txt", "it lies outside of the model's directory"),
        ("1", "Is a directory"),
    ],
)
def test_labels_that_cannot_be_read(tmp_path: Path, name: str, reason: str) -> None:
    told = f"m/config.pbtxt:1: output[0].label_filename: '{name}' cannot be read: {reason}"
    with pytest.raises(InvalidConfig) as caught:
        loaded(tmp_path, LABELS.replace("labels.txt", name))
    assert caught.value.public == str(caught.value) == told


def test_a_file_that_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"model\.onnx is not a valid ONNX model"):
        loaded(tmp_path, "", b"nothing")


def test_a_huge_max_batch_size_is_not_allocated(tmp_path: Path) -> None:
    version = loaded(tmp_path, f"max_batch_size: {2**31 - 1}")
    assert version.signature.max_batch_size == 2**31 - 1
    (instance,) = version.instances
    assert instance.name == "m_0"


@pytest.mark.parametrize(
    ("kind", "allowed", "told"),
    [
        ("inline", False, "'inline' runs the model's code in the server's own process, which has"),
        ("thread", False, "has to be allowed by --allow-in-process-python; without this parameter"),
        ("inline", True, ""), ("thread", True, ""), ("process", False, ""), ("auto", False, ""),
    ],
)  # fmt: skip
def test_python_models_run_in_process_only_if_allowed(
    tmp_path: Path, kind: str, allowed: bool, told: str
) -> None:
    write_python_model(tmp_path, "m", IDENTITY_MODEL, execution(kind))
    options = LoadOptions(cores=1, in_process_python=allowed)
    if not told:
        assert opened_python(tmp_path, options).warnings == ()
        return
    with pytest.raises(InvalidConfig, match=rf"m/config\.pbtxt:2: parameters.*{told}"):
        opened_python(tmp_path, options)


def test_an_onnx_model_cannot_have_a_process_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="'process' is for Python models"):
        opened(tmp_path, execution("process"))


def test_in_process_python_models_are_started(tmp_path: Path) -> None:
    config = execution("thread") + "instance_group { count: 2 }\n"
    config += tensors("input", ("INPUT0", "FP32", "1")) + tensors(
        "output", ("OUTPUT0", "FP32", "1")
    )
    write_python_model(tmp_path, "m", IDENTITY_MODEL, config)
    options = LoadOptions(cores=1, in_process_python=True)
    model = load_version(opened_python(tmp_path, options), 1, options)
    assert [(item.name, str(item.kind)) for item in model.instances] == [
        ("m_0_0", "thread"), ("m_0_1", "thread")
    ]  # fmt: skip
    for item in model.instances:
        item.model.close()


FUNCTION = "from headrace import model\n@model\ndef area(width: float) -> float: ...\n"


@pytest.mark.parametrize("kind", ["process", "inline"])
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            'input {\n name: "width"\n data_type: TYPE_FP32\n dims: [ 1 ]\n}\n',
            "m/config.pbtxt:5: input[0].data_type: 'width' is TYPE_FP32 here, and TYPE_FP64 in the"
            " model\nm/config.pbtxt:6: input[0].dims: 'width' has [1] here, and [] in the model",
        ),
        (
            "max_batch_size: 128",
            "m/config.pbtxt:3: max_batch_size: it is 128 here, and 64 in the model",
        ),
    ],
)
def test_contradictions_of_a_function_name_file_line_and_field(
    tmp_path: Path, kind: str, config: str, told: str
) -> None:
    write_python_model(tmp_path, "m", FUNCTION, execution(kind).strip() + "\n" + config)
    options = LoadOptions(cores=1, in_process_python=True)
    model = opened_python(tmp_path, options)
    with pytest.raises(InvalidConfig) as caught:
        load_version(model, 1, options)
    assert str(caught.value) == told


def test_contradictions_of_a_completion_use_tritons_words(tmp_path: Path) -> None:
    source = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
                return config
    """
    write_python_model(tmp_path, "m", source, 'input {\n name: "X"\n dims: [ 2 ]\n}')
    model = opened_python(tmp_path)
    with pytest.raises(InvalidConfig) as caught:
        load_version(model, 1, OPTIONS)
    assert str(caught.value) == (
        "m/config.pbtxt:4: input[0].dims: unable to load model, configuration expects dims [2]"
        " for input 'X', model provides [1]"
    )


def test_a_misspelt_parameter_is_reported(tmp_path: Path) -> None:
    names = ["execution_limit_sec", "threshold", "Max_RSS", "functions", "nice"]
    values = [f'parameters {{ key: "{name}" value {{ string_value: "1" }} }}' for name in names]
    write_python_model(tmp_path, "m", IDENTITY_MODEL, "\n".join(values))
    model = opened_python(tmp_path)
    wanted = [("Max_RSS", 4, "max_rss"), ("execution_limit_sec", 2, "execution_limit_secs"),
              ("functions", 5, "function")]  # fmt: skip
    assert model.warnings == tuple(
        f"m/config.pbtxt:{line}: parameters['{name}']: only the model itself may read this; did"
        f" you mean '{known}'?"
        for name, line, known in wanted
    )


def test_worker_settings_of_an_in_process_model_name_their_line(tmp_path: Path) -> None:
    config = execution("inline") + 'parameters { key: "python" value { string_value: "/x" } }\n'
    write_python_model(tmp_path, "m", IDENTITY_MODEL, config)
    options = LoadOptions(cores=1, in_process_python=True)
    model = opened_python(tmp_path, options)
    with pytest.raises(InvalidConfig, match=r"config\.pbtxt:3: .*'python'.* for worker processes"):
        load_version(model, 1, options)


CONFIG = 'name: "m" backend: "x" max_batch_size: 4 '


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with two versions."""
    for name in ("m/1/model.x", "m/2/model.x"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    return tmp_path / "m"


def origin(model: Path, text: str = CONFIG, version: int = 1) -> Origin:
    file = parse_config(text, "m/config.pbtxt")
    source = read_model_directory(model)
    return origins(fingerprint(source), file, file.config, source.versions, {})[version]


def test_unchanged_versions_are_kept_and_missing_ones_loaded(model: Path) -> None:
    assert step(origin(model), origin(model)) is Step.KEEP
    (model / "3").mkdir()
    (model / "2/model.x").write_text("another")
    assert step(origin(model), origin(model, CONFIG + "version_policy { all {} }")) is Step.KEEP
    other = origin(model, "# said\n" + CONFIG)
    assert step(origin(model), other) is Step.KEEP
    assert step(None, origin(model)) is Step.LOAD


@pytest.mark.parametrize("name", ["1/model.x", "1/more", "labels.txt"])
def test_changed_files_are_loaded(model: Path, name: str) -> None:
    before = origin(model)
    (model / name).write_text("another")
    assert step(before, origin(model)) is Step.LOAD


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "instance_group { count: 2 kind: KIND_CPU }", Step.RESIZE),
        ("", "instance_group { count: 1 kind: KIND_CPU }", Step.RESIZE),  # which has another name
        ("", 'instance_group { name: "m" count: 1 }', Step.KEEP),
        ("instance_group { count: 2 }", "instance_group { count: 2 kind: KIND_AUTO }", Step.KEEP),
        ("", "instance_group { kind: KIND_GPU gpus: 0 }", Step.LOAD),
        ("instance_group { kind: KIND_GPU }", "", Step.LOAD),
        ("", "dynamic_batching { max_queue_delay_microseconds: 1 }", Step.LOAD),
        ("", 'parameters { key: "a" value { string_value: "b" } }', Step.LOAD),
        ("", 'metric_tags { key: "a" value: "b" }', Step.LOAD),
    ],
)
def test_changed_configurations(model: Path, before: str, after: str, expected: Step) -> None:
    assert step(origin(model, CONFIG + before), origin(model, CONFIG + after)) is expected


def test_an_explicit_default_may_differ_from_an_absent_field(model: Path) -> None:
    """Without it, the largest batch is guessed."""
    before = origin(model, 'name: "m" backend: "x"')
    after = origin(model, 'name: "m" backend: "x" max_batch_size: 0')
    assert step(before, after) is Step.LOAD
    # Another path is another origin.
    before = origin(model)
    moved = replace(before, content=replace(before.content, directory=Path("elsewhere")))
    assert step(before, moved) is Step.LOAD


@pytest.mark.parametrize(
    ("there", "wanted", "removed", "missing"),
    [
        ("a", "a", "", ""),
        ("a", "abc", "", "bc"),
        ("abc", "a", "bc", ""),
        ("abc", "b", "ac", ""),
        ("a", "b", "", ""),  # no difference
        ("ab", "bcd", "", "d"),
        ("abc", "de", "c", ""),
        ("ab", "ba", "", ""),
    ],
)
def test_instances_are_added_and_removed(
    there: str, wanted: str, removed: str, missing: str
) -> None:
    found = resize(list(there), [WantedInstance(name, None) for name in wanted])
    assert found == (list(removed), [WantedInstance(name, None) for name in missing])


def test_only_in_place_changes_of_the_configuration_are_applied() -> None:
    complete = ModelConfig(name="m", max_batch_size=8)
    complete.instance_group.add(name="m", count=1)
    wanted = ModelConfig(name="m")
    wanted.instance_group.add(name="m", count=3)
    wanted.version_policy.all.SetInParent()
    result = adjusted(complete, wanted)
    assert result.max_batch_size == 8
    assert [group.count for group in result.instance_group] == [3]
    assert result.version_policy.HasField("all")
    assert [group.count for group in complete.instance_group] == [1]
