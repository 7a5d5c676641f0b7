"""One stream of ModelStreamInfer."""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Self

import grpc

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.grpc_client import GrpcClient


class Stream:
    """A stream whose requests a test sends one by one."""

    def __init__(self, client: GrpcClient, *metadata: tuple[str, str]) -> None:
        self._requests: SimpleQueue[pb.ModelInferRequest | None] = SimpleQueue()
        self.call = client.stream(self._sent(), metadata)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self.call.cancel()

    def send(self, *messages: pb.ModelInferRequest) -> None:
        for message in messages:
            self._requests.put(message)

    def half_close(self) -> None:
        self._requests.put(None)

    def receive(self) -> pb.ModelStreamInferResponse:
        response: pb.ModelStreamInferResponse = next(self.call)
        return response

    def rest(self) -> list[pb.ModelStreamInferResponse]:
        """The remaining messages; the stream must end without an error."""
        responses: list[pb.ModelStreamInferResponse] = list(self.call)
        assert self.call.code() is grpc.StatusCode.OK
        return responses

    def _sent(self) -> Iterator[pb.ModelInferRequest]:
        while (message := self._requests.get()) is not None:
            yield message
