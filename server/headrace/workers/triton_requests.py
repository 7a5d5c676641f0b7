"""Requests and responses for Triton's Python models, and the senders that answer requests.

A client's request is answered by the return value of `execute`, or by a sender, at any time and
from any thread. One that the model neither answers nor keeps is answered with an error, so that no
client waits in vain. A request made by a model is for another model, and is executed by the
`ServerLink` that this process is connected to: Triton's API is a module, so there is one connection
per process, and only this module keeps it.
"""

import json
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from headrace.workers.triton_tensors import (
    INT64,
    UINT32,
    UINT64,
    Tensor,
    TritonModelException,
    elements,
    flag,
    text,
    whole,
    wrong,
)


class TritonError:
    """An error that answers one request; its code becomes the status of the answer."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = text("message", message)
        self._code = whole("code", code, (self.UNKNOWN, self.CANCELLED))

    def message(self) -> str:
        """The text for the client."""
        return self._message

    def code(self) -> int:
        """One of the constants of this class."""
        return self._code

    def __str__(self) -> str:
        return self._message


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `TypeError`, and `TritonModelException` for invalid parameters."""
        self._tensors: list[Tensor] = (
            output_tensors.copy()
            if type(output_tensors) is list
            else elements("output_tensors", output_tensors, "Tensor")
        )
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise no_tensor("output_tensors", tensor)
        if error is not None and not isinstance(error, TritonError):
            raise wrong("error", "a TritonError or None", error)
        self._error = error
        self._parameters = checked(parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        """The tensors of the response."""
        return self._tensors

    def has_error(self) -> bool:
        """True for an error response."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """The parameters of the response, as JSON."""
        return json.dumps(self._parameters)

    def parameter_values(self) -> dict[str, Any]:
        """The parameters of the response."""
        return self._parameters


def no_tensor(what: str, given: object) -> Exception:
    """The error for an element of a list of tensors that is none."""
    if given is None:
        return TritonModelException(f"{what} must be of Tensor, got None")
    return wrong(what, "of Tensor", given)


def checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as a dictionary; raises `TritonModelException` for invalid ones.

    Triton refuses floating-point numbers, although its protocol supports them.
    """
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect a dict of parameters, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(name)} for {name!r}"
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                "Expect parameters values to have type bool/int/str, found type"
                f" {type(value)} for {name!r}"
            )
    return dict(parameters)


class ServerLink(Protocol):
    """The server for its models, from any thread."""

    def exec(self, request: Any, decoupled: bool) -> Any:
        """Run another model; see `InferenceRequest.exec`."""

    def async_exec(self, request: Any, decoupled: bool) -> Awaitable[Any]:
        """Run another model without blocking; see `InferenceRequest.async_exec`."""

    def control(self, document: Mapping[str, Any]) -> Any:
        """Run a control operation of the server, and wait for the result."""

    def register(self, document: Mapping[str, Any]) -> None:
        """Create a family of metrics; raises `TritonModelException` for a conflict."""

    def tell(self, document: Mapping[str, Any]) -> None:
        """Send an update of a metric, without waiting."""


class _Connection:
    server: ServerLink | None = None


def connect(server: ServerLink | None) -> None:
    """Connect this process to `server`; not for models."""
    _Connection.server = server


def connected() -> ServerLink:
    """The server; raises `TritonModelException` outside of a worker."""
    if _Connection.server is None:
        raise TritonModelException("this is only possible inside a server's worker")
    return _Connection.server


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class ResponseReceiver(Protocol):
    """The receiver of responses, which sends them to the server, from any thread."""

    def respond(
        self, number: int, response: InferenceResponse | None, final: bool, wanted: Sequence[str]
    ) -> None:
        """Send a response to a request, `final` for the last one, or only the end."""

    def drop(self, number: int, error: TritonError) -> None:
        """End a request with an error; called wherever the interpreter frees an object."""

    def wait_for_room(self, number: int) -> None:
        """Block while the client does not read."""

    async def room(self, number: int) -> None:
        """`wait_for_room` for coroutines."""

    def is_cancelled(self, number: int) -> bool:
        """True if a request was cancelled."""


class Answering:
    """The responses to one request so far, by senders."""

    __slots__ = ("closed", "decoupled", "number", "sent", "source", "wanted")

    def __init__(
        self, source: ResponseReceiver, number: int, wanted: Sequence[str], decoupled: bool
    ) -> None:
        self.source = source
        self.number = number
        self.wanted = wanted
        self.decoupled = decoupled
        self.sent = 0
        self.closed = False  # no more responses may be sent

    def __del__(self) -> None:
        if not self.closed:
            missing = (
                "its response sender must send TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                if self.decoupled
                else "execute returned no response to it, and its response sender sent none"
            )
            text = f"the model has dropped the request without completing it: {missing}"
            self.source.drop(self.number, TritonError(text))


