"""Generate requests to controlled models by controlled clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.core.call import InferResponse, Raw, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, NotFound, QueueTimeout
from headrace.core.tensors import Tensor
from headrace.doors.http.generate import (
    NOT_ONE_RESPONSE,
    GenerateExchange,
    GenerateRoute,
)
from headrace.doors.http.head import head_of
from headrace.engine.entrance import GIVE_UP_BYTES, PAUSE_BYTES
from tests.doors.fakes import FakeEngine, Work, until

Message = dict[str, Any]
_EVENTS = b"text/event-stream; charset=utf-8"


class AskedCall:
    """One request through the route, and its client."""

    def __init__(self, engine: FakeEngine, path: str, body: bytes | None, **headers: str) -> None:
        """`body` None means that none is received."""
        self.engine = engine
        self.sent: list[Message] = []
        self.reads = asyncio.Event()  # true while the client reads
        self.reads.set()
        self._gone = asyncio.Event()
        self._body: list[Message] = []
        if body is not None:
            self._body.append({"type": "http.request", "body": body, "more_body": False})
        self._headers = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ]
        self.scope: Message = {
            "type": "http", "method": "POST", "path": path, "headers": self._headers,
        }  # fmt: skip
        self.route = GenerateRoute(engine, 1_000)
        assert self.route.claims("POST", path)
        self.task = asyncio.create_task(self.route.handle(self.scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    def leave(self) -> None:
        """Disconnect the client."""
        self._gone.set()

    async def work(self, model: str = "many") -> Work:
        """The work given to the model."""
        await until(lambda: bool(self.engine.models[model].work))
        return self.engine.models[model].last

    async def answer(self) -> tuple[int, bytes, bytes]:
        """The complete answer: status, content type, body."""
        await self.task
        head, *body = self.sent
        headers = dict(head["headers"])
        more = [piece.get("more_body", False) for piece in body]
        assert more == [True] * (len(body) - 1) + [False]
        text = b"".join(piece["body"] for piece in body)
        assert int(headers.get(b"content-length", len(text))) == len(text)
        return head["status"], headers[b"content-type"], text

    @property
    def text(self) -> bytes:
        """The body so far."""
        return b"".join(piece.get("body", b"") for piece in self.sent)


@asynccontextmanager
async def calling(
    verb: str = "generate_stream",
    body: bytes | None = b'{"x":1,"id":"a"}',
    model: str = "many",
    **headers: str,
) -> AsyncIterator[AskedCall]:
    """A request; after it nothing may stay counted."""
    engine = FakeEngine()
    call = AskedCall(engine, f"/v2/models/{model}/{verb}", body, **headers)
    try:
        yield call
    finally:
        call.task.cancel()
        await asyncio.wait([call.task])
    assert (engine.admission.requests, engine.admission.bytes) == (0, 0)


@pytest.fixture
async def call() -> AsyncIterator[AskedCall]:
    async with calling() as call:
        yield call


def document(text: bytes) -> bytes:
    """The response of `Work.answer` for a text, as JSON."""
    value = orjson.dumps(text[0] if len(text) == 1 else list(text))
    return b'{"id":"a","model_name":"many","model_version":"7","y":%b}' % value


@pytest.mark.parametrize(("path", "claimed"), [
    ("/v2/models/m/generate", True), ("/v2/models/m/generate_stream", True),
    ("/v2/models/m/versions/2/generate", True), ("/v2/models/m/versions/2/generate_stream", True),
    ("/v2/models/m/versions/x/generate", False), ("/v2/models/m/infer", False),
    ("/v2/models//generate", False), ("/v2/models/m/n/generate", False), ("/generate", False),
])  # fmt: skip
def test_paths(path: str, claimed: bool) -> None:
    assert GenerateRoute(FakeEngine(), 1).claims("POST", path) is claimed


async def test_one_response() -> None:
    async with calling("generate", b'{"x":[1,2],"t":0.5}') as call:
        work = await call.work()
        assert work.request.inputs["x"].array.tolist() == [[1, 2]]
        assert work.request.parameters == {"t": 0.5}
        assert call.engine.admission.requests == 1
        work.answer("ab", final=True)
        assert await call.answer() == (
            200, b"application/json", document(b"ab").replace(b'"id":"a",', b""),
        )  # fmt: skip
        assert call.scope["inference"] == {"model": "many", "version": "7", "request_id": ""}
        assert not work.cancelled


async def test_more_than_one_response() -> None:
    """The first one has decided on the status. The model need not continue."""
    async with calling("generate") as call:
        work = await call.work()
        work.answer("a")
        await asyncio.sleep(0)
        assert not call.sent
        work.answer("b")
        status, _, text = await call.answer()
        assert (status, orjson.loads(text)) == (200, {"error": NOT_ONE_RESPONSE})
        assert work.cancelled


def events(*texts: bytes) -> bytes:
    return b"".join(b"data: %b\n\n" % text for text in texts)


JSON, NOT_ONE = b"application/json", orjson.dumps({"error": NOT_ONE_RESPONSE})


@pytest.mark.parametrize(("verb", "steps", "status", "kind", "body"), [
    ("generate", "a.", 200, JSON, document(b"a")),
    ("generate", ".", 500, JSON, NOT_ONE),
    ("generate", "!", 500, JSON, b'{"error":"why"}'),
    ("generate", "a!", 500, JSON, b'{"error":"why"}'),
    ("generate_stream", ".", 200, _EVENTS, b""),
    ("generate_stream", "a!", 200, _EVENTS, events(document(b"a"), b'{"error":"why"}')),
])  # fmt: skip
async def test_end_of_responses(
    verb: str, steps: str, status: int, kind: bytes, body: bytes
) -> None:
    """By `.`, with no further response, or by `!`, an execution error."""
    async with calling(verb) as call:
        work = await call.work()
        for step in steps:
            if step == ".":
                work.request.finish()
            elif step == "!":
                work.request.fail(ExecutionFailed("why"))
            else:
                work.answer(step)
        assert await call.answer() == (status, kind, body)


async def test_a_stream(call: AskedCall) -> None:
    work = await call.work()
    assert not call.sent
    for number, letters in enumerate(("a", "bc", "d")):
        work.answer(letters)
        await until(lambda: call.text.count(b"\n\n") == number + 1)  # noqa: B023
    assert call.engine.admission.requests == 1
    work.answer("e", final=True)
    status, kind, text = await call.answer()
    assert (status, kind) == (200, _EVENTS)
    assert b"content-length" not in dict(call.sent[0]["headers"])
    assert text == events(*[document(t) for t in (b"a", b"bc", b"d", b"e")])
    assert call.scope["inference"]["request_id"] == "a"


async def test_an_error_that_comes_first_decides_on_the_status(call: AskedCall) -> None:
    (await call.work()).request.fail(QueueTimeout("late"))
    assert await call.answer() == (503, _EVENTS, b'data: {"error":"late"}\n\n')
    assert dict(call.sent[0]["headers"])[b"retry-after"] == b"1"


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(("body", "model", "headers", "status", "text"), [
    (b"{", "many", {}, 400, "failed to parse the request JSON"),
    (b'{"x":"a"}', "many", {}, 400, "input 'x' of datatype INT32 takes integers"),
    (b'{"id":"bad"}', "many", {}, 400, "as asked"),
    (b'{"x":1}', "nobody", {}, 404, "no model 'nobody'"),
    (b" " * 1_001, "many", {}, 413, "exceeds"),
    (b'{"x":1}', "many", {"content_encoding": "gzip"}, 400, "must not be compressed"),
    (b'{"x":1}', "many", {"content_length": "x"}, 400, "Content-Length must be a number"),
])  # fmt: skip
async def test_errors_before_inference(
    verb: str, body: bytes, model: str, headers: dict[str, str], status: int, text: str
) -> None:
    async with calling(verb, body, model, **headers) as call:
        found, kind, answer = await call.answer()
        assert (found, kind) == (status, b"application/json")
        assert text in orjson.loads(answer)["error"]


async def test_a_wrong_method() -> None:
    engine = FakeEngine()
    call = AskedCall(engine, "/v2/models/many/generate", b"")
    call.scope["method"] = "GET"
    assert (await call.answer())[0] == 405


async def test_identity_is_no_encoding() -> None:
    async with calling("generate", content_encoding="identity") as call:
        (await call.work()).answer("a", final=True)
        assert (await call.answer())[0] == 200


async def test_timings_among_the_members() -> None:
    async with calling("generate", b'{"x":1,"headrace_timing":true}') as call:
        work = await call.work()
        assert work.request.parameters == {}
        work.answer("a", final=True)
        answer = orjson.loads((await call.answer())[2])
        assert (answer["batch_rows"], answer["queue_us"], answer["compute_us"]) == (3, 0, 0)


async def test_a_model_pauses_while_its_client_does_not_read(call: AskedCall) -> None:
    work = await call.work()
    work.answer("a")
    await until(lambda: bool(call.text))
    call.reads.clear()
    work.answer("b")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not work.held  # bytes in transit do not count
    work.answer(PAUSE_BYTES)
    assert work.holds == 1
    work.answer("under way when it was asked")
    assert work.holds == 1
    call.reads.set()
    await until(lambda: not work.held)
    work.answer("c", final=True)
    _, _, text = await call.answer()
    assert text.count(b"\n\n") == 5


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize("before", [0, 1])
async def test_the_client_disconnects(verb: str, before: int) -> None:
    async with calling(verb) as call:
        work = await call.work()
        for _ in range(before):
            work.answer("a")
        call.leave()
        await call.task
        assert work.cancelled


async def test_the_client_disconnects_in_its_request() -> None:
    async with calling(body=None) as call:
        call.leave()
        await call.task
        assert not call.sent
        assert not call.engine.many.work


async def test_a_response_that_has_no_json(call: AskedCall) -> None:
    work = await call.work()
    half = Tensor("h", Datatype.FP16, np.zeros(1, np.float16))
    work.request.respond(InferResponse("many", "7", "a", [half], Timing(1, 2, 3)), False)
    assert work.cancelled
    status, _, text = await call.answer()
    assert status == 400
    assert b"sending FP16 data via JSON is not supported" in text


@pytest.mark.parametrize(("verb", "started"), [("generate", 0), ("generate_stream", 1)])
async def test_the_server_ends(verb: str, started: int) -> None:
    async with calling(verb) as call:
        work = await call.work()
        if started:
            work.answer("a")
            await until(lambda: bool(call.text))
        call.task.cancel()
        status, _, text = await call.answer()
        assert status == (200 if started else 503)
        assert b'{"error":"Server exiting"}' in text
        assert work.cancelled


async def test_a_connection_does_not_outlast_the_server(call: AskedCall) -> None:
    work = await call.work()
    call.engine.admission.close()
    work.answer("a", final=True)
    await call.answer()
    assert dict(call.sent[0]["headers"])[b"connection"] == b"close"


async def test_without_a_signature_the_body_is_forwarded_undecoded() -> None:
    """A front end knows no models; their refusal arrives late."""
    async with calling(body=b'{"x":') as call:
        call.engine.many.signature = None
        work = await call.work()
        assert work.request.options.raw is Raw.GENERATE
        assert bytes(work.request.inputs[""].array.data) == b'{"x":'
        work.request.refuse(NotFound("no such model"))
        assert await call.answer() == (404, b"application/json", b'{"error":"no such model"}')


# --- slow clients


def exchange_of(engine: FakeEngine) -> GenerateExchange:
    """A request that no model has yet."""
    head = head_of(engine, "/v2/models/many/generate_stream", {"name": "many"}, [])
    exchange = GenerateExchange(1_000, head, engine.admission)
    exchange.begin()
    return exchange


def long(count: int) -> InferResponse:
    """A response of somewhat more than `count` bytes."""
    return InferResponse("m", "1", "", [], Timing(1, 2, 3), {"text": "x" * count})


async def test_a_model_that_does_not_pause_is_cancelled() -> None:
    engine = FakeEngine()
    exchange = exchange_of(engine)
    work = Work(engine.many, exchange)
    exchange.respond(long(GIVE_UP_BYTES), False)  # one may be of any size
    assert (work.held, work.cancelled) == (True, False)
    exchange.respond(long(1), False)
    assert (work.held, work.cancelled) == (True, True)
    assert await exchange.news() == []
    assert "does not read the responses" in str(exchange.error)
    exchange.respond(long(1), True)
    assert exchange.count == 2


async def test_responses_before_the_request_is_attached() -> None:
    engine = FakeEngine()
    exchange = exchange_of(engine)
    exchange.respond(long(PAUSE_BYTES), False)
    assert exchange.held  # for the next model
    work = Work(engine.many, exchange)
    work.held = True
    [text] = await exchange.news()
    assert len(text) > PAUSE_BYTES
    assert not work.held
    exchange.drop()
    assert work.cancelled


async def test_later_responses_wait_for_a_large_one(call: AskedCall) -> None:
    """The large response is encoded on a thread."""
    work = await call.work()
    work.answer(200_000)
    work.answer("b", final=True)
    await call.task
    large, *rest = call.text.split(b"\n\n")
    assert len(large) > 400_000
    assert rest == [b"data: " + document(b"b"), b""]


async def test_a_client_that_disconnects_while_a_response_is_encoded(call: AskedCall) -> None:
    work = await call.work()
    work.answer(200_000)
    work.answer("b")
    call.leave()
    await call.task
    assert work.cancelled
    assert call.text == b""


async def test_unread_responses_are_charged(call: AskedCall) -> None:
    work, admission = await call.work(), call.engine.admission
    before = admission.bytes
    work.answer("first")
    await until(lambda: bool(call.text))
    call.reads.clear()
    work.answer("second")
    await until(lambda: admission.bytes == before)  # it is being sent
    work.answer(1000)
    assert admission.bytes > before + 1000
    call.reads.set()
    await until(lambda: admission.bytes == before)
    call.reads.clear()
    for _ in range(3):
        work.answer(1000)
    call.leave()
