"""The engine's end of a link, with an engine that records its calls."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from headrace.api.operations import handed_on
from headrace.core.call import (
    Call,
    InferResponse,
    Timing,
)
from headrace.core.datatypes import Datatype
from headrace.core.errors import NotFound, Overloaded, QuotaExceeded
from headrace.core.identity import Identity, PeerFacts, Role
from headrace.core.quotas import Quota, Quotas
from headrace.core.tensors import Buffer, Tensor
from headrace.doors.grpc.call import Unary
from headrace.engine.admission import Held
from headrace.engine.client_accounts import limit_clients
from headrace.ipc.frames import IN_FILE, INLINE, Header, frame, pack_header
from headrace.observability.audit import AuditEntry, AuditOutcome
from headrace.plugins.frontends.channel import FrameChannel
from headrace.plugins.frontends.link_infer import (
    Flag,
    LinkKind,
    RequestWriter,
    numbers_rest,
    read_error,
)
from headrace.plugins.frontends.session import FrontEndSession, RemotePayer
from tests.doors.fakes import FakeEngine, until
from tests.protocol.strategies import PROPERTY


async def unanswered(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers nothing."""
    await asyncio.Event().wait()


class FrontEnd:
    """The other end of the link, and the engine behind it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.engine.admission.most_requests = 2
        self.frames: list[tuple[LinkKind, int, int, bytes, bytes]] = []
        self.lost: list[str] = []
        self.ready = 0
        self.unary: dict[str, Unary] = {}  # handlers of calls over gRPC, by path
        ours, theirs = socket.socketpair()
        self.entries: list[AuditEntry] = []
        self.host = FrontEndSession(
            ours, self.engine, unanswered, self.unary, self._on_ready, self.lost.append,
            record=self.entries.append,
        )  # fmt: skip
        self.sock: socket.socket = theirs
        self.channel = FrameChannel(theirs, self._take, self.lost.append)

    def _on_ready(self) -> None:
        self.ready += 1

    def _take(self, header: Header[LinkKind], meta: bytes, rest: Buffer) -> None:
        self.frames.append((header.kind, header.number, header.flags, meta, bytes(rest)))

    def infer(self, number: int, model: str = "plain", flags: int = 0) -> None:
        """Send a request with one tensor."""
        tensor = Tensor("x", Datatype.FP32, np.arange(4, dtype=np.float32))
        meta, pieces = RequestWriter().parts(
            Call(model, "", str(number), {"x": tensor}, nbytes=100)
        )
        self.channel.send_parts(LinkKind.INFER, flags, number, meta, pieces)


@asynccontextmanager
async def linked() -> AsyncIterator[FrontEnd]:
    """Both ends, closed at the end."""
    front_end = FrontEnd()
    try:
        yield front_end
    finally:
        front_end.channel.close()
        front_end.host.close()
        admission = front_end.engine.admission
        assert (admission.requests, admission.bytes) == (0, 0)


@pytest.fixture
async def front_end() -> AsyncIterator[FrontEnd]:
    async with linked() as front_end:
        yield front_end


def response(request: Call) -> InferResponse:
    """An answer with the request's tensors."""
    return InferResponse("m", "7", request.id, list(request.inputs.values()), Timing(1, 2, 3))


async def test_a_request_and_its_answers(front_end: FrontEnd) -> None:
    work, admission = front_end.engine.plain.work, front_end.engine.admission
    front_end.infer(5)
    await until(lambda: bool(work))
    assert work[0].request.inputs["x"].array.tolist() == [0, 1, 2, 3]
    assert (admission.requests, admission.bytes) == (1, 100)
    work[0].request.respond(response(work[0].request), False)
    assert admission.requests == 1
    work[0].request.respond(response(work[0].request), True)
    assert admission.requests == 0
    await until(lambda: len(front_end.frames) == 2)
    assert [f[:3] for f in front_end.frames] == [
        (LinkKind.RESPONSE, 5, 0),
        (LinkKind.RESPONSE, 5, Flag.FINAL),
    ]


