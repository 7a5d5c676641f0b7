"""The routes for the traffic between a model's versions, which Triton does not have."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from headrace.core.errors import InvalidRequest
from headrace.core.texts import shown
from headrace.engine.engine import Engine
from headrace.transports.http.described import TRAFFIC, answers, body, record
from headrace.transports.http.json_bodies import json_answer, json_body
from headrace.wire.documents import to_json

_Name = Annotated[str, Path(description="Name of a model")]
_PATH = "/v2/models/{name}/traffic"
_SHARE: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1}
_VERSION: dict[str, Any] = {"type": ["string", "integer"]}
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer", "minimum": 1}
_RULES = body(
    record(
        {
            "split": {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
            "baseline": _VERSION,
            "sticky": record({"header": _TEXT, "parameter": _TEXT}),
            "shadow": {
                "type": ["string", "integer", "object"],
                "properties": {"version": _VERSION, "share": _SHARE, "max_pending": _WHOLE},
            },
            "rollback": record(
                {
                    "max_error_rate": _SHARE,
                    "max_error_rate_increase": _SHARE,
                    "max_latency_ms": {"type": "number", "minimum": 0},
                    "max_latency_ratio": {"type": "number", "minimum": 1},
                    "latency_quantile": _SHARE,
                    "min_requests": _WHOLE,
                    "window_secs": {"type": "number", "minimum": 1},
                }
            ),
        }
    )
)
_OF_VERSION = body(record({"version": _VERSION, "reason": _TEXT}))
_TOLD = "The rules in force, and what they do"
_CHANGED = answers(_TOLD, TRAFFIC, 400, 404, 413, 503)


def add_traffic_routes(app: FastAPI, engine: Engine) -> None:
    """Have `app` answer them."""
    traffic = engine.traffic

    def document(name: str) -> Response:
        return json_answer(to_json(traffic.document(name)))

    @app.get(
        _PATH, tags=["traffic"], summary="How requests are divided between versions",
        response_class=Response, responses=answers(_TOLD, TRAFFIC, 404),
    )  # fmt: skip
    async def model_traffic(name: _Name) -> Response:
        return document(name)

    @app.post(
        _PATH, tags=["traffic"], summary="Replace the rules for that",
        openapi_extra=_RULES, response_class=Response, responses=_CHANGED,
    )  # fmt: skip
    async def set_model_traffic(name: _Name, request: Request) -> Response:
        traffic.set(name, await json_body(request))
        return document(name)

    @app.delete(
        _PATH, tags=["traffic"], summary="Go back to the rules of the configuration",
        response_class=Response, responses=answers(_TOLD, TRAFFIC, 400, 404, 503),
    )  # fmt: skip
    async def reset_model_traffic(name: _Name) -> Response:
        traffic.reset(name)
        return document(name)

    @app.post(
        f"{_PATH}/promote", tags=["traffic"], summary="Give a version all requests",
        openapi_extra=_OF_VERSION, response_class=Response, responses=_CHANGED,
    )  # fmt: skip
    async def promote(name: _Name, request: Request) -> Response:
        traffic.promote(name, *_version_and_reason(await json_body(request)))
        return document(name)

    @app.post(
        f"{_PATH}/rollback", tags=["traffic"], summary="Give them to the baseline again",
        openapi_extra=_OF_VERSION, response_class=Response, responses=_CHANGED,
    )  # fmt: skip
    async def roll_back(name: _Name, request: Request) -> Response:
        traffic.roll_back(name, *_version_and_reason(await json_body(request)))
        return document(name)


def _version_and_reason(given: Mapping[str, Any]) -> tuple[str, str]:
    """Both may be left out; raises `InvalidRequest`."""
    for name in given:
        if name not in ("version", "reason"):
            raise InvalidRequest(f"unknown member {name!r:.60}, it may have version, reason")
    version, reason = given.get("version", ""), given.get("reason", "")
    if type(version) is int:
        version = str(version)
    for name, value in (("version", version), ("reason", reason)):
        if type(value) is not str:
            raise InvalidRequest(f"'{name}' must be a string, got {shown(value)}")
    return version, reason
