"""What a protocol over HTTP says and understands, without the connection that carries it.

A conversation is a generator: it yields requests, is sent the answer to each, and returns what has
come of them.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from google.protobuf import json_format
from google.protobuf.message import Message

from headrace.core.signature import Signature, TensorSpec
from headrace.execution.remote.connection import (
    CallFailed,
    RemoteDescription,
    RemoteRequest,
    nonsense,
)
from headrace.wire.http_exchange import HttpRequest, HttpResponse
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_rest import error_text
from headrace.wire.remote_status import http_failure_of

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Conversation: TypeAlias = Generator[HttpRequest, HttpResponse, T]


@dataclass(slots=True)
class Declared:
    """What is known of the model here, from when its configuration is complete on.

    For protocols whose answers do not tell, and before inference is asked for.
    """

    signature: Signature | None = None

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The outputs as declared."""
        return () if self.signature is None else self.signature.outputs

    @property
    def batches(self) -> bool:
        """Whether axis 0 of every tensor counts rows."""
        return self.signature is not None and self.signature.batches


class Inference(Protocol):
    """How one server is asked for inference; both methods raise `CallFailed`."""

    def request(self, request: RemoteRequest) -> HttpRequest:
        """What is sent."""

    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """What has come."""


class Rest(Protocol):
    """A protocol, for one model. Conversations raise `CallFailed`."""

    def describe(self) -> Conversation[RemoteDescription]:
        """Ask what the model is."""

    def learn(self) -> Conversation[Inference]:
        """Ask what has to be known of a server before it can be asked for inference."""

    def ready(self) -> Conversation[bool]:
        """Ask whether the model is ready."""


@runtime_checkable
class RestControl(Protocol):
    """Protocols have this, too, by which a server has models loaded; both raise `CallFailed`."""

    def load(self, config: str) -> Conversation[None]:
        """Have the model loaded; see `headrace.execution.remote.connection.LoadingConnection`."""

    def unload(self) -> Conversation[None]:
        """Have the model unloaded."""


def refusal(model: str, response: HttpResponse) -> CallFailed:
    """An answer that is an error."""
    said = error_text(response.body)
    text = bytes(response.body[:2000]).decode(errors="replace")
    failure = http_failure_of(model, response.status, said, text)
    return CallFailed(failure, f"status {response.status}: {said or ' '.join(text.split())[:120]}")


def message_of(model: str, document: Any, message: M) -> M:
    """A message that JSON has told of, but for fields that are unknown; raises `CallFailed`."""
    try:
        return json_format.ParseDict(document, message, ignore_unknown_fields=True)
    except (json_format.ParseError, AttributeError, TypeError) as error:
        raise nonsense(model, error) from None
