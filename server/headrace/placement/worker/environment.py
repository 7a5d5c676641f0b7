"""The environment that a worker runs in: the server's interpreter, or what a plugin provides."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from headrace.core import plugins
from headrace.core.model_spec import LoadSpec


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter and, if it is the model's own, the directory it is in.

    `hold` keeps a cached one from being removed while this value is there.
    """

    python: str
    prefix: str = ""
    hold: object = None


Provide = Callable[[], Environment]  # blocks; raises `LoadFailed` or `InvalidOption`


@cache  # what is installed stays while a process runs, and looking for it takes time
def _providers() -> Mapping[str, Callable[[LoadSpec], Provide | None]]:
    return plugins.load(plugins.ENVIRONMENTS, lambda target: target)


def demanded(spec: LoadSpec) -> Provide | None:
    """The function that provides a model's own environment; None if it asks for none.

    Raises `InvalidOption` or `LoadFailed` for what cannot be followed.
    """
    found = (demand(spec) for demand in _providers().values())
    return next((provide for provide in found if provide is not None), None)


def environment_of(spec: LoadSpec) -> Environment:
    """The environment that a model asks for; the server's interpreter if it asks for none.

    Blocks for as long as a build takes. Raises `LoadFailed` or `InvalidOption` if it cannot be had.
    """
    provide = demanded(spec)
    return provide() if provide else Environment(spec.parameters.get("python") or sys.executable)
