"""Configurations and files of load requests: allowed fields and paths."""

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidConfig, InvalidRequest, LoadFailed
from headrace.protocol.documents import to_json
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile, parse_config, parse_json_config
from headrace.repository.overrides import (
    MOST_FILES,
    Uploads,
    checked_paths,
    isolated_as,
    of_own_files,
    overridden,
)

BASE = parse_config(
    """
    name: "m" backend: "python" max_batch_size: 8
    input { name: "A" data_type: TYPE_FP32 dims: 1 }
    output { name: "B" data_type: TYPE_FP32 dims: 1 label_filename: "labels.txt" }
    parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env" } }
    parameters { key: "batching" value { string_value: "off" } }
    optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }
    """,
    "m/config.pbtxt",
)
WHOLE = normalise(BASE.config)


def over(document: dict[str, Any]) -> ConfigFile:
    return overridden(BASE, WHOLE, parse_json_config(json.dumps(document), "config of m"))


def test_scheduling_settings_may_be_overridden() -> None:
    file = over({
        "max_batch_size": 0, "instanceGroup": [{"count": 3}],
        "dynamic_batching": {"max_queue_delay_microseconds": "100"},
        "parameters": {"max_concurrency": {"string_value": "7"}},
        "optimization": {"graph": {"level": 1}},
    })  # fmt: skip
    config = file.config
    assert file.sets("max_batch_size")
    assert file.sets("instance_group")
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert config.instance_group[0].count == 3
    assert not config.input  # as in Triton, absent fields are dropped ...
    # ... except for fields that a request cannot set.
    assert {n: p.string_value for n, p in config.parameters.items()} == {
        "EXECUTION_ENV_PATH": "/opt/env",
        "max_concurrency": "7",
    }
    assert config.optimization.graph.level == 1
    assert len(config.optimization.execution_accelerators.cpu_execution_accelerator) == 1


def test_a_request_that_may_contain_code_keeps_the_isolation_of_the_repository() -> None:
    base = ModelConfig()
    base.parameters["worker_user"].string_value = "models"
    base.parameters["nice"].string_value = "5"
    found = isolated_as(base, parse_json_config('{"max_batch_size": 2}', "c")).config
    assert (found.max_batch_size, set(found.parameters)) == (2, {"worker_user"})
    assert found.parameters["worker_user"].string_value == "models"
    same = '{"parameters": {"worker_user": {"string_value": "models"}}}'
    assert set(isolated_as(base, parse_json_config(same, "c")).config.parameters) == {"worker_user"}
    for name in ("worker_user", "worker_sandbox"):
        text = f'{{"parameters": {{"{name}": {{"string_value": "other"}}}}}}'
        with pytest.raises(InvalidConfig, match="cannot change how a model is isolated"):
            isolated_as(base, parse_json_config(text, "c"))
        with pytest.raises(InvalidConfig, match=rf"parameters\['{name}'\]"):
            isolated_as(ModelConfig(), parse_json_config(text, "c"))


def test_gpu_settings_may_be_overridden() -> None:
    limit = {"gpu_mem_limit": {"string_value": "1073741824"}}
    config = over({"instance_group": [{"kind": "KIND_GPU"}], "parameters": limit}).config
    assert config.parameters["gpu_mem_limit"].string_value == "1073741824"


def test_the_served_configuration_may_be_sent_back() -> None:
    document = to_json(WHOLE) | {"max_batch_size": 4}
    assert over(document).config.max_batch_size == 4
    assert dict(over(document).config.parameters) == dict(WHOLE.parameters)


