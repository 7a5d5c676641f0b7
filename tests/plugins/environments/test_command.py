"""The command line of `headrace environments`; builds are tested in `tests/contract`."""

import os
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.plugins.environments.cache import Built, EnvironmentCache, key_of
from tests.models.environments import write_wheelhouse
from tests.models.python_models import IDENTITY, write_python_model


def run(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["environments", *words])
    return ended.value.code


def built(path: Path, lock: int) -> Built:
    (path / "python").write_text("abc")
    return Built(("a" * 80,), "Python 3.12.1")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one environment, under a name of the operator."""
    monkeypatch.setenv("HEADRACE_ENVIRONMENT_CACHE", str(tmp_path))
    EnvironmentCache(tmp_path).acquire(key_of("one"), "m", built, 1)
    return tmp_path


def test_list_and_prune(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = f"{key_of('one')}  used 0 days ago  3 B  Python 3.12.1  {'a' * 60}...\n"
    assert run("list") == 0
    assert capsys.readouterr().out == row
    assert run("prune") == 0
    assert capsys.readouterr().out == ""
    assert run("prune", "--unused-days=0") == 0
    assert capsys.readouterr().out == f"removed  {row}"
    assert os.listdir(cache) == []
    assert run("list", "--environment-cache=/nowhere") == 0


@pytest.mark.parametrize(("words", "says"), [
    (("list", "--enviroment-cache=x"), "did you mean '--environment-cache'?"),
    (("prune", "--unused-day=1"), "did you mean '--unused-days'?"),
    (("prune", "--unused-days=x"), "expected a number of days, got 'x'"),
    (("prune", "--unused-days=-1"), "expected a number of days, got '-1'"),
    (("build", ".", "--environment-build-timeout-secs=0"), "must be at least 1, got 0"),
])  # fmt: skip
def test_wrong_usage(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert says in capsys.readouterr().err


def test_gpu_models_are_built_for_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = "instance_group { kind: KIND_GPU gpus: [ 0, 7 ] }"
    write_python_model(tmp_path, "m", IDENTITY, groups)
    assert run("build", str(tmp_path)) == 0
    assert capsys.readouterr().out == "m version 1: needs none\n"


def test_a_missing_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "/no/repository") == 1
    assert capsys.readouterr().err.startswith("error: model repository /no/repository cannot")


@pytest.mark.slow
def test_built_environments_are_kept(tmp_path: Path) -> None:
    """The environment exceeds the cache's limit, but only the next command's build removes it."""
    write_wheelhouse(tmp_path / "wheels")
    for name, version in (("one", "1.0"), ("two", "2.0")):
        write_python_model(tmp_path / "repository", name, IDENTITY)
        (tmp_path / "repository" / name / "requirements.txt").write_text(f"flavour=={version}")
    cache = EnvironmentCache(tmp_path / "cache")
    options = [f"--environment-cache={tmp_path}/cache", f"--wheelhouse={tmp_path}/wheels"]
    limited = [*options, "--environment-cache-bytes=1"]
    assert run("build", str(tmp_path / "repository"), *limited) == 0
    assert sorted(entry.wanted for entry in cache.entries()) == [
        ("flavour==1.0",), ("flavour==2.0",),
    ]  # fmt: skip
    (tmp_path / "repository" / "one" / "requirements.txt").write_text("colour")
    assert run("build", str(tmp_path / "repository"), *limited) == 0
    assert sorted(entry.wanted for entry in cache.entries()) == [("colour",), ("flavour==2.0",)]