class InferenceResponseSender:
    """Answers one request, from any thread."""

    __slots__ = ("_answering",)

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the end of the request, or both.

        Blocks while the client does not read, unless called on an event loop. Raises `TypeError`,
        and `TritonModelException` for invalid responses.
        """
        answering = self._answering
        self._check(response, flags)
        if not flags and not _on_event_loop():
            answering.source.wait_for_room(answering.number)
        self._send(response, flags)

    async def asend(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """`send` for coroutines: others run while it waits for the client to read."""
        answering = self._answering
        self._check(response, flags)
        if not flags:
            await answering.source.room(answering.number)
        self._send(response, flags)

    def is_cancelled(self) -> bool:
        """True if the request was cancelled."""
        return self._answering.source.is_cancelled(self._answering.number)

    def _send(self, response: InferenceResponse | None, flags: int) -> None:
        answering = self._answering
        final = bool(flags)
        if response is not None:
            # An ordinary model's only response is its last one, too: the flag is optional.
            final = final or not answering.decoupled
            answering.sent += 1
        answering.closed = answering.closed or final
        answering.source.respond(answering.number, response, final, answering.wanted)

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        answering = self._answering
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            whole("flags", flags, UINT32)
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is not None and not isinstance(response, InferenceResponse):
            raise wrong("response", "an InferenceResponse or None", response)
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if not answering.decoupled:
            if answering.sent and response is None:
                return  # the response was already the end
            if answering.sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one"
                    " response."
                )
            if response is None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before"
                    " sending a response."
                )
        if answering.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")


def _on_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:  # no event loop exists
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """The preferred memory for a request's outputs; ignored, since outputs are in CPU memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        """Raises `TypeError`."""
        if preferred_memory_type not in (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU):
            raise wrong("preferred_memory_type", "a TRITONSERVER_MEMORY_*", preferred_memory_type)
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = whole("preferred_device_id", preferred_device_id, INT64)


class InferenceTrace:
    """The trace of a request, if it is traced; passed on to requests made for it."""

    __slots__ = ("_link",)

    def __init__(self, link: str = "") -> None:
        """`link` is the server's form of it: a number, `traceparent` and `tracestate`."""
        self._link = link

    def get_context(self) -> str | None:
        """The context to continue, as JSON with `traceparent`; None if there is none."""
        _, _, context = self._link.partition(" ")
        parent, _, state = context.partition(" ")
        if not parent:
            return None
        return json.dumps({"traceparent": parent} | ({"tracestate": state} if state else {}))


_DEFAULT_MEMORY = PreferredMemory(TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request: a client's, with the batch dimension if the model batches, or the model's own."""

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
        `TritonModelException` for invalid values.
        """
        name = text("model_name", model_name)
        if not name:
            raise TritonModelException("a request needs the name of a model: model_name")
        self._inputs: Sequence[Tensor] = elements("inputs", inputs, "Tensor")
        for tensor in self._inputs:
            if not isinstance(tensor, Tensor):
                raise no_tensor("inputs", tensor)
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
        self._source: ResponseReceiver | None = None
        self._answering: Answering | None = None
        self._release = TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """The tensors of the request."""
        return list(self._inputs)

    def request_id(self) -> str:
        """The client's id of the request, or ""."""
        return self._id

    def correlation_id(self) -> int | str:
        """The id of its sequence; 0 for none."""
        found: int | str = self._extras.get("correlation_id", 0)
        return found

    def requested_output_names(self) -> list[str]:
        """The names of the wanted outputs."""
        return list(self._extras.get("outputs", self._outputs))

    def flags(self) -> int:
        """The sequence flags: START, END."""
        return int(self._extras.get("flags", 0))

    def set_flags(self, flags: int) -> None:
        """Set the sequence flags."""
        self._extras = {**self._extras, "flags": whole("flags", flags, UINT32)}

    def timeout(self) -> int:
        """The queue timeout in microseconds; 0 for none."""
        return int(self._extras.get("timeout", 0))

    def priority(self) -> int:
        """The priority level; 0 for the model's default."""
        return int(self._extras.get("priority", 0))

    def parameters(self) -> str:
        """The parameters of the request, as JSON."""
        return json.dumps(self._extras.get("parameters", {}))

    def trace(self) -> InferenceTrace:
        """The trace of the request."""
        return InferenceTrace(str(self._extras.get("trace", "")))

    def is_cancelled(self) -> bool:
        """True if the request was cancelled."""
        return self._source is not None and self._source.is_cancelled(self._number)

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of its responses.

        Raises `TritonModelException` for the model's own request.
        """
        if self._answering is None:
            if self._source is None:
                raise TritonModelException("a request that the model has made has no sender")
            self._answering = Answering(
                self._source, self._number, self.requested_output_names(), False
            )
        return InferenceResponseSender(self._answering)

    def set_release_flags(self, flags: int) -> None:
        """Set whether the request is released or rescheduled when `execute` returns."""
        if whole("flags", flags, UINT32) not in (
            TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        ):  # fmt: skip
            raise TritonModelException(
                f"release flags are RELEASE_ALL or RELEASE_RESCHEDULE, got {flags}"
            )
        self._release = flags

    def exec(self, decoupled: bool = False) -> Any:
        """Run the other model; returns an `InferenceResponse`, or an iterator of them.

        Errors there are in the response; raises `TritonModelException` where a model must not make
        calls.
        """
        several = flag("decoupled", decoupled)
        return self._server().exec(self, several)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """`exec` for coroutines."""
        several = flag("decoupled", decoupled)
        return self._server().async_exec(self, several)

    def _server(self) -> ServerLink:
        if self._source is not None:
            raise TritonModelException("only a request that the model has made can be executed")
        return connected()


def received(
    source: ResponseReceiver,
    number: int,
    inputs: Sequence[Tensor],
    request_id: str,
    outputs: Sequence[str],
    extras: Mapping[str, Any],
    decoupled: bool,
) -> InferenceRequest:
    """A received request; not for models."""
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
    """True if the model has rescheduled the request; not for models."""
    return request._release == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