@pytest.mark.parametrize(("document", "field"), [
    ({"backend": "onnxruntime"}, "backend"), ({"platform": "onnxruntime_onnx"}, "platform"),
    ({"default_model_filename": "evil.py"}, "default_model_filename"),
    ({"cc_model_filenames": {"7.5": "x"}}, "cc_model_filenames"),
    ({"metric_tags": {"a": "b"}}, "metric_tags"),
    ({"model_warmup": [{"name": "w"}]}, "model_warmup"),
    ({"model_operations": {"op_library_filename": ["evil.so"]}}, "model_operations"),
    ({"model_repository_agents": {"agents": [{"name": "a"}]}}, "model_repository_agents"),
    ({"parameters": {"python": {"string_value": "/bin/sh"}}}, "parameters['python']"),
    ({"parameters": {"own": {"string_value": "x"}}}, "parameters['own']"),
    ({"parameters": {"trust_model_code": {}}}, "parameters['trust_model_code']"),
    ({"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp"}}},
     "parameters['EXECUTION_ENV_PATH']"),
    ({"optimization": {"execution_accelerators": {}}}, "optimization.execution_accelerators"),
    ({"output": [{"name": "B", "label_filename": "1/model.py"}]}, "output[0].label_filename"),
])  # fmt: skip
def test_settings_of_code_and_files_cannot_be_overridden(
    document: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        over(document)
    assert f"config of m: {field}: a request cannot change this" in str(caught.value)
    assert "--load-overrides=code" in str(caught.value)


def test_the_number_of_instances_is_bounded() -> None:
    many: list[dict[str, object]] = [{}] * 65
    for groups in ([{"count": 65}], [{"count": 9, "gpus": list(range(8))}], many):
        with pytest.raises(InvalidConfig, match="at most 64 instances"):
            over({"instance_group": groups})


@pytest.mark.parametrize(("threads", "instances", "says"), [
    ({"intra": "64"}, 1, ""), ({"intra": "16", "inter": "16"}, 2, ""), ({"intra": "x"}, 2, ""),
    ({"intra": "1500"}, 3, "may have 64 threads, got 4500"),
    ({"intra": "16", "inter": "17"}, 2, "may have 64 threads, got 66"),
    ({"inter": "65"}, 1, r"parameters\['inter_op_thread_count'\]: .* got 65; --load-overrides="),
    ({"intra": "9" * 5000}, 1, ""),  # no number of threads, as loading it says
])  # fmt: skip
def test_the_number_of_threads_is_bounded(
    threads: dict[str, str], instances: int, says: str
) -> None:
    parameters = {f"{n}_op_thread_count": {"string_value": text} for n, text in threads.items()}
    document = {"instance_group": [{"count": instances}], "parameters": parameters}
    with pytest.raises(InvalidConfig, match=says) if says else nullcontext():
        over(document)
    with pytest.raises(InvalidConfig, match=says) if says else nullcontext():
        of_own_files(parse_json_config(json.dumps(document), "c"))


def test_threads_of_the_repository_may_be_sent_back() -> None:
    base = parse_config(
        'name: "m" parameters { key: "intra_op_thread_count" value { string_value: "96" } }', "m"
    )
    whole = normalise(base.config)
    same = parse_json_config(json.dumps(to_json(whole)), "c")
    assert overridden(base, whole, same).config.parameters == whole.parameters
    same.config.parameters["intra_op_thread_count"].string_value = "97"
    with pytest.raises(InvalidConfig, match="got 97"):
        overridden(base, whole, same)


def test_files_of_a_request_are_validated() -> None:
    text = '{"backend": "onnxruntime", "default_model_filename": "m.onnx", "max_batch_size": 2}'
    assert of_own_files(parse_json_config(text, "c")).config.max_batch_size == 2
    text = '{"parameters": {"session.use_env_allocators": {"string_value": "1"}}}'
    with pytest.raises(InvalidConfig, match=r"parameters\['session.use_env_allocators'\]"):
        of_own_files(parse_json_config(text, "c"))


@pytest.mark.parametrize(("text", "says"), [
    ("", "is not JSON"), ("max_batch_size: 1", "is not JSON"), ("[]", "must be a JSON object"),
    ("null", "must be a JSON object"), ('{"max_batch_sise": 1}', "did you mean 'max_batch_size'"),
    ('{"max_batch_size": "many"}', "max_batch_size"),
    ('{"max_batch_size": 99999999999}', "max_batch_size"),
    ('{"input": [{"data_type": "TYPE_FP99"}]}', "TYPE_FP99"), ('{"input": {}}', "input"),
    ('{"parameters": []}', "parameters"), ('{"name": "\\ud800"}', "is not JSON"),
    ('{"a":' * 2_000, "is not JSON"),
    (f'{{"name": "{"x" * (1 << 20)}"}}', "at most 1048576 are taken"),
])  # fmt: skip
def test_texts_that_are_not_a_configuration(text: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_json_config(text, "config of m")
    message = str(caught.value)
    assert message.startswith("config of m: ")
    assert says in message
    assert len(message.splitlines()) == 1


FIELDS = st.sampled_from([f.name for f in ModelConfig.DESCRIPTOR.fields] + ["nonsense"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=5), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(FIELDS, JSON, max_size=3) | JSON)
def test_any_json_is_a_configuration_or_refused(document: object) -> None:
    file = parsed(json.dumps(document))
    if file is not None:
        assert file.config.backend == "python"
        assert file.config.parameters["EXECUTION_ENV_PATH"].string_value == "/opt/env"


@given(st.text())
def test_any_text(text: str) -> None:
    parsed(text)


def parsed(text: str) -> ConfigFile | None:
    """The parsed text; None if it is refused."""
    problem = ""
    try:
        return overridden(BASE, WHOLE, parse_json_config(text, "c"))
    except InvalidConfig as error:
        problem = str(error)
    assert problem.startswith("c: ")
    return None


# --- files of requests


PART = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["", ".", "..", "1", "model.onnx", "~", "a" * 256, "\0", "\\", "$HOME", "\ud800"]
)
PATH = st.lists(PART, max_size=5).map("/".join) | st.text(max_size=20)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread changes."""
    deadline = monotonic() + 30
    while not condition():
        assert monotonic() < deadline


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())


def test_files_have_their_own_directory_while_in_use(temporary: Path) -> None:
    uploads = Uploads(10)
    files = checked_paths({"1/model.onnx": b"abc", "labels.txt": memoryview(b"de"), "1/w/x": b""})
    first, second = uploads.put("m", files), uploads.put("m", files)
    assert (uploads.names(), uploads.token("m"), uploads.token("n")) == ({"m"}, second, 0)
    one, two = uploads.materialise("m", first), uploads.materialise("m", second)
    assert uploads.materialise("m", first) is one
    assert one.path != two.path
    for path in (one.path, one.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    found = [p for p in one.path.rglob("*") if p.is_file()]
    assert {str(p.relative_to(one.path)): p.read_bytes() for p in found} == {
        "1/model.onnx": b"abc", "labels.txt": b"de", "1/w/x": b"",
    }  # fmt: skip
    with pytest.raises(LoadFailed, match=r"5 bytes of files are too many .* 10 are kept at most"):
        uploads.put("m", files)
    path = one.path
    del one
    until(lambda: not path.exists())
    with pytest.raises(LoadFailed, match="are no longer kept"):
        uploads.materialise("m", first)
    uploads.put("m", files)
    assert two.path.exists()
    uploads.close()
    uploads.close()


def test_a_group_may_read_uploads(temporary: Path) -> None:
    uploads = Uploads(10, os.getegid())
    token = uploads.put("m", checked_paths({"1/model.onnx": b"abc"}))
    lease = uploads.materialise("m", token)
    path = lease.path
    paths = (path.parent, path, path / "1", path / "1" / "model.onnx")
    modes = [stat.S_IMODE(each.stat().st_mode) for each in paths]
    assert modes == [0o710, 0o750, 0o750, 0o640]
    uploads.close()


def test_failed_writes_leave_nothing_behind(temporary: Path) -> None:
    uploads = Uploads(10)
    with pytest.raises(LoadFailed, match="its files cannot be kept: "):
        uploads.put("m", {("a" * 300,): b"abc"})
    (root,) = temporary.iterdir()
    until(lambda: not list(root.iterdir()))
    uploads.put("m", {("a",): b"0123456789"})  # the counted version no longer exists
    uploads.close()


def test_leftovers_of_a_killed_process_are_removed(temporary: Path) -> None:
    for name in ("headrace-models-dead", "headrace-models-alive", "headrace-models-link"):
        if name.endswith("link"):
            (temporary / name).symlink_to(temporary)
        else:
            (temporary / name / "1").mkdir(parents=True)
    alive = os.open(temporary / "headrace-models-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    uploads = Uploads(10)
    uploads.put("m", {("a",): b""})
    uploads.close()
    os.close(alive)
    left = {p.name for p in temporary.iterdir()}
    assert left == {"headrace-models-alive", "headrace-models-link"}
    (temporary / "headrace-models-link").unlink()
    uploads.put("m", {("a",): b""})
    uploads.close()


@pytest.mark.parametrize(("path", "problem"), [
    ("", "must consist of names"), ("/", "must consist of names"), ("/../x", "must consist"),
    ("../x", "must consist of names"), ("1/../../x", "must consist of names"),
    ("1//x", "must consist of names"), ("1/", "must consist of names"),
    ("./x", "must consist of names"), ("1/a\0b", "neither control characters"),
    ("1\\x", "nor backslashes"), ("a" * 256, "is too long"),
    ("/".join(["a" * 200] * 6), "is too long"), ("/".join("a" * 17), "must have at most 16 names"),
    ("\ud800", "is not text"),
])  # fmt: skip
def test_paths_outside_of_the_directory_are_refused(path: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        checked_paths({path: b""})


def test_slashes_before_a_path_mean_nothing() -> None:
    assert checked_paths({"/1/model.py": b"x", "//2/model.py": b"y"}) == {
        ("1", "model.py"): b"x", ("2", "model.py"): b"y",
    }  # fmt: skip


def test_paths_that_cannot_be_together() -> None:
    with pytest.raises(InvalidRequest, match="a file is given twice"):
        checked_paths({"1/model.onnx": b"", "/1/model.onnx": b""})
    with pytest.raises(InvalidRequest, match="'1' is a file and a directory"):
        checked_paths({"1": b"", "1/model.onnx": b""})
    with pytest.raises(InvalidRequest, match=f"at most {MOST_FILES} files"):
        checked_paths({str(n): b"" for n in range(MOST_FILES + 1)})


@given(st.dictionaries(PATH, st.binary(max_size=4), max_size=4))
def test_no_file_is_written_outside(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = tempfile.tempdir
        tempfile.tempdir = folder
        uploads = Uploads(1_000)
        try:
            parts = checked_paths(files)
            upload = uploads.materialise("m", uploads.put("m", parts))
            inside = {p for p in upload.path.rglob("*") if p.is_file()}
            assert {p.relative_to(upload.path).parts for p in inside} == set(parts)
            assert {p for p in Path(folder).rglob("*") if p.is_file()} == inside
        except (InvalidRequest, LoadFailed):
            assert not [p for p in Path(folder).rglob("*") if p.is_file()]
        finally:
            uploads.close()
            tempfile.tempdir = before
