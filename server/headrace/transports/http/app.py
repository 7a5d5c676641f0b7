"""The HTTP routes of the protocol but for inference, with OpenAPI documentation of all."""

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from headrace import __version__
from headrace.core.errors import ServerError
from headrace.engine.engine import Engine
from headrace.transports.http import health, openapi
from headrace.transports.http.described import (
    LIVE,
    MODEL_CONFIG,
    MODEL_METADATA,
    MODEL_READY,
    READY,
    SERVER_METADATA,
    STATISTICS,
    Schema,
    answers,
)
from headrace.transports.http.docs_page import render_docs, render_root
from headrace.transports.http.json_bodies import json_answer
from headrace.transports.http.log_routes import add_log_routes
from headrace.transports.http.near import hint
from headrace.transports.http.repository_routes import add_repository_routes
from headrace.transports.http.restricted import restricted_routes
from headrace.transports.http.shared_memory_routes import add_shared_memory_routes
from headrace.transports.http.trace_routes import add_trace_routes
from headrace.transports.http.traffic import add_traffic_routes
from headrace.wire.documents import to_json
from headrace.wire.header_rules import NO_RULES, HeaderRules
from headrace.wire.status import INTERNAL, INTERNAL_TEXT, STATUS, retry_after
from headrace.wire.v2_json import error_body

log = logging.getLogger(__name__)

Name = Annotated[str, Path(description="Name of a model")]
Version = Annotated[str, Path(pattern="^[0-9]+$", description="Number of a version")]
_JSON = "application/json"


