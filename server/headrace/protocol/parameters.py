"""Parameters of requests and tensors, for JSON and protobuf alike once they are Python values.

Covers the parameters of infer requests (reserved names, and the rest, which models may read), those
that place a tensor in shared memory, and those of load and unload requests. The existence and size
of shared memory regions are not checked here.

Times appear in parameters and headers. A request's timeout has the form of `grpc-timeout`: a number
and a unit, such as `100m` for milliseconds. Gateways from HTTP to gRPC accept this header from HTTP
clients, too. Envoy sends its own timeout in milliseconds in a header.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from headrace.core.bytes_array import wrong_strings
from headrace.core.call import (
    MAX_PARAMETERS,
    MAX_TEXT,
    NO_OPTIONS,
    SHORT_TEXT,
    Call,
    CallOptions,
    InferResponse,
    Parameter,
    RegionSlice,
    Shared,
    SharedInput,
    Timing,
)
from headrace.core.datatypes import ITEM_SIZES, Datatype
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.model_spec import LoadParameters
from headrace.core.signature import quoted
from headrace.core.tensors import Buffer, byte_size_mismatch, element_count
from headrace.core.texts import shown

if TYPE_CHECKING:
    from headrace.protocol.pb import grpc_service_pb2 as pb

# Reserved parameters: the field of `Call`, and the accepted types.
_RESERVED: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "an unsigned integer or a string"),
    "sequence_start": ((bool,), "a boolean"),
    "sequence_end": ((bool,), "a boolean"),
    "priority": ((int,), "an unsigned integer"),
    "timeout": ((int,), "an unsigned integer of microseconds"),
}
_TRITONS = "triton_"
_MIN_SIGNED = -(2**63)
_MAX_UNSIGNED = 2**64 - 1


def split_parameters(
    given: dict[str, Any], also_reserved: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Parameter]]:
    """Split parameters into fields of `CallOptions` and those that models may read.

    Names in `also_reserved` belong to the transport and are left out. Raises `InvalidRequest` for a
    value of a wrong type, an integer beyond 64 bits, a text beyond `MAX_TEXT` and names that start
    with `triton_`.
    """
    if len(given) > MAX_PARAMETERS:
        raise too_many_parameters("a request", len(given))
    reserved: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    for name, value in given.items():
        if len(name) > SHORT_TEXT:
            check_text("the name of a parameter", name)
        if type(value) is str and len(value) > SHORT_TEXT:
            check_text(f"parameter {shown(name)}", value)
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
        elif name in also_reserved:
            continue
        elif name.startswith(_TRITONS):
            raise InvalidRequest(
                f"parameter keys starting with '{_TRITONS}' are reserved for Triton usage and"
                f" should not be specified, got '{name}'"
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


def call_options(
    reserved: Mapping[str, Any], classes: Mapping[str, int], shared: Shared | None = None
) -> CallOptions:
    """The options of a request with these `reserved` parameters, classes and shared memory."""
    if not (reserved or classes or shared):
        return NO_OPTIONS
    return CallOptions(classes=classes if shared else classes or None, shared=shared, **reserved)


def check_text(what: str, text: str) -> None:
    """Refuse an id, or a text among parameters, of more than `MAX_TEXT` bytes of UTF-8."""
    if len(text) > SHORT_TEXT:
        size = len(text) if len(text) > MAX_TEXT else len(text.encode(errors="replace"))
        if size > MAX_TEXT:
            raise too_long(what, size)


def too_long(what: str, size: int) -> InvalidRequest:
    """The error of an id, or a text among parameters, of more than `MAX_TEXT` bytes."""
    return InvalidRequest(f"{what} may have {MAX_TEXT} bytes, got {size}")


def is_reserved(name: str) -> bool:
    """True for parameters that models must not read."""
    return name in _RESERVED or name.startswith(_TRITONS)


def too_many_parameters(what: str, count: int) -> InvalidRequest:
    """The error of `what` with more parameters than allowed."""
    return InvalidRequest(f"{what} may have {MAX_PARAMETERS} parameters, got {count}")


def json_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """Parameters as a JSON object."""
    text = orjson.dumps(parameters)
    if b"null" not in text:
        return text
    members = (orjson.dumps(name) + b":" + json_parameter(v) for name, v in parameters.items())
    return b"{%b}" % b",".join(members)


def json_parameter(value: Parameter) -> bytes:
    """One parameter's value; NaN and infinities are bare words, as in tensors."""
    text = orjson.dumps(value)
    # orjson writes them as null. Nothing else becomes null, since no parameter is None.
    return text if text != b"null" else json.dumps(value).encode()


