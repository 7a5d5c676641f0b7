"""Models looked up by name, in repositories that change."""

from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.repository.layout import DUPLICATE, NO_SUCH, Catalogue, at_start, scan


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name / "1").mkdir(parents=True)
    return root


def test_what_lies_in_the_repositories_now(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", "a", "b"), write(tmp_path / "two", "b")
    file = tmp_path / "c.onnx"
    file.write_bytes(b"")
    catalogue = Catalogue((one, two), (file,))
    assert catalogue.names() == {"a": "", "b": DUPLICATE, "c": ""}
    write(two, "d")
    assert catalogue.names()["d"] == ""
    found = catalogue.read("a")
    assert found is not None
    assert (found.path, found.versions) == (one / "a", (1,))
    found = catalogue.read("c")
    assert found is not None
    assert found.file == file
    with pytest.raises(LoadFailed, match="in two or more repositories"):
        catalogue.read("b")


@pytest.mark.parametrize("name", ["nobody", "", ".", "..", "../one/a", "a/1", "/", "a\0", "A"])
def test_only_a_name_that_a_directory_has_leads_anywhere(tmp_path: Path, name: str) -> None:
    assert Catalogue((write(tmp_path / "one", "a"),)).read(name) is None


def test_a_repository_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = Catalogue((tmp_path / "gone", write(tmp_path / "one", "a")))
    assert catalogue.names() == {"a": ""}
    assert "gone cannot be read" in caplog.text
    with pytest.raises(LoadFailed, match="gone cannot be read"):
        catalogue.read("a")


def test_a_name_of_several_repositories_with_namespaces(tmp_path: Path) -> None:
    one, two = write(tmp_path / "x/one", "a", "b"), write(tmp_path / "y/one", "a")
    catalogue = Catalogue((one, two), namespacing=True)
    assert list(catalogue.names()) == ["a@one", "a@one-2", "b"]
    found = catalogue.read("a@one-2")
    assert found is not None
    assert (found.name, found.path, found.written_name) == ("a@one-2", two / "a", "a")
    with pytest.raises(LoadFailed, match="There are 2 identifiers of model 'a'"):
        catalogue.read("a")


def test_models_to_begin_with(tmp_path: Path) -> None:
    sources = scan([write(tmp_path, "a", "b")])
    assert at_start(sources, ["*"]) == sources
    assert at_start(sources, []) == []
    found = at_start(sources, ["b", "nobody", "nobody"])
    assert [(s.name, s.problem) for s in found] == [("b", ""), ("nobody", NO_SUCH)]
