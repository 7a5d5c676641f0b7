"""The OpenAPI description of the operations' HTTP routes, and of the loaded models.

Answers that share their documents with gRPC are described by their messages; documents specific to
HTTP are declared here, under the names of the messages that they replace.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace import __version__
from headrace.api.operations import NAMED, OPERATIONS, Category, Operation, Route, parameters
from headrace.core.datatypes import Datatype
from headrace.core.identity import Permission
from headrace.core.signature import Signature, TensorSpec
from headrace.engine.version import ModelVersion
from headrace.observability.logs import FORMATS
from headrace.protocol.pb import POOL, traffic_pb2
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig

_ENUM = FieldDescriptor.TYPE_ENUM
_MESSAGE = FieldDescriptor.TYPE_MESSAGE
_BYTES = FieldDescriptor.TYPE_BYTES


_SCALARS = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
}


def message_schemas(descriptors: Iterable[Descriptor]) -> dict[str, dict[str, Any]]:
    """Schemas of messages and of all messages in them, by `schema_name`."""
    schemas: dict[str, dict[str, Any]] = {}
    waiting = list(descriptors)
    while waiting:
        descriptor = waiting.pop()
        name = schema_name(descriptor)
        if name not in schemas:
            schemas[name] = _schema(descriptor)
            waiting += [found for f in descriptor.fields if (found := _message(f)) is not None]
    return dict(sorted(schemas.items()))


def schema_name(descriptor: Descriptor) -> str:
    """The name of a message without its package."""
    return descriptor.full_name.removeprefix(f"{descriptor.file.package}.")


def reference(descriptor: Descriptor) -> dict[str, str]:
    """The `$ref` to the schema of a message."""
    return {"$ref": f"#/components/schemas/{schema_name(descriptor)}"}


def _schema(descriptor: Descriptor) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _field(field) for field in descriptor.fields},
    }
    always = [f.name for f in descriptor.fields if f.is_repeated or not f.has_presence]
    return schema | {"required": always} if always else schema


def _message(field: FieldDescriptor) -> Descriptor | None:
    """The message type of a field, or of a map's values."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        found: Descriptor | None = entry.fields_by_name["value"].message_type
        return found
    return entry


def _field(field: FieldDescriptor) -> dict[str, Any]:
    if not field.is_repeated:
        return _json_schema_value(field)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        values = _json_schema_value(entry.fields_by_name["value"])
        return {"type": "object", "additionalProperties": values}
    return {"type": "array", "items": _json_schema_value(field)}


def _json_schema_value(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None:
        return reference(field.message_type)
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    return {"type": _SCALARS.get(field.cpp_type, "integer")}


Schema = dict[str, Any]

_STATUSES = {
    400: "The request breaks the protocol, or does not fit the model",
    403: "Not for pages of other sites",
    404: "No such model, version or region",
    413: "The body is too large",
    422: "Workers have died of these inputs before",
    500: "The model failed, or there is no such shared memory",
    501: "Not offered, or not allowed by the server's settings",
    503: "Not now, or not allowed by the server's settings",
}
_INFERENCE_ERRORS = 400, 404, 413, 422, 500, 501, 503
_PARAMETERS = {
    "name": {"description": "Name of a model", "schema": {"type": "string"}},
    "version": {
        "description": "Number of a version",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "region": {"description": "Name of a region", "schema": {"type": "string"}},
}
_BINARY: Schema = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_MOST_ELEMENTS = 1000  # elements of an example


class DescribedVersion(NamedTuple):
    """A loaded version at the time of description; it may be unloaded meanwhile."""

    model: str
    version: str
    signature: Signature
    config: ModelConfig
    decoupled: bool


def loaded(versions: Iterable[ModelVersion]) -> list[DescribedVersion]:
    """The highest ready version of each model."""
    newest = {version.model: version for version in versions if version.ready}
    return [
        DescribedVersion(v.model, v.name, v.chain.signature, v.config, v.chain.decoupled)
        for v in newest.values()
    ]


def document(
    models: Iterable[DescribedVersion] = (),
    operations: Sequence[Operation] = OPERATIONS,
    bearer: bool = False,
    headers: Mapping[Category, str] = MappingProxyType({}),
) -> Schema:
    """The OpenAPI document of `models`, and of the operations; thread-safe.

    With `bearer`, clients show keys or tokens; `headers` are those that categories require.
    """
    paths: dict[str, Schema] = {}
    for version in models:
        paths |= _model(version, _security(NAMED["ModelInfer"], bearer, headers))
    tags = {"models": "The models of this server, with an example for each"} if paths else {}
    tags |= dict.fromkeys((operation.tag for operation in operations if operation.routes), "")
    for operation in operations:
        for route in operation.routes:
            for path in route.forms:
                item = paths.setdefault(path.replace(":path}", "}"), {})
                described = _described(operation, route, path)
                item[route.method.lower()] = described | _security(operation, bearer, headers)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace",
            "version": __version__,
            "summary": "KServe V2 (Open Inference) protocol",
            "description": "An operation that the server restricts is answered with 403 without its"
            " header, and any with 500 where the server has a bug.",
        },
        # Viewers keep this order.
        "tags": [
            {"name": name} | ({"description": text} if text else {}) for name, text in tags.items()
        ],
        "paths": paths,
        "components": {"schemas": _schemas(operations)} | _schemes(bearer, headers),
    }


