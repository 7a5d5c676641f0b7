"""What is done to a version that serves when its model is loaded again."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine.loading import Step, adjusted, resize, step
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from headrace.repository.layout import read_model_directory
from headrace.repository.model_files import Origin, fingerprint, origins
from headrace.repository.reading import Placement

CONFIG = 'name: "m" backend: "x" max_batch_size: 4 '


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two versions."""
    for name in ("m/1/model.x", "m/2/model.x"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    return tmp_path / "m"


def origin(model: Path, text: str = CONFIG, version: int = 1) -> Origin:
    file = parse_config(text, "m/config.pbtxt")
    source = read_model_directory(model)
    return origins(fingerprint(source), file, file.config, source.versions, {})[version]


def test_the_same_is_kept(model: Path) -> None:
    assert step(origin(model), origin(model)) is Step.KEEP
    (model / "3").mkdir()
    (model / "2/model.x").write_text("another")
    assert step(origin(model), origin(model, CONFIG + "version_policy { all {} }")) is Step.KEEP
    other = origin(model, "# said\n" + CONFIG)
    assert step(origin(model), other) is Step.KEEP


def test_what_does_not_serve_is_loaded(model: Path) -> None:
    assert step(None, origin(model)) is Step.LOAD


@pytest.mark.parametrize("name", ["1/model.x", "1/more", "labels.txt"])
def test_other_files_are_loaded(model: Path, name: str) -> None:
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
def test_other_configurations(model: Path, before: str, after: str, expected: Step) -> None:
    assert step(origin(model, CONFIG + before), origin(model, CONFIG + after)) is expected


def test_a_default_that_is_written_out_may_mean_something_else(model: Path) -> None:
    """Without it, the largest batch is guessed."""
    before = origin(model, 'name: "m" backend: "x"')
    after = origin(model, 'name: "m" backend: "x" max_batch_size: 0')
    assert step(before, after) is Step.LOAD


def test_another_place_is_another_origin(model: Path) -> None:
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
        ("a", "b", "", ""),  # one is as good as another
        ("ab", "bcd", "", "d"),
        ("abc", "de", "c", ""),
        ("ab", "ba", "", ""),
    ],
)
def test_instances_come_and_go(there: str, wanted: str, removed: str, missing: str) -> None:
    found = resize(list(there), [Placement(name, None) for name in wanted])
    assert found == (list(removed), [Placement(name, None) for name in missing])


def test_of_the_configuration_only_what_has_changed_in_place_is_taken_over() -> None:
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
