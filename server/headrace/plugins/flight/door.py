"""The door `flight`: the procedures of Arrow Flight, on a port of their own.

They are gRPC, so the native gRPC transport carries them, with its limits, deadlines and shutdown;
pyarrow converts the tables, and none of its servers and threads is involved.
"""

from typing import Any

from headrace.api.operations import NAMED
from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.doors.door import Door
from headrace.doors.grpc.call import Handlers, Peer, RpcContext, StreamSession, check_call
from headrace.doors.grpc.native.server import NativeServer
from headrace.doors.grpc.options import GrpcOptions
from headrace.doors.listeners import bind
from headrace.engine.engine import Engine
from headrace.plugins.flight.streams import (
    Parcels,
    Pickup,
    TableStream,
    output_schema,
    target_signature,
)
from headrace.plugins.flight.wire import SERVICE, flight_info, read_descriptor, schema_result
from headrace.protocol.arrow import pyarrow

_ADDRESS = "127.0.0.1"  # unless one is given
_WINDOW = 8 << 20  # bytes that a client may be ahead, for it sends everything in one stream
_SMALL = 64 << 10  # bytes of a message that is no table


# What the procedures are in the protocol's table.
_OPERATIONS = {
    "GetFlightInfo": "ModelMetadata",
    "GetSchema": "ModelMetadata",
    "ListFlights": "RepositoryIndex",
    "DoExchange": "ModelStreamInfer",
    "DoPut": "ModelStreamInfer",
    "DoGet": "ModelStreamInfer",
}


class FlightDoor(Door):
    """Arrow Flight: tables through models."""

    operations = ("ModelInfer",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parcels = Parcels()
        self._server: NativeServer | None = None

    async def open(self, address: str) -> str:
        """Listen on a port, or HOST:PORT; raises `OSError`, also without pyarrow."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or _ADDRESS
        if not port.isdecimal() or int(port) > 65535:
            raise OSError(f"expected a port, or HOST:PORT, got {address!r}")
        try:
            pyarrow()  # here, since it takes long
        except ServerError as error:
            raise OSError(str(error)) from None
        engine, parcels, gate = self._engine, self._parcels, self.gate
        unary = {"GetFlightInfo": self._info, "GetSchema": self._schema}
        sessions = {
            "DoExchange": lambda peer: TableStream(engine, gate, None, peer),
            "DoPut": lambda peer: TableStream(engine, gate, parcels, peer),
            "DoGet": lambda peer: Pickup(parcels, peer),
            "ListFlights": lambda peer: FlightList(engine, peer),
        }
        small = (*unary, "DoGet", "ListFlights")
        handlers = Handlers(
            {},
            {SERVICE + name: handler for name, handler in unary.items()},
            {SERVICE + name: handler for name, handler in sessions.items()},
            operations={SERVICE + name: NAMED[found] for name, found in _OPERATIONS.items()},
            gate=gate,
            limits={SERVICE + name: _SMALL for name in small},
        )
        admission = engine.admission
        self._server = NativeServer(
            handlers,
            admission,
            admission.max_request_bytes,
            False,
            self.tls,
            options=GrpcOptions(window=_WINDOW),
            door="flight",
        )
        try:
            listener = bind(host, int(port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        port = listener.getsockname()[1]
        await self._server.start([listener])
        scheme = "grpc" if self.tls is None else "grpc+tls"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def drain(self, seconds: float) -> None:
        """Implements `Door.drain`: connections announce the shutdown."""
        if self._server is not None:
            await self._server.announce(seconds)

    async def close(self, grace: float) -> None:
        """Implements `Door.close`."""
        self._parcels.close()
        if self._server is not None:
            await self._server.stop(grace)

    async def _info(self, message: Buffer, call: RpcContext) -> bytes:
        name, version, schema = self._described(message, call)
        return flight_info(name, version, schema)

    async def _schema(self, message: Buffer, call: RpcContext) -> bytes:
        return schema_result(self._described(message, call)[2])

    def _described(self, message: Buffer, call: RpcContext) -> tuple[str, str, Any]:
        """The model of a descriptor, its version and its schema; raises `ServerError`."""
        name, version = read_descriptor(message)
        check_call(self.gate, call, call.identity, name, version, NAMED["ModelMetadata"])
        return name, version, output_schema(target_signature(self._engine, name, version))


class FlightList(StreamSession):
    """ListFlights: the models that are ready and take tables."""

    idle = True

    def __init__(self, engine: Engine, peer: Peer) -> None:
        self._engine, self._peer = engine, peer

    def receive(self, message: Any) -> None:
        """Ignore the criteria, which every server defines itself."""

    def half_close(self) -> None:
        """Send all, and end."""
        ready = {version.model for version in self._engine.versions() if version.ready}
        for name in sorted(filter(self._peer.identity.sees, ready)):
            try:
                schema = output_schema(target_signature(self._engine, name, ""))
            except ServerError:  # it takes no tables, or was unloaded
                continue
            self._peer.send([flight_info(name, "", schema)])
        self._peer.finish()

    def sent(self) -> None:
        """Do nothing: the list is short."""

    def closed(self) -> None:
        """Do nothing: nothing is kept."""