# --- what a client has to show


def _schemes(bearer: bool, headers: Mapping[Category, str]) -> Schema:
    found: Schema = {
        f"header-{name}": {"type": "apiKey", "in": "header", "name": name}
        for name in sorted(set(headers.values()))
    }
    if bearer:
        found["bearer"] = {"type": "http", "scheme": "bearer", "description": "API key or token"}
    return {"securitySchemes": found} if found else {}


def _security(operation: Operation, bearer: bool, headers: Mapping[Category, str]) -> Schema:
    """The member `security` of an operation; empty if there is nothing to show."""
    needed: Schema = {}
    if bearer and operation.permission is not Permission.OPEN:
        needed["bearer"] = []
    if operation.category is not None and (name := headers.get(operation.category)):
        needed[f"header-{name}"] = []
    return {"security": [needed]} if needed else {}


# --- routes


def _described(operation: Operation, route: Route, path: str) -> Schema:
    names = parameters(path)
    several, full = len(operation.routes) > 1, path != route.forms[0]
    words = [_snake(operation.name), *([route.method.lower()] if several else [])]
    more = f", one {'model' if names[-1] == 'name' else names[-1]}" if full else ""
    described: Schema = {
        "tags": [operation.tag],
        "summary": route.summary + more,
        "operationId": "_".join([*words, *(names[-1:] if full else [])]),
        "parameters": [{"name": n, "in": "path", "required": True} | _PARAMETERS[n] for n in names],
        "responses": {},
    }
    if operation.category == "inference":
        _describe_inference(operation.name, route, described)
        return described
    good: Schema = {"description": route.summary}
    if operation.response in _OWN or _descriptor(operation, operation.response).fields:
        good["content"] = _json(_ELSEWHERE.get(operation.response, _reference(operation.response)))
    answers = described["responses"]
    answers["200"] = good
    answers |= _errors(route.errors)
    if route.unready:
        answers["503"] = {"description": "Not ready", "content": good["content"]}
    if route.body:
        described["requestBody"] = {"content": _json(_reference(operation.request))}
        if "required" in _OWN.get(operation.request, {}):
            described["requestBody"]["required"] = True
    return described


def _describe_inference(name: str, route: Route, described: Schema) -> None:
    text, content = "The outputs", _json(_reference("GenerateRequest"))
    given = _json(_reference("GenerateResponse"))
    if name == "GenerateStream":
        given = {"text/event-stream": {"schema": _TEXT}}
        text = "One event for each response: `data: ` and a GenerateResponse or an Error"
    if name == "ModelInfer":
        given = _json(_reference("InferResponse"))
        content = _json(_reference("InferRequest"))
        content |= {media: {"schema": _BINARY} for media in route.media}
        in_bytes = (
            "An InferResponse in as many bytes as Inference-Header-Content-Length says, and behind"
            " it the outputs that were asked for in binary"
        )
        given |= {media: {"schema": _BINARY} for media in route.media}
        given["application/octet-stream"] = {"schema": _BINARY | {"description": in_bytes}}
        described["parameters"].append(
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "required": False,
                "schema": {"type": "integer"},
                "description": "Size of the JSON in front of binary tensors; 0 for a raw body",
            }
        )
    described["requestBody"] = {"required": True, "content": content}
    described["responses"] = {"200": {"description": text, "content": given}}
    described["responses"] |= _errors(_INFERENCE_ERRORS)


