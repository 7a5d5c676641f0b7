"""The application of the HTTP door, of which FastAPI's part is made when a request first needs it.

Importing FastAPI and building its application takes a quarter of a second and 18 MB, and a server
of which only inference and probes are asked never needs it: those are answered by the routes in
front. The first other request has it built, on a thread, so that everything else is answered
meanwhile; those that come until it is there wait for the same build.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.engine.engine import Engine
from headrace.engine.threads import Threads
from headrace.transports.http.exchange import JSON, Answer
from headrace.transports.http.health import HealthRoute
from headrace.transports.http.infer import Route, send_answer
from headrace.wire.header_rules import Category, HeaderRules
from headrace.wire.status import INTERNAL, INTERNAL_TEXT
from headrace.wire.v2_json import error_body

log = logging.getLogger(__name__)


class LateApp:
    """Routes, and behind them an application that `build` gives, on a thread, when first needed.

    A build that fails is logged; those who wait for it are answered with a 500, and the next
    request has it tried again. Owned by the event loop.
    """

    def __init__(self, routes: Sequence[Route], build: Callable[[], ASGIApp]) -> None:
        self._routes = routes
        self._build = build
        self._threads = Threads(1, "http-application")
        self._app: ASGIApp | None = None
        self._building: asyncio.Task[ASGIApp | None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        for route in self._routes:
            if route.claims(scope["method"], scope["path"]):
                await route.handle(scope, receive, send)
                return
        app = self._app or await self._built()
        if app is None:
            await send_answer(send, Answer(INTERNAL.http, JSON, [error_body(INTERNAL_TEXT)]))
            return
        await app(scope, receive, send)

    async def _built(self) -> ASGIApp | None:
        """The application, None if it cannot be built."""
        if self._building is None:
            self._building = asyncio.create_task(self._make())
        return await asyncio.shield(self._building)  # one that goes away takes it from no other

    async def _make(self) -> ASGIApp | None:
        try:
            self._app = await self._threads.run(self._build)
        except Exception as error:
            log.error("bug while building an HTTP application", exc_info=error)
        else:
            gc.freeze()  # what was imported and built stays, and need not be looked through again
        self._building = None
        return self._app


def late_app(
    engine: Engine, max_request_bytes: int, rules: HeaderRules, inference: Sequence[Route] = ()
) -> LateApp:
    """The application that answers for `engine`, by these rules for headers.

    `inference` answers what is inference, where that is not done by other processes.
    """

    def build() -> ASGIApp:
        from headrace.transports.http.app import create_app  # which imports FastAPI

        return create_app(engine, max_request_bytes, rules)

    return LateApp([*inference, HealthRoute(engine, rules.keys().get(Category.HEALTH))], build)
