"""What a model says that it needs, and where."""

from pathlib import Path

import pytest

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.plugins.environments.resolve import Packages, Ready, demand_of

BLOCK = "# /// script\n# dependencies = ['from-block']\n# requires-python = '>=3.11'\n# ///\n"


def spec(root: Path, source: str = "", single: bool = False, **parameters: str) -> LoadSpec:
    """A model on disk."""
    folder = root if single else root / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(source)
    return LoadSpec("m", folder / "model.py", root, parameters, version=1)


def asked(spec: LoadSpec) -> list[str]:
    found = demand_of(spec)
    assert isinstance(found, Packages)
    return [line.text for line in found.requirements.lines]


def test_nothing_is_asked_for(tmp_path: Path) -> None:
    assert demand_of(spec(tmp_path)) is None
    assert demand_of(spec(tmp_path, python="/usr/bin/python3")) is None
    (tmp_path / "requirements.txt").write_text("# none\n")
    assert demand_of(spec(tmp_path)) is None


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("far")
    assert asked(spec(tmp_path)) == ["far"]
    assert asked(spec(tmp_path, BLOCK)) == ["from-block"]
    (tmp_path / "1" / "requirements.txt").write_text("near")
    assert asked(spec(tmp_path)) == ["near"]
    with pytest.raises(LoadFailed, match="keep one"):
        demand_of(spec(tmp_path, BLOCK))
    (tmp_path / "1" / "requirements.txt").write_text("")
    assert demand_of(spec(tmp_path)) is None


def test_a_single_file_has_its_block_alone(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("of-something-else")
    assert demand_of(spec(tmp_path, single=True)) is None
    assert asked(spec(tmp_path, BLOCK, single=True)) == ["from-block"]


def test_interpreters(tmp_path: Path) -> None:
    found = demand_of(spec(tmp_path, BLOCK, python="/usr/bin/python3"))
    assert isinstance(found, Packages)
    assert (found.python, found.requires_python) == ("/usr/bin/python3", ">=3.11")
    found = demand_of(spec(tmp_path, python="python3.12"))
    assert isinstance(found, Packages)
    assert (found.python, found.requirements.lines) == ("python3.12", [])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("# /// script\n# dependencies = 1\n# ///\n", "model.py: its script block: dependencies"),
        ("# /// script\n# requires-python = '3'\n# ///\n", "'3' is no version specifier"),
        ("# /// script\n# dependencies = ['-e .']\n# ///\n", "'-e .' is no requirement"),
    ],
)
def test_a_block_that_is_wrong(source: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed) as caught:
        demand_of(spec(tmp_path, source))
    assert says in str(caught.value)


def test_a_ready_environment(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (tmp_path / "env").mkdir()
    given = spec(model, BLOCK, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    (model / "env.tar.gz").write_text("")
    assert demand_of(given) == Ready(model / "env.tar.gz")
    given = spec(model, EXECUTION_ENV_PATH=str(tmp_path / "env"))
    assert demand_of(given) == Ready(tmp_path / "env")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("env.tar.gz", "expected an absolute path or one below"),
        ("$$TRITON_MODEL_DIRECTORY/../env", "leads out of the model's directory"),
        ("$$TRITON_MODEL_DIRECTORY/link", "leads out of the model's directory"),
        ("$$TRITON_MODEL_DIRECTORY/nothing", "there is no"),
    ],
)
def test_a_ready_environment_that_is_refused(value: str, says: str, tmp_path: Path) -> None:
    given = spec(tmp_path / "m", EXECUTION_ENV_PATH=value)
    (tmp_path / "env").mkdir()
    (tmp_path / "m" / "link").symlink_to("../env")
    with pytest.raises(InvalidOption, match=says) as caught:
        demand_of(given)
    assert caught.value.path == "parameters['EXECUTION_ENV_PATH']"
    assert str(tmp_path) not in caught.value.text


def test_a_ready_environment_has_its_own_interpreter(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="brings an interpreter of its own"):
        demand_of(spec(tmp_path, EXECUTION_ENV_PATH="/tmp", python="python3"))
