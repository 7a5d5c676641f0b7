"""Models and versions in repositories."""

import os
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.repository.layout import read_model_directory, single_file
from tests.models import onnx_graphs
from tests.repository.files import directories, write
from tests.support.stores import catalogue, scan


@pytest.mark.parametrize(("entries", "versions", "ignored"), [
    ([], (), ()), (["1"], (1,), ()), (["10", "9", "2"], (2, 9, 10), ()),  # by number, not by text
    (["0"], (0,), ()), (["01", "1", "00"], (1,), ("00", "01")),
    (["configs", "warmup", "initial_state", "latest", "1a", "-1", "1.0"], (), ()),
    (["\u00b2", "\u0661", "1"], (1,), ("\u0661",)),  # digits elsewhere, no version here
])  # fmt: skip
def test_versions_are_numbers_without_leading_zeros(
    tmp_path: Path, entries: list[str], versions: tuple[int, ...], ignored: tuple[str, ...]
) -> None:
    source = read_model_directory(directories(tmp_path / "m", ".", *entries))
    assert (source.versions, source.ignored) == (versions, ignored)


def test_directories_that_are_versions(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("")
    assert read_model_directory(tmp_path).versions == ()
    root = directories(tmp_path, "m", "elsewhere")
    (root / "m" / "7").symlink_to(root / "elsewhere")
    assert read_model_directory(root / "m").versions == (7,)


@pytest.mark.parametrize("name", ["config.pbtxt", "configs/mine.pbtxt"])
def test_an_unreadable_configuration(tmp_path: Path, name: str) -> None:
    directories(tmp_path, "m/1", "m/configs", "n/1")
    (tmp_path / "m" / name).symlink_to("x" * 300)
    bad, good = scan([tmp_path], "mine")
    assert bad.problem == "its directory cannot be read: File name too long"
    assert (good.name, good.problem) == ("n", "")


def test_choice_of_the_configuration_file(tmp_path: Path) -> None:
    assert read_model_directory(tmp_path).config_path is None
    write(tmp_path / "config.pbtxt")
    assert read_model_directory(tmp_path).config_path == tmp_path / "config.pbtxt"
    small = tmp_path / "configs" / "small.pbtxt"
    write(small)
    assert read_model_directory(tmp_path, "small").config_path == small
    assert read_model_directory(tmp_path, "large").config_path == tmp_path / "config.pbtxt"


@pytest.mark.parametrize(("url", "copies"), [
    ("s3://bucket/models", "aws s3 sync"), ("s3://https://minio:9000/bucket", "aws s3 sync"),
    ("gs://bucket", "gcloud storage rsync"), ("as://account/container/models", "azcopy sync"),
    ("hf://org/model", "hf download"), ("oci://registry/models:1", "oras pull"),
    ("https://host/model.onnx", "curl"), ("models:/iris/1", "mlflow artifacts download"),
    ("mlflow://iris", "mlflow artifacts download"),
])  # fmt: skip
def test_a_url_is_refused_with_advice(url: str, copies: str) -> None:
    for look in (lambda path: scan([path]), single_file):
        with pytest.raises(LoadFailed) as raised:
            look(Path(url))
        assert str(raised.value).startswith(f"{url} is ")
        assert "this server has no store for that" in str(raised.value)
        assert copies in str(raised.value)


@pytest.mark.parametrize(("paths", "versions", "flat"), [
    (["1/model.py"], (1,), False), (["2/model.py", "config.pbtxt", "configs/a.pbtxt"], (2,), False),
    (["1/saved_model.pb", "1/variables/variables.index"], (1,), False),
    (["config.pbtxt", "later.txt"], (), False),  # of a model on another server
    (["model.onnx"], (1,), True), (["model.onnx", "config.pbtxt", "labels.txt"], (1,), True),
    (["model.onnx/model.onnx", "model.onnx/weights"], (1,), True), (["net.v2.onnx"], (1,), True),
    (["model.joblib", "requirements.txt"], (1,), True), (["trees.ubj"], (1,), True),
    (["MLmodel", "model.pkl", "code/own.py"], (1,), True), (["model/MLmodel"], (1,), True),
    (["saved_model.pb", "variables/variables.index", "assets/words"], (1,), True),
    (["model.savedmodel/saved_model.pb"], (1,), True), (["model.plan"], (1,), True),
])  # fmt: skip
def test_a_model_in_place_of_a_repository(
    tmp_path: Path, paths: list[str], versions: tuple[int, ...], flat: bool
) -> None:
    for path in paths:
        write(tmp_path / "net" / path)
    [source] = scan([tmp_path / "net"])
    assert (source.name, source.written_name, source.path) == ("net", "net", tmp_path / "net")
    assert (source.versions, source.flat) == (versions, flat)
    [renamed] = scan([tmp_path / "net"], name="digits")
    assert (renamed.name, renamed.written_name, renamed.versions) == ("digits", "", versions)
    if versions:
        inside = source.version_path(versions[0]).relative_to(tmp_path / "net").as_posix()
        assert inside == ("." if flat else str(versions[0]))


@pytest.mark.parametrize("paths", [
    ["a/1/model.py", "config.pbtxt"], ["1/1/model.py", "2/config.pbtxt"], ["a/model.py"],
    ["a/1/model.py", "model.onnx"], ["mlflow/MLmodel"], ["a/1/model.py", "1/notes.txt"],
    ["a/config.pbtxt", "README.md", "model.md", "train.py"],
])  # fmt: skip
def test_a_repository_that_looks_like_a_model(tmp_path: Path, paths: list[str]) -> None:
    for path in paths:
        write(tmp_path / path)
    found = scan([tmp_path], name="digits")
    assert [source.path.parent for source in found] == [tmp_path] * len(found)
    assert not any(source.flat or source.renamed for source in found)
    _, [warning] = catalogue([tmp_path], name="digits").sources()
    assert warning.startswith("--model-name=digits has no effect")


def test_the_name_of_the_directory_that_the_server_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "net" / "model.onnx")
    monkeypatch.chdir(tmp_path / "net")
    assert [source.name for source in scan([Path()])] == ["net"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    directories(tmp_path, "a/1")
    (tmp_path / "a").chmod(0)
    try:
        (source,) = scan([tmp_path])
        assert source.problem == "its directory cannot be read: Permission denied"
    finally:
        (tmp_path / "a").chmod(0o700)


def test_a_model_of_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "resnet.v2.onnx"
    path.write_bytes(onnx_graphs.identity())
    source = single_file(path)
    assert (source.name, source.versions, source.config_path) == ("resnet.v2", (1,), None)
    assert source.file == path
    with pytest.raises(LoadFailed, match="there is no model file"):
        single_file(tmp_path / "nothing.onnx")
