"""A model's calls of its server: other models, model control, and metrics.

The server keeps the values of metrics: instances of a model, and models, that use the same family
and labels update the same metric. A family's metrics last as long as its object, as in Triton, and
at most until the model is unloaded; using a metric of a deleted family is an error.
"""

import base64
import os
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from math import inf
from typing import Any, Protocol

from headrace.ipc.elements import Buffer
from headrace.workers.batches import read_response
from headrace.workers.triton_requests import InferenceResponse, TritonError, connected
from headrace.workers.triton_tensors import TritonModelException, flag, real, text, wrong

_MOST_REPLIES = 16  # queued replies above which the call is paused
Reply = tuple[dict[str, Any], Buffer, int]


class Caller(Protocol):
    """The source of replies, which receives them while a thread waits for them."""

    def wait(self, there: Callable[[], object]) -> None:
        """Wait until `there` is true, or the server is gone."""

    def cancel_call(self, number: int) -> None:
        """Cancel a call; its replies go on until the other model ends them."""

    def drop_call(self, number: int) -> None:
        """Drop further replies to a call."""

    def hold_call(self, number: int, held: bool) -> None:
        """Pause or resume the replies to a call."""

    def watched(self) -> AbstractContextManager[None]:
        """Let the running event loop receive replies within `with`."""


class ServerCall:
    """A call of the server, and its replies: one, or any number."""

    def __init__(self, caller: Caller, number: int) -> None:
        self._caller = caller
        self._number = number
        self._replies: deque[Reply] = deque()
        self._ended = False
        self._wake: Callable[[], object] | None = None
        self._held = False

    def take(self, told: dict[str, Any], data: Buffer, size: int) -> None:
        """Queue a reply; called on any thread."""
        self._replies.append((told, data, size))
        self._ended = self._ended or told["final"]
        if not self._held and not self._ended and len(self._replies) >= _MOST_REPLIES:
            self._held = True
            self._caller.hold_call(self._number, True)
        self._notify()

    def next(self) -> Reply | None:
        """Wait for the next reply; None after the last."""
        self._caller.wait(self._there)
        return self._pop()

    async def next_async(self) -> Reply | None:
        """`next` for coroutines."""
        await self.come()
        return self._pop()

    async def come(self) -> None:
        """Wait until there is an untaken reply, or the end."""
        import asyncio  # already imported by the caller

        come, loop, here = asyncio.Event(), asyncio.get_running_loop(), threading.get_ident()

        def wake() -> None:
            # Replies mostly come on the loop's own thread, which needs no waking: that would take a
            # message to itself for each.
            if threading.get_ident() == here:
                come.set()
            else:
                loop.call_soon_threadsafe(come.set)

        self._wake = wake
        try:
            if not self._there():
                with self._caller.watched():
                    while not self._there():
                        await come.wait()
                        come.clear()
        finally:
            self._wake = None

    def _pop(self) -> Reply | None:
        if not self._replies:
            return None
        reply = self._replies.popleft()
        if self._held and len(self._replies) <= _MOST_REPLIES // 2:
            self._held = False
            if not self._ended:
                self._caller.hold_call(self._number, False)
        return reply

    def _notify(self) -> None:
        wake = self._wake
        if wake is not None:
            with suppress(RuntimeError):  # the loop is closed: nothing waits
                wake()

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        if not self._ended:
            self._caller.cancel_call(self._number)

    def drop(self) -> None:
        """Drop further replies."""
        if not self._ended:
            self._ended = True
            self._notify()
            self._caller.drop_call(self._number)

    def _there(self) -> bool:
        return bool(self._replies) or self._ended


class ResponseIterator:
    """The responses of another model, as they arrive; for `for` and, in coroutines, `async for`.

    It keeps them, and starts over when it is iterated again after the last one, as in Triton.
    """

    def __init__(self, call: ServerCall) -> None:
        self._call = call
        self._over = False
        self._kept: list[InferenceResponse] = []
        self._given = 0  # kept responses returned so far

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._begin()
        return self

    def __next__(self) -> InferenceResponse:
        response = self._again()
        if response is None and not self._over:
            response = self._response(self._call.next())
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        self._begin()
        return self

    async def __anext__(self) -> InferenceResponse:
        response = self._again()
        if response is None and not self._over:
            response = self._response(await self._call.next_async())
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Cancel the call: the other model learns of it, and decides which responses follow.

        As in Triton. If it has not begun, the only response is an error, `TritonError.CANCELLED`.
        """
        self._call.cancel()

    def __del__(self) -> None:
        self._call.drop()

    def only(self) -> InferenceResponse:
        """The single response of an ordinary model."""
        return next(self, _lost())

    async def only_async(self) -> InferenceResponse:
        """`only` for coroutines."""
        return await anext(self, _lost())

    def _begin(self) -> None:
        if self._over and self._given == len(self._kept):
            self._given = 0

    def _again(self) -> InferenceResponse | None:
        """The next kept response; None if there is none."""
        if self._given == len(self._kept):
            return None
        self._given += 1
        return self._kept[self._given - 1]

    def _response(self, reply: Reply | None) -> InferenceResponse | None:
        """Convert a reply to a response; None at the end."""
        if reply is None:
            self._over = True
            return None
        told, data, size = reply
        self._over = told["final"]
        if told["response"] is None:
            response = InferenceResponse([])  # as in Triton, the end may have no tensors
        else:
            response = read_response(told["response"], told["sizes"], data, size)
        self._kept.append(response)
        self._given = len(self._kept)
        return response


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model in the server, with another configuration (JSON) or files if given.

    Raises `TypeError`, and `TritonModelException` on failure.
    """
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(f"files must be a dict of bytes, got {type(files).__name__}")
    encoded = {
        text("files", name): base64.b64encode(data).decode() for name, data in (files or {}).items()
    }
    document = {"model": text("model_name", model_name), "config": text("config", config)}
    connected().control({"op": "load", **document, "files": encoded})


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model in the server.

    Raises `TypeError`, and `TritonModelException` on failure.
    """
    dependents = flag("unload_dependents", unload_dependents)
    name = text("model_name", model_name)
    connected().control({"op": "unload", "model": name, "dependents": dependents})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """True if a model takes requests; raises `TypeError`."""
    name, version = text("model_name", model_name), text("model_version", model_version)
    return bool(connected().control({"op": "ready", "model": name, "version": version}))


def _lost() -> InferenceResponse:
    return InferenceResponse(
        error=TritonError("the other model has given no response", TritonError.INTERNAL)
    )


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("nv_", "headrace_", "python_", "process_", "http_server_", "rpc_server_")


class _Record:
    """Name and kind of a family, for its metrics, which do not keep the family alive."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.deleted = False
        self.process = os.getpid()  # a forked process has a copy


