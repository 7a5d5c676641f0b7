"""Where a request's time went, as clients see it: response parameters or a `Server-Timing` text."""

from headrace.core.requests import InferRequest, InferResponse, Timing

TIMING_PARAMETER = (
    "headrace_timing"  # a request parameter: answer with timings among the parameters
)


def wants_timing(request: InferRequest) -> bool:
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
