"""The OpenAPI description of the bare ASGI endpoints, which FastAPI does not see."""

from typing import Any

from fastapi import FastAPI

from headrace.transports.http.described import document_schemas

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
# Members of the models' own: inputs and parameters, outputs and parameters.
_OWN: dict[str, Any] = {
    "type": ["string", "number", "boolean", "array"],
    "items": {"type": ["string", "number", "boolean"]},
}
_GENERATE_REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "parameters": {"type": "object"}},
    "additionalProperties": _OWN,
    "examples": [{"text_input": "hello", "max_tokens": 5}],
}
_GENERATE_RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["model_name", "model_version"],
    "properties": {
        "id": {"type": "string"},
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
    },
    "additionalProperties": _OWN,
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_SCHEMAS = {
    "Tensor": _TENSOR,
    "InferRequest": _REQUEST,
    "InferResponse": _RESPONSE,
    "GenerateRequest": _GENERATE_REQUEST,
    "GenerateResponse": _GENERATE_RESPONSE,
    "Error": _ERROR,
}


def describe_inference(app: FastAPI) -> None:
    """Let `app` describe the infer and generate routes beside its own."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _leave_out_validation(document)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(_SCHEMAS | document_schemas())
        inference: dict[str, Any] = {}
        for suffix, operation in (
            ("infer", _infer), ("generate", _generate), ("generate_stream", _generate_stream)
        ):  # fmt: skip
            inference |= {
                f"/v2/models/{{name}}/{suffix}": {"post": operation(suffix, ["name"])},
                f"/v2/models/{{name}}/versions/{{version}}/{suffix}": {
                    "post": operation(f"{suffix}_version", ["name", "version"])
                },
            }
        document["paths"] = inference | document["paths"] | inference  # first, and made anew
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _leave_out_validation(document: dict[str, Any]) -> None:
    """FastAPI declares its own validation error everywhere; this server never sends it."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for schema in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(schema, None)


def _operation(
    name: str, summary: str, parameters: list[str], request: Any, good: Any
) -> dict[str, Any]:
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": name,
        "parameters": [
            {"name": p, "in": "path", "required": True, "schema": {"type": "string"}}
            for p in parameters
        ],
        "requestBody": {"required": True, "content": request},
        "responses": {
            "200": good,
            "400": _answer("The request breaks the protocol or the model's signature", "Error"),
            "404": _answer("No such model or version", "Error"),
            "413": _answer("The request is too large", "Error"),
            "422": _answer("Workers have died of these inputs before", "Error"),
            "500": _answer("The model failed", "Error"),
            "503": _answer("Not now: not ready, queue full, timed out or overloaded", "Error"),
        },
    }


def _infer(name: str, parameters: list[str]) -> dict[str, Any]:
    request = _json("InferRequest") | {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }
    good = _answer("The outputs", "InferResponse")
    good["content"]["application/octet-stream"] = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "An InferResponse in as many bytes as Inference-Header-Content-Length"
            " says, and behind it the outputs that were asked for in binary",
        }
    }
    operation = _operation(name, "Run the model", parameters, request, good)
    operation["responses"]["501"] = _answer(
        "Another compression, or a model with any number of responses", "Error"
    )
    operation["parameters"].append(
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "required": False,
            "schema": {"type": "integer"},
            "description": "Size of the JSON in front of binary tensors; 0 for a raw body",
        }
    )
    return operation


def _generate(name: str, parameters: list[str]) -> dict[str, Any]:
    good = _answer("The outputs", "GenerateResponse")
    summary = "Run the model, with inputs and outputs as flat JSON"
    return _operation(name, summary, parameters, _json("GenerateRequest"), good)


def _generate_stream(name: str, parameters: list[str]) -> dict[str, Any]:
    description = "One event for each response: `data: ` and a GenerateResponse or an Error"
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    good = {"description": description, "content": content}
    summary = "Run the model, and get each response as it comes"
    return _operation(name, summary, parameters, _json("GenerateRequest"), good)


def _answer(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": _json(schema)}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
