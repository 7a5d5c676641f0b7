"""Bodies of messages to calls, and answers to bodies of the same form.

The content type of Arrow streams marks one, a header `inference-header-content-length` V2 with
binary tensors, the content type `application/octet-stream` alone the data of the only input. Other
bodies that begin with a brace are JSON: V2 if they have the text `"inputs"`, else flat as for
generate; all others are raw.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.api.operations import ARROW_STREAM
from headrace.core.call import Call, InferResponse
from headrace.core.errors import ModelNotReady
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature
from headrace.engine.entrance import Target
from headrace.engine.workbench import LARGE
from headrace.plugins.inboxes.broker import Record
from headrace.plugins.inboxes.ledger import GivenUp, Message
from headrace.protocol.arrow_ipc import check_stream, decode_stream, encode_response, limited
from headrace.protocol.elements import charge_objects
from headrace.protocol.generate import decode_generate, encode_generate
from headrace.protocol.v2_json import (
    JSON_SIZE,
    ResponseForm,
    decode_infer,
    decode_raw,
    parse_json_size,
    takes_long,
)

FORMS = ("auto", "v2", "flat", "raw", "arrow")
_TYPE = "content-type"
_OF_BODY = frozenset({_TYPE, JSON_SIZE})
_JSON = b"application/json"
_PLAIN = {_TYPE: _JSON}
_BINARY = b"application/octet-stream"
_ARROW = ARROW_STREAM.encode()
# Headers of a message without an answer, after its own.
_KIND, _REASON, _TRIES = "headrace-error", "headrace-error-reason", "headrace-tries"

Encode = Callable[[InferResponse], tuple[bytes, Mapping[str, bytes]]]


class Most(NamedTuple):
    """The largest bodies: of requests, and of what they become; the latter has no limit if 0."""

    request_bytes: int
    object_bytes: int


class Decoded(NamedTuple):
    """A request, and how its answers are encoded: their body, and headers about it."""

    call: Call
    encode: Encode


def form_of(message: Message, form: str) -> str:
    """The form of a message's body, of `FORMS` without `auto`; `form` is what is declared."""
    if form != "auto":
        return form
    if JSON_SIZE in message.headers:
        return "v2"
    kind = message.headers.get(_TYPE, b"")
    if kind and kind.partition(b";")[0].strip().lower() == _ARROW:
        return "arrow"
    if kind.startswith(_BINARY) or message.body[:64].lstrip()[:1] != b"{":
        return "raw"
    return "v2" if b'"inputs"' in message.body else "flat"


def slow(message: Message, form: str, target: Target) -> bool:
    """True if a body is slow to decode: also a short Arrow stream, since pyarrow is imported."""
    if form == "arrow" or len(message.body) <= LARGE:
        return form == "arrow"
    if form == "flat":
        return True
    header = message.headers.get(JSON_SIZE)
    size = "0" if form == "raw" else None if header is None else header.decode("latin-1")
    return takes_long(message.body, size, target.signature)


def decode(
    message: Message, form: str, target: Target, most: Most, charge: Charge = uncharged
) -> Decoded:
    """Decode a message for its target; `charge` is called with the decoded size of long data.

    Raises `ServerError`.
    """
    signature, model, version, body = target.signature, target.model, target.name, message.body
    if signature is None:  # it is being loaded
        raise ModelNotReady(f"model '{model}' is not ready")
    if form == "flat":
        found = Decoded(decode_generate(signature, model, version, body, charge), _flat)
    elif form == "arrow":
        check_stream(body, most.request_bytes)
        bounded = limited(charge, most.object_bytes)
        found = Decoded(decode_stream(signature, model, version, body, bounded), _arrow)
    elif form == "raw":
        found = _decoded(*decode_raw(signature, model, version, body))
    else:
        found = _decode_v2(message, signature, model, version, charge)
    if charge is not uncharged:
        charge_objects(found.call.inputs.values(), charge, most.object_bytes)
    return found


def answer(message: Message, response: InferResponse, encode: Encode) -> Record:
    """The record that answers a message: with its key, its headers, and its trace context."""
    return _record(message, *encode(response))


def plain_answer(message: Message, body: bytes) -> Record:
    """The record that answers a message with a body of JSON; see `answer`."""
    return _record(message, body, _PLAIN)


def _record(message: Message, body: bytes, about: Mapping[str, bytes]) -> Record:
    kept = {name: value for name, value in message.headers.items() if name not in _OF_BODY}
    return Record(message.key, {**kept, **about}, body)


def failure(message: Message, failed: GivenUp) -> Record:
    """The record for a message that has no answer: as it came, with the reason in headers.

    A bare one has neither its headers nor its body.
    """
    reason = {
        _KIND: failed.kind.encode(), _REASON: failed.reason.encode(errors="replace"),
        _TRIES: b"%d" % failed.tries,
    }  # fmt: skip
    if failed.bare:
        return Record(message.key, reason, b"")
    return Record(message.key, {**message.headers, **reason}, message.body)


def _decode_v2(
    message: Message, signature: Signature, model: str, version: str, charge: Charge
) -> Decoded:
    body, header = message.body, message.headers.get(JSON_SIZE)
    size = parse_json_size(None if header is None else header.decode("latin-1"), len(body))
    return _decoded(*decode_infer(model, version, body, size, signature, charge))


def _decoded(call: Call, form: ResponseForm) -> Decoded:
    return Decoded(call, v2_encoder(form))


def v2_encoder(form: ResponseForm) -> Encode:
    """The encoder of answers to V2 requests, with their outputs in this form."""

    def encode(response: InferResponse) -> tuple[bytes, Mapping[str, bytes]]:
        buffers, size = form.encode(response)
        if size is None:
            return b"".join(buffers), _PLAIN
        return b"".join(buffers), {_TYPE: _BINARY, JSON_SIZE: b"%d" % size}

    return encode


def _arrow(response: InferResponse) -> tuple[bytes, Mapping[str, bytes]]:
    return b"".join(encode_response(response)), {_TYPE: _ARROW}


def _flat(response: InferResponse) -> tuple[bytes, Mapping[str, bytes]]:
    return encode_generate(response), {_TYPE: _JSON}
