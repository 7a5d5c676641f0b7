"""A server as its client sees it: the operations of the protocol, asked for over HTTP."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace.api.operations import OPERATIONS, Operation
from headrace.cli.client.address import BadAnswer, Refused
from headrace.cli.client.connection import Connection

if TYPE_CHECKING:
    from headrace.cli.client.inference import Question
    from headrace.core.call import InferResponse

Document = dict[str, Any]
_JSON = {"content-type": "application/json"}


class Server:
    """Methods raise `ClientError`; documents are the protocol's JSON as it comes."""

    def __init__(
        self, connection: Connection, operations: Sequence[Operation] = OPERATIONS
    ) -> None:
        self._connection = connection
        self._operations = {operation.name: operation for operation in operations}

    @property
    def address(self) -> str:
        """Where the server is, as a URL."""
        return str(self._connection.address)

    def document(self, operation: str, given: Document | None = None, /, **parts: str) -> Document:
        """The JSON object that answers an operation of the table; see `ask`."""
        found = self.ask(operation, given, **parts)
        if not isinstance(found, dict):
            raise BadAnswer(f"the answer to {operation} is no JSON object")
        return found

    def documents(self, operation: str, given: Document, /, **parts: str) -> list[Document]:
        """The JSON array of objects that answers an operation; see `ask`."""
        found = self.ask(operation, given, **parts)
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise BadAnswer(f"the answer to {operation} is no JSON array of objects")
        return found

    def ask(self, operation: str, given: Document | None = None, /, **parts: str) -> Any:
        """The answer of an operation as JSON, None for one without a body.

        `given` is the request's document, None for none, and `parts` are the path's parameters;
        empty ones are left out.
        """
        routes = self._operations[operation].routes
        route = next((found for found in routes if found.body is (given is not None)), routes[0])
        body = None if route.method != "POST" else [json.dumps(given or {}).encode()]
        answer = self._connection.ask(route.method, route.filled(**parts), body, _JSON)
        return answer.json() if answer.body else None

    def load(self, model: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it again; returns when it is ready.

        `config` is a configuration as JSON that takes the place of the model's own, `files` by
        path what takes the place of its directory.
        """
        parameters: Document = {"config": config} if config else {}
        for path, content in (files or {}).items():
            parameters[f"file:{path}"] = base64.b64encode(content).decode()
        self.ask("RepositoryModelLoad", {"parameters": parameters}, name=model)

    def infer(self, model: str, version: str, question: "Question") -> "InferResponse":
        """Ask a model for one response."""
        # Imported late: what asks for anything else needs no numpy.
        from headrace.cli.client.inference import decode, encode

        pieces, headers = encode(question)
        path = self._path("ModelInfer", model, version)
        return decode(self._connection.ask("POST", path, pieces, headers))

    def generate(self, model: str, version: str, document: Document) -> Iterator[Document]:
        """Ask a model with flat JSON, and yield its responses as they come."""
        body = json.dumps(document).encode()
        path = self._path("GenerateStream", model, version)
        for text in self._connection.events(path, body):
            try:
                response = json.loads(text)
            except (ValueError, RecursionError):
                raise BadAnswer(f"an event is no JSON: {text}") from None
            if not isinstance(response, dict):
                raise BadAnswer(f"an event is no JSON object: {text}")
            if isinstance(error := response.get("error"), str) and "model_name" not in response:
                raise Refused(200, error)
            yield response

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _path(self, operation: str, model: str, version: str) -> str:
        return self._operations[operation].routes[0].filled(name=model, version=version)
