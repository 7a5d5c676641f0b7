"""The routes of the log's settings."""

from fastapi import FastAPI, Request, Response

from headrace.core.errors import Unavailable
from headrace.engine.log_control import LogControl
from headrace.observability.logs import FORMATS
from headrace.transports.http.described import LOG_SETTINGS, answers, body, record
from headrace.transports.http.json_bodies import json_answer, json_body

_FLAG = {"type": ["boolean", "null"]}  # null leaves a setting as it is
_CHANGES = {
    "log_info": _FLAG,
    "log_warning": _FLAG,
    "log_error": _FLAG,
    "log_verbose_level": {"type": ["integer", "null"], "minimum": 0},
    "log_format": {"enum": [*FORMATS, None]},
}
_TOLD = "The settings in force"


def add_log_routes(app: FastAPI, logs: LogControl) -> None:
    """Let `app` tell and change the log's settings."""

    @app.get(
        "/v2/logging", tags=["logging"], summary="Settings of the log",
        response_class=Response, responses=answers(_TOLD, LOG_SETTINGS),
    )  # fmt: skip
    async def settings() -> Response:
        return json_answer(logs.document())

    @app.post(
        "/v2/logging", tags=["logging"], summary="Change settings of the log",
        openapi_extra=body(record(_CHANGES)),
        response_class=Response, responses=answers(_TOLD, LOG_SETTINGS, 400, 413, 501, 503),
    )  # fmt: skip
    async def change(request: Request) -> Response:
        changes = await json_body(request)
        wanted = changes.get("log_format")
        if isinstance(wanted, str) and wanted not in FORMATS:
            # With Triton's status, which over gRPC is that of any wrong value.
            raise Unavailable(f"invalid argument for --log_format, got: {wanted[:80]}")
        logs.change(changes)
        return json_answer(logs.document())
