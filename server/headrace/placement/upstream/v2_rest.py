"""The V2 protocol over HTTP."""

import json
import logging
from collections.abc import Generator
from urllib.parse import quote

from headrace.core.errors import InvalidRequest, ServerError
from headrace.placement.upstream.connection import (
    Declared,
    RemoteDescription,
    RemoteRequest,
    nonsense,
)
from headrace.placement.upstream.http_client import (
    Conversation,
    Rest,
    failed_by,
    json_of,
    message_of,
    refusal,
)
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.elements import NOT_IN_JSON
from headrace.protocol.http1 import HttpRequest, HttpResponse
from headrace.protocol.json_text import parse_json
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.v2_json import (
    JSON_SIZE,
    RequestWriter,
    parse_json_size,
    read_answer,
    request_headers,
)
from headrace.protocol.v2_protobuf import RemoteAnswer

log = logging.getLogger(__name__)

_BINARY = "binary_tensor_data"  # the extension
_JSON_SIZE = JSON_SIZE.encode()
_NOT_OFFERED = frozenset({400, 404, 405, 501})


class V2Rest(Rest):
    """The V2 protocol, with the extensions for configurations, binary tensors and repositories."""

    def __init__(self, options: RemoteOptions, model: str, declared: Declared) -> None:
        super().__init__(options, model, declared)
        version = f"/versions/{options.version}" if options.version else ""
        name = quote(options.model, safe="")
        self._path = f"/v2/models/{name}{version}"
        self._repository = f"/v2/repository/models/{name}"
        self._messages = RequestWriter(True)

    def describe(self) -> Conversation[RemoteDescription]:
        """The model's metadata, and its configuration where the server offers that."""
        metadata = yield from self._metadata()
        response = yield HttpRequest("GET", f"{self._path}/config")
        if response.status in _NOT_OFFERED:
            return RemoteDescription(metadata, None)
        document = json_of(self.model, response)
        return RemoteDescription(metadata, message_of(self.model, document, ModelConfig()))

    def learn(self) -> Conversation[None]:
        """True if tensors can be binary."""
        binary = self.options.tensors == "binary"
        if not self.options.tensors:
            response = yield HttpRequest("GET", "/v2")
            binary = response.status == 200 and _BINARY in _extensions(response)
        if not binary:
            only_binary = [s.name for s in self.declared.outputs if s.datatype in NOT_IN_JSON]
            self._messages = RequestWriter(False, frozenset(only_binary))

    def request(self, request: RemoteRequest) -> HttpRequest:
        """The request in the form that the server takes."""
        try:
            body, size = self._messages.request(
                request.inputs, request.outputs, request.parameters, request.id
            )
        except InvalidRequest as error:
            raise failed_by(error) from None
        return HttpRequest("POST", f"{self._path}/infer", request_headers(size), body)

    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """The outputs, in whichever form they have come."""
        if response.status != 200:
            raise refusal(self.model, response)
        size = response.headers.get(_JSON_SIZE)
        try:
            header = None if size is None else size.decode("latin-1")
            found = read_answer(response.body, parse_json_size(header, len(response.body)))
        except ServerError as error:
            log.error("model %s: a server's answer makes no sense: %s", self.model, error,
                      extra={"model": self.model})  # fmt: skip
            raise nonsense(self.model, error) from None
        arrays = {tensor.name: tensor.array for tensor in found.outputs}
        return RemoteAnswer(arrays, found.parameters)

    def load(self, config: str) -> Conversation[None]:
        """Load the model, by an extension of the protocol."""
        document = {"parameters": {"config": config}} if config else {}
        yield from self._change("load", json.dumps(document).encode())

    def unload(self) -> Conversation[None]:
        """Unload the model."""
        yield from self._change("unload", b"{}")

    def ready(self) -> Conversation[bool]:
        """Triton answers with the status alone, others say it in the body, too."""
        response = yield HttpRequest("GET", f"{self._path}/ready")
        if response.status in (400, 404, 503):
            return False
        if response.status != 200:
            raise refusal(self.model, response)
        try:
            document = parse_json(response.body) if response.body else None
        except InvalidRequest:
            return True  # the status is what the protocol asks for
        return not isinstance(document, dict) or document.get("ready") is not False

    def _change(self, what: str, body: bytes) -> Conversation[None]:
        headers = {"content-type": "application/json"}
        response = yield HttpRequest("POST", f"{self._repository}/{what}", headers, [body])
        if response.status != 200:
            raise refusal(self.model, response)

    def _metadata(self) -> Generator[HttpRequest, HttpResponse, pb.ModelMetadataResponse]:
        response = yield HttpRequest("GET", self._path)
        if response.status != 200:
            raise refusal(self.model, response)
        document = _document(response)
        if document is None:
            text = f"GET {self._path} is not answered as the V2 protocol has it"
            raise nonsense(self.model, InvalidRequest(text))
        known = {name: document.get(name) for name in ("name", "inputs", "outputs")}
        return message_of(self.model, known, pb.ModelMetadataResponse())


def _document(response: HttpResponse) -> dict[str, object] | None:
    """The JSON object in an answer; None if there is none."""
    try:
        document = parse_json(response.body)
    except InvalidRequest:
        return None
    return document if isinstance(document, dict) else None


def _extensions(response: HttpResponse) -> list[object]:
    found = (_document(response) or {}).get("extensions")
    return found if isinstance(found, list) else []