def create_app(
    engine: Engine,
    max_request_bytes: int,
    rules: HeaderRules = NO_RULES,
) -> FastAPI:
    """The application that answers for `engine`, by these rules for headers; see `LateApp`."""
    keys = rules.keys()
    app = FastAPI(
        title="headrace",
        version=__version__,
        summary="KServe V2 (Open Inference) protocol",
        description="An operation that the server restricts is answered with 403 without its"
        " header, and any with 500 where the server has a bug.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.router.route_class = restricted_routes(keys, rules.allowed_origins())
    app.state.admission = engine.admission  # which counts the bodies that are being read
    _health(app, engine)
    _metadata(app, engine)
    add_repository_routes(app, engine, max_request_bytes)
    add_log_routes(app, engine.logs)
    add_trace_routes(app, engine.tracing)
    add_shared_memory_routes(app, engine.regions)
    add_traffic_routes(app, engine)
    _errors(app)
    openapi.describe_inference(app)

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)
    async def root() -> Response:
        return Response(render_root(__version__), media_type="text/html; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(render_docs(app.openapi()), media_type="text/html; charset=utf-8")

    return app


def _health(app: FastAPI, engine: Engine) -> None:
    """Some load balancers probe with HEAD."""

    @app.get(
        "/v2/health/live", tags=["health"], summary="Is the server alive?",
        response_class=Response, responses=answers("It is", LIVE),
    )  # fmt: skip
    @app.head("/v2/health/live", include_in_schema=False)
    async def live() -> Response:
        return json_answer(*health.live(engine))

    @app.get(
        "/v2/health/ready", tags=["health"], summary="Does the server take requests?",
        response_class=Response, responses=answers("It does", READY, unready=READY),
    )  # fmt: skip
    @app.head("/v2/health/ready", include_in_schema=False)
    async def ready() -> Response:
        return json_answer(*health.ready(engine))

    @app.get(
        "/v2/models/{name}/ready", tags=["health"], summary="Does the model take requests?",
        response_class=Response, responses=answers("It does", MODEL_READY, unready=MODEL_READY),
    )  # fmt: skip
    @app.head("/v2/models/{name}/ready", include_in_schema=False)
    async def model_ready(name: Name) -> Response:
        return json_answer(*health.model_ready(engine, name, ""))

    @app.get(
        "/v2/models/{name}/versions/{version}/ready", tags=["health"],
        summary="Does the version take requests?", response_class=Response,
        responses=answers("It does", MODEL_READY, 400, unready=MODEL_READY),
    )  # fmt: skip
    @app.head("/v2/models/{name}/versions/{version}/ready", include_in_schema=False)
    async def version_ready(name: Name, version: Version) -> Response:
        return json_answer(*health.model_ready(engine, name, version))


def _metadata(app: FastAPI, engine: Engine) -> None:
    @app.get(
        "/v2", tags=["metadata"], summary="Server metadata",
        response_class=Response, responses=answers("What the server offers", SERVER_METADATA),
    )  # fmt: skip
    @app.get("/v2/", include_in_schema=False)
    async def server_metadata() -> Response:
        # Clients pass over members that they do not know.
        document = to_json(engine.server_metadata()) | {"headrace": engine.identity()}
        return json_answer(document)

    # Before the routes with a model name: a model cannot be called "stats".
    @app.get(
        "/v2/models/stats", tags=["statistics"], summary="Statistics of all models",
        response_class=Response, responses=answers("By model and version", STATISTICS),
    )  # fmt: skip
    async def all_statistics() -> Response:
        return json_answer(to_json(engine.model_statistics()))

    async def metadata(name: str, version: str) -> dict[str, Any]:
        await engine.bring(name, version)
        return to_json(engine.model_metadata(name, version))

    async def config(name: str, version: str) -> dict[str, Any]:
        await engine.bring(name, version)
        return to_json(engine.model_config(name, version))

    async def statistics(name: str, version: str) -> dict[str, Any]:
        return to_json(engine.model_statistics(name, version))

    _add_document(app, "", "metadata", "Model metadata", metadata, MODEL_METADATA)
    _add_document(app, "/config", "metadata", "Model configuration", config, MODEL_CONFIG)
    _add_document(app, "/stats", "statistics", "Model statistics", statistics, STATISTICS)


def _add_document(
    app: FastAPI,
    suffix: str,
    tag: str,
    summary: str,
    document: Callable[[str, str], Awaitable[dict[str, Any]]],
    schema: Schema,
) -> None:
    """A document of a model, with and without a version."""
    operation = f"model{suffix.replace('/', '_')}"
    # A client that asks for statistics of what is not there has made a mistake, says Triton.
    errors = (400,) if schema is STATISTICS else (400, 404, 503)

    @app.get(
        f"/v2/models/{{name}}{suffix}", tags=[tag], summary=summary, operation_id=operation,
        response_class=Response, responses=answers(summary, schema, *errors),
    )  # fmt: skip
    async def of_model(name: Name) -> Response:
        return json_answer(await document(name, ""))

    @app.get(
        f"/v2/models/{{name}}/versions/{{version}}{suffix}",
        tags=[tag], summary=f"{summary} of a version", operation_id=f"version_{operation}",
        response_class=Response, responses=answers(summary, schema, *errors),
    )  # fmt: skip
    async def of_version(name: Name, version: Version) -> Response:
        return json_answer(await document(name, version))


NO_ROUTE = "Not Found: /docs describes all paths"


def _errors(app: FastAPI) -> None:
    """Every error in the protocol's form, also those that FastAPI itself finds."""

    @app.exception_handler(ServerError)
    async def server_error(_: Request, error: ServerError) -> Response:
        status = STATUS[type(error)]
        seconds = retry_after(error)
        retry = {"retry-after": str(seconds)} if seconds else None
        return Response(error_body(str(error)), status.http, retry, _JSON)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = error.detail
        if error.status_code == 404:
            text = NO_ROUTE + hint(request.url.path)
        if allowed := (error.headers or {}).get("Allow"):
            text += f": this path takes {allowed}"
        return Response(error_body(text), error.status_code, error.headers, _JSON)

    # A path parameter that does not fit: a version that is no number has no route, as in Triton.
    @app.exception_handler(RequestValidationError)
    async def no_route(_: Request, error: RequestValidationError) -> Response:
        return Response(error_body(NO_ROUTE), 404, media_type=_JSON)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("bug while answering %s", request.url.path, exc_info=error)
        return Response(error_body(INTERNAL_TEXT), INTERNAL.http, media_type=_JSON)
