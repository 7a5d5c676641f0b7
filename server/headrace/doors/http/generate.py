"""Generate requests: flat JSON in, and flat JSON or a stream of server-sent events out.

A bare ASGI endpoint in front of the FastAPI application, like the infer route. Responses are
encoded when they come and sent when the client reads. While it does not read, they are queued, and
the model is asked to pause; when the client disconnects, the request is cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial

from starlette.types import Receive, Scope, Send

from headrace.api.gate import Gate
from headrace.api.operations import NAMED
from headrace.core.call import Call, InferResponse, Raw, Timing
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.doors.http.asgi import OPERATION
from headrace.doors.http.exchange import CLOSE, JSON, Answer, Exchange
from headrace.doors.http.head import InferHead
from headrace.doors.http.infer import (
    BareRoute,
    InferRoute,
    PostRoute,
    answer_instead,
    read_body,
    send_answer,
    send_head,
    watch_disconnect,
)
from headrace.engine.admission import Account
from headrace.engine.entrance import GIVE_UP_BYTES, PAUSE_BYTES, Entrance, not_read
from headrace.engine.workbench import LARGE, Job
from headrace.protocol.generate import EVENT_STREAM, decode_generate, encode_generate, event
from headrace.protocol.parameters import add_timing, server_timing
from headrace.protocol.v2_json import error_body, pass_raw

NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response,"
    " use generate stream for model that generates various number of responses"
)
_EVENTS = b"content-type: %b\r\n" % EVENT_STREAM
_FAREWELL_SECS = 1  # for sending the shutdown error to a client


class GenerateExchange(Exchange):
    """A generate request in flight, and its responses as JSON that were not sent yet.

    Invariants: the call is held exactly while the model was asked to pause; after `over` or `gone`
    no more responses are accepted.
    """

    __slots__ = (
        "_behind", "_charged", "_job", "_news", "_paused", "_pending", "_queued", "_texts", "count",
        "error", "gone", "over", "refused", "timing",
    )  # fmt: skip

    refusal = ""
    timing: Timing | None  # of the last response

    def __init__(self, limit: int, head: InferHead, account: Account) -> None:
        super().__init__(limit, head, account)
        self.count = 0  # responses so far
        self.over = False
        self.error: Exception | None = None  # the error that ended the request
        self.refused = False  # true if the request was refused before it was queued
        self.gone = False  # the client has disconnected
        self._texts: list[bytes] = []
        self._queued = 0  # bytes of these
        self._pending = 0  # bytes of responses not encoded yet
        self._charged = 0  # bytes of both that are charged to the account
        self._news = asyncio.Event()
        self._paused = False
        self._job: Job[bytes] | None = None  # encodes a large response
        self._behind: deque[Callable[[], None]] = deque()  # events queued behind the job

    # --- the request

    def open(self) -> None:
        """Implements `Exchange.open`."""
        super().open()
        encoding = self.head.content_encoding
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            raise InvalidRequest(
                f"a generate request must not be compressed, got Content-Encoding '{encoding}'"
            )

    def _takes_long(self, body: Buffer, signature: Signature | None) -> bool:
        return signature is not None

    def _read(self, body: Buffer, signature: Signature | None, charge: Charge) -> Call:
        model, version = self.head.key
        if signature is None:
            return pass_raw(model, version, body, Raw.GENERATE)
        return decode_generate(signature, model, version, body, charge)

    # --- from the engine

    def respond(self, response: InferResponse, final: bool) -> None:
        """Queue a response."""
        if self.over:
            return
        size = sum(tensor.array.nbytes for tensor in response.outputs)
        self._pending += size
        if self._job is None:
            self._take_up(response, final, size)
        else:
            self._behind.append(partial(self._take_up, response, final, size))
        if self._job is not None:
            self._restrain(final)

    def finish(self) -> None:
        """Note the end without a further response."""
        if self._job is not None:
            self._behind.append(self.finish)
            return
        self.over = True
        self._news.set()

    def fail(self, error: ServerError) -> None:
        """Note the error that ends the request."""
        if self._job is not None:
            self._behind.append(partial(self.fail, error))
        elif not self.over:
            self.error = error
            self.finish()

    def refuse(self, error: ServerError) -> None:
        """Note the error that refused the request."""
        self.refused = True
        self.fail(error)

    def _take_up(self, response: InferResponse, final: bool, size: int) -> None:
        """Encode a response of `size` bytes, on the workbench if it is large."""
        if size > LARGE:
            try:
                self.account.check_answer(response.model_name, size)
                self._grow_answer(0)
            except ServerError as error:
                self._pending -= size
                self._give_up(error)
                return
            self._job = self.workbench.do(
                size, lambda charge: self._text(response, charge),
                partial(self._encoded, final, size), partial(self._grow, response.model_name),
                self.account,
            )  # fmt: skip
            return
        self._pending -= size
        try:
            text = self._text(response, uncharged)
        except Exception as error:  # no JSON form, or a bug
            self._give_up(error)
        else:
            self._add(text, final)

    def _grow(self, model: str, nbytes: int) -> None:
        """Charge a piece of the text, which is joined with the others; raises `ServerError`."""
        self._grow_answer(2 * nbytes)
        self.account.check_answer(model, self._answering // 2)

    def _text(self, response: InferResponse, charge: Charge) -> bytes:
        """The JSON of a response; raises `InvalidRequest` if it has none."""
        self.id = response.id
        self.timing = response.timing
        if self._timed:
            add_timing(response)
        return encode_generate(response, charge)

    def _encoded(
        self, final: bool, size: int, text: bytes | None, problem: Exception | None
    ) -> None:
        """Queue a response encoded on the workbench, and process the events behind it."""
        self._job = None
        self._pending -= size
        self._leave_answer()
        if text is None:
            self._give_up(problem or not_read())
            return
        self._add(text, final)
        while self._behind and self._job is None:
            self._behind.popleft()()

    def _add(self, text: bytes, final: bool) -> None:
        self._texts.append(text)
        self._queued += len(text)
        self.count += 1
        self.over = self.over or final
        self._news.set()
        self._restrain(final)

    def _charge_queue(self) -> None:
        waiting = self._queued + self._pending
        self.account.count(waiting - self._charged)
        self._charged = waiting

    def _restrain(self, final: bool) -> None:
        """Hold the call, or end it, if more is queued than its limits allow."""
        self._charge_queue()
        waiting = self._queued + self._pending
        if final:
            return
        if self._paused and waiting > GIVE_UP_BYTES:
            self._texts.clear()
            self._give_up(not_read())
        elif not self._paused and waiting > PAUSE_BYTES:
            self._paused = True
            self.hold(True)

    def _give_up(self, error: Exception) -> None:
        self.drop()
        self.error = error
        self.finish()

    # --- from the client

    def leave(self) -> None:
        """Note that the client has disconnected."""
        self.gone = True
        self._news.set()

    def drop(self) -> None:
        """Drop the queue, and cancel the call unless it is over."""
        if self._job is not None:
            self._job.cancel()
            self._job = None
            self._leave_answer()
        self._behind.clear()
        self._queued = self._pending = 0
        self._charge_queue()
        if not self.over:
            self.over = True
            self.cancel()

    async def news(self) -> list[bytes]:
        """The queued responses, once there are any, or the end or the client's disconnection.

        The model resumes.
        """
        await self._news.wait()
        texts, self._texts = self._texts, []
        self._queued = 0
        self._charge_queue()
        if not (self.over or self.gone):
            self._news.clear()
        if self._paused and self._pending <= PAUSE_BYTES:
            self._paused = False
            if not self.over:
                self.hold(False)
        return texts


class GenerateRoute(PostRoute):
    """The routes of generate requests."""

    operations = ("Generate", "GenerateStream")

    async def post(self, head: InferHead, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `PostRoute.post`."""
        exchange = GenerateExchange(self._limit, head, self.account(scope))
        try:
            if await self._submit(exchange, receive, send):
                streams = scope[OPERATION] == NAMED["GenerateStream"].counted
                give = self._stream if streams else self._answer
                await _watched(give(exchange, send), exchange, receive)
        finally:
            exchange.drop()
            exchange.close()
            scope["inference"] = exchange.fields()

    async def _submit(self, exchange: GenerateExchange, receive: Receive, send: Send) -> bool:
        """Read and queue the request; returns False if it was answered with an error instead."""
        try:
            exchange.open()
            body = await read_body(exchange, receive)
            exchange.submit(body)
        except (Exception, asyncio.CancelledError) as error:
            answer = answer_instead(exchange, error)
            if answer is not None:
                await self._send(answer, send)
            return False
        return True

    async def _answer(self, exchange: GenerateExchange, send: Send) -> None:
        """Send the single response, or an error."""
        texts: list[bytes] = []
        try:
            ended = False
            while not (ended or exchange.gone or len(texts) > 1):
                texts += await exchange.news()
                ended = exchange.over
        except asyncio.CancelledError as error:
            answer = answer_instead(exchange, error)
            assert answer is not None, "an end of the server without a word. This is a bug."
            await self._send(answer, send)
            return
        if not exchange.gone:
            await self._send(_one_answer(exchange, texts), send)

    async def _stream(self, exchange: GenerateExchange, send: Send) -> None:
        """Send one event per response, and one for a final error."""
        started = ended = False
        failure: Answer | None = None
        try:
            while not ended:
                events = [event(text) for text in await exchange.news()]
                if exchange.gone:
                    return
                ended = exchange.over
                if exchange.error is not None:
                    failure = exchange.failure(exchange.error)
                if not started:
                    if failure is not None and exchange.refused:
                        await self._send(failure, send)
                        return
                    await self._begin(exchange, None if exchange.count else failure, send)
                    started = True
                if failure is not None:
                    events += [event(bytes(text)) for text in failure.buffers]
                body = b"".join(events)
                await send({"type": "http.response.body", "body": body, "more_body": not ended})
        except asyncio.CancelledError as error:
            answer = answer_instead(exchange, error)
            assert answer is not None, "an end of the server without a word. This is a bug."
            with suppress(TimeoutError):  # a client that does not read gets no error
                async with asyncio.timeout(_FAREWELL_SECS):
                    if started:
                        last = event(bytes(answer.buffers[0]))
                        await send({"type": "http.response.body", "body": last})
                    else:
                        await self._send(answer, send)

    async def _begin(self, exchange: GenerateExchange, failure: Answer | None, send: Send) -> None:
        """Send the head of a stream, with the status of its first response."""
        status, lines = 200, _EVENTS + exchange.backend_line
        if failure is not None:
            status, lines = failure.status, _EVENTS + failure.lines.removeprefix(JSON)
        await send_head(send, status, lines + (CLOSE if self._engine.exiting else b""))

    async def _send(self, answer: Answer, send: Send) -> None:
        if self._engine.exiting and not answer.closes:
            answer.lines += CLOSE
        await send_answer(send, answer)


