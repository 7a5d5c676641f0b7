"""What the OpenAPI document says of a route beside its path: bodies, answers and statuses.

It stands beside each route, and is written in the form that the web framework takes.
"""

from collections.abc import Mapping
from typing import Any

from headrace.observability.logs import FORMATS
from headrace.wire.documents import message_schemas, reference
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.pb.model_config_pb2 import ModelConfig
from headrace.wire.pb.traffic_pb2 import ModelTrafficResponse

Schema = dict[str, Any]

ERROR = {"$ref": "#/components/schemas/Error"}
_STATUSES = {
    400: "The request breaks the protocol, or does not fit the model",
    403: "Not for pages of other sites",
    404: "No such model, version or region",
    413: "The body is too large",
    501: "Not offered, or not allowed by the server's settings",
    503: "Not now, or not allowed by the server's settings",
}
MODEL_METADATA = reference(pb.ModelMetadataResponse.DESCRIPTOR)
MODEL_CONFIG = reference(ModelConfig.DESCRIPTOR)
STATISTICS = reference(pb.ModelStatisticsResponse.DESCRIPTOR)
TRAFFIC = reference(ModelTrafficResponse.DESCRIPTOR)
SYSTEM_REGIONS = {
    "type": "array",
    "items": reference(pb.SystemSharedMemoryStatusResponse.RegionStatus.DESCRIPTOR),
}
CUDA_REGIONS = {
    "type": "array",
    "items": reference(pb.CudaSharedMemoryStatusResponse.RegionStatus.DESCRIPTOR),
}
SERVER_METADATA, LIVE, READY, MODEL_READY, MODEL_INDEX, LOG_SETTINGS, TRACE_SETTINGS = (
    {"$ref": f"#/components/schemas/{name}"}
    for name in (
        "ServerMetadata", "ServerLive", "ServerReady", "ModelReady", "RepositoryIndex",
        "LogSettings", "TraceSettings",
    )
)  # fmt: skip
_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_NUMBER = {"type": "string", "pattern": "^-?[0-9]+$"}
_STATES = ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]
TRACE_LEVELS = {"type": "array", "items": {"enum": ["OFF", "TIMESTAMPS", "TENSORS"]}}


def document_schemas() -> dict[str, Schema]:
    """Schemas of what routes answer, by the names that `described` refers to them by."""
    return _own_schemas() | message_schemas(
        (
            pb.ModelMetadataResponse.DESCRIPTOR,
            ModelConfig.DESCRIPTOR,
            pb.ModelStatisticsResponse.DESCRIPTOR,
            pb.SystemSharedMemoryStatusResponse.RegionStatus.DESCRIPTOR,
            pb.CudaSharedMemoryStatusResponse.RegionStatus.DESCRIPTOR,
            ModelTrafficResponse.DESCRIPTOR,
        )
    )


def _own_schemas() -> dict[str, Schema]:
    """Of documents that are not those of gRPC."""
    log = {
        "log_file": _TEXT, "log_info": _FLAG, "log_warning": _FLAG, "log_error": _FLAG,
        "log_verbose_level": {"type": "integer", "minimum": 0},
        "log_format": _TEXT | {"enum": list(FORMATS)},
    }  # fmt: skip
    trace = {
        "trace_level": TRACE_LEVELS, "trace_rate": _NUMBER, "trace_count": _NUMBER,
        "trace_mode": _TEXT | {"enum": ["triton", "opentelemetry"]},
    }  # fmt: skip
    # A model that was never loaded has a name and nothing else.
    model = {"name": _TEXT, "version": _TEXT, "state": _TEXT | {"enum": _STATES}, "reason": _TEXT}
    # Where metrics are; null where there are none.
    metrics = record({"address": _TEXT, "port": {"type": "integer"}}, "address", "port") | {
        "type": ["object", "null"]
    }
    return {
        "ServerMetadata": record(
            {
                "name": _TEXT,
                "version": _TEXT,
                "extensions": {"type": "array", "items": _TEXT},
                "headrace": record({"id": _TEXT, "metrics": metrics}, "id", "metrics"),
            },
            "name",
            "version",
            "extensions",
            "headrace",
        ),
        "ServerLive": record({"live": _FLAG}, "live"),
        "ServerReady": record({"ready": _FLAG, "reason": _TEXT}, "ready"),
        "ModelReady": record(
            {"name": _TEXT, "ready": _FLAG, "error": _TEXT, "reason": _TEXT}, "name", "ready"
        ),
        "RepositoryIndex": {"type": "array", "items": record(model, "name")},
        "LogSettings": record(log, *log),
        # Beside these, as texts, what there is to know of the mode.
        "TraceSettings": record(trace, *trace) | {"additionalProperties": _TEXT},
    }


def answers(
    what: str, schema: Schema | None, *errors: int, unready: Schema | None = None
) -> dict[int | str, dict[str, Any]]:
    """The answers of a route: `what` is in that of status 200, by `schema`, None for no body.

    `errors` are the other statuses; that of 503 has the form `unready` where it is no plain error.
    """
    good: dict[str, Any] = {"description": what}
    if schema is not None:
        good["content"] = _json(schema)
    found: dict[int | str, dict[str, Any]] = {200: good}
    for status in errors:
        found[status] = {"description": _STATUSES[status], "content": _json(ERROR)}
    if unready is not None:
        found[503] = {"description": "Not ready", "content": _json(unready)}
    return found


def record(properties: Mapping[str, Any], *required: str) -> Schema:
    """The schema of an object."""
    schema = {"type": "object", "properties": dict(properties)}
    return schema | {"required": list(required)} if required else schema


def body(schema: Schema, required: bool = False) -> dict[str, Any]:
    """What a route says that takes a JSON object; unless it is required, an empty body will do."""
    content: dict[str, Any] = {"content": _json(schema)}
    return {"requestBody": content | {"required": True} if required else content}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