REGION = "shared_memory_region"
_OFFSET, _SIZE = "shared_memory_offset", "shared_memory_byte_size"
PARAMETERS = (REGION, _OFFSET, _SIZE)
_MOST, _MOST_UNSIGNED = 2**63 - 1, 2**64 - 1


def region_parameters(place: RegionSlice) -> dict[str, Parameter]:
    """The parameters of a tensor at this place in shared memory."""
    return {REGION: place.region, _OFFSET: place.offset, _SIZE: place.byte_size}


def read_region_slice(what: str, parameters: Mapping[str, Any]) -> RegionSlice:
    """Read a tensor's place in shared memory; `what` names the tensor in messages.

    Raises `InvalidRequest`.
    """
    region = parameters[REGION]
    if type(region) is not str or not region:
        raise InvalidRequest(f"'{REGION}' of {what} must be a region's name")
    offset, size = parameters.get(_OFFSET), parameters.get(_SIZE)
    if offset is None:
        offset = 0
    if size is None:
        raise InvalidRequest(f"{what} has a '{REGION}' and no '{_SIZE}'")
    for name, value in ((_OFFSET, offset), (_SIZE, size)):
        if type(value) is not int:  # excludes bool
            raise InvalidRequest(f"'{name}' of {what} must be a non-negative integer")
    if not 0 <= offset <= _MOST:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{region}'."
            f" {what[:1].upper()}{what[1:]} asks for {offset}"
        )
    if size + offset > _MOST_UNSIGNED:
        raise InvalidRequest(
            f"Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds maximum"
            f" value ({_MOST_UNSIGNED}) for region '{region}'"
        )
    if not 0 <= size <= _MOST - offset:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{region}'."
            f" {what[:1].upper()}{what[1:]} asks for {offset} + {size}"
        )
    return RegionSlice(region, offset, size)


def shared_input(
    name: str,
    datatype: Datatype,
    shape: Sequence[int],
    parameters: Mapping[str, Any],
    model: str,
    request_id: str,
) -> SharedInput:
    """An input in shared memory, whose size must match its shape.

    Raises `InvalidRequest`.
    """
    place = read_region_slice(f"input '{name}'", parameters)
    count = element_count(name, shape)
    if datatype is Datatype.BYTES:
        if count * 4 > place.byte_size:
            text = (
                f"expected {count} string elements {{}}, got fewer: {place.byte_size} bytes cannot"
                f" hold {count} length indicators"
            )
            raise wrong_strings(text, name, model, request_id)
    elif place.byte_size != count * ITEM_SIZES[datatype]:
        raise byte_size_mismatch(name, datatype, shape, place.byte_size, model, request_id)
    return SharedInput(datatype, tuple(shape), place)


def shared_output(name: str, parameters: Mapping[str, Any]) -> RegionSlice:
    """The place of an output in shared memory; raises `InvalidRequest`."""
    if parameters.get("classification", 0) != 0:
        raise InvalidRequest(
            f"output '{name}': 'classification' can not be had in shared memory,"
            f" set it or '{REGION}'"
        )
    return read_region_slice(f"output '{name}'", parameters)


CONFIG = "config"
FILE = "file:"
PARAMETERS_MEMBER = "parameters"
_DEPENDENTS = "unload_dependents"
_SHOWN = 60  # characters of an unknown member
_MESSAGES: TypeAlias = "Mapping[str, pb.ModelRepositoryParameter]"


def load_parameters_of_message(parameters: _MESSAGES) -> LoadParameters:
    """Parse the parameters of a `RepositoryModelLoad`; raises `InvalidRequest`."""
    config: str | None = None
    files: dict[str, Buffer] = {}
    for name, value in parameters.items():
        if name == CONFIG:
            config = _value(name, value, "string_param")
        elif name.startswith(FILE):
            files[name.removeprefix(FILE)] = _value(name, value, "bytes_param")
        else:
            raise unknown_load(name)
    return LoadParameters(config, files)


def unload_dependents_of_json(document: Mapping[str, Any]) -> bool:
    """Parse `unload_dependents` of a JSON body; raises `InvalidRequest`."""
    value = parameters_of(document).get(_DEPENDENTS, False)
    if type(value) is not bool:
        raise InvalidRequest(f"Invalid value for '{_DEPENDENTS}': expected a boolean")
    return value


def unload_dependents_of_message(parameters: _MESSAGES) -> bool:
    """Parse `unload_dependents` of a `RepositoryModelUnload`; raises `InvalidRequest`."""
    if _DEPENDENTS not in parameters:
        return False
    return bool(_value(_DEPENDENTS, parameters[_DEPENDENTS], "bool_param"))


