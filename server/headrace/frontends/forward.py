"""What a front end does not answer itself, handed on to the engine's process.

The engine gets the head of a request first. It asks for the body piece by piece, so that nothing of
one that is refused for its head is read, and what is read is counted where all limits are.
"""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.errors import ServerError
from headrace.core.tensors import Buffer
from headrace.frontends.remote import EngineLink, Pieces
from headrace.transports.grpc.call import Unary
from headrace.transports.http.infer import Disconnected, Route
from headrace.transports.http.protocol import OPERATION
from headrace.wire.status import STATUS, retry_after
from headrace.wire.v2_json import error_body

_NO_BODY = b"0"  # a length


def forwarding_app(link: EngineLink, routes: Sequence[Route]) -> ASGIApp:
    """An application that takes what its routes claim itself, and hands everything else on."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        for route in routes:
            if route.claims(scope["method"], scope["path"]):
                await route.handle(scope, receive, send)
                return
        scope[OPERATION] = ""  # the engine's process counts it
        try:
            document, content = await link.call(_head(scope), pieces=_pieces(receive))
        except Disconnected:
            return
        except ServerError as error:
            content = error_body(str(error))
            json = [("content-type", "application/json"), ("content-length", str(len(content)))]
            if seconds := retry_after(error):
                json.append(("retry-after", str(seconds)))
            document = {"status": STATUS[type(error)].http, "headers": json}
        headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in document["headers"]]
        start: dict[str, Any] = {"type": "http.response.start", "status": document["status"]}
        await send(start | {"headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


def _head(scope: Scope) -> dict[str, object]:
    """A request without its body, as JSON has it."""
    headers = scope["headers"]
    return {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": scope["raw_path"].decode("latin-1"),
        "query": scope["query_string"].decode("latin-1"),
        "headers": [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers],
        "client": (scope.get("client") or ("",))[0],
        "server": scope.get("server"),
        "body": any(
            name == b"transfer-encoding" or (name == b"content-length" and value != _NO_BODY)
            for name, value in headers
        ),
    }


def _pieces(receive: Receive) -> Pieces:
    async def next_piece() -> tuple[bytes, bool]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        return message.get("body", b""), not message.get("more_body", False)

    return next_piece


def forwarding_handler(link: EngineLink, path: str) -> Unary:
    """A procedure that is answered by the engine's process."""

    async def handler(data: Buffer, call: object) -> bytes:
        _, message = await link.call({"grpc": path}, data)
        return message

    return handler
