"""Durations of all answers, under the names and attributes of OpenTelemetry's conventions.

`http.server.request.duration` is that of the door HTTP, `rpc.server.call.duration` of all others.
Attributes that the server does not count by are left out: clients choose paths, so there is the
route of an operation with a single one. `headrace.identity` is the class of the client.
"""

from collections.abc import Iterator, Mapping
from functools import cache

from headrace.api.operations import OPERATIONS
from headrace.observability.statistics import (
    STATUS_NAMES,
    Answers,
    Buckets,
    Family,
    Histogram,
    LatencyBounds,
    Sourced,
    in_seconds,
)

_OTHER = "_OTHER"  # OpenTelemetry's value for what is not told
_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)

_Timed = tuple[Histogram, LatencyBounds]


def _read(source: _Timed) -> Buckets:
    histogram, bounds = source
    return in_seconds(histogram, bounds)


_HTTP: Family[_Timed] = Family(
    "http_server_request_duration_seconds", "histogram", _read,
    "Seconds from the first byte of a request to its answer",
)  # fmt: skip
_RPC: Family[_Timed] = Family(
    "rpc_server_call_duration_seconds", "histogram", _read,
    "Seconds from the first byte of a call to its answer",
)  # fmt: skip


def answer_families(answers: Answers) -> Iterator[Sourced]:
    """The families of all doors; durations of streams are those of each of their requests."""
    http: list[tuple[Mapping[str, str], _Timed]] = []
    rpc: list[tuple[Mapping[str, str], _Timed]] = []
    for door, operation, identity, status, histogram in answers.durations():
        method, route, procedure = _places(operation)
        own = {"headrace_operation": operation, "headrace_identity": identity}
        source = histogram, answers.bounds
        if door == "http":
            own |= {"http_request_method": method, "http_response_status_code": status}
            own |= {"http_route": route} if route else {}
            own |= {"error_type": status} if status >= "500" else {}
            http.append((own, source))
        else:
            by_grpc = status in STATUS_NAMES
            own |= {"rpc_system_name": "grpc" if by_grpc else door, "headrace_door": door}
            own |= {"rpc_method": procedure if door == "grpc" else _OTHER}
            own |= {"rpc_response_status_code": status}
            failed = status in _ERRORS if by_grpc else status >= "500"
            rpc.append((own | ({"error_type": status} if failed else {}), source))
    yield _HTTP, http
    yield _RPC, rpc


@cache
def _places(label: str) -> tuple[str, str, str]:
    """Method, route and procedure of the operations with a label: each if it is the only one."""
    found = [operation for operation in OPERATIONS if operation.counted == label]
    methods = {route.method for operation in found for route in operation.routes}
    routes = {route.path for operation in found for route in operation.routes}
    procedures = {operation.procedure for operation in found if operation.procedure}
    method = methods.pop() if len(methods) == 1 else _OTHER
    procedure = procedures.pop().removeprefix("/") if len(procedures) == 1 else _OTHER
    return method, routes.pop() if len(routes) == 1 else "", procedure
