"""The engine's look-up of model names and versions."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.engine.engine import WantedHeaders
from headrace.engine.model import parse_version


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), ("0", 0), ("007", 7), (str(2**63 - 1), 2**63 - 1)]
)
def test_a_version_is_a_number(text: str, number: int) -> None:
    assert parse_version(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "", "abc", "-1", "1.0", " 1", "1_0", "\u00b2", "\u0661", str(2**63), "0" * 19 + "1",
        "9" * 5_000,
    ],
)  # fmt: skip
def test_other_versions_are_refused_and_quoted_in_part(text: str) -> None:
    with pytest.raises(InvalidRequest, match="should be an integral value > 0") as caught:
        parse_version(text)
    assert f"version string '{text[:40]}'" in str(caught.value)


TENANT = SimpleNamespace(chain=SimpleNamespace(forwarded_headers=("x-tenant",)))
PLAIN = SimpleNamespace(chain=SimpleNamespace(forwarded_headers=()))


def test_an_unloaded_model_keeps_its_forwarded_headers() -> None:
    """A request with them loads the model again."""
    versions = [TENANT]
    model: Any = SimpleNamespace(name="m", ready_versions=lambda: versions)
    told: list[dict[str, object]] = []
    headers = WantedHeaders()
    headers.watch(lambda names: told.append(dict(names)))
    for ready in ([TENANT], [], [TENANT], [], [PLAIN], []):
        versions[:] = ready
        headers.forward(model)
    assert told == [{}, {"forwarded": {"m": ("x-tenant",)}}, {"forwarded": {}}]
