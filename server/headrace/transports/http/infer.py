"""The infer route: a bare ASGI endpoint over bytes, inside the FastAPI application.

It is on the path of every request, so it takes none of FastAPI's routing and dependency machinery.
Order of work: find the model, count the request in, read the body within its limit, decode, submit,
await, encode.
"""

import asyncio
import logging

from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from headrace.core.errors import (
    InvalidRequest,
    PayloadTooLarge,
    ServerError,
    ServerExiting,
    Unsupported,
)
from headrace.core.requests import InferResponse
from headrace.engine.engine import Engine
from headrace.engine.version import FutureSink
from headrace.wire.compression import choose_encoding, compress, decompress, too_large
from headrace.wire.http_infer import (
    ResponseForm,
    decode_infer,
    decode_raw,
    encode_infer,
    error_body,
    parse_json_size,
)
from headrace.wire.status import INTERNAL, INTERNAL_TEXT, STATUS

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

TIMING_PARAMETER = (
    "headrace_timing"  # a request parameter: answer with timings among the parameters
)
_JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
_CLOSE: tuple[bytes, bytes] = (b"connection", b"close")
_BINARY: tuple[bytes, bytes] = (b"content-type", b"application/octet-stream")
_WATCH_AFTER = 0.005  # seconds; most answers are there before anyone can have gone away


class _Disconnected(Exception):
    """The client has gone; there is nobody to answer."""


