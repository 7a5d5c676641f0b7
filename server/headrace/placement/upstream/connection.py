"""Interfaces of the client of one upstream, for every protocol.

A client takes requests and returns responses as values; `headrace.protocol` encodes them. Each
model has clients of its own, so that their problems do not affect other models. A thread that loads
a model has one on a temporary event loop (`ProtocolClients.visit`).

On the event loop, callers are notified by callbacks, without a task or a future in between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.core.call import Parameter
from headrace.core.errors import RemoteBroken
from headrace.observability.traces import TraceContext
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.status import Failure, Fate
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput


class CallTrace(Protocol):
    """The span of a call, as part of its request's trace."""

    @property
    def context(self) -> TraceContext:
        """The span to send to the upstream as the parent of its own."""

    def sent(self, endpoint: str) -> None:
        """Note the upstream of the call, possibly after others that have not begun it."""

    def ended(self, error: str) -> None:
        """End the span; `error` is "" on success."""


class CallTraces(Protocol):
    """Creates spans for calls."""

    def begin_call(self, link: str) -> CallTrace | None:
        """Start the span for the trace of a call's context; None if nothing is to be sent."""


class RemoteRequest(NamedTuple):
    """The request of one call: the `outputs` wanted, and further properties.

    `headers` are for this call, with lower-case names; over gRPC they are metadata. `deadline` is
    in nanoseconds of the monotonic clock; 0 for none. `target` is the upstream with the state of
    its sequence.
    """

    inputs: Sequence[RemoteInput]
    outputs: Sequence[str]
    parameters: Mapping[str, Parameter]
    id: str = ""
    headers: Sequence[tuple[str, str]] = ()
    deadline: int = 0
    trace: CallTrace | None = None
    target: object = None


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """A model as described by an upstream; `config` is None if it provides none."""

    metadata: pb.ModelMetadataResponse
    config: ModelConfig | None


class CallFailed(Exception):
    """A call failed.

    `text` is the upstream's message, for the log and for a failed load. `failure` is the
    consequence for a request.
    """

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure
        self.text = text


class Receiver(Protocol):
    """The caller; exactly one method is called, once, and not before `begin` returns.

    Neither is called after cancellation.
    """

    def answered(self, answer: RemoteAnswer) -> None:
        """Receive the call's response."""

    def failed(self, error: Exception) -> None:
        """Receive the failure: a `CallFailed`, or a bug's exception."""


class UpstreamCall(Protocol):
    """A call in flight."""

    def cancel(self) -> None:
        """Cancel the call: its receiver is not called any more. No effect after its end."""


class RemoteStream(UpstreamCall, Protocol):
    """A stream for one request to one upstream, and its responses. Nothing here blocks."""

    def hold(self, held: bool) -> None:
        """Pause the upstream, by flow control, or resume it.

        Responses in transit are still received.
        """


class StreamReceiver(Protocol):
    """The caller of a stream. Nothing is called before `stream` returns, or after `cancel`.

    `ended` or `failed` is called once, last.
    """

    def received(self, answer: RemoteAnswer | Failure) -> None:
        """Receive a response, or a failure instead.

        It may have no outputs if its parameters mark it as the last one.
        """

    def ended(self) -> None:
        """The upstream has ended the stream."""

    def failed(self, error: Exception) -> None:
        """The stream has failed, and so has the request unless it has all its responses.

        The fate of a `CallFailed` is UNSENT only if no upstream has seen anything of the stream.
        """


class ProtocolClient(Protocol):
    """A client of one upstream, on the event loop on which it was created.

    Times are in seconds, 0 for no limit. Coroutines raise `CallFailed`.
    """

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> UpstreamCall:
        """Start an inference call."""

    def stream(
        self, request: RemoteRequest, seconds: float, receiver: StreamReceiver
    ) -> RemoteStream:
        """Start a call with any number of responses; only for protocols with streams."""

    async def ready(self, seconds: float) -> bool:
        """True if the upstream reports the model as ready."""

    async def describe(self, seconds: float) -> RemoteDescription:
        """The model's metadata, and its configuration if provided."""

    async def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """The response of one call, for use during a load."""

    async def load(self, config: str, seconds: float) -> None:
        """Load the model; `config` is a complete configuration as JSON that replaces the
        upstream's, unless it is "".
        """

    async def unload(self, seconds: float) -> None:
        """Unload the model."""

    async def close(self) -> None:
        """Close the connection and cancel calls in flight."""


def with_headers(
    own: Sequence[tuple[str, str]], forwarded: Sequence[tuple[str, str]]
) -> Sequence[tuple[str, str]]:
    """A connection's own headers, preceded by those of one call."""
    if not forwarded:
        return own
    names = {name for name, _ in forwarded}
    return (*(item for item in own if item[0] not in names), *forwarded)


def nonsense(model: str, problem: Exception) -> CallFailed:
    """The failure of a call with a malformed response; `problem` is for the log."""
    error = RemoteBroken(f"the server of model '{model}' has sent an invalid response")
    return CallFailed(Failure(Fate.ANSWERED, error), f"sent an invalid response: {problem}")
