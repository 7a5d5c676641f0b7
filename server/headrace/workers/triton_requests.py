"""Requests as Triton's Python models see them: those of clients, and a model's own.

A client's request is answered by what `execute` gives back for it, or by a sender. A request that a
model has made is for another model, and is executed by what this process is connected to.
"""

import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from headrace.workers.triton_arguments import (
    INT64,
    UINT32,
    UINT64,
    elements,
    flag,
    text,
    whole,
    wrong,
)
from headrace.workers.triton_responses import checked, tensors
from headrace.workers.triton_senders import Answering, Exchange, InferenceResponseSender
from headrace.workers.triton_server import Server, connected
from headrace.workers.triton_tensors import Tensor, TritonModelException

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """Where the outputs of a request should lie; here they are always in the CPU's memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        """Raises `TypeError`."""
        if preferred_memory_type not in (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU):
            raise wrong("preferred_memory_type", "a TRITONSERVER_MEMORY_*", preferred_memory_type)
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = whole("preferred_device_id", preferred_device_id, INT64)


class InferenceTrace:
    """The trace that a request is part of, if it is traced; for requests that are made for it."""

    __slots__ = ("_link",)

    def __init__(self, link: str = "") -> None:
        """`link` is what the server knows it by: a number, `traceparent` and `tracestate`."""
        self._link = link

    def get_context(self) -> str | None:
        """The context to go on with, as JSON with `traceparent`; None if there is none."""
        _, _, context = self._link.partition(" ")
        parent, _, state = context.partition(" ")
        if not parent:
            return None
        return json.dumps({"traceparent": parent} | ({"tracestate": state} if state else {}))


_DEFAULT_MEMORY = PreferredMemory(TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """One request: a client's, with the batch dimension where the model batches, or one's own."""

    __slots__ = (
        "_answering", "_extras", "_id", "_inputs", "_number", "_outputs", "_release", "_source",
        "_target",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] | None = None,
        requested_output_names: Iterable[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _DEFAULT_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """A request to another model; `timeout` is in microseconds.

        `inputs`, `requested_output_names` and `model_name` are required. Raises `TypeError`, and
        `TritonModelException` for what cannot be sent.
        """
        name = text("model_name", model_name)
        if not name:
            raise TritonModelException("a request needs the name of a model: model_name")
        self._inputs: Sequence[Tensor] = tensors("inputs", inputs)
        self._outputs: Sequence[str] = [
            text("requested_output_names", each)
            for each in elements("requested_output_names", requested_output_names, "str")
        ]
        self._id = text("request_id", request_id)
        if not isinstance(correlation_id, str):
            correlation_id = whole("correlation_id", correlation_id, UINT64)
        if not isinstance(preferred_memory, PreferredMemory):
            raise wrong("preferred_memory", "a PreferredMemory", preferred_memory)
        if not isinstance(trace, InferenceTrace):
            raise wrong("trace", "an InferenceTrace", trace)
        self._extras: Mapping[str, Any] = {
            "correlation_id": correlation_id, "flags": whole("flags", flags, UINT32),
            "timeout": whole("timeout", timeout, UINT64),
            "parameters": checked(parameters) if parameters is not None else {},
        }  # fmt: skip
        if trace._link:
            self._extras = {**self._extras, "trace": trace._link}
        self._target = name, whole("model_version", model_version, INT64)
        self._number = 0
        self._source: Exchange | None = None
        self._answering: Answering | None = None
        self._release = TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """Its tensors."""
        return list(self._inputs)

    def request_id(self) -> str:
        """The client's own name for it, or ""."""
        return self._id

    def correlation_id(self) -> int | str:
        """The sequence that it belongs to; 0 for none."""
        found: int | str = self._extras.get("correlation_id", 0)
        return found

    def requested_output_names(self) -> list[str]:
        """The outputs that are wanted."""
        return list(self._extras.get("outputs", self._outputs))

    def flags(self) -> int:
        """Whether it begins or ends a sequence."""
        return int(self._extras.get("flags", 0))

    def set_flags(self, flags: int) -> None:
        """Say whether it begins or ends a sequence."""
        self._extras = {**self._extras, "flags": whole("flags", flags, UINT32)}

    def timeout(self) -> int:
        """How long it may wait in the queue, in microseconds; 0 for any time."""
        return int(self._extras.get("timeout", 0))

    def priority(self) -> int:
        """Its priority level; 0 for the model's default."""
        return int(self._extras.get("priority", 0))

    def parameters(self) -> str:
        """Its parameters as JSON."""
        return json.dumps(self._extras.get("parameters", {}))

    def trace(self) -> InferenceTrace:
        """The trace that it is part of."""
        return InferenceTrace(str(self._extras.get("trace", "")))

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._source is not None and self._source.is_cancelled(self._number)

    def get_response_sender(self) -> InferenceResponseSender:
        """What answers it; raises `TritonModelException` for a request of one's own."""
        if self._answering is None:
            if self._source is None:
                raise TritonModelException("a request that the model has made has no sender")
            self._answering = Answering(
                self._source, self._number, self.requested_output_names(), False
            )
        return InferenceResponseSender(self._answering)

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of it when `execute` returns: nothing more, or it is given again."""
        if whole("flags", flags, UINT32) not in (
            TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        ):  # fmt: skip
            raise TritonModelException(
                f"release flags are RELEASE_ALL or RELEASE_RESCHEDULE, got {flags}"
            )
        self._release = flags

    def exec(self, decoupled: bool = False) -> Any:
        """Have the other model run; an `InferenceResponse`, or an iterator of them.

        What goes wrong there is in the response; raises `TritonModelException` where a model must
        not ask for this.
        """
        several = flag("decoupled", decoupled)
        return self._server().exec(self, several)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """As `exec`, for coroutines."""
        several = flag("decoupled", decoupled)
        return self._server().async_exec(self, several)

    def _server(self) -> Server:
        if self._source is not None:
            raise TritonModelException("only a request that the model has made can be executed")
        return connected()


def received(
    source: Exchange,
    number: int,
    inputs: Sequence[Tensor],
    request_id: str,
    outputs: Sequence[str],
    extras: Mapping[str, Any],
    decoupled: bool,
) -> InferenceRequest:
    """A request as it came; not for models."""
    request = InferenceRequest.__new__(InferenceRequest)
    request._inputs = inputs
    request._id = request_id
    request._outputs = outputs
    request._extras = extras
    request._number = number
    request._source = source
    request._release = TRITONSERVER_REQUEST_RELEASE_ALL
    request._answering = None
    if decoupled:
        wanted = request.requested_output_names()
        request._answering = Answering(source, number, wanted, True)
    return request


def is_given_back(request: InferenceRequest) -> bool:
    """Whether the model wants to be given a request again; not for models."""
    return request._release == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
