"""The environment of a worker: the server's interpreter, or one provided by a plugin."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from headrace.core import plugins
from headrace.core.model_spec import LoadSpec


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter and, if it belongs to the model, the environment's directory.

    `hold` keeps a cached environment from being removed while this value exists.
    """

    python: str
    prefix: str = ""
    hold: object = None


Provide = Callable[[], Environment]  # blocks; raises `LoadFailed` or `InvalidOption`


@cache  # installed plugins do not change, and scanning takes time
def _providers() -> Mapping[str, Callable[[LoadSpec], Provide | None]]:
    return plugins.load(plugins.ENVIRONMENTS, lambda target: target)


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