class InferRoute(BaseRoute):
    """Matches `/v2/models/{name}[/versions/{digits}]/infer` and answers it."""

    def __init__(self, engine: Engine, max_request_bytes: int, body_timeout_secs: int) -> None:
        self._engine = engine
        self._limit = max_request_bytes
        self._body_timeout = body_timeout_secs

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Starlette's routing interface."""
        if scope["type"] != "http":
            return Match.NONE, {}
        target = infer_target(scope["path"])
        if target is None:
            return Match.NONE, {}
        return Match.FULL, {"infer_target": target}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Never raises."""
        body_size = [0]  # what admission has counted, so that it is counted out whatever happens
        entered = False
        consumed = False
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            if scope["method"] != "POST":
                await _send_error(send, 405, "Method Not Allowed")
                return
            name, version = scope["infer_target"]
            found = self._engine.find(name, version)
            about = scope["inference"] = {"model": name, "version": found.name}
            if found.decoupled:
                raise Unsupported(
                    "HTTP end point doesn't support models with decoupled transaction policy"
                )
            declared = _content_length(headers)
            if declared > self._limit:
                raise PayloadTooLarge(too_large("request body", self._limit, declared))
            self._engine.admission.enter(0, declared)
            entered = True
            body = await self._read(receive, body_size)
            consumed = True
            if "content-encoding" in headers:
                packed = len(body)
                body = decompress(body, headers["content-encoding"], self._limit)
                self._grow(body_size, len(body) - packed)
            json_size = parse_json_size(headers.get("inference-header-content-length"), len(body))
            if json_size == 0:
                request, form = decode_raw(found.signature, name, version, body)
            else:
                request, form = decode_infer(name, version, body, json_size)
            about["request_id"] = request.id
            timed = request.parameters.pop(TIMING_PARAMETER, False) is True
            sink = FutureSink(asyncio.get_running_loop().create_future())
            ticket = found.submit(request, sink)
            try:
                response = await _first(sink.future, receive)
            except BaseException:
                ticket.cancel()
                raise
            found.classify(request, response)
            await self._answer(send, response, form, headers, timed)
        except _Disconnected:
            return
        except asyncio.CancelledError:
            # Only the end of the process cancels a request, one that it has waited for long enough.
            await _send_error(send, STATUS[ServerExiting].http, "Server exiting", [_CLOSE])
        except TimeoutError:
            text = f"no more of the request body came for {self._body_timeout} s"
            await _send_error(send, 408, text, [_CLOSE])
        except ServerError as error:
            status = STATUS[type(error)]
            extra: Headers = (
                [(b"retry-after", b"%d" % status.retry_after)] if status.retry_after else []
            )
            if isinstance(error, Unsupported) and "compression" in str(error):
                extra.append((b"accept-encoding", b"gzip, deflate"))
            # Answered at once, not when the body is there: uvicorn passes over the rest of it. Only
            # where that is too much, or of unknown size, the connection is given up instead.
            if not consumed and (
                "transfer-encoding" in headers or _content_length(headers) > self._limit
            ):
                extra.append(_CLOSE)
            await _send_error(send, status.http, str(error), extra)
        except Exception:
            log.exception("bug while answering %s", scope["path"])
            await _send_error(send, INTERNAL.http, INTERNAL_TEXT)
        finally:
            if entered:
                self._engine.admission.leave(body_size[0])

    async def _read(self, receive: Receive, counted: list[int]) -> bytes:
        """The whole body, bounded in size and in patience while it is read."""
        pieces: list[bytes] = []
        size = 0
        async with asyncio.timeout(self._body_timeout) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Disconnected
                piece: bytes = message.get("body", b"")
                size += len(piece)
                if size > self._limit:
                    raise PayloadTooLarge(too_large("request body", self._limit))
                self._grow(counted, len(piece))
                if not message.get("more_body", False):
                    return b"".join([*pieces, piece]) if pieces else piece
                pieces.append(piece)
                patience.reschedule(asyncio.get_running_loop().time() + self._body_timeout)

    def _grow(self, counted: list[int], nbytes: int) -> None:
        if nbytes > 0:
            self._engine.admission.grow(nbytes)
            counted[0] += nbytes

    async def _answer(
        self,
        send: Send,
        response: InferResponse,
        form: ResponseForm,
        asked: dict[str, str],
        timed: bool,
    ) -> None:
        timing = response.timing
        if timed:
            response.parameters |= {
                "queue_us": timing.queue_ns // 1_000,
                "compute_us": timing.compute_ns // 1_000,
                "batch_rows": timing.batch_rows,
            }
        buffers, json_size = encode_infer(response, form)
        headers: Headers = [_JSON if json_size is None else _BINARY]
        if json_size is not None:
            headers.append((b"inference-header-content-length", b"%d" % json_size))
        headers.append((b"server-timing", server_timing(response)))
        if self._engine.exiting:
            headers.append(_CLOSE)
        accept = asked.get("accept-encoding")
        if accept is not None and (encoding := choose_encoding(accept)) != "identity":
            buffers = [compress(b"".join(buffers), encoding)]
            headers.append((b"content-encoding", encoding.encode()))
        headers.append((b"content-length", b"%d" % sum(map(len, buffers))))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for buffer in buffers[:-1]:
            await send({"type": "http.response.body", "body": buffer, "more_body": True})
        await send({"type": "http.response.body", "body": buffers[-1]})


def infer_target(path: str) -> tuple[str, str] | None:
    """Model name and version (or "") of an infer path; None for any other path."""
    if not path.startswith("/v2/models/") or not path.endswith("/infer"):
        return None
    parts = path[len("/v2/models/") : -len("/infer")].split("/")
    if len(parts) == 1 and parts[0]:
        return parts[0], ""
    if len(parts) == 3 and parts[0] and parts[1] == "versions" and parts[2].isdigit():
        return parts[0], parts[2]
    return None


def server_timing(response: InferResponse) -> bytes:
    """The Server-Timing header of a response: milliseconds, and the rows of its batch."""
    timing = response.timing
    return b'queue;dur=%.3f, compute;dur=%.3f, batch;desc="%d"' % (
        timing.queue_ns / 1e6,
        timing.compute_ns / 1e6,
        timing.batch_rows,
    )


async def _first(future: "asyncio.Future[InferResponse]", receive: Receive) -> InferResponse:
    """The response, unless the client goes away first.

    Watching for that costs a task, so it begins only when the answer takes its time.
    """
    loop = asyncio.get_running_loop()
    watch: list[asyncio.Task[None]] = []

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not future.done():
            future.set_exception(_Disconnected())

    timer = loop.call_later(_WATCH_AFTER, lambda: watch.append(loop.create_task(disconnected())))
    try:
        return await future
    finally:
        timer.cancel()
        for task in watch:
            task.cancel()


def _content_length(headers: dict[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not text.isdigit():
        raise InvalidRequest(f"Content-Length must be a number of bytes, got {text[:40]!r}")
    return int(text)


async def _send_error(send: Send, status: int, text: str, extra: Headers | None = None) -> None:
    body = error_body(text)
    headers = [_JSON, (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
