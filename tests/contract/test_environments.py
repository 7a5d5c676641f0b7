"""Python models with environments, side by side in one server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.environments import (
    parameter,
    write_archive,
    write_environment,
    write_telling_model,
    write_wheelhouse,
)
from tests.models.python_models import IDENTITY, tensors, write_python_model
from tests.support.client import Client
from tests.support.command import run
from tests.support.server_process import ServerProcess, clean_server

BLOCK = "# /// script\n# dependencies = ['flavour>=2']\n# requires-python = '>=3.10'\n# ///\n"
ENV_PATH = "EXECUTION_ENV_PATH"

# Environments are built; their parts are tested in tests/plugins/environments.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, a wheelhouse, and an empty cache."""
    folder = tmp_path_factory.mktemp("environments")
    write_wheelhouse(folder / "wheels")
    root = folder / "repository"
    one = write_telling_model(root, "one", "instance_group { count: 2 }")
    (one / "requirements.txt").write_text("Flavour == 1.0  # with all its dependencies\n")
    write_telling_model(root, "two", block=BLOCK)
    bad = write_telling_model(root, "bad")
    (bad / "1" / "requirements.txt").write_text(
        "--extra-index-url https://me:secret@host.invalid/simple\nflavour==9.9\n"
    )
    ready = parameter(ENV_PATH, "$$TRITON_MODEL_DIRECTORY/environment")
    write_environment(write_telling_model(root, "ready", ready) / "environment")
    packed = parameter(ENV_PATH, "$$TRITON_MODEL_DIRECTORY/packed.tar.gz")
    write_archive(write_telling_model(root, "packed", packed) / "packed.tar.gz")
    config = tensors("input", ("INPUT0", "INT32", "1")) + tensors(
        "output", ("OUTPUT0", "INT32", "1")
    )
    write_python_model(root, "plain", IDENTITY, config)
    return folder


def options(folder: Path) -> list[str]:
    return [f"--environment-cache={folder}/cache", f"--wheelhouse={folder}/wheels"]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """A server of these models, the first to use the cache."""
    given = [*options(folder), "--exit-on-error=false"]
    environment = {"PIP_INDEX_URL": "https://token@host.invalid/simple"}
    with clean_server(folder / "repository", options=given, environment=environment) as process:
        yield process


def tell(client: Client, model: str) -> dict[str, Any]:
    answer = client.infer(model, {"X": np.zeros(1, np.int32)})
    told: dict[str, Any] = json.loads(answer["TOLD"][0])
    return told


def test_models_with_conflicting_packages(caller: Client, folder: Path) -> None:
    one, two = tell(caller, "one"), tell(caller, "two")
    assert (one["flavour"], two["flavour"]) == ("1.0", "2.0")
    assert one["prefix"] != two["prefix"]
    for told in (one, two):
        assert Path(told["prefix"]).parent == folder / "cache"
        assert told["path"] == f"{told['prefix']}/bin"
    # An environment has the server's numpy and no other package of it.
    told = tell(caller, "one")
    assert told["numpy"] == np.__version__
    assert told["isolated"]
    assert told["seen"] == []


def test_existing_and_absent_environments(caller: Client, folder: Path) -> None:
    ready, packed = tell(caller, "ready"), tell(caller, "packed")
    assert ready["flavour"] == "3.0"
    assert ready["prefix"] == str(folder / "repository" / "ready" / "environment")
    assert packed["flavour"] == "4.0"
    assert len(list((folder / "cache").glob("*/bin/adapted"))) == 1
    answer = caller.infer("plain", {"INPUT0": np.ones(1, np.int32)})
    np.testing.assert_array_equal(answer["OUTPUT0"], [1])


def test_a_failed_build_and_finished_ones(
    caller: Client, server: ServerProcess, folder: Path
) -> None:
    [bad] = [model for model in caller.index().models if model.name == "bad"]
    assert bad.state == "UNAVAILABLE"
    assert bad.reason == "the model's environment cannot be built; the server's log says why"
    why = "failed to load bad version 1: its environment could not be built: uv failed"
    server.await_logged(why)
    server.await_logged("Because there is no version of flavour==9.9")
    assert "Traceback" not in server.log
    assert "secret" not in server.log
    assert "token" not in server.log
    server.await_logged("built the environment of one in")
    assert server.log.count("building the environment of one: 1 package and what it needs") == 1
    assert server.log.count("built the environment of one in") == 1
    # Of three that were built; failed builds leave nothing.
    assert len(list((folder / "cache").iterdir())) == 6


@pytest.mark.slow
def test_the_next_server_reuses_environments(server: ServerProcess, folder: Path) -> None:
    ended = run("environments", "list", options(folder)[0])
    assert sorted(line.split("  ")[-1] for line in ended.stdout.splitlines()) == [
        "Flavour == 1.0", "flavour>=2", "packed.tar.gz",
    ]  # fmt: skip
    ended = run("environments", "build", str(folder / "repository"), *options(folder))
    assert ended.returncode == 1  # of one model
    assert ended.stderr.count("error: bad: ") == 1
    assert "built the environment" not in ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(f"one version 1: {folder}/cache/")
    assert "plain version 1: needs none" in lines
    assert f"ready version 1: {folder}/repository/ready/environment" in lines


@pytest.mark.slow
def test_environments_in_use_are_not_removed(server: ServerProcess, folder: Path) -> None:
    ended = run("environments", "prune", "--unused-days=0", options(folder)[0])
    assert ended.returncode == 0
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["in"] * 3


def test_a_file_with_a_script_block_is_checked_alone(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    source = (folder / "repository" / "two" / "1" / "model.py").read_text()
    model.write_text(
        source + "\n    @staticmethod\n    def auto_complete_config(config):\n"
        '        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [1]})\n'
        '        config.add_output({"name": "TOLD", "data_type": "TYPE_STRING", "dims": [1]})\n'
        "        return config\n"
    )
    # The server's own interpreter has no such package.
    ended = run("models", "check", "--quiet", str(model), *options(folder))
    assert ended.stdout == "ok    model (versions 1)\n1 model, 0 with errors\n"
