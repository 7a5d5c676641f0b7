"""Calls to one server over gRPC: on the thread that loads a model, and on the event loop.

Requests and answers are bytes; what is in them is up to `headrace.wire`. Each model has connections
of its own, so that what happens to one of them is not another model's.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from headrace.execution.remote.options import Credentials, Endpoint
from headrace.wire.remote_status import Failure, failure_of

_SERVICE = "/inference.GRPCInferenceService/"
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # what is named is what is meant
    # A server that has been started again is to be found as soon as it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
Metadata = Sequence[tuple[str, str]]


class CallFailed(Exception):
    """A call has ended with a status; `status` is its number, `text` what came along."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text

    def failure(self, model: str) -> Failure:
        """What that means for a request to `model`."""
        return failure_of(model, self.status, self.text)


class LoadingCalls:
    """Calls that wait for their answers, on any thread; for as long as `with` lasts."""

    def __init__(self, endpoint: Endpoint, credentials: Credentials) -> None:
        self._metadata = _metadata(credentials)
        if endpoint.secure:
            options = _options(endpoint)
            self._channel = grpc.secure_channel(endpoint.target, _tls(credentials), options)
        else:
            self._channel = grpc.insecure_channel(endpoint.target, _options(endpoint))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call(self, procedure: str, message: bytes, timeout: float) -> bytes:
        """The answer; raises `CallFailed`. `timeout` is in seconds, 0 for none."""
        try:
            ask: Any = self._channel.unary_unary(_SERVICE + procedure)
            answer: bytes = ask(message, timeout=timeout or None, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _failed(error) from None
        return answer


class Calls:
    """Calls on the event loop that is running when this is made."""

    def __init__(self, endpoint: Endpoint, credentials: Credentials) -> None:
        options = _options(endpoint)
        if endpoint.secure:
            channel = grpc.aio.secure_channel(endpoint.target, _tls(credentials), options)
        else:
            channel = grpc.aio.insecure_channel(endpoint.target, options)
        self._channel = channel
        self._metadata = _metadata(credentials)
        self._infer: Any = channel.unary_unary(_SERVICE + "ModelInfer")
        self._ready: Any = channel.unary_unary(_SERVICE + "ModelReady")

    async def infer(self, message: bytes, seconds: float) -> bytes:
        """A ModelInferResponse, within so many seconds, 0 for any; raises `CallFailed`.

        To cancel the wait cancels the call.
        """
        return await self._answer(self._infer, message, seconds)

    async def ready(self, message: bytes, seconds: float) -> bytes:
        """A ModelReadyResponse; raises `CallFailed`."""
        return await self._answer(self._ready, message, seconds)

    async def close(self) -> None:
        """End the connection, with whatever is under way."""
        await self._channel.close()

    async def _answer(self, procedure: Any, message: bytes, seconds: float) -> bytes:
        call = procedure(message, timeout=seconds or None, metadata=self._metadata)
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        return answer


def _failed(error: Any) -> CallFailed:
    return CallFailed(error.code().value[0], error.details() or "")


def _metadata(credentials: Credentials) -> Metadata:
    return (("authorization", credentials.authorization),) if credentials.authorization else ()


def _options(endpoint: Endpoint) -> list[tuple[str, Any]]:
    # It is connected to by address, but known to its certificate, or a proxy, by name.
    own = [("grpc.default_authority", endpoint.host)]
    if endpoint.secure:
        own.append(("grpc.ssl_target_name_override", endpoint.host))
    return [*_OPTIONS, *own]


def _tls(credentials: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        credentials.root or None, credentials.key or None, credentials.certificate or None
    )
