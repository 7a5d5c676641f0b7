"""TensorFlow Serving over HTTP: its tensors are JSON, its signatures are among its metadata."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Array, concatenated
from headrace.execution.remote.connection import (
    CallFailed,
    RemoteDescription,
    RemoteRequest,
    nonsense,
)
from headrace.execution.remote.http_client import (
    Conversation,
    Declared,
    Inference,
    message_of,
    refusal,
)
from headrace.execution.remote.options import RemoteOptions
from headrace.wire import tfserving
from headrace.wire.elements import array_of_nested, nested_json
from headrace.wire.http_exchange import HttpRequest, HttpResponse
from headrace.wire.json_text import parse_json
from headrace.wire.pb import tfserving_pb2 as tf
from headrace.wire.remote_infer import RemoteAnswer, RemoteInput
from headrace.wire.remote_status import Failure, Fate


class TfServingRest:
    """`headrace.execution.remote.http_client.Rest`."""

    def __init__(self, options: RemoteOptions, model: str, declared: Declared) -> None:
        which = ""
        if options.version:
            which = f"/versions/{options.version}"
        elif options.protocol.label:
            which = f"/labels/{quote(options.protocol.label, safe='')}"
        self._path = f"/v1/models/{quote(options.model, safe='')}{which}"
        self._signature = options.protocol.signature or tfserving.SIGNATURE
        self._model = model
        self._declared = declared

    def describe(self) -> Conversation[RemoteDescription]:
        """The signature of the model."""
        response = yield HttpRequest("GET", f"{self._path}/metadata")
        document = _object(self._model, response)
        metadata = document.get("metadata")
        found = metadata.get(tfserving.SIGNATURE_FIELD) if isinstance(metadata, dict) else None
        signatures = message_of(self._model, found, tf.SignatureDefMap())
        try:
            said = tfserving.metadata_of(signatures, self._signature)
        except InvalidRequest as error:
            failure = Failure(Fate.ANSWERED, ExecutionFailed(str(error)))
            raise CallFailed(failure, str(error)) from None
        return RemoteDescription(said, None)

    def learn(self) -> Conversation[Inference]:
        """Nothing: all servers are alike."""
        yield from ()
        return TfServingInference(self._path, self._signature, self._model, self._declared)

    def ready(self) -> Conversation[bool]:
        """Whether a version is available."""
        response = yield HttpRequest("GET", self._path)
        if response.status == 404:
            return False
        document = _object(self._model, response)
        status = message_of(self._model, document, tf.GetModelStatusResponse())
        return tfserving.available(status)


class TfServingInference:
    """All inputs at once, and all outputs of them."""

    def __init__(self, path: str, signature: str, model: str, declared: Declared) -> None:
        self._path = f"{path}:predict"
        self._head = b'{"signature_name":' + orjson.dumps(signature) + b',"inputs":{'
        self._model = model
        self._declared = declared

    def request(self, request: RemoteRequest) -> HttpRequest:
        """The columnar form, in which tensors are as they are here."""
        tensors = [
            orjson.dumps(item.name) + b":" + nested_json(item.datatype, joined(item))
            for item in request.inputs
        ]
        body = self._head + b",".join(tensors) + b"}}"
        return HttpRequest("POST", self._path, {"content-type": "application/json"}, [body])

    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """The outputs; a model with one has no name at it."""
        found = _object(self._model, response).get("outputs")
        specs = self._declared.outputs
        if not isinstance(found, dict) or found.keys() == {"b64"}:
            if len(specs) != 1:
                raise nonsense(self._model, InvalidRequest("outputs without names"))
            found = {specs[0].name: found}
        try:
            return RemoteAnswer(
                {
                    spec.name: array_of_nested(spec.name, spec.datatype, found[spec.name])
                    for spec in specs
                    if spec.name in found
                },
                {},
            )
        except InvalidRequest as error:
            raise nonsense(self._model, error) from None


def joined(item: RemoteInput) -> Array:
    """The rows of an input as one array."""
    parts = item.parts
    array = parts[0] if len(parts) == 1 else concatenated([part.ravel() for part in parts])
    return np.asarray(array).reshape(item.shape)


def _object(model: str, response: HttpResponse) -> Mapping[str, Any]:
    if response.status != 200:
        raise refusal(model, response)
    try:
        document = parse_json(response.body)
    except InvalidRequest as error:
        raise nonsense(model, error) from None
    if not isinstance(document, dict):
        raise nonsense(model, InvalidRequest("no JSON object"))
    return document
