"""Parameters of requests: reserved ones, the model's, shared memory and times."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import MAX_PARAMETERS, Parameter, RegionSlice
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.protocol.parameters import (
    json_parameter,
    json_parameters,
    parse_grpc_timeout,
    shared_input,
    shared_output,
    split_parameters,
    timeout_of,
)
from tests.protocol.strategies import PROPERTY, any_text, refused

TRANSPORT = frozenset({"binary_data_output", "triton_of_this_transport"})
MAX = 2**64 - 1


def test_reserved_parameters() -> None:
    for name, value in (
        ("sequence_id", 0), ("sequence_id", MAX), ("sequence_id", "a sequence"), ("priority", 3),
        ("sequence_start", True), ("sequence_end", False), ("priority", MAX), ("timeout", 1_000),
    ):  # fmt: skip
        assert split_parameters({name: value}, TRANSPORT) == ({name: value}, {})
    given = {"binary_data_output": True, "triton_of_this_transport": True, "mine": 1, "priority": 2}
    assert split_parameters(given, TRANSPORT) == ({"priority": 2}, {"mine": 1})
    with refused("parameter keys starting with 'triton_' are reserved"):
        split_parameters({"triton_x": 1}, TRANSPORT)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("sequence_id", [True, -1, MAX + 1, 1.0], "an unsigned integer or a string"),
        ("sequence_start", [1], "a boolean"), ("sequence_end", ["true"], "a boolean"),
        ("priority", [-1, "1", True], "an unsigned integer"),
        ("timeout", [0.5, None, [1]], "an unsigned integer of microseconds"),
    ],
)  # fmt: skip
def test_reserved_parameters_of_a_wrong_type(name: str, values: list[Any], expected: str) -> None:
    for value in values:
        with refused(f"invalid value type for '{name}' parameter, expected {expected}"):
            split_parameters({name: value}, TRANSPORT)


def test_parameters_of_models() -> None:
    for value in ("text", "", 7, -(2**63), MAX, 0.5, float("inf"), True):
        assert split_parameters({"mine": value}, TRANSPORT) == ({}, {"mine": value})
    for wrong in (None, [], [1], {}, {"a": 1}):
        with refused("parameter 'mine' has invalid type"):
            split_parameters({"mine": wrong}, TRANSPORT)
    for large in (MAX + 1, -(2**63) - 1, 10**4000):
        with refused("parameter 'mine' does not fit into 64 bits"):
            split_parameters({"mine": large}, TRANSPORT)


def test_parameters_are_limited() -> None:
    given = {str(number): number for number in range(MAX_PARAMETERS)}
    assert len(split_parameters(given, frozenset())[1]) == MAX_PARAMETERS
    with refused(f"{MAX_PARAMETERS} parameters, got 1025"):
        split_parameters(given | {"more": 1}, frozenset())


scalars = st.none() | st.booleans() | st.integers() | st.floats() | any_text
names = any_text | st.sampled_from(["sequence_id", "sequence_start", "priority", "timeout"])


@PROPERTY
@given(st.dictionaries(names, scalars | st.lists(scalars, max_size=2), max_size=4))
def test_any_parameters_are_split_or_refused(given: dict[str, Any]) -> None:
    try:
        reserved, custom = split_parameters(given, TRANSPORT)
    except InvalidRequest:
        return
    assert reserved.keys() | custom.keys() == given.keys() - TRANSPORT


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), b"NaN"), (float("inf"), b"Infinity"), (float("-inf"), b"-Infinity"),
        (0.5, b"0.5"), (MAX, b"18446744073709551615"), (True, b"true"), ("null", b'"null"'),
    ],
)  # fmt: skip
def test_values_in_json(value: Parameter, text: bytes) -> None:
    assert json_parameter(value) == text
    whole = '{"null":"null","ä":'.encode() + text + b"}"
    assert json_parameters({"null": "null", "ä": value}) == whole
    assert json_parameters({"a": value}) == b'{"a":' + text + b"}"


# --- shared memory


def in_region(offset: Any = 0, size: Any = 8, region: Any = "r", **more: Any) -> dict[str, Any]:
    """Parameters of a tensor in shared memory."""
    place = {"shared_memory_offset": offset, "shared_memory_byte_size": size}
    return {"shared_memory_region": region} | place | more


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        (in_region(region=7), "'shared_memory_region' of input 'x' must be a region's name"),
        (in_region(region=""), "'shared_memory_region' of input 'x' must be a region's name"),
        (in_region(size=None), "has a 'shared_memory_region' and no 'shared_memory_byte_size'"),
        (in_region(size="8"), "'shared_memory_byte_size' of input 'x' must be a non-negative int"),
        (in_region(size=True), "'shared_memory_byte_size' of input 'x' must be a non-negative int"),
        (in_region(offset=1.0), "'shared_memory_offset' of input 'x' must be a non-negative int"),
        (in_region(-1), "Invalid offset for shared memory region: 'r'. Input 'x' asks for -1"),
        (in_region(2**63), "Invalid offset for shared memory region: 'r'."),
        (in_region(size=-8), "Invalid offset + byte size for shared memory region: 'r'."),
        (in_region(2**63 - 8, 8), "Invalid offset + byte size for shared memory region: 'r'."),
        (in_region(32, 2**64 - 32), "Integer overflow detected: byte_size (18446744073709551584) +"
         " offset (32) exceeds maximum value (18446744073709551615) for region 'r'"),
        (in_region(size=12), "input byte size mismatch for input 'x' for model 'm'. Expected 8,"),
    ],
)  # fmt: skip
def test_inputs_without_a_place_in_shared_memory(parameters: dict[str, Any], part: str) -> None:
    with refused(part):
        shared_input("x", Datatype.FP32, (2,), parameters, "m", "")


def test_inputs_that_do_not_fit_their_region() -> None:
    text = "expected 2 string elements for inference input 'x' for model 'm', got fewer: 7 bytes"
    with refused(text):
        shared_input("x", Datatype.BYTES, (2,), in_region(size=7), "m", "")
    with refused("causes total element count to exceed"):
        shared_input("x", Datatype.FP32, (2**40, 2**40), in_region(), "m", "")


def test_outputs_in_shared_memory() -> None:
    assert shared_output("y", in_region(None, 0)) == RegionSlice("r", 0, 0)
    with refused("output 'y': 'classification' can not be had in shared"):
        shared_output("y", in_region(classification=2))
    with refused("output 'y' has a 'shared_memory_region' and no"):
        shared_output("y", in_region(size=None))


# --- times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2H", 7200), ("3M", 180), ("4S", 4), ("50m", 0.05), ("60u", 6e-5), ("70n", 7e-8),
        ("0S", 0), ("277777H", 999_997_200), ("277778H", 1e9), ("99999999H", 1e9),
        ("", None), ("5", None), ("m", None), ("5ms", None), ("-5m", None), ("123456789m", None),
        ("5 m", None), ("\u0665m", None),
    ],
)  # fmt: skip
def test_timeout_of_the_grpc_timeout_header(text: str, seconds: float | None) -> None:
    assert parse_grpc_timeout(text) == seconds


GRPC, ENVOY = b"grpc-timeout", b"x-envoy-expected-rq-timeout-ms"


@pytest.mark.parametrize(
    ("headers", "microseconds"),
    [
        ({}, 0), ({GRPC: "50m"}, 50_000), ({GRPC: " 50m "}, 50_000),
        ({GRPC: "1n"}, 1), ({GRPC: "0S"}, 1),  # expired, but not unlimited
        ({ENVOY: "15000"}, 15_000_000), ({ENVOY: "0"}, 0),  # no timeout in Envoy
        ({GRPC: "50m", ENVOY: "0"}, 50_000), ({GRPC: "50m", ENVOY: "20"}, 20_000),
        ({GRPC: "50m", ENVOY: "80"}, 50_000),
    ],
)  # fmt: skip
def test_the_shortest_timeout_counts(headers: dict[bytes, str], microseconds: int) -> None:
    assert timeout_of(headers) == microseconds


@pytest.mark.parametrize("name", [GRPC, ENVOY])
def test_invalid_timeouts_are_refused(name: bytes) -> None:
    for text in ("", "soon", "1e3", "9" * 16):
        with refused(f"{name.decode()} must be"):
            timeout_of({name: text})
