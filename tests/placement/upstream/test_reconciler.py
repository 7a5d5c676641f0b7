"""Models that servers load because this one wants them to."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from headrace.connections.endpoint import Endpoint
from headrace.core.errors import ExecutionFailed
from headrace.placement.upstream.connection import CallFailed, RemoteDescription
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.reconciler import BlockingClients, RepositoryReconciler
from headrace.placement.upstream.triton_options import LoadCounts
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import Failure, Fate

ENDPOINT = Endpoint("s", "grpc", "127.0.0.1", 1, "localhost")


class Server:
    """A connection to a server; something may happen while it loads a model."""

    def __init__(self) -> None:
        self.loaded = False
        self.meanwhile: Callable[[], None] = lambda: None

    def describe(self, seconds: float) -> RemoteDescription:
        if self.loaded:
            return RemoteDescription(pb.ModelMetadataResponse(), None)
        raise CallFailed(Failure(Fate.ANSWERED, ExecutionFailed("unknown")), "unknown")

    def infer(self, request: object, seconds: float) -> Any:
        raise NotImplementedError

    def load(self, config: str, seconds: float) -> None:
        self.meanwhile()
        self.loaded = True

    def unload(self, seconds: float) -> None:
        self.loaded = False


class Visit(BlockingClients):
    """BlockingClients of one server."""

    def __init__(self, server: Server) -> None:
        options = RemoteOptions.of({"endpoints": "grpc://127.0.0.1"}, "m", 0, Path())
        super().__init__(options, "m")
        self._server = server

    def to(self, endpoint: Endpoint) -> Any:
        return nullcontext(self._server)


@pytest.mark.parametrize("used", [False, True], ids=["nobody else", "somebody else"])
def test_a_model_that_is_given_back_while_it_loads(used: bool) -> None:
    server, uses = Server(), LoadCounts()
    reconciler = RepositoryReconciler(Visit(server), [], uses)
    if used:
        uses.take(("m", ENDPOINT))
    server.meanwhile = reconciler.release
    reconciler.ensure(ENDPOINT, 10)
    assert server.loaded is used


def test_a_model_that_stays_loaded() -> None:
    server = Server()
    reconciler = RepositoryReconciler(Visit(server), [], None)
    server.meanwhile = reconciler.release
    reconciler.ensure(ENDPOINT, 10)
    assert server.loaded
