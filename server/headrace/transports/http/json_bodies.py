"""The bodies of control requests and of their answers: JSON objects of moderate size."""

from typing import Any

import orjson
from fastapi import Request, Response

from headrace.core.errors import InvalidRequest

_CONTROL_LIMIT = 1 << 20  # bytes of a control request's body


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a control request; empty for an empty body. Raises `InvalidRequest`."""
    pieces = b""
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > _CONTROL_LIMIT:
            raise InvalidRequest(f"the request body exceeds {_CONTROL_LIMIT} bytes")
    if not pieces.strip():
        return {}
    try:
        document = orjson.loads(pieces)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    if type(document) is not dict:
        raise InvalidRequest("the request must be a JSON object")
    return document


def json_answer(document: object, status: int = 200) -> Response:
    """An answer that is `document`."""
    return Response(orjson.dumps(document), status, media_type="application/json")
