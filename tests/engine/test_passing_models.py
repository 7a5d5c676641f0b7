"""What doors that are elsewhere are told of models that other servers run."""

from types import SimpleNamespace
from typing import Any

from headrace.core.requests import Passes
from headrace.engine.passing_models import PassingModels

TENANT = SimpleNamespace(forwarded_headers=("x-tenant",), passes=Passes.HTTP)
PLAIN = SimpleNamespace(forwarded_headers=(), passes=Passes.NONE)


def test_a_model_that_is_not_in_memory_is_asked_with_the_same_headers() -> None:
    """Since that has it loaded again; until then nobody knows whether it passes requests on."""
    versions = [TENANT]
    model: Any = SimpleNamespace(name="m", router=None, ready_versions=lambda: versions)
    told: list[tuple[dict[str, object], dict[str, str]]] = []
    models = PassingModels()
    models.watch(lambda headers, passes: told.append((dict(headers), dict(passes))))
    for ready in ([TENANT], [], [TENANT], [], [PLAIN], []):
        versions[:] = ready
        models.follow(model)
    known: dict[str, object] = {"m": ("x-tenant",)}
    assert told == [
        (known, {"m": "http"}),
        (known, {}),
        (known, {"m": "http"}),
        (known, {}),
        ({}, {}),
    ]
