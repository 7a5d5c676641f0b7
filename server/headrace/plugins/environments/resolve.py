"""Environment of a model: from its requirements to an interpreter, built on demand.

The requirements come from the first of:

1. `EXECUTION_ENV_PATH` in the configuration's parameters, as in Triton: an existing environment, as
a directory or an archive.
2. In the version's directory, a `requirements.txt` or a script block in the Python file itself.
3. A `requirements.txt` in the model's directory.

A model that consists of a single file has no directory: only its script block counts, not the files
that happen to be beside it.

Blocks during a build, and is for loading threads and commands. Called for each loaded instance, and
fast if the environment exists; restarted workers keep the environment of their instance.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.placement.worker.environment import Environment
from headrace.plugins.environments.build import (
    UNFIT,
    BuildPlan,
    StepFailed,
    archive_plan,
    check_ready,
    packages_plan,
)
from headrace.plugins.environments.cache import (
    CANNOT_BE_BUILT,
    Built,
    cache_of,
    key_of,
)
from headrace.plugins.environments.interpreters import Interpreter, choose, own, probe, satisfies
from headrace.plugins.environments.requirements import (
    Requirements,
    ScriptBlock,
    from_dependencies,
    read_requirements,
    read_script_block,
    redact,
)

PATH_PARAMETER = "EXECUTION_ENV_PATH"
_BUILDS = (
    "isolated models use only environments that exist: building one would run code of its packages"
    " as the server's user; `headrace environments build` builds it in advance"
)
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_FILE = "requirements.txt"


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages to install, and the interpreter: a name or path, or a version specifier."""

    requirements: Requirements
    python: str = ""
    requires_python: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """An existing environment: a directory, or an archive of one."""

    path: Path


def demand_of(spec: LoadSpec) -> Packages | Ready | None:
    """The environment that the model requests; None for none.

    Raises `InvalidOption` or `LoadFailed` for invalid requests.
    """
    python = spec.parameters.get("python", "")
    if value := spec.parameters.get(PATH_PARAMETER, ""):
        if python:
            raise InvalidOption(
                "parameters['python']", f"{PATH_PARAMETER} brings an interpreter of its own"
            )
        return Ready(_ready_path(value, spec.root))
    block = _block(spec)
    requirements = _requirements(spec, block)
    if not requirements.wanted and not block.requires_python and (not python or "/" in python):
        return None
    return Packages(requirements, python, block.requires_python)


def _ready_path(value: str, root: Path) -> Path:
    """The path named by the parameter."""
    field = f"parameters['{PATH_PARAMETER}']"
    inside = value.startswith(_MODEL_DIRECTORY)
    path = Path(value.replace(_MODEL_DIRECTORY, str(root.resolve())))
    if not path.is_absolute():
        raise InvalidOption(
            field, f"expected an absolute path or one below {_MODEL_DIRECTORY}, got {value!r}"
        )
    real = path.resolve()
    if inside and not real.is_relative_to(root.resolve()):
        raise InvalidOption(field, f"{value!r} leads out of the model's directory")
    if not real.exists():
        raise InvalidOption(field, f"there is no {value!r}")
    return real


def _block(spec: LoadSpec) -> ScriptBlock:
    """The script block of the model's file, empty if it has none."""
    if spec.path.suffix != ".py":
        return ScriptBlock()
    where = f"{spec.path.name}: its script block"
    try:
        block = read_script_block(spec.path.read_bytes().decode("utf-8-sig", "replace"))
        if block is not None:
            satisfies(tuple(sys.version_info[:3]), block.requires_python)
    except ValueError as error:
        raise LoadFailed(f"{where}: {redact(str(error))}") from error
    except OSError as error:
        raise LoadFailed(f"{where}: {error.strerror}") from error
    return block or ScriptBlock()


