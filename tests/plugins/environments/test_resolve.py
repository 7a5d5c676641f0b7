"""From a model's requirements to its interpreter: real builds."""

import hashlib
import logging
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import EnvironmentOptions, IsolationOptions, LoadSpec
from headrace.placement.worker.environment import Environment, demanded, environment_of
from headrace.plugins.environments.cache import cache_of
from headrace.plugins.environments.interpreters import choose, probe
from headrace.plugins.environments.resolve import Packages, Ready, demand_of
from tests.models.environments import write_wheelhouse
from tests.models.python_models import IDENTITY, write_python_model
from tests.support.wheels import write_wheel

BLOCK = "# /// script\n# dependencies = ['from-block']\n# requires-python = '>=3.11'\n# ///\n"


def model(root: Path, source: str = "", single: bool = False, **parameters: str) -> LoadSpec:
    """A model on disk."""
    folder = root if single else root / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(source)
    return LoadSpec("m", folder / "model.py", root, parameters, version=1, single_file=single)


def asked(model: LoadSpec) -> tuple[str, ...]:
    found = demand_of(model)
    assert isinstance(found, Packages)
    return found.requirements.wanted


def test_a_model_without_requirements(tmp_path: Path) -> None:
    assert demand_of(model(tmp_path)) is None
    assert demand_of(model(tmp_path, python="/usr/bin/python3")) is None
    (tmp_path / "requirements.txt").write_text("# none\n")
    assert demand_of(model(tmp_path)) is None


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("far")
    assert asked(model(tmp_path)) == ("far",)
    assert asked(model(tmp_path, BLOCK)) == ("from-block",)
    (tmp_path / "1" / "requirements.txt").write_text("near")
    assert asked(model(tmp_path)) == ("near",)
    with pytest.raises(LoadFailed, match="keep one"):
        demand_of(model(tmp_path, BLOCK))
    (tmp_path / "1" / "requirements.txt").write_text("")
    assert demand_of(model(tmp_path)) is None


def test_a_single_file_has_its_block_alone(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("of-something-else")
    assert demand_of(model(tmp_path, single=True)) is None
    assert asked(model(tmp_path, BLOCK, single=True)) == ("from-block",)


def test_interpreters(tmp_path: Path) -> None:
    found = demand_of(model(tmp_path, BLOCK, python="/usr/bin/python3"))
    assert isinstance(found, Packages)
    assert (found.python, found.requires_python) == ("/usr/bin/python3", ">=3.11")
    found = demand_of(model(tmp_path, python="python3.12"))
    assert isinstance(found, Packages)
    assert (found.python, found.requirements.wanted) == ("python3.12", ())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("# /// script\n# dependencies = 1\n# ///\n", "model.py: its script block: dependencies"),
        ("# /// script\n# requires-python = '3'\n# ///\n", "'3' is no version specifier"),
        ("# /// script\n# dependencies = ['-e .']\n# ///\n", "script block's '-e .' is no requ"),
    ],
)
def test_an_invalid_block(source: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed) as caught:
        demand_of(model(tmp_path, source))
    assert says in str(caught.value)


