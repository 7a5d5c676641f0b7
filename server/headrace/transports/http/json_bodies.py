"""The bodies of control requests and of their answers: JSON objects of moderate size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import Request, Response

from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.engine.admission import Account
from headrace.transports.http.protocol import ACCOUNT
from headrace.wire.compression import too_large
from headrace.wire.json_text import refuse_without_memory

_CONTROL_LIMIT = 1 << 20  # bytes of a control request's body
_ALWAYS = 64 << 10  # bytes of a body for which there is room on a server that is full


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a control request; empty for an empty body.

    Raises `InvalidRequest`, and `PayloadTooLarge` for more than such a request can have use for.
    """
    async with whole_body(request) as body:
        return parse_object(body)


@asynccontextmanager
async def whole_body(request: Request, limit: int = 0) -> AsyncIterator[bytes]:
    """A body of up to `limit` bytes, 0 for that of control requests.

    It counts while it comes and is being used; the first bytes whatever the limits: whoever
    operates a server that is full has to be able to ask something of it. Raises `PayloadTooLarge`,
    `Overloaded` and `ServerExiting`.
    """
    account: Account = request.scope.get(ACCOUNT) or request.app.state.admission
    body = bytearray()
    size, charged, begun = 0, 0, False  # charged: bytes beyond the first ones
    try:
        async for piece in request.stream():
            wanted = size + len(piece)
            if wanted > (limit or _CONTROL_LIMIT):
                refusal = f"the request body exceeds {_CONTROL_LIMIT} bytes"
                raise PayloadTooLarge(too_large("request body", limit) if limit else refusal)
            if wanted <= _ALWAYS:
                account.count(len(piece))
            else:
                if not begun:
                    account.begin(len(piece))
                    begun = True
                account.grow(len(piece), charged)
                charged += len(piece)
            size = wanted
            body += piece
        whole = bytes(body)
        body.clear()
        yield whole
    finally:
        account.count(charged - size)
        if begun:
            account.drop(charged)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, an empty one for an empty body; raises `InvalidRequest`."""
    if not body.strip():
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        refuse_without_memory(error)
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    if type(document) is not dict:
        raise InvalidRequest("the request must be a JSON object")
    return document


def json_answer(document: object, status: int = 200) -> Response:
    """An answer that is `document`."""
    return Response(orjson.dumps(document), status, media_type="application/json")
