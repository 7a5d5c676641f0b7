"""Liveness and readiness over HTTP, answered without the web framework: every probe asks for them.

The framework has routes with the same answers, for the OpenAPI document and for all other methods.
"""

import logging
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from headrace.core.errors import ServerError
from headrace.engine.engine import Engine
from headrace.transports.http.access import OPERATION
from headrace.transports.http.categories import key_error
from headrace.transports.http.head import model_target, opens
from headrace.wire.header_rules import Category, Key
from headrace.wire.status import INTERNAL, INTERNAL_TEXT, STATUS
from headrace.wire.v2_json import error_body

log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], int]  # a document and its status

_METHODS = {"GET", "HEAD"}  # some load balancers probe with HEAD


def live(engine: Engine) -> Answer:
    """Whether the server is alive."""
    return {"live": engine.live}, 200


def ready(engine: Engine) -> Answer:
    """Whether the server takes requests."""
    if reason := engine.readiness.reason:
        return {"ready": False, "reason": reason}, 503
    return {"ready": True}, 200


def model_ready(engine: Engine, name: str, version: str) -> Answer:
    """Whether a model takes requests, or its version unless that is ""; raises `InvalidRequest`."""
    reason = engine.model_obstacle(name, version)
    document: dict[str, Any] = {"name": name, "ready": not reason}
    if reason:
        return document | {"error": "Model version not ready", "reason": reason}, 503
    return document, 200


class HealthRoute:
    """The paths of liveness and readiness, for whoever has the key of their category, if any."""

    def __init__(self, engine: Engine, key: Key | None = None) -> None:
        self._engine = engine
        self._key = key
        self._of_server = {"/v2/health/live": live, "/v2/health/ready": ready}

    def claims(self, method: str, path: str) -> bool:
        """`Route.claims`."""
        return method in _METHODS and (path in self._of_server or _model(path) is not None)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`Route.handle`."""
        scope[OPERATION] = Category.HEALTH
        try:
            if self._key is not None and not opens(self._key, scope["headers"]):
                raise key_error(self._key)
            document, status = self._answer(scope["path"])
            body = orjson.dumps(document)
        except ServerError as error:
            body, status = error_body(str(error)), STATUS[type(error)].http
        except Exception as error:
            log.error("bug while answering %s", scope["path"], exc_info=error)
            body, status = error_body(INTERNAL_TEXT), INTERNAL.http
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, path: str) -> Answer:
        if (of_server := self._of_server.get(path)) is not None:
            return of_server(self._engine)
        found = _model(path)
        assert found is not None, "a route that does not claim the path. This is a bug."
        return model_ready(self._engine, *found)


def _model(path: str) -> tuple[str, str] | None:
    found = model_target(path, "/ready")
    # Digits beyond ASCII are no version, as the framework says.
    return found if found is not None and found[1].isascii() else None