def test_a_ready_environment(tmp_path: Path) -> None:
    root = tmp_path / "m"
    (tmp_path / "env").mkdir()
    given = model(root, BLOCK, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    (root / "env.tar.gz").write_text("")
    assert demand_of(given) == Ready(root / "env.tar.gz")
    given = model(root, EXECUTION_ENV_PATH=str(tmp_path / "env"))
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
    given = model(tmp_path / "m", EXECUTION_ENV_PATH=value)
    (tmp_path / "env").mkdir()
    (tmp_path / "m" / "link").symlink_to("../env")
    with pytest.raises(InvalidOption, match=says) as caught:
        demand_of(given)
    assert caught.value.path == "parameters['EXECUTION_ENV_PATH']"
    assert str(tmp_path) not in caught.value.text


def test_a_ready_environment_has_its_own_interpreter(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="brings an interpreter of its own"):
        demand_of(model(tmp_path, EXECUTION_ENV_PATH="/tmp", python="python3"))


@pytest.fixture
def spec(tmp_path: Path) -> LoadSpec:
    """A model without requirements, with an empty cache and a wheelhouse."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("")
    wheels = write_wheelhouse(tmp_path / "wheels")
    write_wheel(wheels, "numpy", "2.9", {"numpy/__init__.py": ""})
    write_wheel(wheels, "array", "1.0", requires=["numpy"])
    options = EnvironmentOptions(str(tmp_path / "cache"), str(wheels))
    return LoadSpec(
        "m", tmp_path / "m" / "1" / "model.py", tmp_path / "m", version=1, environments=options
    )


def ask(environment: Environment, expression: str) -> str:
    """Value of an expression in an environment."""
    command = [environment.python, "-I", "-c", f"import numpy; print({expression})"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_models_without_an_environment(spec: LoadSpec, tmp_path: Path) -> None:
    assert environment_of(spec) == Environment(sys.executable)
    given = replace(spec, parameters={"python": "/some/python"})
    assert environment_of(given) == Environment("/some/python")
    spec.path.write_text("# /// script\n# requires-python = '>=3.10'\n# ///\n")
    base = str(Path(sys.executable).resolve().parents[1])
    assert environment_of(spec) == Environment(sys.executable, base=base)
    assert not (tmp_path / "cache").exists()


def test_the_server_runs_no_program_of_an_isolated_model(spec: LoadSpec, tmp_path: Path) -> None:
    program = spec.root / "environment" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    program.chmod(0o755)
    isolated = replace(spec, isolation=IsolationOptions(sandbox="preferred"))
    prefix = str(program.parents[1])
    ready = replace(isolated, parameters={"EXECUTION_ENV_PATH": prefix})
    assert environment_of(ready) == Environment(str(program), prefix)
    (spec.root / "requirements.txt").write_text("packaging\n")
    for parameters, error in (
        ({"python": str(program)}, r"does not run an isolated model's interpreter"),
        ({}, r"isolated models use only environments that exist"),
    ):
        with pytest.raises((InvalidOption, LoadFailed), match=error):
            environment_of(replace(isolated, parameters=parameters))
    assert not (tmp_path / "executed").exists()


def test_an_interpreter_by_its_name(
    spec: LoadSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No link: a linked interpreter does not start a virtual environment.
    script = tmp_path / "mypython"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = environment_of(replace(spec, parameters={"python": "mypython"}))
    assert probe(found.python).real == os.path.realpath(sys.executable)
    assert not found.prefix


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("python9.9", "there is no interpreter called 'python9.9' on the PATH"),
        (sys.executable, "the model requires Python <3, and this is Python 3"),
    ],
)
def test_an_interpreter_that_does_not_fit(python: str, says: str, spec: LoadSpec) -> None:
    spec.path.write_text("# /// script\n# requires-python = '<3'\n# ///\n")
    with pytest.raises(InvalidOption, match=says) as caught:
        environment_of(replace(spec, parameters={"python": python}))
    assert caught.value.path == "parameters['python']"


def test_a_missing_wheelhouse(spec: LoadSpec, tmp_path: Path) -> None:
    (spec.root / "requirements.txt").write_text("flavour")
    given = replace(spec, environments=replace(spec.environments, wheelhouse="/nowhere"))
    with pytest.raises(LoadFailed, match="there is no wheelhouse /nowhere") as caught:
        environment_of(given)
    assert "nowhere" not in caught.value.public
    assert list((tmp_path / "cache").iterdir()) == []


SAFE = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="archives are unpacked from Python 3.11.4 on"
)


@pytest.mark.parametrize(
    "content",
    ["directory", pytest.param("archive", marks=SAFE), pytest.param("text", marks=SAFE)],
)
def test_an_invalid_environment(content: str, spec: LoadSpec) -> None:
    path = spec.root / "env"
    if content == "directory":
        path.mkdir()
    elif content == "text":
        path.write_text("no archive")
    else:
        subprocess.run(["tar", "czf", str(path), "-C", str(spec.root), "1"], check=True)
    given = replace(spec, parameters={"EXECUTION_ENV_PATH": str(path)})
    says = "no whole tar archive" if content == "text" else "is no environment: it has no bin/py"
    with pytest.raises(LoadFailed, match=says) as caught:
        environment_of(given)
    assert str(spec.root) not in caught.value.public


@pytest.mark.slow
def test_requirements_that_bring_numpy_have_their_own(spec: LoadSpec) -> None:
    (spec.root / "requirements.txt").write_text("array")
    found = environment_of(spec)
    assert ask(found, "numpy.__file__").startswith(f"{found.prefix}/lib")
    assert not (Path(found.prefix) / "headrace-numpy").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("requirement", "shared"), [("array", True), ("flavour==1.0", False)])
def test_servers_share_environments_with_their_own_numpy(
    requirement: str, shared: bool, spec: LoadSpec, tmp_path: Path
) -> None:
    """A server's numpy matters only to environments that link to it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ours = Path(np.__file__).parent
    for part in (ours, ours.with_name("numpy.libs")):
        (elsewhere / part.name).symlink_to(part)
    write_python_model(tmp_path / "repository", "m", IDENTITY)
    (tmp_path / "repository" / "m" / "requirements.txt").write_text(requirement)
    command = [
        sys.executable, "-m", "headrace", "environments", "build", str(tmp_path / "repository"),
        f"--environment-cache={spec.environments.cache}",
        f"--wheelhouse={spec.environments.wheelhouse}",
    ]  # fmt: skip
    prefixes = [
        subprocess.run(
            command, capture_output=True, check=True, text=True,
            env=os.environ | {"PYTHONPATH": path},
        ).stdout
        for path in ("", str(elsewhere), str(elsewhere), "")
    ]  # fmt: skip
    assert prefixes[0].startswith(f"m version 1: {tmp_path}/cache/")
    assert (prefixes[0] == prefixes[1]) is shared
    assert prefixes[2:] == [prefixes[1], prefixes[0]]


@pytest.mark.slow
def test_missing_packages(spec: LoadSpec, tmp_path: Path) -> None:
    (spec.root / "requirements.txt").write_text("flavour==9.9")
    with pytest.raises(LoadFailed, match=r"could not be built: uv failed(.|\n)*flavour==9\.9"):
        environment_of(spec)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_options_in_requirements(spec: LoadSpec, tmp_path: Path) -> None:
    more = write_wheelhouse(spec.root / "more")
    write_wheel(more, "flavour", "3.0rc1")
    (spec.root / "limits.txt").write_text("colour<2\n")
    (spec.root / "requirements.txt").write_text(
        "-i https://u:p@host.invalid/x\n-f more\n-f https://host.invalid/y\n-c limits.txt\n"
        "flavour>=3.0rc1 ; python_version > '3'\n./more/colour-1.0-py3-none-any.whl\n"
    )
    found = environment_of(spec)
    assert ask(found, "__import__('flavour').VERSION") == "3.0rc1"
    assert ask(found, "__import__('colour').VERSION") == "1.0"


@pytest.mark.slow
def test_hashes_are_compared(spec: LoadSpec, tmp_path: Path) -> None:
    wheel = Path(spec.environments.wheelhouse) / "flavour-1.0-py3-none-any.whl"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    line = "flavour==1.0 --hash=sha256:{}\n"
    (spec.root / "requirements.txt").write_text(line.format("0" * 64))
    with pytest.raises(LoadFailed, match=r"(?i)hash"):
        environment_of(spec)
    (spec.root / "requirements.txt").write_text(line.format(digest))
    assert ask(environment_of(spec), "__import__('flavour').VERSION") == "1.0"
    (spec.root / "requirements.txt").write_text(line.format(digest) + "colour==1.0\n")
    with pytest.raises(LoadFailed, match="all requirements must have a hash"):
        environment_of(spec)


@pytest.mark.slow
def test_a_changed_file_means_another_environment(spec: LoadSpec) -> None:
    file = spec.root / "requirements.txt"
    file.write_text("flavour==1.0")
    first = environment_of(spec)
    file.write_text("# the same\nflavour==1.0")
    assert environment_of(spec).prefix == first.prefix
    wheels = Path(spec.environments.wheelhouse)
    wheel = spec.root / "flavour-2.0-py3-none-any.whl"
    wheel.write_bytes((wheels / wheel.name).read_bytes())
    file.write_text(f"./{wheel.name}\n")
    second = environment_of(spec)
    assert second.prefix != first.prefix
    assert ask(second, "__import__('flavour').VERSION") == "2.0"
    assert len(list(cache_of(spec.environments.cache).entries())) == 2


@pytest.mark.slow
def test_settings_of_pip_and_of_uv(
    spec: LoadSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a wheelhouse, and with a model that tries to set up uv."""
    for name, value in (
        ("PIP_CONFIG_FILE", os.devnull), ("PIP_NO_INDEX", "1"), ("UV_CACHE_DIR", "/no/cache"),
        ("PIP_FIND_LINKS", spec.environments.wheelhouse), ("UV_CONSTRAINT", "/no/file"),
        ("UV_SYSTEM_PYTHON", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    (spec.root / "requirements.txt").write_text("flavour<2")
    (spec.root / "uv.toml").write_text("no toml")
    found = environment_of(replace(spec, environments=EnvironmentOptions(str(tmp_path / "cache"))))
    assert ask(found, "__import__('flavour').VERSION") == "1.0"


@pytest.mark.slow
def test_files_that_change_during_the_build(spec: LoadSpec, tmp_path: Path) -> None:
    """Their environment would be found by a key that is not its own."""
    file = spec.root / "requirements.txt"
    file.write_text("flavour==1.0")
    provide = demanded(spec)
    assert provide is not None
    file.write_text("flavour==2.0")
    with pytest.raises(LoadFailed, match="requirements changed while they were installed"):
        provide()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_a_script_block_may_name_a_wheel(spec: LoadSpec) -> None:
    write_wheel(spec.root / "more", "flavour", "3.0")
    wheel = "more/flavour-3.0-py3-none-any.whl"
    spec.path.write_text(f"# /// script\n# dependencies = ['flavour @ {wheel}']\n# ///\n")
    assert ask(environment_of(spec), "__import__('flavour').VERSION") == "3.0"


@pytest.mark.slow
def test_an_interpreter_without_a_pip(spec: LoadSpec, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (spec.root / "requirements.txt").write_text("flavour==1.0")
    found = environment_of(replace(spec, parameters={"python": str(bare / "bin" / "python")}))
    assert ask(found, "__import__('flavour').VERSION") == "1.0"


@pytest.mark.slow
def test_another_interpreter_gets_numpy_installed(
    spec: LoadSpec, caplog: pytest.LogCaptureFixture
) -> None:
    ours = "{}.{}".format(*sys.version_info)
    try:
        other = choose(f"!={ours}.*")
    except LoadFailed:
        pytest.skip("there is no other interpreter on the PATH")
    caplog.set_level(logging.INFO)
    spec.path.write_text(f"# /// script\n# requires-python = '!={ours}.*'\n# ///\n")
    found = environment_of(spec)
    assert probe(found.python).version == other.version
    assert ask(found, "numpy.__file__").startswith(f"{found.prefix}/lib")
    assert f"building the environment of m: numpy, {other}" in caplog.text
