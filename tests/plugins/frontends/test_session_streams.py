"""Requests with many responses over a link, with a controlled engine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from starlette.types import Receive, Scope, Send

from headrace.core.call import Call, InferResponse
from headrace.core.errors import ExecutionFailed, InvalidRequest, NotFound, Overloaded, ServerError
from headrace.core.identity import NO_PEER
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import Unary
from headrace.engine.admission import Admission
from headrace.ipc.frames import FrameReader, frame
from headrace.plugins.frontends.link_infer import Flag, LinkKind, RequestWriter
from headrace.plugins.frontends.process import (
    EngineSession,
    RemoteEngine,
    RemoteTarget,
    forwarding_handler,
)
from headrace.plugins.frontends.session import FrontEndSession
from headrace.protocol.v2_json import pass_raw
from tests.doors.fakes import FakeEngine, Work, until

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
NO_CALLS: Mapping[str, Unary] = {}
_BIG = 60 << 10  # bytes of a response that still travels in its frame


class Door(Call):
    """A door's call that records its answers."""

    def __init__(self, asked: Call) -> None:
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.got: list[str] = []
        self.errors: list[ServerError] = []
        self.target: RemoteTarget | None = None

    def respond(self, response: InferResponse, final: bool) -> None:
        text = b"".join(tensor.array.tobytes() for tensor in response.outputs).decode()
        self.got.append(text + "." * final)

    def finish(self) -> None:
        self.got.append("end")

    def fail(self, error: ServerError) -> None:
        self.got.append("error")
        self.errors.append(error)

    def refuse(self, error: ServerError) -> None:
        self.got.append("refused")
        self.errors.append(error)


async def none(scope: Scope, receive: Receive, send: Send) -> None:
    """No application: there are no calls."""
    raise AssertionError(scope)


class Link:
    """A front end, and the engine that it is linked with."""

    def __init__(self, unary: Mapping[str, Unary] = NO_CALLS) -> None:
        self.engine = FakeEngine()
        self.lost: list[str] = []
        ours, theirs = socket.socketpair()
        self.host = FrontEndSession(
            ours, self.engine, none, unary, lambda: None, self.lost.append
        )  # fmt: skip
        self.front_end = EngineSession(theirs, _nothing, _nothing, self.lost.append)
        self.admission = Admission(0, 0)
        self.front_end.watch(self.admission)

    def submit(
        self, model: str, door: int = 0, body: bytes | None = None, make: type[Door] = Door
    ) -> Door:
        """Send a request by one kind of door; a raw one if it has a body."""
        asked = Call(model, "", "a", {}) if body is None else pass_raw(model, "", body)
        call = make(asked)
        target = RemoteEngine(self.front_end, self.admission, door).find(model)
        assert isinstance(target, RemoteTarget)
        call.target = target
        self.admission.enter(call.nbytes)
        target.submit(call)
        return call

    async def work(self, model: str = "many", count: int = 1) -> Work:
        """The work given to the model."""
        await until(lambda: len(self.engine.models[model].work) == count)
        return self.engine.models[model].last


def _nothing(_: object) -> None:
    raise AssertionError("not asked for")


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    """Both ends, closed at the end: no error was logged, and nothing stays counted."""
    link = Link()
    yield link
    link.host.close()
    await until(lambda: bool(link.lost))
    assert link.engine.admission.requests == 0


async def test_many_responses(link: Link) -> None:
    call = link.submit("many")
    work = await link.work()
    assert link.engine.admission.requests == 1
    work.answer("one")
    work.answer("two")
    await until(lambda: len(call.got) == 2)
    work.answer("three", final=True)
    assert link.engine.admission.requests == 0
    await until(lambda: len(call.got) == 3)
    assert call.got == ["one", "two", "three."]
    assert call.target is not None
    assert (call.target.decoupled, call.target.name) == (True, "7")


async def test_a_model_is_known_to_be_decoupled_before_it_answers(link: Link) -> None:
    many, plain = link.submit("many"), link.submit("plain")
    target = many.target
    assert target is not None
    assert not target.decoupled
    (await link.work("plain")).answer("x", final=True)
    await until(lambda: bool(plain.got))
    assert [target.decoupled] == [True]
    assert plain.target is not None
    assert not plain.target.decoupled


async def test_an_end_without_a_response(link: Link) -> None:
    for count, model in enumerate(("many", "plain")):
        call = link.submit(model)
        work = await link.work(model)
        for _ in range(count):
            work.answer("x")
        work.request.finish()
        await until(lambda: call.got[-1:] == ["end"])  # noqa: B023
        assert len(call.got) == count + 1


async def test_an_error_after_responses(link: Link) -> None:
    call = link.submit("many")
    work = await link.work()
    work.answer("x")
    work.request.fail(ExecutionFailed("why"))
    await until(lambda: bool(call.errors))
    assert call.got == ["x", "error"]
    assert str(call.errors[0]) == "why"


