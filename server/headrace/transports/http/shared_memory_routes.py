"""HTTP routes of system and CUDA shared memory."""

import base64
import binascii
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response

from headrace.core.errors import InvalidRequest
from headrace.engine.shared_memory import Regions
from headrace.transports.http.described import (
    CUDA_REGIONS,
    SYSTEM_REGIONS,
    answers,
    body,
    record,
)
from headrace.transports.http.json_bodies import json_answer, json_body
from headrace.wire.documents import to_json
from headrace.wire.elements import json_name

_Region = Annotated[str, Path(description="Name of a region")]
_SYSTEM = record(
    {
        "key": {"type": "string", "description": "Name of the POSIX shared memory object"},
        "offset": {"type": "integer", "minimum": 0, "default": 0},
        "byte_size": {"type": "integer", "minimum": 1},
    },
    "key",
    "byte_size",
)
_CUDA = record(
    {
        "raw_handle": record(
            {"b64": {"type": "string", "description": "A cudaIpcMemHandle_t in base64"}}, "b64"
        ),
        "device_id": {"type": "integer", "minimum": 0},
        "byte_size": {"type": "integer", "minimum": 1},
    },
    "raw_handle",
    "device_id",
    "byte_size",
)
_REGISTERED = answers("The region is registered", None, 400, 413, 501)
_FORGOTTEN = answers("The region is not there any more", None, 501)
_DONE = partial(Response, media_type="application/json")
_KINDS = (
    ("systemsharedmemory", "system shared memory", False),
    ("cudasharedmemory", "CUDA shared memory", True),
)


def add_shared_memory_routes(app: FastAPI, regions: Regions) -> None:
    """Let `app` tell and change which regions there are."""
    for path, words, cuda in _KINDS:
        _add_status(app, regions, path, words, cuda)
        _add_unregister(app, regions, path, words, cuda)

    @app.post(
        "/v2/systemsharedmemory/region/{region}/register", tags=["shared memory"],
        summary="Register system shared memory",
        operation_id="register_systemsharedmemory", openapi_extra=body(_SYSTEM, required=True),
        response_class=Response, responses=_REGISTERED,
    )  # fmt: skip
    async def register_system(request: Request, region: _Region) -> Response:
        given = await json_body(request)
        key = _member(given, "key", str)
        offset = 0 if given.get("offset") is None else _member(given, "offset", int)
        await regions.register_system(region, key, offset, _member(given, "byte_size", int))
        return _DONE()

    @app.post(
        "/v2/cudasharedmemory/region/{region}/register", tags=["shared memory"],
        summary="Register CUDA shared memory",
        operation_id="register_cudasharedmemory", openapi_extra=body(_CUDA, required=True),
        response_class=Response, responses=_REGISTERED,
    )  # fmt: skip
    async def register_cuda(request: Request, region: _Region) -> Response:
        given = await json_body(request)
        text = _member(_member(given, "raw_handle", dict), "b64", str)
        try:
            handle = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest("'raw_handle' must have 'b64', a text in base64") from None
        size = _member(given, "byte_size", int)
        await regions.register_cuda(region, handle, _member(given, "device_id", int), size)
        return _DONE()


def _add_status(app: FastAPI, regions: Regions, path: str, words: str, cuda: bool) -> None:
    schema = CUDA_REGIONS if cuda else SYSTEM_REGIONS

    def answer(name: str) -> Response:
        message = regions.cuda_status(name) if cuda else regions.system_status(name)
        found: dict[str, Any] = to_json(message)["regions"]
        return json_answer([found[n] for n in sorted(found)])

    @app.get(
        f"/v2/{path}/status", tags=["shared memory"], summary=f"All regions of {words}",
        operation_id=f"status_{path}", response_class=Response,
        responses=answers("The regions by their names", schema),
    )  # fmt: skip
    async def status() -> Response:
        return answer("")

    @app.get(
        f"/v2/{path}/region/{{region}}/status", tags=["shared memory"],
        summary=f"A region of {words}", operation_id=f"status_{path}_region",
        response_class=Response, responses=answers("The region", schema, 404),
    )  # fmt: skip
    async def region_status(region: _Region) -> Response:
        return answer(region)


def _add_unregister(app: FastAPI, regions: Regions, path: str, words: str, cuda: bool) -> None:
    @app.post(
        f"/v2/{path}/unregister", tags=["shared memory"], summary=f"Forget all {words}",
        operation_id=f"unregister_{path}", response_class=Response, responses=_FORGOTTEN,
    )  # fmt: skip
    async def unregister_all() -> Response:
        regions.unregister("", cuda)
        return _DONE()

    @app.post(
        f"/v2/{path}/region/{{region}}/unregister", tags=["shared memory"],
        summary=f"Forget a region of {words}", operation_id=f"unregister_{path}_region",
        response_class=Response, responses=_FORGOTTEN,
    )  # fmt: skip
    async def unregister(region: _Region) -> Response:
        regions.unregister(region, cuda)
        return _DONE()


def _member(given: dict[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if type(value) is not kind:
        expected, got = json_name(kind), json_name(type(value))
        raise InvalidRequest(f"'{name}' of a region must be {expected}, got {got}")
    return value
