"""Rules for traffic as JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidOption
from headrace.plugins.traffic.control import TrafficStage
from headrace.plugins.traffic.rules import (
    InvalidRules,
    RollbackRule,
    Shadow,
    Sticky,
    TrafficRules,
    parse_rules,
    read_rules,
)

SPLIT: dict[str, Any] = {"split": {"1": 90, "2": 10}}


@pytest.mark.parametrize(
    ("document", "rules"),
    [
        ({}, TrafficRules()),
        (SPLIT, TrafficRules({1: 90, 2: 10}, 1)),
        ({"split": {"10": 1, "9": 0.5}}, TrafficRules({9: 0.5, 10: 1}, 9)),
        ({"split": {"1": 0, "2": 1}}, TrafficRules({1: 0, 2: 1}, 2)),
        (SPLIT | {"baseline": 2}, TrafficRules({1: 90, 2: 10}, 2)),
        (
            SPLIT | {"sticky": {"header": "X-User"}},
            TrafficRules({1: 90, 2: 10}, 1, Sticky(header="x-user")),
        ),
        (
            SPLIT | {"sticky": {"parameter": "User"}},
            TrafficRules({1: 90, 2: 10}, 1, Sticky(parameter="User")),
        ),
        ({"shadow": "3"}, TrafficRules(shadow=Shadow(3))),
        ({"shadow": 3}, TrafficRules(shadow=Shadow(3))),
        (
            {"shadow": {"version": "3", "share": 0.5, "max_pending": 8}},
            TrafficRules(shadow=Shadow(3, 0.5, 8)),
        ),
        (
            SPLIT | {"rollback": {"max_error_rate": 0.01, "window_secs": 30}},
            TrafficRules(
                {1: 90, 2: 10}, 1, rollback=RollbackRule(max_error_rate=0.01, window_secs=30)
            ),
        ),
    ],
)
def test_rules(document: object, rules: TrafficRules) -> None:
    assert read_rules(document) == rules
    assert parse_rules(json.dumps(document)) == rules


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"split": {"1": NaN}}', "NaN is no number of JSON"),
        ('{"split": {"1": 1, "1": 2}}', "'1' is given twice"),
        ("[]", "must be a JSON object, got []"),
        ('{"splits": {}}', "unknown member 'splits', it may have split, baseline, sticky"),
        ('{"split": []}', "split: must be an object of weights by version"),
        ('{"split": {"one": 1}}', "split: must be the number of a version, got 'one'"),
        ('{"split": {"01": 1}}', "split: must be the number of a version, got '01'"),
        ('{"split": {"9223372036854775808": 1}}', "split: must be the number of a version"),
        ('{"split": {"1": -1}}', "split['1']: must be a number from 0 to 1e+09, got -1"),
        ('{"split": {"1": true}}', "split['1']: must be a number"),
        ('{"split": {"1": "90"}}', "split['1']: must be a number"),
        ('{"split": {"1": 1e400}}', "split['1']: must be a number"),
        ('{"split": {"1": 1' + "0" * 400 + "}}", "split['1']: must be a number"),
        ('{"split": {"1": 0, "2": 0}}', "split: at least one weight must be more than 0"),
        ('{"split": {"1": 1}, "baseline": "3"}', "baseline: must be a version of the split (1)"),
        ('{"baseline": "3"}', "baseline: must be a version of the split (none)"),
        ('{"split": {"1": 1}, "baseline": 1.5}', "baseline: must be the number of a version"),
        ('{"split": {"1": 1}, "sticky": {}}', "sticky: must have either 'header' or 'parameter'"),
        ('{"split": {"1": 1}, "sticky": {"cookie": "a"}}', "sticky: unknown member 'cookie'"),
        ('{"split": {"1": 1}, "sticky": {"header": "a b"}}', "sticky.header: must be the name"),
        ('{"split": {"1": 1}, "sticky": {"header": "a-bin"}}', "sticky.header: must be the name"),
        ('{"split": {"1": 1}, "sticky": {"parameter": 7}}', "sticky.parameter: must be a name"),
        ('{"sticky": {"header": "a"}}', "sticky: is about a split, and there is none"),
        ('{"rollback": {"max_error_rate": 1}}', "rollback: is about a split"),
        ('{"shadow": {}}', "shadow.version: is missing"),
        ('{"shadow": null}', "shadow: must be a JSON object, got None"),
        ('{"split": {"1": 1}, "shadow": "1"}', "shadow.version: 1 gets requests by the split"),
        ('{"shadow": {"version": 1, "share": 0}}', "shadow.share: must be more than 0"),
        ('{"shadow": {"version": 1, "share": 2}}', "shadow.share: must be a number from 0 to 1"),
        ('{"shadow": {"version": 1, "max_pending": 0}}', "shadow.max_pending: must be a whole"),
        ('{"split": {"1": 1}, "rollback": {}}', "rollback: must have at least one of max_error"),
        (
            '{"split": {"1": 1}, "rollback": {"max_error_rate": 5}}',
            "rollback.max_error_rate: must be a number from 0 to 1, got 5",
        ),
        (
            '{"split": {"1": 1}, "rollback": {"max_latency_ms": 1, "latency_quantile": 1}}',
            "rollback.latency_quantile: must be between 0 and 1",
        ),
        (
            '{"split": {"1": 1}, "rollback": {"max_latency_ms": 1, "min_requests": 1.5}}',
            "rollback.min_requests: must be a whole number",
        ),
    ],
)
def test_invalid_rules(text: str, problem: str) -> None:
    with pytest.raises(InvalidRules) as error:
        parse_rules(text)
    assert problem in str(error.value)
    assert len(str(error.value)) < 300


def test_too_many_versions() -> None:
    with pytest.raises(InvalidRules, match="at most 32 versions, got 33"):
        read_rules({"split": {str(n): 1 for n in range(1, 34)}})


def test_a_configuration_names_the_parameter() -> None:
    stage = TrafficStage()
    stage.check({})
    stage.check({"traffic": '{"split": {"1": 1}}'})
    with pytest.raises(InvalidOption, match="at least one weight") as error:
        stage.check({"traffic": '{"split": {"1": 0}}'})
    assert error.value.path == "parameters['traffic']"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
PIECES = st.fixed_dictionaries(
    {},
    optional={
        "split": st.dictionaries(st.sampled_from(["1", "2", "x"]), JSON) | JSON,
        "baseline": JSON,
        "sticky": st.dictionaries(st.sampled_from(["header", "parameter"]), JSON) | JSON,
        "shadow": st.dictionaries(st.sampled_from(["version", "share"]), JSON) | JSON,
        "rollback": st.dictionaries(st.sampled_from(["max_error_rate", "window_secs"]), JSON),
    },
)


@given(JSON | PIECES)
def test_any_document_is_rules_or_invalid(document: object) -> None:
    try:
        rules = read_rules(document)
    except InvalidRules:
        return
    assert all(weight >= 0 for weight in rules.split.values())


@given(st.text())
def test_any_text_is_rules_or_invalid(text: str) -> None:
    try:
        parse_rules(text)
    except InvalidRules:
        return
