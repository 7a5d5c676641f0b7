"""Times in headers and parameters: how long a request may take, and where its time went.

What a request may take comes as gRPC writes it, in `grpc-timeout`: a number and a unit, such as
`100m` for milliseconds. Gateways that turn HTTP into gRPC take that header of HTTP clients, too.
Envoy tells in a header of its own after how many milliseconds it will give a request up.
"""

import re
from collections.abc import Mapping

from headrace.core.call import Call, InferResponse, Timing
from headrace.core.errors import InvalidRequest, ServerError

TIMING = "server-timing"  # a trailer of gRPC
# Its value, in every answer: nanoseconds in the queue and in execution, and rows. `dur` is in
# milliseconds as over HTTP, but whole numbers take half as long.
EXACT_TIMING = b'queue;dur=%de-6, compute;dur=%de-6, batch;desc="%d"'
TIMING_PARAMETER = (
    "headrace_timing"  # a request parameter: answer with timings among the parameters
)
GRPC_TIMEOUT = b"grpc-timeout"
ENVOY_TIMEOUT = b"x-envoy-expected-rq-timeout-ms"
_GRPC_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_NANOSECONDS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
_MILLISECONDS = re.compile(r"[0-9]{1,15}")


def parse_grpc_timeout(text: str) -> float | None:
    """The seconds of a `grpc-timeout`; None if it is none."""
    match = _GRPC_TIMEOUT.fullmatch(text)
    return None if match is None else int(match[1]) * _NANOSECONDS[match[2]] / 1e9


def timeout_of(headers: Mapping[bytes, str]) -> int:
    """Microseconds that a request over HTTP may wait by its headers, at least 1; 0: no limit.

    `headers` has names in lower case. Raises `InvalidRequest`.
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
        # Envoy says 0 for a request that it never gives up.
        found += [milliseconds * 1e3] if (milliseconds := int(text)) else []
    return max(int(min(found)), 1) if found else 0


def wants_timing(request: Call) -> bool:
    """Whether the request asks for timings; takes the parameter out, it is not the model's."""
    return bool(request.parameters) and request.parameters.pop(TIMING_PARAMETER, False) is True


def add_timing(response: InferResponse) -> None:
    """Put the timings, in microseconds, among the response's parameters."""
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
    """`EXACT_TIMING` of a request."""
    return EXACT_TIMING % (timing.queue_ns, timing.compute_ns, timing.batch_rows)


def time_of(error: ServerError) -> Timing:
    """Where the time of a request went that has failed; nowhere if it was never queued."""
    return Timing(*(error.spent or (0, 0, 0)))
