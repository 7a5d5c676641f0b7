"""The routes for the traffic between a model's versions, which Triton does not have."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from headrace.core.errors import InvalidRequest
from headrace.engine.engine import Engine
from headrace.engine.traffic_documents import model_traffic as document_of
from headrace.transports.http.json_bodies import json_answer, json_body
from headrace.wire.documents import to_json

_Name = Annotated[str, Path(description="Name of a model")]
_PATH = "/v2/models/{name}/traffic"


def add_traffic_routes(app: FastAPI, engine: Engine) -> None:
    """Have `app` answer them."""
    traffic = engine.traffic

    def document(name: str) -> Response:
        return json_answer(to_json(document_of(traffic, name)))

    @app.get(_PATH, tags=["traffic"], summary="How requests are divided between versions")
    async def model_traffic(name: _Name) -> Response:
        return document(name)

    @app.post(_PATH, tags=["traffic"], summary="Replace the rules for that")
    async def set_model_traffic(name: _Name, request: Request) -> Response:
        traffic.set(name, await json_body(request))
        return document(name)

    @app.delete(_PATH, tags=["traffic"], summary="Go back to the rules of the configuration")
    async def reset_model_traffic(name: _Name) -> Response:
        traffic.reset(name)
        return document(name)

    @app.post(f"{_PATH}/promote", tags=["traffic"], summary="Give a version all requests")
    async def promote(name: _Name, request: Request) -> Response:
        body = await json_body(request)
        traffic.promote(name, *_version_and_reason(body))
        return document(name)

    @app.post(f"{_PATH}/rollback", tags=["traffic"], summary="Give them to the baseline again")
    async def roll_back(name: _Name, request: Request) -> Response:
        body = await json_body(request)
        traffic.roll_back(name, *_version_and_reason(body))
        return document(name)


def _version_and_reason(body: Mapping[str, Any]) -> tuple[str, str]:
    """Both may be left out; raises `InvalidRequest`."""
    for name in body:
        if name not in ("version", "reason"):
            raise InvalidRequest(f"unknown member {name!r:.60}, it may have version, reason")
    version, reason = body.get("version", ""), body.get("reason", "")
    if type(version) is int:
        version = str(version)
    for name, value in (("version", version), ("reason", reason)):
        if type(value) is not str:
            raise InvalidRequest(f"'{name}' must be a string, got {value!r:.60}")
    return version, reason