def _errors(statuses: Iterable[int]) -> Schema:
    content = _json(_reference("Error"))
    return {str(s): {"description": _STATUSES[s], "content": content} for s in statuses}


def _descriptor(operation: Operation, message: str) -> Descriptor:
    return POOL.FindMessageTypeByName(f"{operation.package}.{message}")


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# --- models


def _model(version: DescribedVersion, security: Schema) -> dict[str, Schema]:
    """The path that runs a model, with the model's own inputs and outputs, and an example."""
    flat, signature = version.decoupled, version.signature
    inputs, outputs = signature.inputs, signature.outputs
    asked = _flat(inputs) if flat else _tensors(signature, "inputs", inputs)
    given = _flat(outputs) if flat else _tensors(signature, "outputs", outputs)
    example = _example(version, signature, flat)
    content = _json(asked | ({} if example is None else {"examples": [example]}))
    answer = {"text/event-stream": {"schema": _TEXT}} if flat else _json(given)
    path = NAMED["GenerateStream" if flat else "ModelInfer"].routes[0].filled(name=version.model)
    described = {
        "tags": ["models"],
        "summary": f"Run {version.model}",
        "operationId": f"run_{version.model}",
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The outputs", "content": answer}},
    }
    described["responses"] |= _errors(_INFERENCE_ERRORS)  # type: ignore[operator]
    return {path: {"post": described | security}}


def _tensors(signature: Signature, member: str, specs: Sequence[TensorSpec]) -> Schema:
    """The schema of a request or response with tensors of these specifications."""
    required = sum(not spec.optional for spec in specs)
    tensors = {
        "type": "array",
        "minItems": required if member == "inputs" else 1,
        "maxItems": len(specs),
        "items": {"oneOf": [_tensor(signature, spec) for spec in specs]},
    }
    if not specs:
        tensors = {"type": "array", "maxItems": 0}
    return {"allOf": [_reference(f"Infer{'Request' if member == 'inputs' else 'Response'}")]} | {
        "type": "object", "required": [member], "properties": {member: tensors},
    }  # fmt: skip


def _tensor(signature: Signature, spec: TensorSpec) -> Schema:
    shape = signature.wire_shape(spec)
    dims = [{"type": "integer", "minimum": 0} if dim < 0 else {"const": dim} for dim in shape]
    return {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"const": spec.name},
            "datatype": {"const": str(spec.datatype)},
            "shape": {
                "type": "array", "prefixItems": dims, "minItems": len(dims), "maxItems": len(dims),
            },
            "parameters": _VALUES,
            "data": {"type": "array", "items": {"type": [_kind(spec), "array"]}},
        },
    }  # fmt: skip


def _flat(specs: Sequence[TensorSpec]) -> Schema:
    """The schema of a document with tensors as members, as for `generate`."""
    kinds = {spec.name: {"type": [_kind(spec), "array"]} for spec in specs}
    return {"type": "object", "properties": kinds}


def _kind(spec: TensorSpec) -> str:
    match spec.datatype:
        case Datatype.BOOL:
            return "boolean"
        case Datatype.BYTES:
            return "string"
        case Datatype.FP16 | Datatype.BF16 | Datatype.FP32 | Datatype.FP64:
            return "number"
    return "integer"


def _example(version: DescribedVersion, signature: Signature, flat: bool) -> Schema | None:
    """A valid request of zeros; None if it would be too long or has no JSON form."""
    zeros = {"boolean": False, "string": "", "number": 0.0, "integer": 0}
    example: Schema = {} if flat else {"inputs": []}
    for spec in signature.inputs:
        if spec.optional:
            continue
        shape = [abs(dim) for dim in signature.wire_shape(spec)]
        if prod(shape) > _MOST_ELEMENTS or spec.datatype in (Datatype.FP16, Datatype.BF16):
            return None
        data = [zeros[_kind(spec)]] * prod(shape)
        if flat:
            example[spec.name] = data
        else:
            tensor = {"name": spec.name, "datatype": str(spec.datatype), "shape": shape}
            example["inputs"].append(tensor | {"data": data})
    if version.config.HasField("sequence_batching"):
        one = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
        example |= one if flat else {"parameters": one}
    return example


# --- schemas of documents


