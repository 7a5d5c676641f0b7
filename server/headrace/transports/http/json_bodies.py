"""The bodies of control requests and of their answers: JSON objects of moderate size."""

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import Request, Response

from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.wire.compression import too_large

_CONTROL_LIMIT = 1 << 20  # bytes of a control request's body


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a control request; empty for an empty body.

    Raises `InvalidRequest`, and `PayloadTooLarge` for more than such a request can have use for.
    """
    pieces = b""
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > _CONTROL_LIMIT:
            raise PayloadTooLarge(f"the request body exceeds {_CONTROL_LIMIT} bytes")
    return parse_object(pieces)


async def read_body(request: Request, limit: int, hold: Callable[[int], None]) -> bytes:
    """A body of up to `limit` bytes; raises `PayloadTooLarge`.

    `hold` is called with the size of each piece, before it is kept, and may raise.
    """
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > limit:
            raise PayloadTooLarge(too_large("request body", limit))
        hold(len(piece))
        body += piece
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, an empty one for an empty body; raises `InvalidRequest`."""
    if not body.strip():
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    if type(document) is not dict:
        raise InvalidRequest("the request must be a JSON object")
    return document


def json_answer(document: object, status: int = 200) -> Response:
    """An answer that is `document`."""
    return Response(orjson.dumps(document), status, media_type="application/json")
