"""The metrics door: Prometheus text on a port of its own."""

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.observability.metrics import CONTENT_TYPE


def create_metrics_app(scrape: Callable[[], Awaitable[bytes]]) -> ASGIApp:
    """An application that answers `GET /metrics` with what `scrape` gives."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body, status = b"", 200
        if scope["path"].rstrip("/") != "/metrics":
            body, status = b"metrics are at /metrics\n", 404
        elif scope["method"] != "GET":
            body, status = b"only GET is possible here\n", 405
        else:
            body = await scrape()
        headers = [
            (b"content-type", CONTENT_TYPE.encode() if status == 200 else b"text/plain"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app
