"""What a front end does not answer itself, handed on to the engine's process whole."""

import re
from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.frontends.remote import EngineLink
from headrace.transports.grpc.call import Call, Unary
from headrace.wire.http_infer import error_body
from headrace.wire.status import STATUS

_BODY_LIMIT = 1 << 20  # what goes beyond the engine's own limit need not be there
_LONG = re.compile(r"/v2/repository/.*/load")  # requests that may bring files along


def forwarding_app(link: EngineLink, routes: Sequence[BaseRoute], most: int) -> ASGIApp:
    """An application that takes what its routes match itself, and hands everything else on.

    The largest request has `most` bytes.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        for route in routes:
            if route.matches(scope)[0] is Match.FULL:
                await route.handle(scope, receive, send)
                return
        long = _LONG.fullmatch(scope["path"]) is not None
        body = await _read(receive, most if long else _BODY_LIMIT)
        head = {
            "method": scope["method"],
            "path": scope["path"],
            "raw_path": scope["raw_path"].decode("latin-1"),
            "query": scope["query_string"].decode("latin-1"),
            "headers": [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"]],
            "client": (scope.get("client") or ("",))[0],
        }
        try:
            document, content = await link.call(head, body)
        except ServerError as error:
            content = error_body(str(error))
            json = [("content-type", "application/json"), ("content-length", str(len(content)))]
            document = {"status": STATUS[type(error)].http, "headers": json}
        headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in document["headers"]]
        start: dict[str, Any] = {"type": "http.response.start", "status": document["status"]}
        await send(start | {"headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


def forwarding_handler(link: EngineLink, path: str) -> Unary:
    """A procedure that is answered by the engine's process."""

    async def handler(data: Buffer, call: Call) -> bytes:
        _, message = await link.call({"grpc": path, "metadata": dict(call.metadata())}, data)
        return message

    return handler


async def _read(receive: Receive, limit: int) -> bytes:
    """A body, or one byte more than its limit of it."""
    body = bytearray()
    while True:
        message = await receive()
        piece: bytes = message.get("body", b"")
        body += piece[: limit + 1 - len(body)]
        if not message.get("more_body", False):
            return bytes(body)
