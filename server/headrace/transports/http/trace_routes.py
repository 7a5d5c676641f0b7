"""The routes of trace settings, of the server and of models."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from headrace.core.errors import InvalidRequest
from headrace.engine.tracing import Tracing
from headrace.transports.http.described import (
    TRACE_LEVELS,
    TRACE_SETTINGS,
    answers,
    body,
    record,
)
from headrace.transports.http.json_bodies import json_answer, json_body

Name = Annotated[str, Path(description="Name of a model")]
_NUMBER = {"type": ["string", "null"], "pattern": "^-?[0-9]+$"}
_NUMBERS = ("trace_rate", "trace_count", "log_frequency")
# What null does: a model's setting becomes the server's, the server's that of the command line.
_CHANGES = body(
    record(
        {
            "trace_level": TRACE_LEVELS | {"type": ["array", "null"]},
            **dict.fromkeys(_NUMBERS, _NUMBER),
        }
    )
)
_TOLD = "The settings in force"
_CHANGED = answers(_TOLD, TRACE_SETTINGS, 400, 413, 501)


def add_trace_routes(app: FastAPI, tracing: Tracing) -> None:
    """Let `app` tell and change trace settings."""

    async def change(model: str, request: Request) -> Response:
        tracing.change(model, _lists(await json_body(request)))
        return _settings(tracing, model)

    @app.get(
        "/v2/trace/setting", tags=["trace"], summary="Trace settings",
        response_class=Response, responses=answers(_TOLD, TRACE_SETTINGS),
    )  # fmt: skip
    async def settings() -> Response:
        return _settings(tracing, "")

    @app.post(
        "/v2/trace/setting", tags=["trace"], summary="Change trace settings",
        openapi_extra=_CHANGES, response_class=Response, responses=_CHANGED,
    )  # fmt: skip
    async def change_settings(request: Request) -> Response:
        return await change("", request)

    @app.get(
        "/v2/models/{name}/trace/setting", tags=["trace"], summary="Trace settings of a model",
        response_class=Response, responses=answers(_TOLD, TRACE_SETTINGS, 400),
    )  # fmt: skip
    async def settings_of_model(name: Name) -> Response:
        return _settings(tracing, name)

    @app.post(
        "/v2/models/{name}/trace/setting", tags=["trace"],
        summary="Change trace settings of a model",
        openapi_extra=_CHANGES, response_class=Response, responses=_CHANGED,
    )  # fmt: skip
    async def change_settings_of_model(name: Name, request: Request) -> Response:
        return await change(name, request)


def _settings(tracing: Tracing, model: str) -> Response:
    """The settings: levels are an array, everything else is a text."""
    document: dict[str, Any] = {}
    for name, values in tracing.document(model).items():
        document[name] = values if name == "trace_level" else ",".join(values)
    return json_answer(document)


def _lists(document: Mapping[str, Any]) -> dict[str, Sequence[object] | None]:
    """What a client has sent as gRPC has it; raises `InvalidRequest`."""
    lists: dict[str, Sequence[object] | None] = {}
    for name, value in document.items():
        if name == "trace_level" and value is not None and not isinstance(value, list):
            raise InvalidRequest("'trace_level' must be an array of levels")
        lists[name] = value if name == "trace_level" or value is None else [value]
    return lists
