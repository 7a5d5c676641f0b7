"""What serves a request for a model that is not in memory yet.

To a door it is like a model in another process: neither the signature nor whether the model is
decoupled is known when the request comes, so a raw request is decoded, and one that such a door
cannot take is refused, once the model is there.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ServerError,
    Unsupported,
)
from headrace.core.requests import Call, InferResponse, RawRequest, Sink, StageSink, Ticket
from headrace.core.signature import Signature
from headrace.engine.admission import Admission
from headrace.engine.deferred import Deferred
from headrace.engine.doors import Entrance, Target
from headrace.engine.workbench import LARGE
from headrace.wire.elements import Charge, charge_objects, uncharged
from headrace.wire.generate import decode_generate
from headrace.wire.http_infer import body_of, decode_raw, takes_long
from headrace.wire.status import INTERNAL_TEXT
from headrace.wire.timing import add_timing, wants_timing

log = logging.getLogger(__name__)


class Bringing(Protocol):
    """What brings models into memory."""

    def failing(self, name: str) -> str:
        """Why a model cannot be loaded, as far as that is known; "" if it is not."""

    def when_loaded(
        self, name: str, done: Callable[[ServerError | None], None]
    ) -> Callable[[], None]:
        """Have `done` called when a model is in memory, or with an error; returns what calls that
        off."""


class ColdStart:
    """What will serve one request, once its model is in memory; the ticket of it until then.

    Invariant: `_sink` is there until the request is handed to the model, refused or cancelled.
    """

    direct = None
    signature = None
    ready = False

    __slots__ = (
        "_bringing", "_engine", "_forget", "_held", "_request", "_sink", "_ticket", "decoupled",
        "model", "name", "version",
    )  # fmt: skip

    def __init__(self, engine: Entrance, bringing: Bringing, model: str, version: str) -> None:
        self.model = model
        self.version = version
        self.name = ""  # until the model says which version it is
        self.decoupled = False
        self._engine = engine
        self._bringing = bringing
        self._held = False
        self._request: Call | None = None
        self._sink: Sink | None = None
        self._ticket: Ticket | None = None
        self._forget: Callable[[], None] | None = None

    @property
    def obstacle(self) -> str:
        """Why the model cannot be loaded, as far as that is known."""
        return self._bringing.failing(self.model)

    def submit(self, request: Call, sink: Sink) -> Ticket:
        """Have the request run once the model is there."""
        self._request, self._sink = request, sink
        self._forget = self._bringing.when_loaded(self.model, self._on_loaded)
        return self

    def waits_for(self, version: object) -> bool:
        """Whether a request may have to wait until `version` has done what it does: never.

        What is not in memory does nothing.
        """
        return False

    def cancel(self) -> None:
        """Drop the request."""
        self._sink = self._request = None
        if self._forget is not None:
            self._forget()
        if self._ticket is not None:
            self._ticket.cancel()

    def hold(self, held: bool) -> None:
        """Have the model pause its responses, or go on."""
        self._held = held
        if self._ticket is not None:
            self._ticket.hold(held)

    def _on_loaded(self, error: ServerError | None) -> None:
        sink, request = self._sink, self._request
        self._sink = self._request = None
        if sink is None or request is None:
            return
        if error is None:
            try:
                self._hand_over(request, sink)
                return
            except ServerError as found:
                error = found
            except Exception as bug:
                log.error("bug in a request that waited for its model", exc_info=bug)
                error = ExecutionFailed(INTERNAL_TEXT)
        sink.refuse(error)

    def _hand_over(self, request: Call, sink: Sink) -> None:
        found = self._engine.find(self.model, self.version)
        self.name, self.decoupled = found.name, found.decoupled
        if found.decoupled and sink.refusal:
            raise Unsupported(sink.refusal)
        if type(request) is RawRequest and found.signature is not None:
            self._ticket = submit_raw(found, request, sink, self._engine.admission)
        else:
            self._ticket = found.submit(request, sink)
        if self._held:
            self._ticket.hold(True)


class _TimedSink(StageSink):
    """Puts timings into responses on their way to `sink`."""

    def respond(self, response: InferResponse, final: bool) -> None:
        """Hand a response on."""
        add_timing(response)
        self._sink.respond(response, final)


def submit_raw(
    found: Target,
    request: RawRequest,
    sink: Sink,
    admission: Admission,
    charge: Charge = uncharged,
) -> Ticket:
    """Decode a raw request, on a thread if that takes long, and queue what it is.

    `charge` is called with the bytes that it takes then. Raises `ServerError`, or has the sink
    refuse it later.
    """
    signature = found.signature
    if "" not in request.inputs or signature is None:
        raise InvalidRequest("a raw request without a body")
    body, generates = body_of(request), request.generates

    def submit(decoded: Call) -> Ticket:
        decoded.nbytes = request.nbytes
        if request.timeout and not 0 < decoded.timeout < request.timeout:  # from headers, too
            decoded.timeout = request.timeout
        if request.parameters:  # from headers
            decoded.parameters.update(request.parameters)
        timed = generates and wants_timing(decoded)
        return found.submit(decoded, _TimedSink(sink) if timed else sink)

    if len(body) <= LARGE or not (generates or takes_long(body, "0", signature)):
        return submit(_decoded(signature, request, uncharged))
    return Deferred(
        admission.workbench, len(body),
        lambda charge: _decoded(signature, request, charge), submit, sink, charge,
    )  # fmt: skip


def _decoded(signature: Signature, request: RawRequest, charge: Charge) -> Call:
    names, body = (request.model_name, request.model_version), body_of(request)
    if request.generates:
        found = decode_generate(signature, *names, body, charge)
    else:
        found = decode_raw(signature, *names, body)[0]
    charge_objects(found.inputs.values(), charge)
    return found
