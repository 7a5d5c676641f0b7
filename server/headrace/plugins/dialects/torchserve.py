"""TorchServe over HTTP, which has no tensors: a handler interprets the body as it likes.

So inputs and outputs are declared in the configuration. Bodies are one of:

1. `array`: one input as nested arrays of JSON. For models with one input.
2. `object`: an object with each input under its name.
3. `raw`: the element of a BYTES tensor, or the bytes of another one.

A response is the value of the only output, or an object with outputs by name. A single BYTES output
is the whole response.
"""

from typing import Any
from urllib.parse import quote

import orjson

from headrace.core.bytes_array import bytes_array
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest, Unavailable
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Buffer, TensorArray, raw_bytes
from headrace.placement.upstream.connection import (
    CallFailed,
    RemoteDescription,
    RemoteRequest,
    nonsense,
)
from headrace.placement.upstream.http_client import HttpAsk, Rest, failed_by, refusal
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.elements import array_of_nested, nested_json
from headrace.protocol.http1 import HttpRequest, HttpResponse
from headrace.protocol.json_text import parse_json
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import Failure, Fate
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput

_JSON, _BYTES = "application/json", "application/octet-stream"
_NO_WORKER, _RAISED = "ServiceUnavailableException", "InternalServerException"


class TorchServeRest(Rest):
    """TorchServe over HTTP."""

    def __init__(self, options: RemoteOptions, model: str, signature: Signature) -> None:
        super().__init__(options, model, signature)
        version = options.own.get("remote_label") or options.version
        which = f"/{quote(version, safe='')}" if version else ""
        self._path = f"/predictions/{quote(options.model, safe='')}{which}"

    async def describe(self, ask: HttpAsk) -> RemoteDescription:
        """Query whether the model exists; its tensors are unknown."""
        response = await ask(HttpRequest("OPTIONS", self._path))
        if response.status != 200:
            raise failure(self.model, response)
        return RemoteDescription(pb.ModelMetadataResponse(), None)

    async def ready(self, ask: HttpAsk) -> bool:
        """True if the server has the model with healthy workers."""
        response = await ask(HttpRequest("GET", "/ping"))
        if response.status != 200:
            return False
        response = await ask(HttpRequest("OPTIONS", self._path))
        return response.status == 200

    def request(self, request: RemoteRequest) -> HttpRequest:
        """A body of the configured kind, or one that suits the inputs."""
        inputs = request.inputs
        kind = self.options.own.get("request_body")
        if not kind and len(inputs) == 1:
            kind = "raw" if inputs[0].datatype is Datatype.BYTES else "array"
        if kind in ("array", "raw") and len(inputs) != 1:
            raise failed_by(
                InvalidRequest(f"a request_body '{kind}' is for one input, not {len(inputs)}")
            )
        if kind == "raw":
            return self._post(_BYTES, _raw(inputs[0]))
        values = [nested_json(item.datatype, item.array()) for item in inputs]
        if kind == "array":
            return self._post(_JSON, [values[0]])
        members = [
            orjson.dumps(item.name) + b":" + value
            for item, value in zip(inputs, values, strict=True)
        ]
        return self._post(_JSON, [b"{" + b",".join(members) + b"}"])

    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """The declared outputs."""
        if response.status != 200:
            raise failure(self.model, response)
        specs, body = self.signature.outputs, response.body
        if len(specs) == 1 and specs[0].datatype is Datatype.BYTES:
            shape = [1] * (len(specs[0].dims) + self.signature.batches)
            return RemoteAnswer({specs[0].name: bytes_array([bytes(body)], shape)}, {})
        try:
            document = parse_json(body)
            if len(specs) == 1 and not (isinstance(document, dict) and specs[0].name in document):
                document = {specs[0].name: document}
            if not isinstance(document, dict):
                raise InvalidRequest("no JSON object")
            return RemoteAnswer(
                {s.name: self._array(s, document[s.name]) for s in specs if s.name in document}, {}
            )
        except InvalidRequest as error:
            raise nonsense(self.model, error) from None

    def _array(self, spec: TensorSpec, value: Any) -> TensorArray:
        array = array_of_nested(spec.name, spec.datatype, value)
        rank = len(spec.dims) + self.signature.batches
        return array if array.ndim else array.reshape([1] * rank)

    def _post(self, kind: str, body: list[Buffer]) -> HttpRequest:
        return HttpRequest("POST", self._path, {"content-type": kind}, body)


def failure(model: str, response: HttpResponse) -> CallFailed:
    """The failure for an error response. TorchServe also returns 503 if a handler raised."""
    try:
        document = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        document = None
    kind = document.get("type") if isinstance(document, dict) else None
    if response.status != 503 or kind not in (_NO_WORKER, _RAISED):
        return refusal(model, response)
    text = str(document.get("message", ""))
    if kind == _NO_WORKER:
        return CallFailed(Failure(Fate.REFUSED, Unavailable(text)), text)
    return failed_by(ExecutionFailed(text))


def _raw(item: RemoteInput) -> list[Buffer]:
    if item.datatype is not Datatype.BYTES:
        return [raw_bytes(part) for part in item.parts]
    elements = item.array().ravel().tolist()
    if len(elements) != 1:
        text = f"input '{item.name}' holds {len(elements)} elements, of which the model's server"
        raise failed_by(InvalidRequest(f"{text} takes one at a time"))
    return elements
