"""Which request parameters the protocol reserves, and which reach the model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import MAX_PARAMETERS, Parameter
from headrace.core.errors import InvalidRequest
from headrace.protocol.parameters import json_parameter, json_parameters, split_parameters
from tests.protocol.strategies import PROPERTY, any_text

TRANSPORT = frozenset({"binary_data_output", "triton_of_this_transport"})
MAX = 2**64 - 1


@pytest.mark.parametrize(("name", "value"), [
    ("sequence_id", 0), ("sequence_id", MAX), ("sequence_id", "a sequence"),
    ("sequence_start", True), ("sequence_end", False), ("priority", 3), ("priority", MAX),
    ("timeout", 1_000_000),
])  # fmt: skip
def test_reserved(name: str, value: int | str | bool) -> None:
    assert split_parameters({name: value}, TRANSPORT) == ({name: value}, {})


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("sequence_id", True, "an unsigned integer or a string"),
    ("sequence_id", -1, "an unsigned integer or a string"),
    ("sequence_id", MAX + 1, "an unsigned integer or a string"),
    ("sequence_id", 1.0, "an unsigned integer or a string"), ("sequence_start", 1, "a boolean"),
    ("sequence_end", "true", "a boolean"), ("priority", -1, "an unsigned integer"),
    ("priority", "1", "an unsigned integer"), ("priority", True, "an unsigned integer"),
    ("timeout", 0.5, "an unsigned integer of microseconds"),
    ("timeout", None, "an unsigned integer of microseconds"),
    ("timeout", [1], "an unsigned integer of microseconds"),
])  # fmt: skip
def test_reserved_with_a_wrong_value(name: str, value: Any, expected: str) -> None:
    text = f"invalid value type for '{name}' parameter, expected {expected}"
    with pytest.raises(InvalidRequest, match=text):
        split_parameters({name: value}, TRANSPORT)


@pytest.mark.parametrize("name", ["headrace_trace", "headrace_header:x-user"])
def test_what_the_server_alone_says_is_left_out(name: str) -> None:
    assert split_parameters({name: "7", "mine": 1}, TRANSPORT) == ({}, {"mine": 1})


@pytest.mark.parametrize("value", ["text", "", 7, -(2**63), MAX, 0.5, float("inf"), True])
def test_others_are_the_models(value: str | int | float | bool) -> None:
    assert split_parameters({"mine": value}, TRANSPORT) == ({}, {"mine": value})


@pytest.mark.parametrize("value", [None, [], [1], {}, {"a": 1}])
def test_models_get_only_scalars(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'mine' has invalid type"):
        split_parameters({"mine": value}, TRANSPORT)


@pytest.mark.parametrize("value", [MAX + 1, -(2**63) - 1, 10**4000])
def test_models_get_no_integers_beyond_64_bits(value: int) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'mine' does not fit into 64 bits"):
        split_parameters({"mine": value}, TRANSPORT)


def test_the_prefix_is_reserved() -> None:
    with pytest.raises(InvalidRequest, match="parameter keys starting with 'triton_' are reserved"):
        split_parameters({"triton_x": 1}, TRANSPORT)


def test_the_transports_own_are_left_out() -> None:
    given = {"binary_data_output": True, "triton_of_this_transport": True, "mine": 1, "priority": 2}
    assert split_parameters(given, TRANSPORT) == ({"priority": 2}, {"mine": 1})


scalars = st.none() | st.booleans() | st.integers() | st.floats() | any_text
names = any_text | st.sampled_from(["sequence_id", "sequence_start", "priority", "timeout"])


@PROPERTY
@given(st.dictionaries(names, scalars | st.lists(scalars, max_size=2), max_size=4))
def test_whatever_is_given_is_split_or_refused(given: dict[str, Any]) -> None:
    try:
        reserved, custom = split_parameters(given, TRANSPORT)
    except InvalidRequest:
        return
    assert reserved.keys() | custom.keys() == given.keys() - TRANSPORT


@pytest.mark.parametrize(("value", "text"), [
    (float("nan"), b"NaN"), (float("inf"), b"Infinity"), (float("-inf"), b"-Infinity"),
    (0.5, b"0.5"), (MAX, b"18446744073709551615"), (True, b"true"), ("null", b'"null"'),
])  # fmt: skip
def test_values_in_json(value: Parameter, text: bytes) -> None:
    assert json_parameter(value) == text
    assert (
        json_parameters({"null": "null", "ä": value})
        == '{"null":"null","ä":'.encode() + text + b"}"
    )
    assert json_parameters({"a": value}) == b'{"a":' + text + b"}"


def test_parameters_are_limited() -> None:
    given = {str(number): number for number in range(MAX_PARAMETERS)}
    assert len(split_parameters(given, frozenset())[1]) == MAX_PARAMETERS
    with pytest.raises(InvalidRequest, match=f"{MAX_PARAMETERS} parameters, got 1025"):
        split_parameters(given | {"more": 1}, frozenset())