def check_members(document: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse the members of a request that it cannot have; raises `InvalidRequest`."""
    for name in document:
        if name not in known:
            near = difflib.get_close_matches(name[:_SHOWN].casefold(), known, 1)
            raise InvalidRequest(
                f"unknown member '{name[:_SHOWN]}'"
                + (f"; did you mean '{near[0]}'?" if near else f", expected {quoted(known)}")
            )


def parameters_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a load or unload request; raises `InvalidRequest`."""
    found = document.get(PARAMETERS_MEMBER)
    if found is None:
        return {}
    if type(found) is not dict:
        raise InvalidRequest("Invalid value for 'parameters': expected an object")
    return found


def _value(name: str, value: "pb.ModelRepositoryParameter", expected: str) -> Any:
    if value.WhichOneof("parameter_choice") != expected:
        raise InvalidRequest(
            f"invalid value type for '{name[:80]}' parameter, expected {expected}."
        )
    return getattr(value, expected)


def unknown_load(name: str) -> InvalidRequest:
    """The error of a load request with a parameter of this name."""
    return InvalidRequest(
        f"unrecognized load parameter '{name[:80]}'; expected 'config' or 'file:PATH'"
    )


TIMING = "server-timing"  # a gRPC trailer
# Its value, in every answer: nanoseconds queued and executing, and rows. `dur` is in milliseconds
# as over HTTP, but whole numbers take half the time to format.
EXACT_TIMING = b'queue;dur=%de-6, compute;dur=%de-6, batch;desc="%d"'
TIMING_PARAMETER = (
    "headrace_timing"  # a request parameter: answer with timings among the parameters
)
# A request parameter of this server's own client: the model's other outputs are requested, too. The
# named ones are then those that have places in shared memory, as far as the model still has them.
ALL_OUTPUTS = "headrace_all_outputs"
GRPC_TIMEOUT = b"grpc-timeout"
ENVOY_TIMEOUT = b"x-envoy-expected-rq-timeout-ms"
_GRPC_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_NANOSECONDS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
_LONGEST_SECS = 1e9  # 31 years; 11 000 can be written, too many for 64 bits of nanoseconds
_MILLISECONDS = re.compile(r"[0-9]{1,15}")


def parse_grpc_timeout(text: str) -> float | None:
    """The seconds of a `grpc-timeout`, at most `_LONGEST_SECS`; None if it is malformed."""
    match = _GRPC_TIMEOUT.fullmatch(text)
    if match is None:
        return None
    return min(int(match[1]) * _NANOSECONDS[match[2]] / 1e9, _LONGEST_SECS)


def timeout_of(headers: Mapping[bytes, str]) -> int:
    """The timeout in the headers of an HTTP request, in microseconds, at least 1; 0: none.

    `headers` has lower-case names. Raises `InvalidRequest`.
    """
    found: list[float] = []
    if (text := headers.get(GRPC_TIMEOUT)) is not None:
        seconds = parse_grpc_timeout(text.strip())
        if seconds is None:
            raise InvalidRequest(
                "grpc-timeout must be up to 8 digits and a unit of H, M, S, m (milliseconds), u or"
                f" n, got {text[:40]!r}"
            )
        found.append(seconds * 1e6)
    if (text := headers.get(ENVOY_TIMEOUT)) is not None:
        if _MILLISECONDS.fullmatch(text.strip()) is None:
            raise InvalidRequest(
                f"{ENVOY_TIMEOUT.decode()} must be a number of milliseconds, got {text[:40]!r}"
            )
        # Envoy sends 0 for no timeout.
        found += [milliseconds * 1e3] if (milliseconds := int(text)) else []
    return max(int(min(found)), 1) if found else 0


def wants_timing(request: Call) -> bool:
    """Remove the parameter that requests timings, which is not the model's; True if present."""
    return bool(request.parameters) and request.parameters.pop(TIMING_PARAMETER, False) is True


def add_timing(response: InferResponse) -> None:
    """Add the timings, in microseconds, to the response's parameters."""
    timing = response.timing
    response.parameters |= {
        "queue_us": timing.queue_ns // 1_000,
        "compute_us": timing.compute_ns // 1_000,
        "batch_rows": timing.batch_rows,
    }


def server_timing(timing: Timing) -> bytes:
    """The value of a `Server-Timing` header: milliseconds, and the rows of the batch."""
    return b'queue;dur=%.3f, compute;dur=%.3f, batch;desc="%d"' % (
        timing.queue_ns / 1e6,
        timing.compute_ns / 1e6,
        timing.batch_rows,
    )


def exact_timing(timing: Timing) -> bytes:
    """The value of `EXACT_TIMING` for a request."""
    return EXACT_TIMING % (timing.queue_ns, timing.compute_ns, timing.batch_rows)


def time_of(error: ServerError) -> Timing:
    """The times of a failed request; zeros if it was never queued."""
    return Timing(*(error.spent or (0, 0, 0)))
