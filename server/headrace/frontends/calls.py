"""Everything but infer requests, answered in the engine's process for a front end.

HTTP requests go through the same ASGI application that answers them without front ends, calls of
gRPC to the same handlers.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from headrace.core.errors import ServerError
from headrace.engine.admission import Account
from headrace.transports.grpc.call import Unary
from headrace.wire.link_infer import error_parts

log = logging.getLogger(__name__)

Answer = Callable[[bytes, bytes, bool], None]


class _Call:
    """A call of gRPC, of which a handler may read the metadata."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = metadata

    def metadata(self) -> Mapping[str, str]:
        """What the client sent along."""
        return self._metadata

    @property
    def account(self) -> Account:
        """The front end counts what its clients send."""
        raise NotImplementedError

    def remaining(self) -> float:
        """The front end cancels the call in time."""
        return 0.0

    def set_trailing(self, name: str, value: str) -> None:
        """The procedures that are answered here send none."""
        raise NotImplementedError

    def note(self, model: str, version: str, request_id: str) -> None:
        """The front end writes the access log."""


class EngineCalls:
    """Answers calls by an ASGI application and by handlers of gRPC."""

    def __init__(self, app: ASGIApp, unary: Mapping[str, Unary]) -> None:
        self._app = app
        self._unary = unary

    def begin(self, head: Any, body: bytes, answer: Answer) -> "asyncio.Task[None]":
        """`host.Calls.begin`."""
        return asyncio.get_running_loop().create_task(self._answer(head, body, answer))

    async def _answer(self, head: Any, body: bytes, answer: Answer) -> None:
        try:
            if "grpc" in head:
                handler = self._unary[head["grpc"]]
                message = await handler(body, _Call(head["metadata"]))
                answer(b"{}", bytes(message), False)
            else:
                document, content = await self._http(head, body)
                answer(orjson.dumps(document), content, False)
        except ServerError as error:
            answer(*error_parts(error, ""), True)
        except Exception as error:
            log.error("bug in a call of a front end", exc_info=error)
            answer(b" ", b"", True)

    async def _http(self, head: Any, body: bytes) -> tuple[dict[str, object], bytes]:
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
            "server": None,
            "state": {},
        }
        document: dict[str, object] = {}
        pieces: list[bytes] = []
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return request.pop() if request else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                document["status"] = message["status"]
                document["headers"] = [
                    (n.decode("latin-1"), v.decode("latin-1")) for n, v in message["headers"]
                ]
            else:
                pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return document, b"".join(pieces)
