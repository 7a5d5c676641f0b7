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

from headrace.api.header_rules import HeaderRules
from headrace.api.operations import NAMED, Category
from headrace.core.call import Call, InferResponse, Raw, Timing
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.doors.http.exchange import CLOSE, JSON, Answer, Exchange
from headrace.doors.http.head import Head
from headrace.doors.http.infer import (
    InferRoute,
    PostRoute,
    Route,
    answer_instead,
    read_body,
    send_answer,
    send_head,
    watch_disconnect,
)
from headrace.doors.http.protocol import OPERATION
from headrace.engine.admission import Account
from headrace.engine.doors import GIVE_UP_BYTES, PAUSE_BYTES, Entrance, not_read
from headrace.engine.workbench import LARGE, Job, Workbench
from headrace.protocol.elements import Charge, charge_objects, uncharged
from headrace.protocol.generate import EVENT_STREAM, decode_generate, encode_generate, event
from headrace.protocol.parameters import add_timing, server_timing, wants_timing
from headrace.protocol.v2_json import error_body, pass_raw


class Responses:
    """Queued responses to one generate request, as JSON.

    Owned by the event loop. Invariants: the call is held exactly while the model was asked to
    pause; after `ended` or `gone` no more responses are accepted.
    """

    def __init__(
        self,
        encode: Callable[[InferResponse], bytes],
        give_up_bytes: int = GIVE_UP_BYTES,
        workbench: Workbench | None = None,
        account: Account | None = None,
    ) -> None:
        """The request is ended once more than `give_up_bytes` are queued.

        With a `workbench`, large responses are encoded there. `account` is charged for the queue.
        """
        self.count = 0  # responses so far
        self.ended = False
        self.error: Exception | None = None  # the error that ended the request
        self.refused = False  # true if the request was refused before it was queued
        self.gone = False
        self._encode = encode
        self._workbench = workbench
        self._account = account
        self._give_up_bytes = give_up_bytes
        self._texts: list[bytes] = []
        self._nbytes = 0
        self._pending = 0  # bytes of responses not encoded yet
        self._charged = 0  # bytes charged to the account
        self._news = asyncio.Event()
        self._call: Call | None = None
        self._held = False
        self._job: Job[bytes] | None = None  # encodes a large response
        self._behind: deque[Callable[[], None]] = deque()  # events queued behind the job

    # --- from the engine

    def respond(self, response: InferResponse, final: bool) -> None:
        """Queue a response."""
        if self.ended:
            return
        size = sum(tensor.array.nbytes for tensor in response.outputs)
        if self._job is not None:
            self._pending += size
            self._behind.append(partial(self._take_up, response, final, size))
            self._restrain(final)
        elif size > LARGE and self._workbench is not None:
            self._pending += size
            self._take_up(response, final, size)
            self._restrain(final)
        else:
            self._encode_here(response, final)

    def _take_up(self, response: InferResponse, final: bool, size: int) -> None:
        """Encode a response of `size` bytes, on the workbench if it is large."""
        if size > LARGE and self._workbench is not None:
            self._job = self._workbench.do(
                size, lambda charge: self._encode(response), partial(self._encoded, final, size),
                uncharged,
            )  # fmt: skip
        else:
            self._pending -= size
            self._encode_here(response, final)

    def _encode_here(self, response: InferResponse, final: bool) -> None:
        try:
            text = self._encode(response)
        except Exception as error:  # no JSON form, or a bug
            self._give_up(error)
            return
        self._add(text, final)

    def _encoded(
        self, final: bool, size: int, text: bytes | None, problem: Exception | None
    ) -> None:
        """Queue a response encoded on the workbench, and process later events."""
        self._job = None
        self._pending -= size
        if text is None:
            self._give_up(problem or not_read())
            return
        self._add(text, final)
        while self._behind and self._job is None:
            self._behind.popleft()()

    def _add(self, text: bytes, final: bool) -> None:
        self._texts.append(text)
        self._nbytes += len(text)
        self.count += 1
        self._news.set()
        if final:
            self.ended = True
        self._restrain(final)

    def _charge(self) -> None:
        """Charge the queued bytes."""
        if self._account is not None:
            waiting = self._nbytes + self._pending
            self._account.count(waiting - self._charged)
            self._charged = waiting

    def _restrain(self, final: bool) -> None:
        """Hold the call, or end it, if more is queued than its limits allow."""
        self._charge()
        waiting = self._nbytes + self._pending
        if final:
            return
        if self._held and waiting > self._give_up_bytes:
            self._texts.clear()
            self._give_up(not_read())
        elif not self._held and waiting > PAUSE_BYTES:
            self._held = True
            if self._call is not None:
                self._call.hold(True)

    def finish(self) -> None:
        """Note the end without a further response."""
        if self._job is not None:
            self._behind.append(self.finish)
            return
        self.ended = True
        self._news.set()

    def fail(self, error: ServerError) -> None:
        """Note the error that ends the request."""
        if self._job is not None:
            self._behind.append(partial(self.fail, error))
        elif not self.ended:
            self.error = error
            self.finish()

    def refuse(self, error: ServerError) -> None:
        """Note the error that refused the request."""
        self.refused = True
        self.fail(error)

    # --- from the client

    def attach(self, call: Call) -> None:
        """Note the submitted call."""
        self._call = call
        if self.ended:
            call.cancel()
        elif self._held:
            call.hold(True)

    def leave(self) -> None:
        """Cancel the request: the client has disconnected."""
        self.gone = True
        self._news.set()

    def close(self) -> None:
        """Drop the queue and cancel the call."""
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self._behind.clear()
        self._nbytes = self._pending = 0
        self._charge()
        if self._call is not None and not self.ended:
            self.ended = True
            self._call.cancel()

    async def news(self) -> None:
        """Wait for a response, the end, or the client's disconnection."""
        await self._news.wait()

    def take(self) -> list[bytes]:
        """Take the queued responses; the model resumes."""
        texts, self._texts = self._texts, []
        self._nbytes = 0
        self._charge()
        if not (self.ended or self.gone):
            self._news.clear()
        if self._held and self._pending <= PAUSE_BYTES:
            self._held = False
            if self._call is not None and not self.ended:
                self._call.hold(False)
        return texts

    def _give_up(self, error: Exception) -> None:
        self.close()
        self.error = error
        self.finish()


NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response,"
    " use generate stream for model that generates various number of responses"
)
_EVENTS = b"content-type: %b\r\n" % EVENT_STREAM
_FAREWELL_SECS = 1  # for sending the shutdown error to a client


class GenerateExchange(Exchange):
    """A generate request in flight."""

    __slots__ = ("responses", "timing")

    refusal = ""
    timing: Timing | None  # of the last response

    def __init__(self, limit: int, head: Head, account: Account) -> None:
        super().__init__(limit, head, account)
        self.responses = Responses(self.encode, workbench=self.workbench, account=self.account)

    def open(self) -> None:
        """Implements `Exchange.open`."""
        super().open()
        encoding = self.head.content_encoding
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            raise InvalidRequest(
                f"a generate request must not be compressed, got Content-Encoding '{encoding}'"
            )

    def submit(self, body: Buffer, after: Callable[[], None] | None = None) -> None:
        """Implements `Exchange.submit`."""
        self._consumed = True
        head, found = self.head, self.found
        assert found is not None, "submit before open. This is a bug."
        self.admit()
        if self._again:
            found = self._find()
        if found.signature is None:
            self.take(pass_raw(head.model, head.version, body, Raw.GENERATE))
        elif len(body) > LARGE:
            self._defer(body, found.signature, after)
            return
        else:
            self.take(decode_generate(found.signature, head.model, head.version, body))
            self._more = wants_timing(self)
        self.bound()
        self.submit_to(found)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Responses.respond`."""
        self.responses.respond(response, final)

    def finish(self) -> None:
        """Implements `Responses.finish`."""
        self.responses.finish()

    def fail(self, error: ServerError) -> None:
        """Implements `Responses.fail`."""
        self.responses.fail(error)

    def refuse(self, error: ServerError) -> None:
        """Implements `Responses.refuse`."""
        self.responses.refuse(error)

    def _decode(self, body: Buffer, signature: Signature | None, charge: Charge) -> Call:
        assert signature is not None, "a request without a model. This is a bug."
        request = decode_generate(signature, self.head.model, self.head.version, body, charge)
        charge_objects(request.inputs.values(), charge)
        return request

    def encode(self, response: InferResponse) -> bytes:
        """Encode a response as JSON; raises `InvalidRequest` if it has no JSON form."""
        self.id = response.id
        self.timing = response.timing
        if self.timed:
            add_timing(response)
        return encode_generate(response)


class GenerateRoute(PostRoute):
    """The routes of generate requests."""

    operations = ("Generate", "GenerateStream")

    async def post(self, head: Head, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements `PostRoute.post`."""
        exchange = GenerateExchange(self._limit, head, self.account(scope))
        responses = exchange.responses
        try:
            if await self._submit(exchange, responses, receive, send):
                streams = scope[OPERATION] == NAMED["GenerateStream"].counted
                give = self._stream if streams else self._answer
                await _watched(give(exchange, responses, send), responses, receive)
        finally:
            responses.close()
            exchange.close()
            scope["inference"] = exchange.fields()
            del exchange.responses  # breaks a reference cycle, so that tensors are freed at once

    async def _submit(
        self, exchange: GenerateExchange, responses: Responses, receive: Receive, send: Send
    ) -> bool:
        """Read and queue the request; returns False if it was answered with an error instead."""
        try:
            exchange.open()
            body = await read_body(exchange, receive)
            exchange.submit(body)
            responses.attach(exchange)
        except (Exception, asyncio.CancelledError) as error:
            answer = answer_instead(exchange, error)
            if answer is not None:
                await self._send(answer, send)
            return False
        return True

    async def _answer(self, exchange: GenerateExchange, responses: Responses, send: Send) -> None:
        """Send the single response, or an error."""
        texts: list[bytes] = []
        try:
            ended = False
            while not (ended or responses.gone or len(texts) > 1):
                await responses.news()
                ended = responses.ended
                texts += responses.take()
        except asyncio.CancelledError as error:
            answer = answer_instead(exchange, error)
            assert answer is not None, "an end of the server without a word. This is a bug."
            await self._send(answer, send)
            return
        if not responses.gone:
            await self._send(_one_answer(exchange, responses, texts), send)

    async def _stream(self, exchange: GenerateExchange, responses: Responses, send: Send) -> None:
        """Send one event per response, and one for a final error."""
        started = ended = False
        failure: Answer | None = None
        try:
            while not ended:
                await responses.news()
                if responses.gone:
                    return
                ended = responses.ended
                if responses.error is not None:
                    failure = exchange.failure(responses.error)
                if not started:
                    if failure is not None and responses.refused:
                        await self._send(failure, send)
                        return
                    await self._begin(exchange, None if responses.count else failure, send)
                    started = True
                events = [event(text) for text in responses.take()]
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


def _one_answer(exchange: GenerateExchange, responses: Responses, texts: list[bytes]) -> Answer:
    if len(texts) > 1:
        # As in Triton: the first response decides the status.
        return Answer(200, JSON, [error_body(NOT_ONE_RESPONSE)])
    if responses.error is not None:
        return exchange.failure(responses.error)
    if not texts:
        return Answer(500, JSON, [error_body(NOT_ONE_RESPONSE)])
    assert exchange.timing is not None, "a response that was not encoded. This is a bug."
    timing = b"server-timing: %b\r\n" % server_timing(exchange.timing)
    return Answer(200, JSON + timing + exchange.backend_line, texts)


async def _watched(
    giving: Coroutine[None, None, None], responses: Responses, receive: Receive
) -> None:
    """Send data, and tell `responses` if the client disconnects meanwhile."""
    watch = asyncio.create_task(watch_disconnect(receive, responses.leave))
    try:
        await giving
    finally:
        watch.cancel()


def inference_routes(
    engine: Entrance,
    max_request_bytes: int,
    rules: HeaderRules,
    generate: Entrance | None = None,
) -> list[Route]:
    """The routes of inference; `generate` is the entrance for generate requests."""
    given = max_request_bytes, rules.pattern(), rules.keys().get(Category.INFERENCE)
    return [InferRoute(engine, *given), GenerateRoute(generate or engine, *given)]
