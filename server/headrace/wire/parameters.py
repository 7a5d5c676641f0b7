"""The reserved request parameters, the same for JSON and protobuf once they are Python values."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.core.errors import InvalidRequest
from headrace.core.parameter_names import DEADLINE_PARAMETER, FORWARD_PARAMETER, HEADER_PARAMETER
from headrace.core.requests import MAX_PARAMETERS, Parameter
from headrace.core.texts import shown
from headrace.core.trace_context import TRACE_PARAMETER

# What Call calls each reserved parameter, and what it takes.
_RESERVED: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "an unsigned integer or a string"),
    "sequence_start": ((bool,), "a boolean"),
    "sequence_end": ((bool,), "a boolean"),
    "priority": ((int,), "an unsigned integer"),
    "timeout": ((int,), "an unsigned integer of microseconds"),
}
# By these the server tells itself of a request.
_OURS = frozenset({TRACE_PARAMETER, DEADLINE_PARAMETER})
_PREFIXES = (HEADER_PARAMETER, FORWARD_PARAMETER)
_TRITONS = "triton_"
_MIN_SIGNED = -(2**63)
_MAX_UNSIGNED = 2**64 - 1


def split_parameters(
    given: dict[str, Any], also_reserved: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Parameter]]:
    """Reserved parameters as arguments of `Call`, and the rest, which models may read.

    Names in `also_reserved` belong to the transport and are left out, as are those by which the
    server itself tells of traces, headers and deadlines. Raises `InvalidRequest` for a value of a
    wrong type, an integer beyond 64 bits and names that start with `triton_`.
    """
    if len(given) > MAX_PARAMETERS:
        raise too_many_parameters("a request", len(given))
    reserved: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    for name, value in given.items():
        if name in _RESERVED:
            types, expected = _RESERVED[name]
            wrong = type(value) not in types or (
                type(value) is int and not 0 <= value <= _MAX_UNSIGNED
            )
            if wrong:
                raise InvalidRequest(
                    f"invalid value type for '{name}' parameter, expected {expected},"
                    f" got {shown(value)}"
                )
            reserved[name] = value
        elif name in also_reserved or name in _OURS or name.startswith(_PREFIXES):
            continue
        elif name.startswith(_TRITONS):
            raise InvalidRequest(
                f"parameter keys starting with '{_TRITONS}' are reserved, got '{name}'"
            )
        elif type(value) is int and not _MIN_SIGNED <= value <= _MAX_UNSIGNED:
            raise InvalidRequest(f"parameter '{name}' does not fit into 64 bits")
        elif type(value) in (str, int, float, bool):
            custom[name] = value
        else:
            raise InvalidRequest(
                f"parameter '{name}' has invalid type."
                " It should be either 'int', 'double', 'bool', or 'string'."
            )
    return reserved, custom


def is_reserved(name: str) -> bool:
    """Whether a parameter of this name is not for the model to read."""
    return name in _RESERVED or name in _OURS or name.startswith((*_PREFIXES, _TRITONS))


def too_many_parameters(what: str, count: int) -> InvalidRequest:
    """The error of `what` with more parameters than it may have."""
    return InvalidRequest(f"{what} may have {MAX_PARAMETERS} parameters, got {count}")


def json_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """Parameters as a JSON object."""
    text = orjson.dumps(parameters)
    if b"null" not in text:
        return text
    members = (orjson.dumps(name) + b":" + json_parameter(v) for name, v in parameters.items())
    return b"{%b}" % b",".join(members)


def json_parameter(value: Parameter) -> bytes:
    """The value of one; NaN and infinities are the bare words, as in tensors."""
    text = orjson.dumps(value)
    # What orjson writes for them. Nothing else becomes that, since no parameter is None.
    return text if text != b"null" else json.dumps(value).encode()
