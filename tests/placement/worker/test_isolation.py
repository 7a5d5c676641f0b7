"""The confinement of a model: the stricter of settings and parameters."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import IsolationOptions
from headrace.placement.confinement import Confinement, WorkerUser
from headrace.placement.worker.environment import Environment
from headrace.placement.worker.isolation import confinement_of
from headrace.placement.worker.loaded_worker import LoadedWorker
from headrace.placement.worker.python_backend import PythonBackend
from headrace.placement.worker.python_options import WorkerOptions
from headrace.workers.limits import WorkerLimits
from tests.placement.worker.specs import spec
from tests.support.isolation import needs_landlock, needs_root

_ONE, _OTHER = "64123:64123", "64124:64124"
_ENVIRONMENT = Environment(sys.executable, "/opt/prefix", None, "/opt/base")
_GIB = 1 << 30


def _confined(path: Path, given: IsolationOptions, **parameters: str) -> Confinement | None:
    wanted = replace(spec(path, ""), isolation=given, parameters=parameters)
    return confinement_of(wanted, WorkerOptions.of(parameters), _ENVIRONMENT)


def test_models_are_not_confined_by_default(tmp_path: Path) -> None:
    limits = {"max_processes": "50", "scratch_bytes": "1MiB"}
    assert _confined(tmp_path, IsolationOptions(), **limits) is None


@needs_root
def test_users(tmp_path: Path) -> None:
    two = IsolationOptions((_ONE, _OTHER))
    for given, parameters, user in (
        (two, {}, _ONE),
        (two, {"worker_user": _OTHER}, _OTHER),
        (IsolationOptions(), {"worker_user": _OTHER}, _OTHER),
    ):
        found = _confined(tmp_path, given, **parameters)
        assert found is not None
        assert found.user == WorkerUser.of(user)
        assert not found.sandbox
    with pytest.raises(InvalidOption, match="--worker-user allows 64123:64123, got '64124:64124'"):
        _confined(tmp_path, IsolationOptions((_ONE,)), worker_user=_OTHER)
    with pytest.raises(InvalidOption, match="'root' is root"):
        _confined(tmp_path, IsolationOptions(), worker_user="root")


@needs_landlock
@pytest.mark.parametrize(
    ("sandbox", "parameters"),
    [("preferred", {}), ("required", {}), ("off", {"worker_sandbox": "required"})],
)
def test_a_sandbox(tmp_path: Path, sandbox: str, parameters: dict[str, str]) -> None:
    given = IsolationOptions((), sandbox, ("/srv/read",), ("/srv/write",), 100)
    found = _confined(tmp_path, given, max_open_files="64", **parameters)
    assert found is not None
    assert found.sandbox
    assert found.limits == WorkerLimits(files=64, processes=100, file_bytes=_GIB)
    assert {str(tmp_path / "m"), "/opt/prefix", "/opt/base", sys.prefix, "/srv/read"} <= set(
        found.readable
    )
    assert found.writable == ("/srv/write",)


def test_a_sandbox_cannot_be_lowered() -> None:
    with pytest.raises(InvalidOption, match="expected required; what the server's"):
        WorkerOptions.of({"worker_sandbox": "off"})


@needs_landlock
@pytest.mark.parametrize(
    ("parameters", "processes", "space"),
    [
        ({}, 100, 2 * _GIB),
        ({"max_processes": "50", "scratch_bytes": "1MiB"}, 50, 1 << 20),
        ({"max_processes": "500", "scratch_bytes": "4GiB"}, 100, 2 * _GIB),
    ],
)
def test_limits(tmp_path: Path, parameters: dict[str, str], processes: int, space: int) -> None:
    given = IsolationOptions((), "required", processes=100, scratch_bytes=2 * _GIB)
    found = _confined(tmp_path, given, **parameters)
    assert found is not None
    assert found.limits.processes == processes
    assert found.limits.file_bytes == max(space, _GIB)
    assert found.scratch_bytes == space


def test_a_model_in_the_servers_process_cannot_be_isolated(tmp_path: Path) -> None:
    wanted = spec(tmp_path, "", execution="inline")
    with pytest.raises(InvalidOption, match="cannot be isolated"):
        PythonBackend().load(replace(wanted, isolation=IsolationOptions(sandbox="preferred")))


@needs_root
def test_a_model_that_its_user_cannot_read(tmp_path: Path) -> None:
    wanted = spec(tmp_path, "", worker_user=_ONE)
    wanted.root.chmod(0o700)
    with pytest.raises(LoadFailed, match=r"as user '64123:64123'|user 64123 of group 64123 cannot"):
        LoadedWorker(wanted, "headrace.workers.python_loader")


@needs_landlock
def test_a_path_for_the_sandbox_that_is_gone(tmp_path: Path) -> None:
    given = IsolationOptions((), "required", (str(tmp_path / "gone"),))
    wanted = replace(spec(tmp_path, ""), isolation=given)
    with pytest.raises(LoadFailed, match=r"the worker could not be confined: there is no .*/gone,"):
        LoadedWorker(wanted, "headrace.workers.python_loader")


@needs_landlock
def test_no_environment_is_built_for_a_confined_model(tmp_path: Path) -> None:
    wanted = spec(tmp_path, "", worker_sandbox="required")
    (wanted.root / "requirements.txt").write_text("a-package-that-nobody-has==1\n")
    environments = replace(wanted.environments, cache=str(tmp_path / "cache"))
    wanted = replace(wanted, isolation=IsolationOptions(), environments=environments)
    with pytest.raises(LoadFailed, match="isolated models use only environments that exist"):
        LoadedWorker(wanted, "headrace.workers.python_loader")
