"""Calls, model versions and batches: what both doors share."""

import asyncio
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic_ns
from typing import Any

import numpy as np
import onnxruntime

Array = np.ndarray[Any, np.dtype[Any]]

MAX_ROWS = 64  # of a batch
_FORMATS = {  # datatype, and the format of one element for `struct` and numpy
    "tensor(float)": ("FP32", "f"),
    "tensor(double)": ("FP64", "d"),
    "tensor(int32)": ("INT32", "i"),
    "tensor(int64)": ("INT64", "q"),
}
_BUCKETS_NS = [10_000 << power for power in range(20)]  # upper bounds


class Reason(Enum):
    """The reason of a refusal: its HTTP status and its gRPC status."""

    INVALID = (400, 3)
    NOT_FOUND = (404, 5)
    NO_METHOD = (404, 12)
    LATE = (504, 4)
    FAILED = (500, 13)
    OVERLOADED = (503, 14)


class Refused(Exception):
    """A call is answered with an error; `text` is for the client."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.http_status, self.grpc_status = reason.value
        self.text = text


class Account:
    """The calls and bytes held for clients, with their limits."""

    __slots__ = ("calls", "max_bytes", "max_calls", "nbytes")

    def __init__(self, max_calls: int = 10_000, max_bytes: int = 1 << 30) -> None:
        self.calls = self.nbytes = 0
        self.max_calls, self.max_bytes = max_calls, max_bytes


class Call(ABC):
    """One infer request from its door to its answer; it is the entry of the batcher's queue, too.

    Each door has a subclass and sets `nbytes` and `answered`; its decoder sets the rest but for
    `arrived_ns`, which is the batcher's. `answered` is true as soon as an answer has been formed or
    the client has gone. There is no `__init__`: a Python call for each request.
    """

    __slots__ = ("answered", "arrived_ns", "id", "inputs", "nbytes", "rows", "timeout_ns")

    answered: bool
    nbytes: int
    id: Any  # as the client gave it; None or empty without one
    inputs: dict[str, Array]
    rows: int
    timeout_ns: int  # 0 without one
    arrived_ns: int

    @abstractmethod
    def respond(self, outputs: list[Array], began_ns: int, ended_ns: int, rows: int) -> None:
        """Answer with the call's rows of a batch of `rows`, which ran between the two times."""

    @abstractmethod
    def refuse(self, error: Refused) -> None:
        """Answer with an error."""


class Input:
    """A declared input: the shape of one row, and how numbers become an array."""

    def __init__(self, shape: Sequence[int], datatype: str, code: str) -> None:
        self.shape, self.datatype, self.code = list(shape), datatype, code
        self.size = math.prod(shape)
        self.dtype = np.dtype(code)
        self.packers: dict[int, Callable[..., bytes]] = {}  # by number of elements


class Output:
    """A declared output: its name, its datatype and the shape of one row."""

    def __init__(self, name: str, shape: Sequence[int], datatype: str) -> None:
        self.name, self.shape, self.datatype = name, list(shape), datatype


class Statistics:
    """Counters of a version: requests, batches, rows, nanoseconds, latencies by bucket."""

    def __init__(self) -> None:
        self.requests = self.executions = self.rows = self.queue_ns = self.compute_ns = 0
        self.latencies = [0] * (len(_BUCKETS_NS) + 1)

    def add(self, calls: Sequence[Call], rows: int, began_ns: int, ended_ns: int) -> None:
        """Count a batch that has been answered just now."""
        now_ns, latencies, queue_ns = monotonic_ns(), self.latencies, 0
        for call in calls:
            queue_ns += began_ns - call.arrived_ns
            latencies[bisect_left(_BUCKETS_NS, now_ns - call.arrived_ns)] += 1
        self.requests += len(calls)
        self.executions += 1
        self.rows += rows
        self.queue_ns += queue_ns
        self.compute_ns += (ended_ns - began_ns) * len(calls)


class Version:
    """A model version: its session, its signature, its statistics, and where calls enter."""

    def __init__(self, name: str, path: str, loop: asyncio.AbstractEventLoop) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # the server has one core
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.name = name
        self.inputs = {
            each.name: Input(each.shape[1:], *_FORMATS[each.type])
            for each in self.session.get_inputs()
        }
        self.outputs = [
            Output(each.name, each.shape[1:], _FORMATS[each.type][0])
            for each in self.session.get_outputs()
        ]
        self.statistics = Statistics()
        self.submit = Batcher(self, loop).submit


class Batcher:
    """Queues calls, and runs those that are there at the end of the event loop's tick."""

    def __init__(self, version: Version, loop: asyncio.AbstractEventLoop) -> None:
        self._version, self._loop = version, loop
        self._queue: deque[Call] = deque()
        self._scheduled = False

    def submit(self, call: Call) -> None:
        """Queue a call."""
        call.arrived_ns = monotonic_ns()
        self._queue.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        began_ns = monotonic_ns()
        calls, rows = self._take(began_ns)
        if calls:
            self._run(calls, rows, began_ns)
        if self._queue and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _take(self, now_ns: int) -> tuple[list[Call], int]:
        """The calls that run now, and their rows; late ones are refused on the way."""
        queue, calls, rows = self._queue, [], 0
        while queue and rows + queue[0].rows <= MAX_ROWS:
            call = queue.popleft()
            if call.answered:
                continue
            if call.timeout_ns and now_ns > call.arrived_ns + call.timeout_ns:
                call.refuse(Refused(Reason.LATE, "Request timeout expired"))
                continue
            calls.append(call)
            rows += call.rows
        return calls, rows

    def _run(self, calls: list[Call], rows: int, began_ns: int) -> None:
        version = self._version
        if len(calls) == 1:
            feed = calls[0].inputs
        else:
            feed = {
                name: np.concatenate([call.inputs[name] for call in calls])
                for name in version.inputs
            }
        try:
            outputs = version.session.run(None, feed)
        except Exception as error:  # whatever ONNX Runtime raises: the clients are told
            for call in calls:
                call.refuse(Refused(Reason.FAILED, str(error)))
            return
        ended_ns, start = monotonic_ns(), 0
        for call in calls:
            end = start + call.rows
            call.respond([array[start:end] for array in outputs], began_ns, ended_ns, rows)
            start = end
        version.statistics.add(calls, rows, began_ns, ended_ns)
