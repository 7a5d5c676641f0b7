"""The engine's look-up of model names and versions."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.model_spec import Used
from headrace.engine.engine import WantedHeaders
from headrace.engine.model import Model, parse_version


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


def version(*headers: str, uses: Collection[Used] = ()) -> SimpleNamespace:
    return SimpleNamespace(chain=SimpleNamespace(forwarded_headers=headers, uses=uses))


TENANT, PLAIN = version("x-tenant"), version()


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


def test_an_ensemble_wants_the_headers_of_the_models_that_it_runs() -> None:
    headers = WantedHeaders()
    known: dict[str, object] = {}
    headers.watch(known.update)
    inner = version(uses=[("remote", ""), ("routed", "")])
    for name, one in (
        ("outer", version(uses=[("inner", ""), ("pinned", "2")])), ("inner", inner),
        ("remote", TENANT), ("plain", PLAIN),
    ):  # fmt: skip
        headers.forward(cast("Model", SimpleNamespace(name=name, ready_versions=lambda o=one: [o])))
    tenant = ("x-tenant",)
    assert known["forwarded"] == {"outer": tenant, "inner": tenant, "remote": tenant}
    # A version that a step names is not chosen by rules.
    headers.put("routed", {"routed": "x-user", "pinned": "x-other"})
    both = ("x-tenant", "x-user")
    assert known["forwarded"] == {"outer": both, "inner": both, "remote": tenant}
    assert (headers.of("outer"), headers.of("plain")) == (both, ())


def test_models_that_have_run_each_other_at_different_times() -> None:
    headers = WantedHeaders()
    for name, used in (("a", "b"), ("b", "a"), ("a", "b")):
        uses = version(uses=[(used, "")])
        model: Any = SimpleNamespace(name=name, ready_versions=lambda one=uses: [one])
        headers.forward(model)
    assert headers.of("a") == ()