async def test_a_model_pauses_and_continues(link: Link) -> None:
    slow, quick = link.submit("many"), link.submit("many")
    await link.work(count=2)
    first, second = link.engine.many.work
    slow.hold(True)
    await until(lambda: first.held)
    second.answer("x")
    await until(lambda: quick.got == ["x"])
    slow.hold(False)
    await until(lambda: not first.held)
    assert second.holds == 0


async def test_a_late_hold_is_ignored(link: Link) -> None:
    call = link.submit("many")
    work = await link.work()
    work.answer("x", final=True)
    call.hold(True)  # before the answer is seen
    await until(lambda: bool(call.got))
    call.hold(True)
    plain = link.submit("plain")
    plain.hold(True)  # no effect for a single answer
    await link.work("plain")
    assert (work.holds, link.engine.plain.last.holds) == (0, 0)


async def test_a_response_that_cannot_be_read_fails_alone(link: Link) -> None:
    broken, whole = link.submit("many"), link.submit("many")
    await link.work(count=2)
    first, second = link.engine.many.work
    assert broken.target is not None
    link.host.channel.send(LinkKind.RESPONSE, broken.target.number, b"[]")
    second.answer("x")
    await until(lambda: whole.got == ["x"])
    await until(lambda: first.cancelled)
    assert [str(error) for error in broken.errors] == ["internal error"]
    assert not link.lost


class Broken(Door):
    """A call whose door fails to write its first answer."""

    def respond(self, response: InferResponse, final: bool) -> None:
        raise ValueError("a bug")

    def finish(self) -> None:
        raise ValueError("a bug")

    def fail(self, error: ServerError) -> None:
        if not isinstance(error, ExecutionFailed):
            raise ValueError("a bug")
        super().fail(error)


@pytest.mark.parametrize(
    "answer",
    [
        lambda work: work.answer("x"),
        lambda work: work.answer("x", final=True),
        lambda work: work.request.finish(),
        lambda work: work.request.fail(Overloaded("why")),
    ],
    ids=["response", "last response", "end", "error"],
)
async def test_an_answer_that_its_door_cannot_write_fails_alone(
    link: Link, answer: Callable[[Work], None]
) -> None:
    broken, whole = link.submit("many", make=Broken), link.submit("many")
    await link.work(count=2)
    first, second = link.engine.many.work
    answer(first)
    second.answer("y")
    await until(lambda: whole.got == ["y"])
    await until(lambda: first.cancelled or link.engine.admission.requests == 1)
    assert [str(error) for error in broken.errors] == ["internal error"]
    assert not link.lost


async def test_a_client_disconnects(link: Link) -> None:
    call = link.submit("many")
    work = await link.work()
    work.answer("x")
    call.cancel()
    await until(lambda: work.cancelled)
    assert call.got == []


async def test_generate_requests_are_decoded_in_the_engine(link: Link) -> None:
    body = b'{"x":[1,2],"id":"seven","t":0.5,"headrace_timing":true}'
    call = link.submit("many", Flag.GENERATE, body)
    work = await link.work()
    request = work.request
    assert request.inputs["x"].array.tolist() == [[1, 2]]
    assert (request.id, request.parameters) == ("seven", {"id": "seven", "t": 0.5})
    assert link.engine.admission.bytes == len(body) == request.nbytes
    work.answer("x")
    work.request.finish()
    await until(lambda: call.got == ["x", "end"])
    wrong = link.submit("many", Flag.GENERATE, b'{"x":"a"}')
    nobody = link.submit("nobody", Flag.GENERATE, b"{}")
    await until(lambda: bool(wrong.errors and nobody.errors))
    assert (wrong.got, type(wrong.errors[0])) == (["refused"], InvalidRequest)
    assert (nobody.got, type(nobody.errors[0])) == (["refused"], NotFound)


async def test_doors_with_one_answer_refuse_models_with_many(link: Link) -> None:
    calls = [link.submit("many", door) for door in (Flag.HTTP, Flag.UNARY)]
    await until(lambda: all(call.errors for call in calls))
    assert [call.got for call in calls] == [["refused"], ["refused"]]
    assert not link.engine.many.work


async def test_forwarded_requests_are_charged_once(link: Link) -> None:
    """Also while a long request is written to its file, and while an answer in one is in flight."""
    server, here, size = link.engine.admission, link.admission, 4 << 20
    here.begin(size)
    here.grow(size, 0)
    await until(lambda: server.bytes == size)
    here.admit()
    call = Door(pass_raw("many", "", bytes(size)))
    RemoteEngine(link.front_end, here, 0).find("many").submit(call)
    while not link.engine.many.work:
        await asyncio.sleep(0)
        # Once more while it is copied, with a few bytes of overhead.
        assert server.bytes == size or 2 * size < server.bytes < 2 * size + 100
        assert server.requests <= 1
    link.engine.many.last.answer(size, final=True)
    while not call.got:
        await asyncio.sleep(0)
        assert server.bytes >= size
    here.leave(size)
    await until(lambda: not server.bytes)
    assert (here.bytes, server.unread) == (0, 0)


