"""Restrictions and header patterns as values."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.api.header_rules import HeaderPattern, HeaderRules, Key
from headrace.api.operations import Category
from headrace.core.errors import InvalidRequest


@pytest.mark.parametrize(("pattern", "name", "forwarded"), [
    ("tenant", "x-tenant-id", True), ("tenant", "X-TENANT-ID", True),
    ("X-Tenant", "x-tenant", True), ("(?-i)X-Tenant", "x-tenant", False),
    ("(?-i)X-Tenant", "X-Tenant-Id", True), ("^tenant$", "x-tenant", False), ("a|b", "c", False),
    ("a|b", "cab", True), ("x", "x" * 256, True), ("x", "x" * 257, False),
])  # fmt: skip
def test_matching_names(pattern: str, name: str, forwarded: bool) -> None:
    rules = HeaderPattern(pattern)
    for _ in range(2):  # the second time it is remembered
        assert rules.parameters([(name, "v")]) == ({name: "v"} if forwarded else {})


def test_values_of_one_name_are_joined() -> None:
    given = [("x-a", "1"), ("y", "2"), ("x-a", "3")]
    assert HeaderPattern("x-").parameters(given) == {"x-a": "1, 3"}


@pytest.mark.parametrize(
    "name",
    [
        "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "Timeout",
        "headers", "binary_data_output", "triton_anything", "TRITON_grpc_error",
    ],
)  # fmt: skip
def test_reserved_names_are_refused_where_they_match(name: str) -> None:
    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded"
    with pytest.raises(InvalidRequest, match=text):
        HeaderPattern(".*").parameters([("x", "1"), (name, "v")])
    assert HeaderPattern("^x$").parameters([("x", "1"), (name, "v")]) == {"x": "1"}


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<a", "a{2,1}", "(?-i)("])
def test_invalid_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        HeaderRules(pattern).pattern()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Python's, of patterns such as this example
@example("[[")
@given(st.text(max_size=20))
def test_any_text_is_a_pattern_or_is_refused(pattern: str) -> None:
    try:
        found = HeaderPattern(pattern)
    except ValueError:
        return
    found.parameters([("x-some", "value")])


def test_more_names_than_the_cache_holds() -> None:
    pattern = HeaderPattern("7$")
    names = [(f"n{number}", "") for number in range(3_000)]
    for _ in range(2):
        assert len(pattern.parameters(names)) == 300


# --- restrictions


def test_rules() -> None:
    keys = HeaderRules(restricted=["health, model-config:X-Key=a=b:c", "trace:t=u"]).keys()
    assert keys == {
        Category.HEALTH: Key("x-key", "a=b:c"),
        Category.MODEL_CONFIG: Key("x-key", "a=b:c"),
        Category.TRACE: Key("t", "u"),
    }
    rules = HeaderRules(restricted=["health:K=v"], prefix="p-", restricted_at_both=["trace:K=v"])
    assert rules.keys() == {Category.HEALTH: Key("p-k", "v"), Category.TRACE: Key("k", "v")}


def test_a_category_is_in_one_rule_of_a_door() -> None:
    with pytest.raises(ValueError, match="health is restricted twice"):
        HeaderRules(restricted=["health:k=v"], restricted_at_both=["health:k=v"]).keys()


@pytest.mark.parametrize("name", ["grpc-key", "Key-Bin", "TE", "host", "content-type", "a+b"])
def test_names_invalid_in_metadata(name: str) -> None:
    assert HeaderRules(restricted=[f"health:{name}=v"]).keys()
    with pytest.raises(ValueError, match=re.escape(f"'{name}' cannot be the name of a gRPC call")):
        HeaderRules(restricted_at_both=[f"health:{name}=v"]).keys()


@pytest.mark.parametrize(("rules", "text"), [
    (["health"], "expected CATEGORIES:HEADER=VALUE"),
    (["health:key"], "expected CATEGORIES:HEADER=VALUE"),
    (["health:key="], "expected CATEGORIES:HEADER=VALUE"),
    (["health:=value"], "expected CATEGORIES:HEADER=VALUE"),
    (["health:a key=value"], "expected CATEGORIES:HEADER=VALUE"),
    ([":key=value"], "unknown category ''"), (["health,:key=value"], "unknown category ''"),
    (["everything:key=value"], "unknown category 'everything', expected some of health, "),
    (["health,health:key=value"], "health is restricted twice"),
    (["health:key=value", "trace,health:other=value"], "health is restricted twice"),
])  # fmt: skip
def test_invalid_rules(rules: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        HeaderRules(restricted=rules).keys()
    assert "value'" not in str(caught.value)  # which is a secret


def test_a_key_takes_its_value_alone() -> None:
    key = Key("x", "gehëim")
    assert key.opens(["gehëim".encode()])
    for wrong in ([], [b""], [b"geh"], ["gehëim ".encode()], ["gehëim".encode()] * 2, [b"\xff"]):
        assert not key.opens(wrong)


@given(st.lists(st.text(max_size=30), max_size=3))
def test_any_texts_are_rules_or_are_refused(texts: list[str]) -> None:
    try:
        keys = HeaderRules(restricted=texts).keys()
    except ValueError:
        return
    assert len(keys) >= len(texts)
