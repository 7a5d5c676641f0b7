"""Documents of operations as messages, for transports that speak protobuf but no HTTP."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from headrace.api.operations import Document, Operation
from headrace.client import InputError
from headrace.protocol.documents import to_json
from headrace.protocol.pb import POOL
from headrace.protocol.pb import grpc_service_pb2 as pb


def _class(operation: Operation, name: str) -> type[Message]:
    return GetMessageClass(POOL.FindMessageTypeByName(f"{operation.package}.{name}"))


def answer_document(operation: Operation, data: bytes) -> Any:
    """The document, as over HTTP, of an answer's message; raises `DecodeError`."""
    document = to_json(_class(operation, operation.response).FromString(data))
    if operation.name == "ModelConfig":
        return document["config"]
    if operation.name == "RepositoryIndex":
        return [{n: value for n, value in m.items() if value} for m in document["models"]]
    return document


def request_message(operation: Operation, given: Document, parts: Mapping[str, str]) -> bytes:
    """The request message for a document as over HTTP; raises `InputError`."""
    named = {name: value for name, value in parts.items() if value}
    try:
        if operation.name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            fields = {bool: "bool_param", str: "string_param", bytes: "bytes_param"}
            control = pb.RepositoryModelLoadRequest(model_name=named["name"])  # both are alike
            for name, value in given.get("parameters", {}).items():
                setattr(control.parameters[name], fields[type(value)], value)
            return control.SerializeToString()
        message = _class(operation, operation.request)()
        return ParseDict(given | named, message).SerializeToString()
    except (ParseError, TypeError, ValueError) as error:
        raise InputError(f"{operation.name}: {error}") from None