class Caller:
    """A call of a client without metadata."""

    peer_facts = NO_PEER

    def metadata(self) -> Mapping[str, str]:
        return {}


async def test_calls_that_are_handed_on_are_charged_until_they_are_answered() -> None:
    begun: list[bytes] = []
    go_on = asyncio.Event()

    async def load(message: Buffer, call: object) -> bytes:
        begun.append(bytes(message))
        await go_on.wait()
        return b"done"

    ends = Link(unary={LOAD: load})
    server = ends.engine.admission
    handler = forwarding_handler(ends.front_end, ends.admission, LOAD)
    calls = [asyncio.ensure_future(handler(b"m", Caller())) for _ in range(3)]
    await until(lambda: len(begun) == 3 and server.bytes >= 3 * 4096)
    calls[2].cancel()
    await until(lambda: server.bytes == ends.admission.bytes < 3 * 4096)
    go_on.set()
    assert await asyncio.gather(*calls[:2]) == [b"done", b"done"]
    await until(lambda: not server.bytes)
    ends.host.close()
    await until(lambda: bool(ends.lost))


async def test_usage_of_other_front_ends_counts(link: Link) -> None:
    server = link.engine.admission
    server.max_bytes = 6400
    here = Admission(0, 6400)
    link.front_end.watch(here)
    for nbytes in (6000, 50):  # the latter too small to report
        server.count(nbytes)
        link.host.tell_elsewhere()
    await until(lambda: here.most_bytes == 400)
    assert [here.pressed] == [True]
    here.enter(400)
    with pytest.raises(Overloaded, match="the server is at its limit of 6400 bytes"):
        here.enter(1)
    here.leave(400)
    with pytest.raises(Overloaded):  # it would not be alone
        here.enter(6401)
    await until(lambda: server.refused == 2)
    server.count(-6050)
    link.host.tell_elsewhere()
    await until(lambda: here.most_bytes == 6400)
    assert [here.pressed] == [False]
    here.enter(6401)
    here.leave(6401)
    await until(lambda: not server.bytes)


# --- a front end that does not read


class Stuck:
    """A front end that sends a request, and reads on request."""

    def __init__(self, give_up_bytes: int) -> None:
        self.engine = FakeEngine()
        ours, self.sock = socket.socketpair()
        self.host = FrontEndSession(
            ours, self.engine, none, {}, lambda: None, lambda _: None, give_up_bytes
        )
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.kinds: list[LinkKind] = []
        self._reader = FrameReader(LinkKind)

    async def submit(self, number: int) -> Work:
        """Send a request for the model with many answers."""
        meta, pieces = RequestWriter().parts(Call("many", "", "", {}))
        before = len(self.engine.many.work)
        self.sock.sendall(frame(LinkKind.INFER, meta, number, b"".join(pieces)))
        await until(lambda: len(self.engine.many.work) > before)
        return self.engine.many.last

    def read(self) -> None:
        """Read available bytes."""
        try:
            while data := self.sock.recv(1 << 20, socket.MSG_DONTWAIT):
                self.kinds += [header.kind for header, _, _ in self._reader.feed(data)]
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close it; nothing may stay counted."""
        self.host.close()
        self.sock.close()
        assert (self.engine.admission.requests, self.engine.admission.bytes) == (0, 0)


async def fill(work: Work, most: int) -> int:
    """Answer until the model is paused; the bytes sent."""
    nbytes = 0
    while not work.held:
        work.answer(_BIG)
        nbytes += _BIG
        await asyncio.sleep(0)  # frames of an iteration are written at its end
        assert nbytes < most
    return nbytes


async def test_models_pause_while_the_front_end_does_not_read() -> None:
    stuck = Stuck(64 << 20)
    work, other = await stuck.submit(1), await stuck.submit(2)
    await fill(work, 8 << 20)
    assert (other.held, other.holds) == (False, 0)
    other.answer("x")
    assert other.holds == 1
    stuck.sock.sendall(frame(LinkKind.PAUSE, number=2))  # its client, too
    stuck.sock.sendall(frame(LinkKind.PAUSE, number=99))

    def read() -> bool:
        stuck.read()
        return not work.held

    await until(read)
    assert other.held
    stuck.sock.sendall(frame(LinkKind.GO_ON, number=2))
    await until(lambda: not other.held)
    assert (work.holds, other.holds) == (1, 1)
    stuck.close()
    assert work.cancelled


async def test_a_model_that_does_not_pause_is_cancelled() -> None:
    stuck = Stuck(3 << 20)
    work = await stuck.submit(1)
    while not work.cancelled:
        work.answer(_BIG)
        await asyncio.sleep(0)
    assert work.holds == 1
    assert stuck.host.channel.waiting < 4 << 20
    assert stuck.engine.admission.requests == 0

    def read() -> bool:
        stuck.read()
        return LinkKind.FAIL in stuck.kinds

    await until(read)
    stuck.close()
