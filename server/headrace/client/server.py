"""A server as its client sees it: one method for each thing that the protocol offers over HTTP."""

import base64
import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from headrace.client.address import BadAnswer, Refused
from headrace.client.connection import Answer, Connection

if TYPE_CHECKING:
    from headrace.client.inference import Question
    from headrace.core.call import InferResponse

Document = dict[str, Any]


class Server:
    """Methods raise `ClientError`; documents are the protocol's JSON as it comes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def address(self) -> str:
        """Where the server is, as a URL."""
        return str(self._connection.address)

    def ready(self) -> bool:
        """Whether it takes requests."""
        try:
            self._connection.get("/v2/health/ready")
        except Refused:
            return False
        return True

    def server_metadata(self) -> Document:
        """Who answers."""
        return self._document("/v2")

    def index(self, ready: bool = False) -> list[Document]:
        """All versions of all models with their states; with `ready` those that serve."""
        return self._listed("/v2/repository/index", {"ready": True} if ready else {})

    def metadata(self, model: str, version: str = "") -> Document:
        """Inputs, outputs, versions and platform of a model."""
        return self._document(_path(model, version))

    def config(self, model: str, version: str = "") -> Document:
        """The complete configuration."""
        return self._document(_path(model, version, "/config"))

    def statistics(self, model: str = "", version: str = "") -> Document:
        """The counters of a model, of all models without a name."""
        path = _path(model, version, "/stats") if model else "/v2/models/stats"
        return self._document(path)

    def load(self, model: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it again; returns when it is ready.

        `config` is a configuration as JSON that takes the place of the model's own, `files` by
        path what takes the place of its directory.
        """
        parameters: Document = {"config": config} if config else {}
        for path, content in (files or {}).items():
            parameters[f"file:{path}"] = base64.b64encode(content).decode()
        self._control(model, "load", parameters)

    def unload(self, model: str, dependents: bool = False) -> None:
        """Unload a model, with `dependents` also models that were loaded for it."""
        self._control(model, "unload", {"unload_dependents": dependents})

    def traffic(self, model: str) -> Document:
        """How requests are divided between the versions of a model, and by which rules."""
        return self._document(_path(model, "", "/traffic"))

    def change_traffic(self, model: str, action: str, document: Document) -> Document:
        """Replace the rules (an empty `action`), `promote` a version, or `rollback`; what is so
        from then on."""
        path = _path(model, "", f"/traffic/{action}".rstrip("/"))
        return _object(path, self._post(path, document).json())

    def reset_traffic(self, model: str) -> Document:
        """Go back to the rules of the model's configuration; what is so from then on."""
        path = _path(model, "", "/traffic")
        return _object(path, self._connection.delete(path).json())

    def infer(self, model: str, version: str, question: "Question") -> "InferResponse":
        """Ask a model for one response."""
        # Imported late: what asks for anything else needs no numpy.
        from headrace.client.inference import decode, encode

        pieces, headers = encode(question)
        return decode(self._connection.post(_path(model, version, "/infer"), pieces, headers))

    def generate(self, model: str, version: str, document: Document) -> Iterator[Document]:
        """Ask a model with flat JSON, and yield its responses as they come."""
        body = json.dumps(document).encode()
        for text in self._connection.events(_path(model, version, "/generate_stream"), body):
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

    def _document(self, path: str) -> Document:
        return _object(path, self._connection.get(path).json())

    def _listed(self, path: str, document: Document) -> list[Document]:
        found = self._post(path, document).json()
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise BadAnswer(f"the answer to {path} is no JSON array of objects")
        return found

    def _control(self, model: str, action: str, parameters: Document) -> None:
        path = f"/v2/repository/models/{quote(model, safe='')}/{action}"
        self._post(path, {"parameters": parameters} if parameters else {})

    def _post(self, path: str, document: Document) -> Answer:
        body = json.dumps(document).encode()
        return self._connection.post(path, [body], {"content-type": "application/json"})


def _object(path: str, found: Any) -> Document:
    if not isinstance(found, dict):
        raise BadAnswer(f"the answer to {path} is no JSON object")
    return found


def _path(model: str, version: str, suffix: str = "") -> str:
    middle = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{middle}{suffix}"
