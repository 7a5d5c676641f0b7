"""One call of the native gRPC transport."""

import gzip

import pytest

from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import Handlers, Peer
from headrace.doors.grpc.native.calls import SessionRpc
from headrace.doors.grpc.native.connection import GrpcConnection, Rpc, RpcHead, ServerContext
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
from headrace.protocol.grpc import pack_prefix
from headrace.protocol.http2.protocol import Limits
from tests.doors.fakes import Transport, until


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    ("waits", "least", "most"),
    [(None, 0, 0), (60.0, 1, 60), (1e-5, 1e-6, 2e-5), (0.0, 1e-6, 1e-6)],
)
async def test_deadline_of_a_call(waits: float | None, least: float, most: float) -> None:
    """Also a timeout of almost nothing: uvloop creates another kind of timer for it."""
    context = ServerContext(
        {}, Handlers({}, {}, {}), Admission(0, 0), 1, False, GrpcOptions(), Limits()
    )
    fields = [(b":path", b"/any.Service/Any"), (b":method", b"POST")]
    head = RpcHead(fields, context, GrpcConnection(context))
    head.timeout = waits
    call = Rpc(head, 1)
    call.finished = True  # for its timer
    assert least <= call.remaining() <= most


class Taking:
    """A session that records its messages and refusals."""

    def __init__(self, peer: Peer) -> None:
        self.messages: list[bytes] = []
        self.refused: list[ServerError] = []

    def receive(self, message: Buffer) -> None:
        self.messages.append(bytes(message))

    def refuse(self, error: ServerError) -> None:
        self.refused.append(error)

    idle = False

    def half_close(self) -> None: ...

    def sent(self) -> None: ...

    def closed(self) -> None: ...


def opened(admission: Admission) -> tuple[SessionRpc, Taking, GrpcConnection]:
    """A call whose messages may be compressed, and its session."""
    sessions: list[Taking] = []

    def open_session(peer: Peer) -> Taking:
        sessions.append(Taking(peer))
        return sessions[-1]

    path = "/any.Service/Any"
    context = ServerContext(
        {path: (SessionRpc, open_session)},
        Handlers({}, {}, {}),
        admission,
        1 << 24,
        False,
        GrpcOptions(),
        Limits(),
    )
    connection = GrpcConnection(context)
    connection.connection_made(Transport())
    fields = [
        (b":path", path.encode()), (b":method", b"POST"), (b"content-type", b"application/grpc"),
        (b"grpc-encoding", b"gzip"),
    ]  # fmt: skip
    call = SessionRpc(RpcHead(fields, context, connection), 1)
    return call, sessions[0], connection


def give(call: Rpc, data: bytes) -> None:
    """Receive DATA."""
    call.on_data(memoryview(data), 0, len(data))


@pytest.mark.parametrize("apart", [True, False])
async def test_messages_behind_a_compressed_one_keep_their_order(apart: bool) -> None:
    """Also those in the same frame."""
    admission = Admission(0, 0)
    call, session, connection = opened(admission)
    messages = [b"0" * (1 << 20), b"1", b"2" * (1 << 20), b"3" * 100]
    packed = [gzip.compress(message, mtime=0) for message in messages]
    frames = [
        pack_prefix(1, len(packed[0])) + packed[0], pack_prefix(0, 1) + messages[1],
        pack_prefix(1, len(packed[2])) + packed[2], pack_prefix(1, len(packed[3])) + packed[3],
    ]  # fmt: skip
    for piece in frames if apart else [b"".join(frames)]:
        give(call, piece)
    await until(lambda: len(session.messages) == len(messages))
    assert session.messages == messages
    connection.connection_lost(None)
    assert (admission.messages, admission.bytes) == (0, 0)


@pytest.mark.parametrize("packed", [b"no gzip", gzip.compress(bytes(17 << 20))])
async def test_messages_that_cannot_be_decompressed_do_not_end_their_stream(packed: bytes) -> None:
    admission = Admission(0, 0)
    call, session, connection = opened(admission)
    give(call, pack_prefix(1, len(packed)) + packed + pack_prefix(0, 5) + b"later")
    await until(lambda: session.messages == [b"later"])
    assert len(session.refused) == 1
    assert not call.finished
    connection.connection_lost(None)
    assert (admission.messages, admission.bytes) == (0, 0)


async def test_a_message_without_memory_is_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoMemory:
        def block(self, nbytes: int) -> memoryview:
            raise MemoryError

    admission = Admission(0, 0)
    call, _, connection = opened(admission)
    monkeypatch.setattr("headrace.protocol.grpc.BLOCKS", NoMemory())
    give(call, pack_prefix(0, 1 << 20) + b"0")
    assert call.finished
    connection.connection_lost(None)
    assert admission.messages == 0
