"""Files of models: ownership, changes and manifests."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import LoadFailed
from headrace.repository.layout import read_model_directory, single_file
from headrace.repository.model_files import (
    MANIFEST,
    Digests,
    Fingerprint,
    fingerprint,
    parts,
    read_manifest,
    write_manifest,
)
from tests.models import onnx_graphs
from tests.repository.files import write


def project(root: Path, **files: str) -> Path:
    """Files by path with __ for a slash, all Python; `model.py` among them."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "model.py"


def found(file: Path) -> list[str]:
    """Files that belong to a file."""
    return sorted(str(path.relative_to(file.parent)) for path in parts(file))


def test_requirements_are_not_read_for_a_single_file(tmp_path: Path) -> None:
    assert tmp_path / "requirements.txt" not in parts(tmp_path / "model.py")


@pytest.mark.parametrize(("text", "others"), [
    ("", []), ("import one", ["one.py"]), ("import one as uno, os, numpy", ["numpy.py", "one.py"]),
    ("from one import thing", ["one.py"]), ("def f():\n    import one", ["one.py"]),
    ("import two", ["one.py", "two.py"]), ("import nowhere", ["nowhere.py"]),  # it may still appear
    ("import nowhere.more, os.path", ["nowhere.py"]), ("from . import one", ["one.py"]),
    ("import model", []),
    ("import package.inner", ["package/init.py", "package/inner.py", "package/side.py"]),
    ("from package import inner", ["package/init.py", "package/inner.py", "package/side.py"]),
    ("from plain import far", ["plain/far.py"]), ("from .. import one", []),
    ("import one.more", ["one.py"]),
])  # fmt: skip
def test_local_imports_of_a_python_file(tmp_path: Path, text: str, others: list[str]) -> None:
    file = project(
        tmp_path, model=text, one="", two="import one\nimport two", plain__far="", unused="",
        package__inner="from . import side", package__side="", package__unused="",
    )  # fmt: skip
    (tmp_path / "package" / "__init__.py").write_text("")
    assert [name.replace("__init__", "init") for name in found(file)] == sorted(
        ["model.py", *others]
    )


@pytest.mark.parametrize("text", ["def f(:", "\0", "(" * 10_000, "x = 1 +"])
def test_an_unparsable_file_stands_alone(tmp_path: Path, text: str) -> None:
    assert found(project(tmp_path, model=text)) == ["model.py"]


def test_a_missing_file_stands_alone(tmp_path: Path) -> None:
    assert found(tmp_path / "model.py") == ["model.py"]
    assert found(tmp_path / "model.onnx") == ["model.onnx"]
    assert found(tmp_path / "model.other") == ["model.other"]


def test_external_weights_of_an_onnx_model(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx_graphs.external_weight("weights.bin"))
    assert found(file) == ["model.onnx", "weights.bin"]
    for elsewhere in ("/etc/passwd", "../weights.bin"):
        file.write_bytes(onnx_graphs.external_weight(elsewhere))
        assert found(file) == ["model.onnx"]
    file.write_bytes(b"nothing")
    assert found(file) == ["model.onnx"]


# --- changes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with two versions and a label file."""
    root = tmp_path / "m"
    for name in ("1/model.py", "1/weights/a.bin", "2/model.py", "labels.txt", "config.pbtxt"):
        write(root / name)
    return root


def state(model: Path, config_name: str = "") -> Fingerprint:
    return fingerprint(read_model_directory(model, config_name))


def changed(before: Fingerprint, after: Fingerprint) -> set[str]:
    """Changed parts: "config", "shared", or a version."""
    numbers = {*before.versions, *after.versions}
    found = {str(n) for n in numbers if before.versions.get(n) != after.versions.get(n)}
    if before.config != after.config:
        found.add("config")
    return found | ({"shared"} if before.shared != after.shared else set())


def test_files_of_a_model(model: Path) -> None:
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
def test_parts_concerned_by_a_change(model: Path, name: str, expected: set[str]) -> None:
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


def test_a_replaced_file_of_equal_size_and_time(model: Path) -> None:
    """Archives may give all files one time; a changed time alone is a change, too."""
    before = state(model)
    os.utime(model / "1/model.py", (5, 5))
    touched = state(model)
    assert changed(before, touched) == {"1"}
    (model / "1/model.py").write_text("two")
    os.utime(model / "1/model.py", (5, 5))
    assert changed(touched, state(model)) == {"1"}


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    """Volumes of Kubernetes turn a link to another directory."""
    for name in ("old", "new"):
        write(tmp_path / name / "model.py", name)
    (model / "..data").symlink_to(tmp_path / "old")
    (model / "3").mkdir()
    (model / "3/model.py").symlink_to("../..data/model.py")
    before = state(model)
    (model / "..next").symlink_to(tmp_path / "new")
    (model / "..next").rename(model / "..data")
    assert changed(before, state(model)) == {"3"}


def test_broken_and_circular_links(model: Path) -> None:
    for name, target in (("gone", "nowhere"), ("self", "self"), ("up", "..")):
        (model / "1" / name).symlink_to(target)
    found = state(model).versions[1]
    assert found["1/gone"] is found["1/self"] is None
    assert "1/up/labels.txt" in found
    assert not any(name.startswith("1/up/1/up") for name in found)


def test_a_removed_model_is_no_error(model: Path) -> None:
    source = read_model_directory(model)
    before = fingerprint(source)
    model.rename(model.with_name("away"))
    assert changed(before, fingerprint(source)) == {"1", "2", "config", "shared"}