def _requirements(spec: LoadSpec, block: ScriptBlock) -> Requirements:
    """The requirements from the first source that has any, even an empty list."""
    folder, name = spec.path.parent, spec.path.name
    asked = from_dependencies(block.dependencies, spec.root)
    if spec.single_file:
        return asked
    beside = _read(folder / _FILE, spec.root)
    if asked.wanted and beside is not None and beside.wanted:
        raise LoadFailed(
            f"both {_FILE} and the script block of {name} say what the model needs; keep one"
        )
    if asked.wanted:
        return asked
    return beside or _read(spec.root / _FILE, spec.root) or asked


def _read(path: Path, root: Path) -> Requirements | None:
    """The requirements in a file; None if it does not exist."""
    return read_requirements(path, root) if os.path.lexists(path) else None


def demanded(spec: LoadSpec) -> Callable[[], Environment] | None:
    """A function that finds or builds the environment a model requests; None for none.

    Raises as `demand_of`; the returned function raises likewise if it fails.
    """
    demand = demand_of(spec)
    return None if demand is None else partial(_provided, spec, demand)


def _provided(spec: LoadSpec, demand: Packages | Ready) -> Environment:
    if isinstance(demand, Ready):
        return _ready(spec, demand.path)
    interpreter = _interpreter(spec, demand)
    mine = interpreter.path == sys.executable
    base = str(Path(interpreter.real).parents[1])
    if not demand.requirements.wanted and (mine or demand.python):
        if not interpreter.has_numpy:
            text = f"{interpreter.path} has no numpy, which every model needs"
            raise LoadFailed(f"{text}; a requirements.txt gives it an environment", UNFIT)
        return Environment(interpreter.path, base=base)
    return _cached(spec, packages_plan(spec, demand.requirements, interpreter), base)


def _ready(spec: LoadSpec, path: Path) -> Environment:
    try:
        if path.is_dir():
            if not _isolated(spec):  # it would run as the server's user
                check_ready(path)
            return Environment(str(path / "bin" / "python"), str(path))
        plan = archive_plan(spec, path)
    except OSError as error:
        text = f"{path.name} cannot be read: {error.strerror}"
        raise InvalidOption(f"parameters['{PATH_PARAMETER}']", text) from error
    return _cached(spec, plan)


def _isolated(spec: LoadSpec) -> bool:
    return spec.isolation is not None and spec.isolation.confines(spec.parameters)


def _cached(spec: LoadSpec, plan: BuildPlan, base: str = "") -> Environment:
    """The environment from the cache, built if missing."""

    def build(path: Path, lock: int) -> Built:
        if _isolated(spec):
            raise LoadFailed(_BUILDS)
        try:
            return plan.build(path, lock)
        except StepFailed as error:
            text = f"its environment could not be built: {error}"
            raise LoadFailed(text, CANNOT_BE_BUILT) from error

    # A concurrent build may take its whole time limit, and start only now.
    patience = spec.environments.build_secs + 60.0
    cache = cache_of(spec.environments.cache, spec.environments.cache_bytes)
    hold = cache.acquire(plan.key, spec.model, build, patience)
    if hold.entry.numpy not in ("", plan.numpy):  # linked to that of another server
        hold = cache.acquire(key_of([plan.key, plan.numpy]), spec.model, build, patience)
    path = hold.entry.path
    return Environment(str(path / "bin" / "python"), str(path), hold, base)


def _interpreter(spec: LoadSpec, demand: Packages) -> Interpreter:
    """The named interpreter, else a suitable one; raises `LoadFailed`, `InvalidOption`."""
    if not demand.python:
        return choose(demand.requires_python)
    if "/" in demand.python and _isolated(spec):
        text = "the server does not run an isolated model's interpreter to inspect it"
        raise InvalidOption("parameters['python']", f"{text}; expected a name such as python3.12")
    path = demand.python if "/" in demand.python else shutil.which(demand.python)
    if not path:
        text = f"there is no interpreter called {demand.python!r} on the PATH"
        raise InvalidOption("parameters['python']", text)
    found = own() if path == sys.executable else probe(path)
    if "/" in demand.python:
        found = replace(found, path=path)  # the path may be a script that starts the interpreter
    if not satisfies(found.version, demand.requires_python):
        text = f"the model requires Python {demand.requires_python}, and this is {found}"
        raise InvalidOption("parameters['python']", text)
    return found