def _schemas(operations: Sequence[Operation]) -> dict[str, Schema]:
    """The schemas of all documents by name."""
    found: list[Descriptor] = [*_PARTS]
    for operation in operations:
        for route in operation.routes if operation.category != "inference" else ():
            named = [operation.response, *([operation.request] if route.body else [])]
            found += [_descriptor(operation, name) for name in named if name not in _OWN]
    return dict(sorted((message_schemas(d for d in found if d.fields) | _OWN).items()))


def _record(properties: Mapping[str, Any], *required: str) -> Schema:
    schema = {"type": "object", "properties": dict(properties)}
    return schema | {"required": list(required)} if required else schema


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_VALUES = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
_NAMES = {"id": _TEXT, "model_name": _TEXT, "model_version": _TEXT}
_SIZE = {"type": "integer", "minimum": 1}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_LEAST_ONE = {"type": "number", "minimum": 1}
_VERSION: Schema = {"type": ["string", "integer"]}
_CHANGED_FLAG = {"type": ["boolean", "null"]}  # null leaves a setting unchanged
_COUNT = {"type": "string", "pattern": "^-?[0-9]+$"}
_CHANGED_COUNT = _COUNT | {"type": ["string", "null"]}
_LEVELS = {"type": "array", "items": {"enum": ["OFF", "TIMESTAMPS", "TENSORS"]}}
_LOG = {
    "log_file": _TEXT, "log_info": _FLAG, "log_warning": _FLAG, "log_error": _FLAG,
    "log_verbose_level": {"type": "integer", "minimum": 0},
    "log_format": _TEXT | {"enum": list(FORMATS)},
}  # fmt: skip
_TRACE = {
    "trace_level": _LEVELS, "trace_rate": _COUNT, "trace_count": _COUNT,
    "trace_mode": _TEXT | {"enum": ["triton", "opentelemetry"]},
}  # fmt: skip
# The metrics' address; null if there is none.
_METRICS = _record(
    {"scheme": _TEXT, "address": _TEXT, "port": {"type": "integer"}}, "scheme", "address", "port"
) | {"type": ["object", "null"]}
_INDEX_ENTRY = {
    "name": _TEXT, "version": _TEXT, "reason": _TEXT,
    "state": _TEXT | {"enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
}  # fmt: skip
_TENSOR = {
    "name": _TEXT,
    "shape": _array({"type": "integer", "minimum": 0}),
    "datatype": _TEXT | {"enum": [str(datatype) for datatype in Datatype]},
    "parameters": _VALUES,
    "data": _array({}) | {"description": "Elements in row-major order"},
}
# Members named by the model: inputs and parameters, outputs and parameters.
_OF_MODELS = {
    "additionalProperties": {
        "type": ["string", "number", "boolean", "array"],
        "items": {"type": ["string", "number", "boolean"]},
    }
}
_OVERRIDES = _record({"config": _TEXT | {"description": "A configuration, as JSON text"}}) | {
    "additionalProperties": _TEXT
    | {"description": "As `file:PATH`: a file of the model's directory, in base64"}
}
_RULES = {
    "split": {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
    "baseline": _VERSION,
    "sticky": _record({"header": _TEXT, "parameter": _TEXT}),
    "shadow": {
        "type": ["string", "integer", "object"],
        "properties": {"version": _VERSION, "share": _SHARE, "max_pending": _SIZE},
    },
    "rollback": _record(
        {
            "max_error_rate": _SHARE,
            "max_error_rate_increase": _SHARE,
            "max_latency_ms": {"type": "number", "minimum": 0},
            "max_latency_ratio": _LEAST_ONE,
            "latency_quantile": _SHARE,
            "min_requests": _SIZE,
            "window_secs": _LEAST_ONE,
        }
    ),
}
_NUMBER = {"type": "number", "minimum": 0}
_INT = {"type": "integer", "minimum": 0}
_MODEL_STATUS = {
    "name": _TEXT, "version": _TEXT, "state": _TEXT, "reason": _TEXT, "unloaded": _FLAG,
    "backend": _TEXT, "instances": {"type": "object", "additionalProperties": _INT},
    "threads": _INT, "memory_bytes": _INT, "gpu_memory_bytes": _INT, "load_seconds": _NUMBER,
    "waiting": _INT, "stalled": _INT, "overloaded": _FLAG, "decoupled": _FLAG,
    "backends": {"type": "object", "additionalProperties": _FLAG},
    "servers": {"type": "object", "additionalProperties": _FLAG}, "requests": _INT,
    "failures": _INT, "failures_by_reason": {"type": "object", "additionalProperties": _INT},
    "rows": _INT, "batches": _INT, "last_request": _NUMBER,
    "latency": _array(_INT), "queue": _array(_INT), "compute": _array(_INT),
}  # fmt: skip
_PROCESS_STATUS = {
    "kind": _TEXT | {"enum": ["server", "front end", "worker"]}, "name": _TEXT, "pid": _INT,
    "model": _TEXT, "version": _TEXT, "resident_bytes": _INT, "threads": _INT,
    "cpu_seconds": _NUMBER,
}  # fmt: skip
_LIMIT_STATUS = {
    "name": _TEXT, "option": _TEXT, "used": _INT, "limit": _INT | {"type": ["integer", "null"]},
    "refused": _INT,
}  # fmt: skip
_DEGRADED = {"kind": _TEXT, "name": _TEXT, "version": _TEXT, "reason": _TEXT}
_STATUS = {
    "time": _NUMBER,
    "server": _record({
        "name": _TEXT, "version": _TEXT, "id": _TEXT, "started": _NUMBER, "ready": _FLAG,
        "addresses": {"type": "object", "additionalProperties": _TEXT},
        "model_control": _TEXT, "traffic_control": _FLAG,
    }),
    "client": _record({"name": _TEXT, "kind": _TEXT, "may": _array(_TEXT)}),
    "degraded": _array(_record(_DEGRADED, *_DEGRADED)),
    "cores": _record({"available": _SIZE, "model_threads": _INT, "process_threads": _INT}),
    "memory": _record({
        "resident_bytes": _INT, "model_bytes": _INT, "evictions": _INT,
        "budget_bytes": _INT | {"type": ["integer", "null"]},
    }),
    "processes": _array(_record(_PROCESS_STATUS, *_PROCESS_STATUS)),
    "limits": _array(_record(_LIMIT_STATUS, *_LIMIT_STATUS)),
    "certificates": _array(_record({"door": _TEXT, "file": _TEXT, "expires": _NUMBER})),
    "answers": _array(
        _record({"door": _TEXT, "operation": _TEXT, "status": _TEXT, "count": _INT})
    ),
    "downloads": _array(
        _record({"model": _TEXT, "store": _TEXT, "bytes": _INT, "fetched_bytes": _INT})
    ),
    "lost": _record({"log_lines": _INT, "audit_entries": _INT}),
    "bounds_seconds": _array(_NUMBER),
    "models": _array(_record(_MODEL_STATUS, *_MODEL_STATUS)),
}  # fmt: skip
_TIMES = {f"{part}_ns": _INT for part in ("queue", "gather", "run", "rest", "total")}
_RESULT = {"batches": _INT, "rows_per_batch": _NUMBER, "mean_ns": _INT, "p99_ns": _INT}
_BATCH = {"rows": _INT, "requests": _INT, "closed": _TEXT, **_TIMES}
_OTHER_SETTINGS = {"change": {"type": "object"}, **_RESULT, "busy": _NUMBER}
_COST = {"batches": _INT, "sizes": _INT, "fixed_ns": _INT, "row_ns": _INT, "error_ns": _INT}
_CLOSED = {"type": "object", "additionalProperties": _INT}
_EXPLAINED = {
    "name": _TEXT, "version": _TEXT,
    "settings": _record({
        "max_batch_size": _INT, "preferred_batch_size": _array(_INT),
        "max_queue_delay_microseconds": _INT, "instances": _INT,
    }),
    "since_load": _record({
        "requests": _INT, "batches": _INT, "closed": _CLOSED, "request": _record(_TIMES),
    }),
    "logged_ns": _INT,
    "logged": _record({
        "requests": _INT, "closed": _CLOSED, "request": _record(_TIMES), **_RESULT,
    }),
    "cost": _record(_COST) | {"type": ["object", "null"]},
    "last_batches": _array(_record(_BATCH, *_BATCH)),
    "what_if": _array(_record(_OTHER_SETTINGS, *_OTHER_SETTINGS)),
    "obstacle": _TEXT,
}  # fmt: skip
_PARTS = (
    ModelConfig.DESCRIPTOR,
    pb.SystemSharedMemoryStatusResponse.RegionStatus.DESCRIPTOR,
    pb.CudaSharedMemoryStatusResponse.RegionStatus.DESCRIPTOR,
    traffic_pb2.ModelTrafficResponse.DESCRIPTOR,
)
# The document is part of the message.
_ELSEWHERE = {"ModelConfigResponse": _reference("ModelConfig")}
_OWN: dict[str, Schema] = {
    "Error": _record({"error": _TEXT}, "error"),
    "Tensor": _record(_TENSOR, "name", "shape", "datatype"),
    "InferRequest": _record(
        {
            "id": _TEXT,
            "parameters": _VALUES,
            "inputs": _array(_reference("Tensor")),
            "outputs": _array(_record({"name": _TEXT, "parameters": _VALUES}, "name")),
        },
        "inputs",
    ),
    "InferResponse": _record(
        _NAMES | {"parameters": _VALUES, "outputs": _array(_reference("Tensor"))},
        "model_name", "model_version", "outputs",
    ),
    "GenerateRequest": _record({"id": _TEXT, "parameters": {"type": "object"}})
    | _OF_MODELS
    | {"examples": [{"text_input": "hello", "max_tokens": 5}]},
    "GenerateResponse": _record(_NAMES, "model_name", "model_version") | _OF_MODELS,
    "ServerReadyResponse": _record({"ready": _FLAG, "reason": _TEXT}, "ready"),
    "ModelReadyResponse": _record(
        {"name": _TEXT, "ready": _FLAG, "error": _TEXT, "reason": _TEXT}, "name", "ready"
    ),
    "ServerMetadataResponse": _record(
        {
            "name": _TEXT,
            "version": _TEXT,
            "extensions": _array(_TEXT),
            "headrace": _record({"id": _TEXT, "metrics": _METRICS}, "id", "metrics"),
        },
        "name", "version", "extensions", "headrace",
    ),
    # A model that was never loaded has only a name.
    "RepositoryIndexResponse": _array(_record(_INDEX_ENTRY, "name")),
    "RepositoryIndexRequest": _record({"ready": _FLAG | {"description": "Only what serves"}}),
    "RepositoryModelLoadRequest": _record({"parameters": _OVERRIDES}),
    "RepositoryModelUnloadRequest": _record(
        {"parameters": _record({"unload_dependents": _FLAG})}
    ),
    "SystemSharedMemoryStatusResponse": _array(
        _reference("SystemSharedMemoryStatusResponse.RegionStatus")
    ),
    "CudaSharedMemoryStatusResponse": _array(
        _reference("CudaSharedMemoryStatusResponse.RegionStatus")
    ),
    "SystemSharedMemoryRegisterRequest": _record(
        {
            "key": _TEXT | {"description": "Name of the POSIX shared memory object"},
            "offset": {"type": "integer", "minimum": 0, "default": 0},
            "byte_size": _SIZE,
        },
        "key", "byte_size",
    ),
    "CudaSharedMemoryRegisterRequest": _record(
        {
            "raw_handle": _record(
                {"b64": _TEXT | {"description": "A cudaIpcMemHandle_t in base64"}}, "b64"
            ),
            "device_id": {"type": "integer", "minimum": 0},
            "byte_size": _SIZE,
        },
        "raw_handle", "device_id", "byte_size",
    ),
    # Beside these, settings of the mode, as texts.
    "TraceSettingResponse": _record(_TRACE, *_TRACE) | {"additionalProperties": _TEXT},
    # The effect of null: a model's setting becomes the server's, the server's the command line's.
    "TraceSettingRequest": _record(
        {
            "trace_level": _LEVELS | {"type": ["array", "null"]},
            "trace_rate": _CHANGED_COUNT,
            "trace_count": _CHANGED_COUNT,
            "log_frequency": _CHANGED_COUNT,
        }
    ),
    "LogSettingsResponse": _record(_LOG, *_LOG),
    "LogSettingsRequest": _record(
        {
            "log_info": _CHANGED_FLAG,
            "log_warning": _CHANGED_FLAG,
            "log_error": _CHANGED_FLAG,
            "log_verbose_level": {"type": ["integer", "null"], "minimum": 0},
            "log_format": {"enum": [*FORMATS, None]},
        }
    ),
    "ModelExplainResponse": _record(_EXPLAINED, *_EXPLAINED),
    "ServerStatusResponse": _record(_STATUS, *_STATUS),
    "LogTailResponse": _record(
        {"kept": _SIZE, "records": _array(_TEXT)}, "kept", "records"
    ),
    "SetModelTrafficRequest": _record(_RULES),
    "ModelVersionRequest": _record({"version": _VERSION, "reason": _TEXT}),
}  # fmt: skip
