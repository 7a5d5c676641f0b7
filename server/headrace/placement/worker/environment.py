"""The environment of a worker: the server's interpreter, or one provided by a plugin."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.plugins import PluginGroup


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter and, if it belongs to the model, the environment's directory.

    `hold` keeps a cached environment from being removed while this value exists. `base` is the
    directory of the interpreter that it was made from.
    """

    python: str
    prefix: str = ""
    hold: object = None
    base: str = ""


Provide = Callable[[], Environment]  # blocks; raises `LoadFailed` or `InvalidOption`
Demand = Callable[[LoadSpec], Provide | None]
ENVIRONMENTS: PluginGroup[Demand] = PluginGroup("headrace.environments")


@cache  # installed plugins do not change, and scanning takes time
def _providers() -> Mapping[str, Demand]:
    return ENVIRONMENTS.load(lambda demand: demand) or {"": _none}


def _none(spec: LoadSpec) -> None:
    """Without a plugin, raise `LoadFailed` for a model that asks for an environment."""
    files = () if spec.single_file else (spec.path.parent, spec.root)
    asked = any((folder / "requirements.txt").exists() for folder in files)
    if asked or "EXECUTION_ENV_PATH" in spec.parameters:
        raise LoadFailed("this server was installed without its environments of models")


def demanded(spec: LoadSpec) -> Provide | None:
    """The function that provides a model's own environment; None if it needs none.

    Raises `InvalidOption` or `LoadFailed` for invalid requirements.
    """
    found = (demand(spec) for demand in _providers().values())
    return next((provide for provide in found if provide is not None), None)


def environment_of(spec: LoadSpec) -> Environment:
    """The environment for a model; the server's interpreter by default.

    Blocks during a build. Raises `LoadFailed` or `InvalidOption`.
    """
    provide = demanded(spec)
    return provide() if provide else Environment(spec.parameters.get("python") or sys.executable)
