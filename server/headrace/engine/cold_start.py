"""What serves a request for a model that is not in memory yet.

To a door it is like a model in another process: neither the signature nor whether the model is
decoupled is known when the request comes, so a raw request is decoded, and one that such a door
cannot take is refused, once the model is there.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from headrace.core.call import Call, Done, InferResponse, Raw, Stage
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ServerError,
    Unsupported,
)
from headrace.core.signature import Signature
from headrace.engine.admission import Admission
from headrace.engine.deferred import Deferred
from headrace.engine.doors import Entrance, Target
from headrace.engine.workbench import LARGE
from headrace.wire.elements import Charge, charge_objects, uncharged
from headrace.wire.generate import decode_generate
from headrace.wire.status import INTERNAL_TEXT
from headrace.wire.timing import add_timing, wants_timing
from headrace.wire.v2_json import body_of, decode_raw, takes_long

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
    """What will serve one call, once its model is in memory; the call's owner until then.

    Invariant: `_call` is there until the call is handed to the model, refused or cancelled.
    """

    direct = None
    signature = None
    ready = False
    name = ""  # of the version, which the model will say
    decoupled = False  # as far as that is known

    __slots__ = ("_bringing", "_call", "_engine", "_forget", "model", "version")

    def __init__(self, engine: Entrance, bringing: Bringing, model: str, version: str) -> None:
        self.model = model
        self.version = version
        self._engine = engine
        self._bringing = bringing
        self._call: Call | None = None
        self._forget: Callable[[], None] | None = None

    @property
    def obstacle(self) -> str:
        """Why the model cannot be loaded, as far as that is known."""
        return self._bringing.failing(self.model)

    def submit(self, call: Call) -> None:
        """Have the call run once the model is there."""
        self._call = call
        call.owner = self
        self._forget = self._bringing.when_loaded(self.model, self._on_loaded)

    def waits_for(self, version: object) -> bool:
        """Whether a call may have to wait until `version` has done what it does: never.

        What is not in memory does nothing.
        """
        return False

    def cancel(self, call: Call) -> None:
        """`Owner.cancel`."""
        self._call = None
        if self._forget is not None:
            self._forget()

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`."""
        call.held = held

    def _on_loaded(self, error: ServerError | None) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        if error is None:
            try:
                self._hand_over(call)
                return
            except ServerError as found:
                error = found
            except Exception as bug:
                log.error("bug in a request that waited for its model", exc_info=bug)
                error = ExecutionFailed(INTERNAL_TEXT)
        call.pass_refusal(error)

    def _hand_over(self, call: Call) -> None:
        found = self._engine.find(self.model, self.version)
        if found.decoupled and call.refusal:
            raise Unsupported(call.refusal)
        call.pass_routed(found)
        if call.raw is not None and found.signature is not None:
            submit_raw(found, call, self._engine.admission)
        else:
            found.submit(call)


class _Timed(Stage):
    """Puts timings into responses."""

    __slots__ = ()

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        """Change a response."""
        add_timing(response)


def submit_raw(found: Target, call: Call, admission: Admission, charge: Charge = uncharged) -> None:
    """Decode a raw call, on a thread if that takes long, and queue what it is.

    `charge` is called with the bytes that it takes then. Raises `ServerError`, or has the call
    refused later.
    """
    signature, raw = found.signature, call.raw
    if "" not in call.inputs or signature is None:
        raise InvalidRequest("a raw request without a body")
    body, timeout, parameters = body_of(call), call.timeout, call.parameters

    def submit(decoded: Call) -> None:
        if timeout and not 0 < decoded.timeout < timeout:  # from headers, too
            decoded.timeout = timeout
        decoded.parameters.update(parameters)  # from headers
        call.take(decoded)
        if raw is Raw.GENERATE and wants_timing(call):
            call.enter(_Timed(), found.submit)
        else:
            found.submit(call)

    if len(body) <= LARGE or not (raw is Raw.GENERATE or takes_long(body, "0", signature)):
        submit(_decoded(signature, call, uncharged))
    else:
        Deferred(
            admission.workbench, len(body),
            lambda charge: _decoded(signature, call, charge), submit, call, charge,
        )  # fmt: skip


def _decoded(signature: Signature, call: Call, charge: Charge) -> Call:
    names, body = (call.model_name, call.model_version), body_of(call)
    if call.raw is Raw.GENERATE:
        found = decode_generate(signature, *names, body, charge)
    else:
        found = decode_raw(signature, *names, body)[0]
    charge_objects(found.inputs.values(), charge)
    return found
