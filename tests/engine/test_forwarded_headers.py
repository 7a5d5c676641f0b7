"""What doors that are elsewhere are told of models that other servers run."""

from types import SimpleNamespace
from typing import Any

from headrace.engine.engine import ForwardedHeaders

TENANT = SimpleNamespace(forwarded_headers=("x-tenant",))
PLAIN = SimpleNamespace(forwarded_headers=())


def test_a_model_that_is_not_in_memory_is_asked_with_the_same_headers() -> None:
    """Since that has it loaded again."""
    versions = [TENANT]
    model: Any = SimpleNamespace(name="m", ready_versions=lambda: versions)
    told: list[dict[str, object]] = []
    headers = ForwardedHeaders()
    headers.watch(lambda names: told.append(dict(names)))
    for ready in ([TENANT], [], [TENANT], [], [PLAIN], []):
        versions[:] = ready
        headers.follow(model)
    assert told == [{"m": ("x-tenant",)}, {}]
