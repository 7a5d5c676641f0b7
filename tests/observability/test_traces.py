"""What a trace keeps, which has an end whatever its request does."""

import numpy as np

from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor
from headrace.observability.trace_settings import Sampler, TraceSettings
from headrace.observability.traces import (
    BACKEND_OUTPUT,
    MOST_BYTES,
    MOST_TIMES,
    QUEUE_INPUT,
    Trace,
)

SETTINGS = TraceSettings(timestamps=True, tensors=True)


def a_trace() -> Trace:
    return Trace(1, 0, Sampler(SETTINGS), "HTTP", "m", "", 0)


def floats(nbytes: int) -> Tensor:
    return Tensor("x", Datatype.FP32, np.zeros(nbytes // 4, np.float32))


def test_tensors_count_with_all_their_bytes() -> None:
    trace = a_trace()
    trace.keep(QUEUE_INPUT, [floats(400)])
    assert trace.nbytes == 400
    strings: Array = np.array([b"a" * 1000, b"b" * 2000], object)
    trace.keep(QUEUE_INPUT, [Tensor("s", Datatype.BYTES, strings)])
    assert trace.nbytes > 3400


def test_what_is_too_large_is_kept_without_its_data() -> None:
    trace = a_trace()
    trace.keep(QUEUE_INPUT, [floats(MOST_BYTES + 4), floats(400)])
    strings: Array = np.array([b"a" * MOST_BYTES], object)
    trace.keep(BACKEND_OUTPUT, [Tensor("s", Datatype.BYTES, strings)])
    assert [(a, t.array.shape, t.array.nbytes) for a, t in trace.tensors] == [
        (QUEUE_INPUT, (MOST_BYTES // 4 + 1,), 0),
        (QUEUE_INPUT, (100,), 400),
        (BACKEND_OUTPUT, (1,), 0),
    ]
    assert trace.nbytes == 400


def test_of_many_responses_the_first_are_kept() -> None:
    trace = a_trace()
    for number in range(2 * MOST_TIMES):
        trace.time("INFER_RESPONSE_COMPLETE", number)
        trace.keep(BACKEND_OUTPUT, [floats(4)])
    trace.time("REQUEST_END", 5)
    assert len(trace.times) <= MOST_TIMES + 1
    assert trace.times[-1] == ("REQUEST_END", 5)
    assert len(trace.tensors) <= MOST_TIMES