def _one_answer(exchange: GenerateExchange, texts: list[bytes]) -> Answer:
    if len(texts) > 1:
        # As in Triton: the first response decides the status.
        return Answer(200, JSON, [error_body(NOT_ONE_RESPONSE)])
    if exchange.error is not None:
        return exchange.failure(exchange.error)
    if not texts:
        return Answer(500, JSON, [error_body(NOT_ONE_RESPONSE)])
    assert exchange.timing is not None, "a response that was not encoded. This is a bug."
    timing = b"server-timing: %b\r\n" % server_timing(exchange.timing)
    return Answer(200, JSON + timing + exchange.backend_line, texts)


async def _watched(
    giving: Coroutine[None, None, None], exchange: GenerateExchange, receive: Receive
) -> None:
    """Send data, and tell the exchange if the client disconnects meanwhile."""
    watch = asyncio.create_task(watch_disconnect(receive, exchange.leave))
    try:
        await giving
    finally:
        watch.cancel()


def inference_routes(
    engine: Entrance,
    max_request_bytes: int,
    gate: Gate,
    generate: Entrance | None = None,
) -> list[BareRoute]:
    """The routes of inference; `generate` is the entrance for generate requests."""
    given = max_request_bytes, gate
    return [InferRoute(engine, *given), GenerateRoute(generate or engine, *given)]
