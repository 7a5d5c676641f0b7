"""The routes of the log's settings."""

from fastapi import FastAPI, Request, Response

from headrace.core.errors import Unavailable
from headrace.engine.log_control import LogControl
from headrace.observability.logs import FORMATS
from headrace.transports.http.json_bodies import json_answer, json_body


def add_log_routes(app: FastAPI, logs: LogControl) -> None:
    """Let `app` tell and change the log's settings."""

    @app.get("/v2/logging", tags=["logging"], summary="Settings of the log")
    async def settings() -> Response:
        return json_answer(logs.document())

    @app.post("/v2/logging", tags=["logging"], summary="Change settings of the log")
    async def change(request: Request) -> Response:
        changes = await json_body(request)
        wanted = changes.get("log_format")
        if isinstance(wanted, str) and wanted not in FORMATS:
            # With Triton's status, which over gRPC is that of any wrong value.
            raise Unavailable(f"invalid argument for --log_format, got: {wanted[:80]}")
        logs.change(changes)
        return json_answer(logs.document())
