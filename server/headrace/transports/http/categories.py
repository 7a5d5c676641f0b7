"""Which category of the protocol's operations each route belongs to, and what that asks for.

Routes are named by their paths; what a part in braces is called does not matter. A route that is
not here is not served at all, so that none can be forgotten.
"""

import re
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from headrace.core.errors import Restricted
from headrace.engine.doors import Entrance
from headrace.transports.http.access import OPERATION
from headrace.transports.http.exchange import JSON, Answer
from headrace.transports.http.generate import GenerateRoute
from headrace.transports.http.head import opens
from headrace.transports.http.infer import InferRoute, PostRoute, Route, send_answer
from headrace.wire.header_rules import Category, HeaderRules, Key, named
from headrace.wire.status import STATUS
from headrace.wire.v2_json import error_body

_C = Category
_OF_MODEL = {
    "": _C.METADATA,
    "/ready": _C.HEALTH,
    "/config": _C.MODEL_CONFIG,
    "/stats": _C.STATISTICS,
    "/infer": _C.INFERENCE,
    "/generate": _C.INFERENCE,
    "/generate_stream": _C.INFERENCE,
    "/trace/setting": _C.TRACE,
}
# None is open to all: what describes the protocol, and says nothing of models.
CATEGORIES: dict[str, Category | None] = {
    "/": None,
    "/docs": None,
    "/v2": _C.METADATA,
    "/v2/": _C.METADATA,
    "/v2/health/live": _C.HEALTH,
    "/v2/health/ready": _C.HEALTH,
    "/v2/models/stats": _C.STATISTICS,
    "/v2/repository/index": _C.MODEL_REPOSITORY,
    "/v2/repository/{}/index": _C.MODEL_REPOSITORY,
    "/v2/repository/models/{}/load": _C.MODEL_REPOSITORY,
    "/v2/repository/models/{}/unload": _C.MODEL_REPOSITORY,
    "/v2/repository/{}/models/{}/load": _C.MODEL_REPOSITORY,
    "/v2/repository/{}/models/{}/unload": _C.MODEL_REPOSITORY,
    "/v2/models/{}/traffic": _C.MODEL_REPOSITORY,
    "/v2/models/{}/traffic/promote": _C.MODEL_REPOSITORY,
    "/v2/models/{}/traffic/rollback": _C.MODEL_REPOSITORY,
    "/v2/trace/setting": _C.TRACE,
    "/v2/logging": _C.LOGGING,
    **{f"/v2/models/{{}}{end}": category for end, category in _OF_MODEL.items()},
    **{f"/v2/models/{{}}/versions/{{}}{end}": category for end, category in _OF_MODEL.items()},
    **{
        f"/v2/{kind}sharedmemory{rest}": _C.SHARED_MEMORY
        for kind in ("system", "cuda")
        for rest in (
            "/status", "/region/{}/status", "/region/{}/register", "/unregister",
            "/region/{}/unregister",
        )
    },
}  # fmt: skip
# What is asked for with POST and changes nothing. Inference is no route of that application.
_READING = {"/v2/repository/index", "/v2/repository/{}/index"}
_SAFE = {"GET", "HEAD", "OPTIONS"}
_PART = re.compile(r"\{[^}]*\}")


def category_of(path: str) -> Category | None:
    """The category of a route; raises `LookupError` if it has none."""
    return named(CATEGORIES, _PART.sub("{}", path), "transports/http/categories.py")


def changes(path: str, methods: Iterable[str]) -> bool:
    """Whether a route changes models or settings: all that need not be asked with GET do."""
    return not _SAFE.issuperset(methods) and _PART.sub("{}", path) not in _READING


class RestrictedInference:
    """One of the bare routes, for whoever has the key of inference."""

    def __init__(self, route: PostRoute, key: Key) -> None:
        self._route = route
        self._key = key

    def claims(self, method: str, path: str) -> bool:
        """`Route.claims`."""
        return self._route.claims(method, path)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`Route.handle`."""
        scope[OPERATION] = self._route.operation(scope["path"])
        if opens(self._key, scope["headers"]):
            await self._route.handle(scope, receive, send)
            return
        error = key_error(self._key)
        body = error_body(str(error))
        await send_answer(send, Answer(STATUS[Restricted].http, JSON, [body]))


def inference_routes(
    engine: Entrance,
    max_request_bytes: int,
    rules: HeaderRules,
    generate: Entrance | None = None,
) -> list[Route]:
    """The bare routes, restricted if inference is; `generate` is another way to the engine."""
    key, pattern = rules.keys().get(Category.INFERENCE), rules.pattern()
    given = max_request_bytes, pattern
    routes = (InferRoute(engine, *given), GenerateRoute(generate or engine, *given))
    return list(routes) if key is None else [RestrictedInference(r, key) for r in routes]


def key_error(key: Key) -> Restricted:
    """What whoever comes without a key is told."""
    return Restricted(f"This API is restricted, expecting header '{key.header}'")
