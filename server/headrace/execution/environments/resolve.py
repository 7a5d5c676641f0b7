"""From a model to the environment that its worker runs in, which is built if it is not there.

Blocks for as long as that takes, and is for loading threads and commands. Called for each instance
that is loaded, so that it is quick where the environment is there; restarts of workers keep what
their instance was loaded with.
"""

import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.execution.environments.build import (
    UNFIT,
    Plan,
    archive_plan,
    check_ready,
    packages_plan,
)
from headrace.execution.environments.cache import (
    CANNOT_BE_BUILT,
    Built,
    EnvironmentCache,
    Hold,
    default_root,
)
from headrace.execution.environments.demand import PATH_PARAMETER, Packages, Ready, demand_of
from headrace.execution.environments.interpreters import Interpreter, choose, own, probe, satisfies
from headrace.execution.environments.step import StepFailed


@dataclass(frozen=True, slots=True)
class Environment:
    """What a worker runs in: an interpreter and, if it is the model's own, the directory it is in.

    `hold` keeps a cached one from being removed while this value is there.
    """

    python: str
    prefix: str = ""
    hold: Hold | None = None


def environment_of(spec: LoadSpec) -> Environment:
    """The environment that a model asks for; the server's interpreter if it asks for none.

    Raises `LoadFailed` or `InvalidOption` if it cannot be had.
    """
    demand = demand_of(spec)
    if demand is None:
        return Environment(spec.parameters.get("python") or sys.executable)
    if isinstance(demand, Ready):
        return _ready(spec, demand.path)
    interpreter = _interpreter(demand)
    mine = interpreter.path == sys.executable
    if not demand.requirements.wanted and (mine or demand.python):
        if not interpreter.has_numpy:
            text = f"{interpreter.path} has no numpy, which every model needs"
            raise LoadFailed(f"{text}; a requirements.txt gives it an environment", UNFIT)
        return Environment(interpreter.path)
    return _cached(spec, packages_plan(spec, demand.requirements, interpreter))


def cache_of(root: str) -> EnvironmentCache:
    """The cache in a directory, or in the usual one for an empty name; raises `LoadFailed`."""
    return EnvironmentCache(Path(root).absolute() if root else default_root(os.environ))


def _ready(spec: LoadSpec, path: Path) -> Environment:
    try:
        if path.is_dir():
            check_ready(path)
            return Environment(str(path / "bin" / "python"), str(path))
        plan = archive_plan(spec, path)
    except OSError as error:
        text = f"{path.name} cannot be read: {error.strerror}"
        raise InvalidOption(f"parameters['{PATH_PARAMETER}']", text) from error
    return _cached(spec, plan)


def _cached(spec: LoadSpec, plan: Plan) -> Environment:
    """From the cache, or built."""

    def build(path: Path, lock: int) -> Built:
        try:
            return plan.build(path, lock)
        except StepFailed as error:
            text = f"its environment could not be built: {error}"
            raise LoadFailed(text, CANNOT_BE_BUILT) from error

    # Another may build for as long as it is allowed to, and begin just now.
    patience = spec.environments.build_secs + 60.0
    hold = cache_of(spec.environments.cache).acquire(plan.key, spec.model, build, patience)
    return Environment(str(hold.path / "bin" / "python"), str(hold.path), hold)


def _interpreter(demand: Packages) -> Interpreter:
    """The interpreter that is named, else one that fits; raises `LoadFailed`, `InvalidOption`."""
    if not demand.python:
        return choose(demand.requires_python)
    path = demand.python if "/" in demand.python else shutil.which(demand.python)
    if not path:
        text = f"there is no interpreter called {demand.python!r} on the PATH"
        raise InvalidOption("parameters['python']", text)
    found = own() if path == sys.executable else probe(path)
    if "/" in demand.python:
        found = replace(found, path=path)  # it may be a script that starts the interpreter
    if not satisfies(found.version, demand.requires_python):
        text = f"the model requires Python {demand.requires_python}, and this is {found}"
        raise InvalidOption("parameters['python']", text)
    return found
