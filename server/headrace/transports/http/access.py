"""Each HTTP request is counted, and has its line in the log, once it is answered."""

import logging
from collections.abc import Mapping
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.observability.statistics import OTHER, Answers

access = logging.getLogger("headrace.access")

OPERATION = "headrace.operation"  # in a scope: what the request is counted as
GONE = 499  # in place of a status: the client went away before its answer


def log_access(
    client: str, method: str, path: str, status: int, begun: float, more: Mapping[str, str]
) -> None:
    """Write the line of a request that began at `begun`, by `perf_counter`."""
    fields: dict[str, object] = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round((perf_counter() - begun) * 1_000, 3),
    }
    access.info(
        "%(client)s %(method)s %(path)s %(status)s %(duration_ms)s ms",
        fields,
        extra={**fields, **more},
    )


class CountedApp:
    """An application whose answers are counted by operation and status, and logged if asked for.

    Whatever answers a request says in its scope, as `OPERATION`, what it is counted as; "" for what
    another process counts.
    """

    def __init__(self, app: ASGIApp, answers: Answers, logged: bool) -> None:
        self._app = app
        self._answers = answers
        self._logged = logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if operation := scope.get(OPERATION, OTHER):
                self._answers.of("http", operation)[status or GONE] += 1
            if self._logged:
                client = scope.get("client")
                log_access(
                    client[0] if client else "", scope["method"], scope["path"], status or GONE,
                    begun, scope.get("inference", {}),
                )  # fmt: skip