class Metric:
    """One metric of a family, with its labels."""

    def __init__(
        self, family: _Record, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._family = family
        self._key = {
            "family": family.name,
            "labels": {str(name): str(value) for name, value in labels.items()},
        }
        self._tell("create", 0.0, {"buckets": buckets})

    def increment(self, value: float) -> None:
        """Add to a counter, or to a gauge, which may also decrease."""
        self._only("increment", MetricFamily.COUNTER, MetricFamily.GAUGE)
        value = real("value", value)
        if self._family.kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException(f"a counter cannot be lowered, by {value}")
        self._tell("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._only("set", MetricFamily.GAUGE)
        self._tell("set", real("value", value))

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._only("observe", MetricFamily.HISTOGRAM)
        self._tell("observe", real("value", value))

    def value(self) -> float:
        """The value of a counter or a gauge; not available during start and finalisation."""
        self._only("value", MetricFamily.COUNTER, MetricFamily.GAUGE)
        return float(connected().control({"op": "metric", **self._key}))

    def _only(self, operation: str, *kinds: str) -> None:
        if self._family.deleted:
            raise TritonModelException(
                f"Failed to {operation} metric '{self._family.name}': Invalid metric operation as"
                " the corresponding 'MetricFamily' has been deleted. The model must keep it as"
                " long as its metrics."
            )
        if self._family.kind not in kinds:
            raise TritonModelException(
                f"{operation} is not for a metric of kind {self._family.kind}"
            )

    def _tell(self, operation: str, value: float, more: Mapping[str, Any] | None = None) -> None:
        connected().tell({"do": operation, **self._key, "value": value, **(more or {})})


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
    _record: _Record | None = None

    def __init__(self, name: str, description: str, kind: str) -> None:
        """Raises `TypeError`, and `TritonModelException` for an invalid name.

        While the model executes, the latter is also raised for a name of another kind; before that,
        the server logs the conflict and omits the metrics.
        """
        name, description = text("name", name), text("description", description)
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise wrong("kind", "MetricFamily.COUNTER, GAUGE or HISTOGRAM", kind)
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            raise TritonModelException(
                f"'{name}' cannot be the name of a model's metric: expected letters, digits and _,"
                f" and none of {', '.join(_RESERVED)} in front"
            )
        connected().register({"family": name, "kind": kind, "description": description})
        self._record = _Record(name, kind)

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The metric with these labels; a histogram needs `buckets`, ascending upper bounds.

        Raises `TypeError`, and `TritonModelException` for invalid labels or buckets.
        """
        assert self._record is not None
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException(f"labels must be a dict, got {type(labels).__name__}")
        for name in labels or {}:
            # Buckets have a label `le` of their own.
            if not _LABEL.fullmatch(str(name)) or (buckets is not None and name == "le"):
                raise TritonModelException(f"'{name}' cannot be the name of a label")
        if (self._record.kind == self.HISTOGRAM) != (buckets is not None):
            raise TritonModelException(
                f"a histogram needs buckets, and nothing else has any; got {buckets} for a"
                f" {self._record.kind}"
            )
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException(f"buckets must be a list, got {type(buckets).__name__}")
        bounds = [real("buckets", bound) for bound in buckets or ()]
        if bounds and bounds[-1] == inf:
            bounds.pop()  # the last bucket is implicit
        if any(not low < high for low, high in pairwise([-inf, *bounds, inf])):
            raise TritonModelException(f"buckets are finite, ascending bounds, got {buckets}")
        return Metric(self._record, labels or {}, bounds)

    def __del__(self) -> None:
        record = self._record
        if record is None or record.process != os.getpid():
            return
        record.deleted = True
        with suppress(OSError, TritonModelException):  # the server is gone, or the worker ends
            connected().tell({"do": "delete", "family": record.name})