async def test_requests_of_one_read_are_submitted_together(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback scheduled by the first sees them all, if a turn of the loop is long enough."""
    monkeypatch.setattr("headrace.plugins.frontends.channel.PIECE_SECS", 60.0)
    engine = front_end.engine
    engine.admission.most_requests = 100
    seen: list[int] = []
    submit = engine.plain.submit

    def noted(call: Call) -> None:
        if not engine.plain.work:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: seen.append(len(engine.plain.work)))
        submit(call)

    engine.plain.submit = noted  # type: ignore[method-assign]
    for number in range(30):
        front_end.infer(number)
    await until(lambda: bool(seen))
    assert seen == [30]


@pytest.mark.parametrize("size", [INLINE, INLINE + 1, 5 << 20])
async def test_a_large_message_is_handled_where_it_was_received(
    front_end: FrontEnd, size: int
) -> None:
    kinds: list[type] = []
    path = handed_on()[0]
    head = orjson.dumps({"grpc": path, "given": [], "peer": [*PeerFacts()], "id": ""})

    async def handle(data: Buffer, call: object) -> bytes:
        kinds.append(type(data))
        return b"%d %d" % (len(data), bytes(data).count(b"y"))

    front_end.unary[path] = handle
    front_end.channel.send_parts(LinkKind.CALL, 0, 3, head, [b"y" * size])
    await until(lambda: bool(front_end.frames))
    assert front_end.frames == [(LinkKind.ANSWER, 3, 0, b"{}", b"%d %d" % (size, size))]
    assert kinds == [bytes if size <= INLINE else memoryview]


async def test_thousands_of_calls_begin_in_turns_and_health_checks_at_once(
    front_end: FrontEnd,
) -> None:
    turn, begun = 0, Counter[int]()
    healthy: list[int] = []

    async def config(message: Buffer, call: object) -> bytes:
        begun[turn] += 1
        return b""

    async def live(message: Buffer, call: object) -> bytes:
        healthy.append(begun.total())
        return b""

    service = "/inference.GRPCInferenceService"
    head = {"given": [], "peer": ["", None], "id": ""}
    for name, handler in (("ModelConfig", config), ("ServerLive", live)):
        front_end.unary[f"{service}/{name}"] = handler
    for number in range(1_000):
        asked = orjson.dumps({**head, "grpc": f"{service}/ModelConfig"})
        front_end.channel.send(LinkKind.CALL, number, asked)
    asked = orjson.dumps({**head, "grpc": f"{service}/ServerLive", "urgent": True})
    front_end.channel.send(LinkKind.CALL, 1_000, asked)
    front_end.channel.send(LinkKind.CALL, 1_001, asked)
    front_end.channel.send(LinkKind.CANCEL, 1_001)
    while begun.total() < 1_000:
        turn += 1
        await asyncio.sleep(0)
    assert max(begun.values()) < 100
    assert healthy[0] < 500
    await until(lambda: len(front_end.frames) >= 1_001)


async def test_refusals(front_end: FrontEnd) -> None:
    front_end.infer(1, "nobody")
    for number in (2, 3, 4):
        front_end.infer(number)
    await until(lambda: len(front_end.frames) == 2)
    found = {
        number: (type(read_error(meta, rest)[0]), flags)
        for _, number, flags, meta, rest in front_end.frames
    }
    assert found == {1: (NotFound, Flag.REFUSE), 4: (Overloaded, Flag.REFUSE)}
    assert front_end.engine.admission.refused == 1


@pytest.mark.parametrize(("begun", "flag"), [(True, 0), (False, Flag.UNBEGUN)])
async def test_an_error_names_its_version_and_whether_the_model_has_begun(
    front_end: FrontEnd, begun: bool, flag: int
) -> None:
    front_end.infer(1)
    await until(lambda: bool(front_end.engine.plain.work))
    request = front_end.engine.plain.work[0].request
    request.started = begun
    request.fail(Overloaded("why"))
    await until(lambda: bool(front_end.frames))
    _, number, flags, meta, rest = front_end.frames[0]
    error, version = read_error(meta, rest)
    assert (number, flags, type(error), str(error), version) == (
        1, flag, Overloaded, "why", "7",
    )  # fmt: skip


async def test_cancellation(front_end: FrontEnd) -> None:
    work, admission = front_end.engine.plain.work, front_end.engine.admission
    front_end.infer(1)
    front_end.infer(2)
    front_end.channel.send(LinkKind.CANCEL, 1)
    front_end.channel.send(LinkKind.CANCEL, 99)  # was answered meanwhile
    await until(lambda: len(work) == 2 and work[0].cancelled)
    assert (admission.requests, work[1].cancelled) == (1, False)


async def test_the_end_of_a_front_end_cancels_its_requests(front_end: FrontEnd) -> None:
    work, admission = front_end.engine.plain.work, front_end.engine.admission
    front_end.infer(1)
    front_end.infer(2)
    front_end.channel.send(LinkKind.HELD, rest=numbers_rest(*Held(3, 500, 200)))
    await until(lambda: admission.requests == 5)
    assert admission.bytes == 700
    front_end.channel.close()
    await until(lambda: bool(front_end.lost))
    assert [w.cancelled for w in work] == [True, True]
    assert (admission.requests, admission.bytes, admission.unread) == (0, 0, 0)


async def test_requests_that_the_front_end_has_refused_are_recorded(front_end: FrontEnd) -> None:
    who = Identity("ann", "key", [Role("scorer", frozenset())])
    entry = AuditEntry("LogSettings", AuditOutcome.REFUSED, "403", who, "grpc", "10.0.0.1")
    front_end.channel.send(LinkKind.AUDIT, 0, orjson.dumps(entry.document()))
    await until(lambda: bool(front_end.entries))
    [found] = front_end.entries
    assert found.document() == entry.document()
    front_end.channel.send(LinkKind.AUDIT, 0, b'{"operation": "LogSettings"}')
    await until(lambda: bool(front_end.lost))


async def test_usage_reported_by_front_ends(front_end: FrontEnd) -> None:
    admission = front_end.engine.admission
    front_end.channel.send(LinkKind.READY)
    front_end.channel.send(LinkKind.HELD, rest=numbers_rest(*Held(2, 10)))
    front_end.channel.send(
        LinkKind.HELD, rest=numbers_rest(*Held(1, 4, 3, 2, 5, 6, 7, 8, 9, 10, 3))
    )
    await until(lambda: admission.requests == 1)
    assert (front_end.ready, admission.refused, admission.bytes) == (1, 3, 4)
    assert admission.connections == {"http": 5, "grpc": 6}
    front_end.channel.close()
    await until(lambda: bool(front_end.lost))
    # Nothing is open there any more, but its charges remain.
    assert admission.held(0, 0) == Held(0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 3)


@pytest.mark.parametrize(
    "data",
    [
        frame(LinkKind.RESPONSE, number=1), frame(LinkKind.CALL, b"\xff", 1),
        frame(LinkKind.HELD, number=1), pack_header(LinkKind.INFER, IN_FILE, 1, 0, 5),
        frame(LinkKind.CALL, b"{}", 1) + frame(LinkKind.CALL, b"{}", 1),
        frame(LinkKind.CALL, b"[]", 1),
    ],
    ids=["wrong way", "no json", "no number", "no file", "twice", "list"],
)  # fmt: skip
async def test_invalid_frames_end_only_the_link(data: bytes, front_end: FrontEnd) -> None:
    front_end.infer(7)
    await until(lambda: bool(front_end.engine.plain.work))
    front_end.sock.sendall(data)
    await until(lambda: bool(front_end.lost))
    assert front_end.engine.plain.work[0].cancelled


@pytest.mark.parametrize(("meta", "rest"), [(b"{}", b""), (b"[]", bytes(40)), (b"\xff", b"")])
async def test_a_request_that_cannot_be_read_fails_alone(
    meta: bytes, rest: bytes, front_end: FrontEnd
) -> None:
    front_end.channel.send(LinkKind.INFER, 1, meta, rest)
    front_end.infer(7)
    await until(lambda: bool(front_end.frames and front_end.engine.plain.work))
    assert [(f[0], f[1]) for f in front_end.frames] == [(LinkKind.FAIL, 1)]
    assert not front_end.lost


frames = st.builds(
    frame, st.sampled_from(LinkKind), st.binary(max_size=10), st.integers(0, 3),
    st.binary(max_size=20), st.integers(0, 127),
)  # fmt: skip


@PROPERTY
@given(st.lists(st.binary(max_size=60) | frames, max_size=6))
async def test_any_bytes(pieces: list[bytes]) -> None:
    """The engine raises nothing, and nothing stays counted."""
    async with linked() as front_end:
        front_end.infer(1)
        for piece in pieces:
            front_end.sock.sendall(piece)
        for _ in range(5):
            await asyncio.sleep(0)


class FromAddress(Call):
    """A call of a client at an address."""

    @property
    def payer(self) -> RemotePayer:
        return RemotePayer("192.0.2.1")


async def test_a_client_has_its_quota_once_whatever_its_front_ends() -> None:
    async with linked() as front_end:
        admission = front_end.engine.admission
        admission.most_requests = 100
        limit_clients(admission, Quotas((Quota("q", ("*",), requests=3),)))
        second = FrontEndSession(
            (pair := socket.socketpair())[0], front_end.engine, unanswered, {}, lambda: None,
            front_end.lost.append,
        )  # fmt: skip
        channel = FrameChannel(pair[1], lambda *_: None, front_end.lost.append)
        tensor = Tensor("x", Datatype.FP32, np.arange(4, dtype=np.float32))
        for number in range(1, 4):
            asked = FromAddress("plain", "", str(number), {"x": tensor}, nbytes=100)
            meta, pieces = RequestWriter().parts(asked)
            where = channel if number == 3 else front_end.channel
            where.send_parts(LinkKind.INFER, 0, number, meta, pieces)
        await until(lambda: admission.requests == 3)
        meta, pieces = RequestWriter().parts(FromAddress("plain", "", "4", {"x": tensor}))
        front_end.channel.send_parts(LinkKind.INFER, 0, 4, meta, pieces)
        await until(lambda: len(front_end.frames) == 1)
        [(kind, number, flags, meta, rest)] = front_end.frames
        assert (kind, number, flags) == (LinkKind.FAIL, 4, Flag.REFUSE)
        error, _ = read_error(meta, rest)
        assert isinstance(error, QuotaExceeded)
        assert "3 requests at once of its quota 'q'" in str(error)
        second.close()
        channel.close()
        await until(lambda: admission.requests == 2)
        front_end.infer(5)  # a client without an address, and an identity, has no quota
        await until(lambda: admission.requests == 3)
