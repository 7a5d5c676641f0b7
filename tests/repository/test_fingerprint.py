"""Whether a model's files are what they were: by version, and by what belongs to all versions."""

import os
from pathlib import Path

import pytest

from headrace.repository.layout import read_model_directory, single_file
from headrace.repository.model_files import Fingerprint, fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two versions with a label file."""
    root = tmp_path / "m"
    for name in ("1/model.py", "1/weights/a.bin", "2/model.py", "labels.txt", "config.pbtxt"):
        write(root / name)
    return root


def write(path: Path, text: str = "one") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def state(model: Path, config_name: str = "") -> Fingerprint:
    return fingerprint(read_model_directory(model, config_name))


def changed(before: Fingerprint, after: Fingerprint) -> set[str]:
    """What is not the same: "config", "shared", or a version."""
    numbers = {*before.versions, *after.versions}
    found = {str(n) for n in numbers if before.versions.get(n) != after.versions.get(n)}
    if before.config != after.config:
        found.add("config")
    return found | ({"shared"} if before.shared != after.shared else set())


def test_what_a_model_consists_of(model: Path) -> None:
    found = state(model)
    assert set(found.versions[1]) == {"1/model.py", "1/weights/a.bin"}
    assert set(found.versions[2]) == {"2/model.py"}
    assert set(found.shared) == {"labels.txt"}
    assert set(found.config) == {"config.pbtxt"}
    assert found == state(model)


@pytest.mark.parametrize(("name", "expected"), [
    ("1/model.py", {"1"}), ("1/weights/a.bin", {"1"}), ("1/weights/new.bin", {"1"}),
    ("2/beside.py", {"2"}), ("3/model.py", {"3"}), ("labels.txt", {"shared"}),
    ("requirements.txt", {"shared"}), ("common/code.py", {"shared"}), ("config.pbtxt", {"config"}),
    ("configs/small.pbtxt", set()),  # it is not the chosen one
    (".hidden/file", set()), ("1/.model.py.swp", set()), ("1/__pycache__/model.pyc", set()),
])  # fmt: skip
def test_what_a_change_concerns(model: Path, name: str, expected: set[str]) -> None:
    before = state(model)
    write(model / name, "another")
    assert changed(before, state(model)) == expected


def test_the_chosen_configuration_counts(model: Path) -> None:
    write(model / "configs/small.pbtxt")
    before = state(model, "small")
    write(model / "config.pbtxt", "another")
    assert state(model, "small") == before
    write(model / "configs/small.pbtxt", "another")
    assert changed(before, state(model, "small")) == {"config"}


def test_the_same_content_at_another_time_is_another_state(model: Path) -> None:
    before = state(model)
    os.utime(model / "1/model.py", (5, 5))
    assert changed(before, state(model)) == {"1"}


def test_another_file_that_pretends_to_be_the_same(model: Path) -> None:
    """As of archives in which all files have one time."""
    os.utime(model / "1/model.py", (5, 5))
    before = state(model)
    (model / "1/model.py").write_text("two")
    os.utime(model / "1/model.py", (5, 5))
    assert changed(before, state(model)) == {"1"}


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    """As of a volume that Kubernetes makes: a link is turned to another directory."""
    for name in ("old", "new"):
        write(tmp_path / name / "model.py", name)
    (model / "..data").symlink_to(tmp_path / "old")
    (model / "3").mkdir()
    (model / "3/model.py").symlink_to("../..data/model.py")
    before = state(model)
    (model / "..next").symlink_to(tmp_path / "new")
    (model / "..next").rename(model / "..data")
    assert changed(before, state(model)) == {"3"}


def test_links_that_lead_nowhere_or_in_a_circle(model: Path) -> None:
    (model / "1/gone").symlink_to("nowhere")
    (model / "1/self").symlink_to("self")
    (model / "1/up").symlink_to("..")
    found = state(model).versions[1]
    assert found["1/gone"] is None
    assert found["1/self"] is None
    assert "1/up/labels.txt" in found
    assert not any(name.startswith("1/up/1/up") for name in found)


def test_a_model_that_is_gone_is_no_error(model: Path) -> None:
    source = read_model_directory(model)
    before = fingerprint(source)
    model.rename(model.with_name("away"))
    assert changed(before, fingerprint(source)) == {"1", "2", "config", "shared"}


def test_a_single_file_with_what_it_imports(tmp_path: Path) -> None:
    write(tmp_path / "model.py", "import beside")
    write(tmp_path / "beside.py")
    write(tmp_path / "other.py")
    before = fingerprint(single_file(tmp_path / "model.py"))
    write(tmp_path / "other.py", "another")
    assert fingerprint(single_file(tmp_path / "model.py")) == before
    write(tmp_path / "beside.py", "another")
    assert changed(before, fingerprint(single_file(tmp_path / "model.py"))) == {"1"}
