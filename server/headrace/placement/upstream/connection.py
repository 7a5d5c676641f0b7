"""The client of one server as its pool sees it, whichever protocol is spoken there.

A client takes requests as values and gives answers as values; how those are written is up to
`headrace.protocol`. Each model has clients of its own, so that what happens to one of them is not
another model's. A thread that loads a model has one on an event loop of its own, behind a `Visit`.

On the event loop, whoever makes a call is told what comes of it by a call of its own, without a
task or a future in between.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.core.call import Parameter
from headrace.core.errors import RemoteBroken, ServerError
from headrace.core.signature import Signature, TensorSpec
from headrace.observability.traces import TraceContext
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.status import Failure, Fate
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput


class CallTrace(Protocol):
    """The call of a traced request, as part of its trace."""

    @property
    def context(self) -> TraceContext:
        """The span that the server is told of as the parent of its own."""

    def sent(self, endpoint: str) -> None:
        """Note the server of the call, perhaps after others that have not begun it."""

    def ended(self, error: str) -> None:
        """End the span; `error` is "" if there is an answer."""


class CallTraces(Protocol):
    """Makes calls part of traces."""

    def begin_call(self, link: str) -> CallTrace | None:
        """For a request with this under `TRACE_PARAMETER`; None if the server is told nothing."""


class RemoteRequest(NamedTuple):
    """A request for one call: the `outputs` wanted by name, and what goes beside the inputs.

    `headers` are for the call, names in lower case; over gRPC they are metadata. Nobody waits after
    `deadline`, in nanoseconds of the monotonic clock; 0 for none.
    """

    inputs: Sequence[RemoteInput]
    outputs: Sequence[str]
    parameters: Mapping[str, Parameter]
    id: str = ""
    headers: Sequence[tuple[str, str]] = ()
    deadline: int = 0
    trace: CallTrace | None = None


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """A model as a server describes it; `config` is None if it does not tell."""

    metadata: pb.ModelMetadataResponse
    config: ModelConfig | None


@dataclass(slots=True)
class Declared:
    """The signature as declared here, from when the configuration is complete on.

    For protocols whose answers do not tell, and before inference is asked for.
    """

    signature: Signature | None = None

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The outputs as declared."""
        return () if self.signature is None else self.signature.outputs

    @property
    def batches(self) -> bool:
        """True if axis 0 of every tensor counts rows."""
        return self.signature is not None and self.signature.batches


class CallFailed(Exception):
    """A call has not been answered with what was asked for.

    `text` is what was said, for the log and for a load that fails. `failure` is what it means for
    a request.
    """

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure
        self.text = text


class Receiver(Protocol):
    """The caller; exactly one of these is called, once, and not before `begin` ends.

    Neither is called for a call that was cancelled.
    """

    def answered(self, answer: RemoteAnswer) -> None:
        """The call has an answer."""

    def failed(self, error: Exception) -> None:
        """The call has failed: a `CallFailed`, or a bug's exception."""


class Call(Protocol):
    """A call that is under way."""

    def cancel(self) -> None:
        """End it: its receiver is told nothing any more. Does nothing if it has ended."""


class RemoteStream(Call, Protocol):
    """A stream for one request to one server, and of its responses. Nothing here waits."""

    def hold(self, held: bool) -> None:
        """Pause the server, once what it may send unasked has come; or go on.

        Responses that are under way are still received.
        """


class StreamReceiver(Protocol):
    """The caller of a stream. Nothing is called before `stream` ends, or after `cancel`.

    `ended` or `failed` is called once, and nothing after it.
    """

    def received(self, answer: RemoteAnswer | ServerError) -> None:
        """A response has come, or an error instead.

        It may have no outputs, where its parameters say that it is the last one.
        """

    def ended(self) -> None:
        """The server has ended the stream."""

    def failed(self, error: Exception) -> None:
        """The stream has failed, and the request if it has not all its responses.

        The fate of a `CallFailed` is UNSENT only if no server has seen anything of the stream.
        """


class ProtocolClient(Protocol):
    """A client of one server, on the event loop that was running when this was made.

    Times are in seconds, 0 for any. What is awaited raises `CallFailed`.
    """

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> Call:
        """Send one run."""

    def stream(
        self, request: RemoteRequest, seconds: float, receiver: StreamReceiver
    ) -> RemoteStream:
        """Send one run with any number of responses; only where the protocol has streams."""

    async def ready(self, seconds: float) -> bool:
        """True if the server says that the model is ready."""

    async def describe(self, seconds: float) -> RemoteDescription:
        """The model's metadata, and its configuration if the server tells it."""

    async def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """The answer to one run, for who loads the model."""

    async def load(self, config: str, seconds: float) -> None:
        """Load the model; `config` is a whole configuration as JSON that stands in for the
        server's own, unless it is empty.
        """

    async def unload(self, seconds: float) -> None:
        """Unload the model."""

    async def close(self) -> None:
        """End the connection, with whatever is under way."""


class Visit:
    """A `ProtocolClient` for a thread that may wait: each method is one of that, and blocks."""

    def __init__(self, runner: asyncio.Runner, connection: ProtocolClient) -> None:
        self._run = runner.run
        self._connection = connection

    def describe(self, seconds: float) -> RemoteDescription:
        """The model's metadata, and its configuration if the server tells it."""
        return self._run(self._connection.describe(seconds))

    def infer(self, request: RemoteRequest, seconds: float) -> RemoteAnswer:
        """Send one run."""
        return self._run(self._connection.infer(request, seconds))

    def load(self, config: str, seconds: float) -> None:
        """Load the model."""
        self._run(self._connection.load(config, seconds))

    def unload(self, seconds: float) -> None:
        """Unload the model."""
        self._run(self._connection.unload(seconds))


@contextmanager
def visiting(connect: Callable[[], ProtocolClient]) -> Iterator[Visit]:
    """A connection on an event loop of its own, on a thread that has none, while `with` lasts.

    `connect` makes the connection when that loop is running.
    """

    async def connected() -> ProtocolClient:
        return connect()

    with asyncio.Runner() as runner:
        connection = runner.run(connected())
        try:
            yield Visit(runner, connection)
        finally:
            runner.run(connection.close())


def with_headers(
    own: Sequence[tuple[str, str]], forwarded: Sequence[tuple[str, str]]
) -> Sequence[tuple[str, str]]:
    """A connection's own headers, and those of one call, which go before them."""
    if not forwarded:
        return own
    names = {name for name, _ in forwarded}
    return (*(item for item in own if item[0] not in names), *forwarded)


def nonsense(model: str, problem: Exception) -> CallFailed:
    """An answer that cannot be read; `problem` is for the log."""
    error = RemoteBroken(f"the server of model '{model}' has given an answer that makes no sense")
    return CallFailed(Failure(Fate.ANSWERED, error), f"makes no sense: {problem}")
