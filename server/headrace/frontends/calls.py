"""Everything but infer requests, answered in the engine's process for a front end.

HTTP requests go through the same ASGI application that answers them without front ends, calls of
gRPC to the same handlers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import orjson
from starlette.types import ASGIApp, Message, Receive

from headrace.core.errors import ServerError
from headrace.transports.grpc.call import Unary
from headrace.wire.link_infer import error_parts

log = logging.getLogger(__name__)

Answer = Callable[[bytes, bytes, bool], None]
_Parts: TypeAlias = tuple[bytes, bytes]  # meta and rest of an answer


class UnderWay(Protocol):
    """What can be called off."""

    def cancel(self) -> object:
        """Nobody wants an answer any more."""


@runtime_checkable
class CallUnderWay(UnderWay, Protocol):
    """Something else than an infer request that is being answered."""

    def take(self, piece: bytes, last: bool) -> None:
        """Take a piece of the body that was asked for."""


class Calls(Protocol):
    """What answers everything but infer requests."""

    def begin(
        self, head: Any, body: bytes, answer: Answer, ask: Callable[[], None]
    ) -> CallUnderWay:
        """Answer once, later, unless cancelled.

        `answer` gets the meta and rest of the answer, and whether it is an error; `ask` is called
        for each further piece of the body that is wanted.
        """


class EngineCalls:
    """Answers calls by an ASGI application and by handlers of gRPC."""

    def __init__(self, app: ASGIApp, unary: Mapping[str, Unary]) -> None:
        self._app = app
        self._unary = unary

    def begin(
        self, head: Any, body: bytes, answer: Answer, ask: Callable[[], None]
    ) -> CallUnderWay:
        """`Calls.begin`."""
        if "grpc" in head:
            handler = self._unary[head["grpc"]]
            return _Answering(partial(_grpc, handler, body), answer)
        request = _HttpBody(bool(head["body"]), ask)
        return _Answering(partial(_http, self._app, head, request.receive), answer, request)


class _HttpBody:
    """The body of a request, which the front end has and sends on in pieces."""

    def __init__(self, more: bool, ask: Callable[[], None]) -> None:
        """`more` is whether there is one."""
        self._more = more
        self._told = False  # that there is no more
        self._ask = ask
        self._piece: asyncio.Future[tuple[bytes, bool]] | None = None

    def take(self, piece: bytes, last: bool) -> None:
        """`CallUnderWay.take`."""
        if self._piece is not None and not self._piece.done():
            self._piece.set_result((piece, last))

    async def receive(self) -> Message:
        """ASGI."""
        if self._told:
            return {"type": "http.disconnect"}
        piece = b""
        if self._more:
            self._piece = asyncio.get_running_loop().create_future()
            self._ask()
            piece, last = await self._piece
            self._more = not last
        self._told = not self._more
        return {"type": "http.request", "body": piece, "more_body": self._more}


class _Answering:
    """A call that is being answered."""

    def __init__(
        self, work: Callable[[], Awaitable[_Parts]], answer: Answer, body: _HttpBody | None = None
    ) -> None:
        self._body = body
        self._task = asyncio.get_running_loop().create_task(self._run(work, answer))

    def cancel(self) -> None:
        """`UnderWay.cancel`."""
        self._task.cancel()

    def take(self, piece: bytes, last: bool) -> None:
        """`CallUnderWay.take`."""
        if self._body is not None:
            self._body.take(piece, last)

    async def _run(self, work: Callable[[], Awaitable[_Parts]], answer: Answer) -> None:
        try:
            answer(*await work(), False)
        except ServerError as error:
            answer(*error_parts(error, ""), True)
        except Exception as error:
            log.error("bug in a call of a front end", exc_info=error)
            answer(b" ", b"", True)


async def _grpc(handler: Unary, body: bytes) -> _Parts:
    return b"{}", await handler(body, None)


async def _http(app: ASGIApp, head: Any, receive: Receive) -> _Parts:
    """Status and headers, and the body."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": head["method"],
        "path": head["path"],
        "raw_path": head["raw_path"].encode("latin-1"),
        "query_string": head["query"].encode("latin-1"),
        "root_path": "",
        "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in head["headers"]],
        "client": (head["client"], 0),
        "server": head["server"],
        "state": {},
    }
    document: dict[str, object] = {}
    pieces: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            document["status"] = message["status"]
            document["headers"] = [
                (n.decode("latin-1"), v.decode("latin-1")) for n, v in message["headers"]
            ]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return orjson.dumps(document), b"".join(pieces)
