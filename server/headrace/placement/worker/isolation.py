"""The confinement of a model's workers, from the server's settings and the model's parameters.

Neither side can be lowered by the other: a model may run as another user only if the server's
settings name no user, or this one.
"""

import os
import sys
from pathlib import Path

from headrace.core.errors import InvalidOption
from headrace.core.model_spec import IsolationOptions, LoadSpec
from headrace.placement.confinement import Confinement, WorkerUser, sandbox_problem
from headrace.placement.worker.environment import Environment
from headrace.placement.worker.python_options import WorkerOptions

_HEADRACE = Path(__file__).parents[2]
_LARGEST_FILE = 1 << 30  # at least: tensors between the processes are in files, too
_USER = "parameters['worker_user']"


def confinement_of(
    spec: LoadSpec, options: WorkerOptions, environment: Environment
) -> Confinement | None:
    """The confinement of a model's processes; None for none. Raises `InvalidOption`."""
    given = spec.isolation or IsolationOptions()
    if not given.confines(spec.parameters):
        return None
    space = _least(options.scratch_bytes, given.scratch_bytes)
    limits = options.limits._replace(
        processes=_least(options.limits.processes, given.processes),
        file_bytes=max(space, _LARGEST_FILE),
    )
    own = spec.path if spec.single_file else spec.root
    return Confinement(
        _user(options.user, given),
        _sandboxed(options.sandboxed, given),
        (str(own.resolve()), *_programs(environment), *given.readable),
        given.writable,
        (str(spec.path), str(_HEADRACE / "workers" / "main.py")),
        limits,
        space,
    )


def _least(one: int, other: int) -> int:
    """The stricter of two limits, of which 0 is none."""
    return min(one, other) if one and other else one or other


def _user(asked: str, given: IsolationOptions) -> WorkerUser | None:
    if asked and given.users and asked not in given.users:
        named = ", ".join(given.users)
        raise InvalidOption(_USER, f"--worker-user allows {named}, got {asked!r}")
    name = asked or next(iter(given.users), "")
    if not name:
        return None
    try:
        user = WorkerUser.of(name)
    except ValueError as error:
        raise InvalidOption(_USER, str(error)) from None
    if problem := user.problem():
        raise InvalidOption(_USER, problem)
    return user


def _sandboxed(asked: bool, given: IsolationOptions) -> bool:
    problem = sandbox_problem() if asked or given.sandbox != "off" else ""
    if problem and (asked or given.sandbox == "required"):
        raise InvalidOption("parameters['worker_sandbox']", problem)
    return (asked or given.sandbox != "off") and not problem


def _programs(environment: Environment) -> tuple[str, ...]:
    """The directories of the worker's code, of its interpreter and of installed packages.

    An environment may lack numpy, and then has a link to the server's.
    """
    found = {
        str(_HEADRACE), sys.prefix, sys.base_prefix, environment.prefix, environment.base,
    }  # fmt: skip
    return tuple(sorted(path for path in found if path and os.path.realpath(path) != "/"))
