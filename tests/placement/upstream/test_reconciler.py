"""Models that this server loads on upstreams."""

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.connections.endpoint import Endpoint
from headrace.core.errors import ExecutionFailed, LoadFailed
from headrace.placement.upstream.connection import CallFailed, ProtocolClient, RemoteDescription
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.reconciler import Reconciler
from headrace.placement.upstream.triton_options import LoadCounts, TritonControl
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.status import Failure, Fate

ENDPOINT = Endpoint("s", "grpc", "127.0.0.1", 1, "localhost")


class Server:
    """A connection to a server; `meanwhile` runs while it loads a model."""

    def __init__(self) -> None:
        self.loaded = False
        self.meanwhile: Callable[[], None] = lambda: None

    async def describe(self, seconds: float) -> RemoteDescription:
        if self.loaded:
            return RemoteDescription(pb.ModelMetadataResponse(), None)
        raise CallFailed(Failure(Fate.ANSWERED, ExecutionFailed("unknown")), "unknown")

    async def load(self, config: str, seconds: float) -> None:
        self.meanwhile()
        self.loaded = True

    async def unload(self, seconds: float) -> None:
        self.loaded = False


class Clients(ProtocolClients):
    """Clients of one server."""

    def __init__(self, server: Server) -> None:
        super().__init__(RemoteOptions.of({"endpoints": "grpc://127.0.0.1"}, "m", 0, Path()), "m")
        self._server = server

    def visit(self, endpoint: Endpoint, ask: Callable[[Any], Any]) -> Any:
        return asyncio.run(ask(self._server))


def made(server: Server, uses: LoadCounts, **parameters: str) -> Reconciler:
    control = TritonControl.of({"remote_load": "true", **parameters})
    return Reconciler(Clients(server), [ENDPOINT], ModelConfig(), control, uses)


@pytest.mark.parametrize("used", [False, True], ids=["nobody else", "somebody else"])
async def test_a_model_released_while_it_loads(used: bool) -> None:
    server, uses = Server(), LoadCounts()
    reconciler = made(server, uses, remote_unload="true")
    if used:
        uses.take(("m", ENDPOINT))
    server.meanwhile = reconciler.release
    await reconciler.ensure(cast(ProtocolClient, server), ENDPOINT, 10)
    assert server.loaded is used


async def test_a_model_that_stays_loaded() -> None:
    server = Server()
    reconciler = made(server, LoadCounts())
    server.meanwhile = reconciler.release
    await reconciler.ensure(cast(ProtocolClient, server), ENDPOINT, 10)
    assert server.loaded


def test_a_model_that_no_server_loads_is_given_back() -> None:
    server, uses = Server(), LoadCounts()

    def fail() -> None:
        raise CallFailed(Failure(Fate.ANSWERED, ExecutionFailed("broken")), "broken")

    server.meanwhile = fail
    with pytest.raises(LoadFailed, match=r"no server loads model .m.: .*broken"):
        made(server, uses, remote_unload="true").load(inf)
    server.meanwhile = lambda: None
    reconciler = made(server, uses, remote_unload="true")
    reconciler.load(inf)
    assert server.loaded
    reconciler.release()
    assert not server.loaded
