"""The OpenAPI description of the infer route, a bare ASGI endpoint that FastAPI does not see."""

from typing import Any

from fastapi import FastAPI

_PARAMETERS = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {
            "type": "string",
            "enum": [
                "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
                "FP16", "FP32", "FP64", "BYTES", "BF16",
            ],
        },
        "parameters": _PARAMETERS,
        "data": {"type": "array", "items": {}, "description": "Elements in row-major order"},
    },
}  # fmt: skip
_OUTPUT = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
}
_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _PARAMETERS,
        "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
        "outputs": {"type": "array", "items": _OUTPUT},
    },
}
_RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "id": {"type": "string"},
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "parameters": _PARAMETERS,
        "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
    },
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_SCHEMAS = {
    "Tensor": _TENSOR,
    "InferRequest": _REQUEST,
    "InferResponse": _RESPONSE,
    "Error": _ERROR,
}


def describe_infer(app: FastAPI) -> None:
    """Let `app` describe the infer route beside its own."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _leave_out_validation(document)
        document.setdefault("components", {}).setdefault("schemas", {}).update(_SCHEMAS)
        paths = document["paths"]
        paths["/v2/models/{name}/infer"] = {"post": _operation("infer", ["name"])}
        paths["/v2/models/{name}/versions/{version}/infer"] = {
            "post": _operation("infer_version", ["name", "version"])
        }
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _leave_out_validation(document: dict[str, Any]) -> None:
    """FastAPI declares its own validation error everywhere; this server never sends it."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for schema in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(schema, None)


def _operation(name: str, parameters: list[str]) -> dict[str, Any]:
    return {
        "tags": ["inference"],
        "summary": "Run the model",
        "operationId": name,
        "parameters": [
            *(
                {"name": p, "in": "path", "required": True, "schema": {"type": "string"}}
                for p in parameters
            ),
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "required": False,
                "schema": {"type": "integer"},
                "description": "Size of the JSON in front of binary tensors; 0 for a raw body",
            },
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "200": _answer("The outputs", "InferResponse"),
            "400": _answer("The request breaks the protocol or the model's signature", "Error"),
            "404": _answer("No such model or version", "Error"),
            "413": _answer("The request is too large", "Error"),
            "500": _answer("The model failed", "Error"),
            "503": _answer("Not now: not ready, queue full, timed out or overloaded", "Error"),
        },
    }


def _answer(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}