def test_a_single_file_with_its_imports(tmp_path: Path) -> None:
    write(tmp_path / "model.py", "import beside")
    write(tmp_path / "beside.py")
    write(tmp_path / "other.py")
    before = fingerprint(single_file(tmp_path / "model.py"))
    write(tmp_path / "other.py", "another")
    assert fingerprint(single_file(tmp_path / "model.py")) == before
    write(tmp_path / "beside.py", "another")
    assert changed(before, fingerprint(single_file(tmp_path / "model.py"))) == {"1"}


# --- manifests


ZEROS = "0" * 64 + '"}}'


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A model with two versions and a manifest."""
    for name in ("1/model.py", "2/model.py", "config.pbtxt", ".hidden", "1/__pycache__/x.pyc"):
        write(tmp_path / name)
    write_manifest(tmp_path)
    return tmp_path


def test_contents_of_a_manifest(sealed: Path) -> None:
    names = ["1/model.py", "2/model.py", "config.pbtxt"]
    document = json.loads((sealed / MANIFEST).read_text())
    assert document == {"files": dict.fromkeys(names, digest("one"))}
    assert write_manifest(sealed) == read_manifest(sealed) == document["files"]
    assert Digests().verified(sealed, [1, 2]) == document["files"]
    assert Digests().problems(sealed) == []
    assert Digests().verified(sealed / "1", [1, 7]) == {}  # without a manifest


def test_incomplete_models_are_refused(sealed: Path) -> None:
    write(sealed / "1/model.py", "half")
    (sealed / "config.pbtxt").unlink()
    with pytest.raises(LoadFailed) as refused:
        Digests().verified(sealed, [1])
    assert str(refused.value) == (
        f"{MANIFEST}: 1/model.py does not hold what it is to hold;"
        " config.pbtxt is not there, or is being written"
    )


def test_versions_that_are_not_served_do_not_matter(sealed: Path) -> None:
    (sealed / "2/model.py").unlink()
    assert set(Digests().verified(sealed, [1])) == {"1/model.py", "config.pbtxt"}
    with pytest.raises(LoadFailed, match=r"2/model\.py is not there"):
        Digests().verified(sealed, [1, 2])
    (sealed / MANIFEST).unlink()
    write(sealed / "2/model.py")
    write_manifest(sealed / "2")  # a version may have one of its own
    assert Digests().verified(sealed, [1, 2]) == {"2/model.py": digest("one")}
    write(sealed / "2/model.py", "half")
    assert Digests().verified(sealed, [1]) == {}
    with pytest.raises(LoadFailed, match=r"2/model\.py does not hold"):
        Digests().verified(sealed, [2])


def test_problems_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    names = [f"1/{number}" for number in range(9)]
    write(tmp_path / MANIFEST, json.dumps({"files": dict.fromkeys(names, digest(""))}))
    with pytest.raises(LoadFailed, match=r"and 6 more$"):
        Digests().verified(tmp_path, [1])


def test_a_file_is_read_again_only_if_it_has_changed(sealed: Path) -> None:
    digests = Digests()
    file = sealed / "1/model.py"
    assert digests.of(file) == digests.of(file) == digest("one")
    write(file, "two")
    assert digests.of(file) == digest("two")
    file.unlink()
    assert digests.of(file) is None
    assert digests.of(sealed / "1") is None


@pytest.mark.parametrize(("text", "told"), [
    ("", "no JSON"), ('{"files": {"1/model.py"', "no JSON"), ("[" * 100_000, "no JSON"),
    ("[]", 'expected an object with the member "files"'),
    ('{"files": []}', 'expected an object with the member "files"'),
    ('{"files": {"a": 1}}', "'a': expected sha256:"),
    ('{"files": {"a": "md5:12"}}', "'a': expected sha256:"),
    ('{"files": {"/etc/passwd": "sha256:' + ZEROS, "no path within"),
    ('{"files": {"1/../../x": "sha256:' + ZEROS, "no path within"),
    ('{"files": {"": "sha256:' + ZEROS, "no path within"),
    ('{"files": {"a\\u0000b": "sha256:' + ZEROS, "no path within"),
    ('{"files": {"a\\ud800b": "sha256:' + ZEROS, "no path within"),
])  # fmt: skip
def test_an_invalid_manifest(tmp_path: Path, text: str, told: str) -> None:
    write(tmp_path / MANIFEST, text)
    with pytest.raises(LoadFailed, match=told):
        Digests().verified(tmp_path, [1])


class PathWithLinks(type(Path())):  # type: ignore[misc]
    """A path of a file, to which another hard link is made each time that it is opened."""

    left = 0  # links still to be made

    def open(self, *given: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            os.link(self, self.with_name(f"link{self.left}"))
        return super().open(*given, **options)


@pytest.mark.parametrize("links", [0, 1, 2])
def test_a_file_that_others_link_meanwhile(links: int, tmp_path: Path) -> None:
    """Its stamp changes, though nobody writes it."""
    path = PathWithLinks(tmp_path / "file")
    path.write_bytes(b"one")
    path.left = links
    digests = Digests()
    assert digests.of(path) == digests.of(path) == digest("one")


def test_a_file_that_never_rests(tmp_path: Path) -> None:
    path = PathWithLinks(tmp_path / "file")
    path.write_bytes(b"one")
    path.left = 100
    assert Digests().of(path) is None
