"""The routes of the model repository: index, load and unload."""

import asyncio
from functools import partial

from fastapi import FastAPI, Request, Response

from headrace.core.errors import InvalidRequest, Unsupported
from headrace.core.model_spec import LoadParameters
from headrace.engine.engine import Engine
from headrace.transports.http.described import MODEL_INDEX, answers, body, record
from headrace.transports.http.json_bodies import json_answer, json_body, parse_object, whole_body
from headrace.wire.documents import to_json
from headrace.wire.parameters import load_parameters_of_json, unload_dependents_of_json

_INDEX = body(record({"ready": {"type": "boolean", "description": "Only what serves"}}))
_OVERRIDES = record(
    {"config": {"type": "string", "description": "A configuration, as JSON text"}}
) | {
    "additionalProperties": {
        "type": "string",
        "description": "As `file:PATH`: a file of the model's directory, in base64",
    }
}
_LOAD = body(record({"parameters": _OVERRIDES}))
_UNLOAD = body(record({"parameters": record({"unload_dependents": {"type": "boolean"}})}))
_LARGE = 64 << 10  # bytes of a body, from which on it is parsed on a thread
_DONE = partial(Response, media_type="application/json")


def add_repository_routes(app: FastAPI, engine: Engine, max_request_bytes: int) -> None:
    """Let `app` tell which models there are, and load and unload them."""

    @app.post(
        "/v2/repository/index", tags=["repository"], summary="All models and their states",
        openapi_extra=_INDEX, response_class=Response,
        responses=answers("All versions of all models", MODEL_INDEX, 400, 413),
    )  # fmt: skip
    @app.post("/v2/repository/{repository}/index", include_in_schema=False)
    async def index(request: Request) -> Response:
        ready = (await json_body(request)).get("ready", False)
        if type(ready) is not bool:
            raise InvalidRequest("Invalid value for 'ready': expected a boolean")
        models = to_json(await engine.control.index(ready))["models"]
        # A model that was never loaded has a name and nothing else.
        return json_answer(
            [{key: value for key, value in model.items() if value} for model in models]
        )

    # Also for names that are none, which are refused for that.
    @app.post(
        "/v2/repository/models/{name:path}/load", tags=["repository"], summary="Load a model",
        openapi_extra=_LOAD, response_class=Response,
        responses=answers("The model is loaded", None, 400, 403, 404, 413, 503),
    )  # fmt: skip
    async def load(request: Request, name: str) -> Response:
        engine.control.check(name)  # before its body is taken
        await engine.control.load(name, await _parameters(request, max_request_bytes))
        return _DONE()

    @app.post(
        "/v2/repository/models/{name:path}/unload", tags=["repository"], summary="Unload a model",
        openapi_extra=_UNLOAD, response_class=Response,
        responses=answers("The model is not served any more", None, 400, 403, 413, 503),
    )  # fmt: skip
    async def unload(request: Request, name: str) -> Response:
        engine.control.check(name)
        dependents = unload_dependents_of_json(await json_body(request))
        await engine.control.unload(name, dependents)
        return _DONE()

    @app.post("/v2/repository/{repository}/models/{name}/load", include_in_schema=False)
    @app.post("/v2/repository/{repository}/models/{name}/unload", include_in_schema=False)
    async def named_repository(repository: str, name: str) -> Response:
        raise Unsupported("'repository_name' specification is not supported")


async def _parameters(request: Request, limit: int) -> LoadParameters:
    """What a load request brings along."""
    async with whole_body(request, limit) as body:
        if len(body) < _LARGE:
            return _read(body)
        return await asyncio.to_thread(_read, body)


def _read(body: bytes) -> LoadParameters:
    return load_parameters_of_json(parse_object(body))
