"""Files that are only taken when they hold what their manifest says."""

import hashlib
import json
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.repository.model_files import MANIFEST, Digests, read_manifest, write_manifest


def write(path: Path, text: str = "one") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


ZEROS = "0" * 64 + '"}}'


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two versions, with a manifest."""
    for name in ("1/model.py", "2/model.py", "config.pbtxt", ".hidden", "1/__pycache__/x.pyc"):
        write(tmp_path / name)
    write_manifest(tmp_path)
    return tmp_path


def test_what_is_written(model: Path) -> None:
    names = ["1/model.py", "2/model.py", "config.pbtxt"]
    document = json.loads((model / MANIFEST).read_text())
    assert document == {"files": dict.fromkeys(names, digest("one"))}
    assert write_manifest(model) == read_manifest(model) == document["files"]
    assert Digests().verified(model, [1, 2]) == document["files"]
    assert Digests().problems(model) == []


def test_without_one_nothing_is_checked(tmp_path: Path) -> None:
    write(tmp_path / "1/model.py")
    assert Digests().verified(tmp_path, [1, 7]) == {}


def test_what_is_not_complete_is_refused(model: Path) -> None:
    write(model / "1/model.py", "half")
    (model / "config.pbtxt").unlink()
    with pytest.raises(LoadFailed) as refused:
        Digests().verified(model, [1])
    assert str(refused.value) == (
        f"{MANIFEST}: 1/model.py does not hold what it is to hold;"
        " config.pbtxt is not there, or is being written"
    )


def test_versions_that_are_not_served_do_not_matter(model: Path) -> None:
    (model / "2/model.py").unlink()
    assert set(Digests().verified(model, [1])) == {"1/model.py", "config.pbtxt"}
    with pytest.raises(LoadFailed, match=r"2/model\.py is not there"):
        Digests().verified(model, [1, 2])


def test_a_version_may_have_one_of_its_own(model: Path) -> None:
    (model / MANIFEST).unlink()
    write_manifest(model / "2")
    assert Digests().verified(model, [1, 2]) == {"2/model.py": digest("one")}
    write(model / "2/model.py", "half")
    assert Digests().verified(model, [1]) == {}
    with pytest.raises(LoadFailed, match=r"2/model\.py does not hold"):
        Digests().verified(model, [2])


def test_of_many_problems_some_are_told(tmp_path: Path) -> None:
    names = [f"1/{number}" for number in range(9)]
    write(tmp_path / MANIFEST, json.dumps({"files": dict.fromkeys(names, digest(""))}))
    with pytest.raises(LoadFailed, match=r"and 6 more$"):
        Digests().verified(tmp_path, [1])


def test_a_file_is_read_again_only_if_it_has_changed(model: Path) -> None:
    digests = Digests()
    file = model / "1/model.py"
    assert digests.of(file) == digests.of(file) == digest("one")
    write(file, "two")
    assert digests.of(file) == digest("two")
    file.unlink()
    assert digests.of(file) is None
    assert digests.of(model / "1") is None


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
def test_a_manifest_that_makes_no_sense(tmp_path: Path, text: str, told: str) -> None:
    write(tmp_path / MANIFEST, text)
    with pytest.raises(LoadFailed, match=told):
        Digests().verified(tmp_path, [1])
