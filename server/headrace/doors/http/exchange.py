"""One infer request over HTTP from its head to its answer, for every route.

Steps: find the model, charge the request, receive the body within its limit, decode, submit, encode
the response or the error, release the charge.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.api.operations import ARROW_STREAM
from headrace.core.call import NOBODY, Call, InferResponse, Raw, Timing
from headrace.core.errors import (
    InvalidRequest,
    PayloadTooLarge,
    ServerError,
    Unsupported,
    UnsupportedEncoding,
)
from headrace.core.limits import Charge, Payer, uncharged
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.doors.http.head import InferHead
from headrace.engine.admission import Account, AccountedCall
from headrace.engine.entrance import HTTP_NOT_DECOUPLED, Target
from headrace.engine.workbench import LARGE, Deferred, Job, Workbench
from headrace.protocol.arrow_ipc import check_stream, decode_stream, encode_response, limited
from headrace.protocol.compression import (
    choose_encoding,
    compress,
    decompress,
    decompress_small,
    too_large,
)
from headrace.protocol.elements import charge_objects
from headrace.protocol.parameters import add_timing, server_timing, time_of, wants_timing
from headrace.protocol.status import (
    BEGUN,
    INTERNAL,
    INTERNAL_TEXT,
    STATUS,
    begun_field,
    error_fields,
)
from headrace.protocol.v2_json import (
    ResponseForm,
    decode_infer,
    decode_raw,
    error_body,
    parse_json_size,
    pass_raw,
    takes_long,
)

log = logging.getLogger(__name__)

# Header lines in wire format.
JSON = b"content-type: application/json\r\n"
CLOSE = b"connection: close\r\n"
_BEGUN = BEGUN.encode() + b": %b\r\n"
_BACKEND = b"headrace-backend: %b\r\n"  # the backend that has answered, for a model with several
_TIMING = b"server-timing: %b\r\n"
_ARROW = b"content-type: %b\r\n" % ARROW_STREAM.encode()
_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


@dataclass(slots=True)
class Answer:
    """A status, header lines without `content-length`, and the body in pieces."""

    status: int
    lines: bytes
    buffers: Sequence[Buffer]

    @property
    def closes(self) -> bool:
        """True if the connection must be closed after the answer."""
        return self.status != 200 and self.lines.endswith(CLOSE)

    @property
    def size(self) -> int:
        """The size of the body in bytes."""
        return sum(map(len, self.buffers))


def error_lines(error: ServerError) -> bytes:
    """The header lines of an error that are the same for every operation."""
    fields = error_fields(error)
    return b"".join(b"%b: %b\r\n" % (name.encode(), text.encode()) for name, text in fields)


class Exchange(AccountedCall):
    """An infer request in flight. After `open`, `close` must be called exactly once."""

    __slots__ = (
        "_again", "_answering", "_backend", "_consumed", "_engine", "_form", "_held", "_limit",
        "_timed",
        "account", "entered", "found", "head",
    )  # fmt: skip

    door = "HTTP"
    refusal = HTTP_NOT_DECOUPLED
    found: Target | None
    _form: ResponseForm | None

    def __init__(self, limit: int, head: InferHead, account: Account) -> None:
        """`limit` bounds the body in bytes, also once it is decompressed.

        `account` is the connection's, until the client and the model are known.
        """
        self.head = head
        self.account = account
        self._engine = head.entrance
        self._limit = limit
        self.found = self._form = None
        self.id = self._backend = ""
        self.nbytes = 0
        self._held = self.entered = self._consumed = self._again = self._timed = False
        self._answering = 0

    def open(self) -> None:
        """Find the model and charge a request whose body is yet to arrive; raises `ServerError`."""
        self.begin()
        self.context = self.head.context
        self._find()
        declared = self.head.length or 0
        self._check_size(declared)
        self.account = self._client_account()
        self.account.begin(declared)
        self._held = True

    def open_whole(self, nbytes: int) -> None:
        """Find the model and charge the request with its complete body of `nbytes`.

        Raises `ServerError`.
        """
        self.begin()
        self.context = self.head.context
        self._find()
        if nbytes > self._limit:
            self._check_size(nbytes)
        self.account = self._client_account()
        self.account.enter(nbytes)
        self.nbytes = nbytes
        self.entered = True

    def _client_account(self) -> Account:
        head = self.head
        return self.account.of(self.context.identity, head.model, head.client)

    def _check_size(self, declared: int) -> None:
        if declared > self._limit:
            raise PayloadTooLarge(too_large("request body", self._limit, declared))

    def grow(self, nbytes: int) -> None:
        """Charge received bytes of the body; raises `ServerError` beyond a limit."""
        if self.nbytes + nbytes > self._limit:
            raise PayloadTooLarge(too_large("request body", self._limit))
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes
        self._again = True

    def submit(self, body: Buffer, after: Callable[[], None] | None = None) -> bool:
        """Decode the body and queue the request; raises `ServerError`.

        Returns True if it is decoded on a thread. Then errors refuse the request, and `after` is
        called once it is queued or refused.
        """
        self._consumed = True
        head, found = self.head, self.found
        assert found is not None, "submit before open. This is a bug."
        if self._held:
            self.admit()
        if self._again:
            found = self._find()
        signature = found.signature
        if head.content_encoding is not None:
            small = None if head.arrow else decompress_small(body, head.content_encoding)
            if small is None:
                self._defer(body, signature, after)
                return True
            body = small
        # Also for short Arrow streams: to import pyarrow takes long.
        if head.arrow or (len(body) > LARGE and self._takes_long(body, signature)):
            self._defer(body, signature, after)
            return True
        self._ask(self._read(body, signature, uncharged), found)
        return False

    def _ask(self, asked: Call, found: Target) -> None:
        """Submit a decoded request, with what the head adds to it; raises `ServerError`."""
        self.take(asked)
        self.bound_wait(self.head.timeout)
        self._timed = wants_timing(self)
        if self.head.told:
            self.parameters.update(self.head.told)
        found.submit(self)

    @property
    def payer(self) -> Payer:
        """Implements `Call.payer`."""
        return self.account

    def header(self, name: str) -> str:
        """A header's value by its lower-case name; "" if there is none."""
        return self.head.headers.get(name.encode("latin-1"), "")

    def routed(self, target: Target) -> None:
        """Note the target that serves the request."""
        self.found = target

    def answered_by(self, backend: str) -> None:
        """Note the backend that answers."""
        self._backend = backend

    @property
    def backend_line(self) -> bytes:
        """The header line that names the backend, if the model has several."""
        return _BACKEND % self._backend.encode() if self._backend else b""

    @property
    def workbench(self) -> Workbench:
        """The threads for long work on the request."""
        return self._engine.admission.workbench

    def respond(self, response: InferResponse, final: bool) -> None:
        """Send `response`, encoded on a thread if that is slow."""
        form, packs = self._form or ResponseForm(), self.head.accept_encoding is not None
        try:
            if self.head.arrow_back:
                self.account.check_answer(response.model_name, response.nbytes)
                self.owner = self._encode_later(response, form)
                return
            for tensor in response.outputs:
                if tensor.array.nbytes > LARGE:
                    self.account.check_answer(response.model_name, response.nbytes)
                    if packs or not form.named.get(tensor.name, form.binary):
                        self.owner = self._encode_later(response, form)
                        return
            answer = self._encode(response, form, uncharged)
        except Exception as error:
            answer = self.failure(error)
        self.end(answer)

    def _encode_later(self, response: InferResponse, form: ResponseForm) -> Job[Answer]:
        """Encode and send `response` on a thread; raises `Overloaded`."""
        model, size, written = response.model_name, response.nbytes, 0

        def grow(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self.account.check_answer(model, written)
            self._grow_answer(nbytes)

        def finish(answer: Answer | None, problem: Exception | None) -> None:
            self.owner = NOBODY  # breaks a reference cycle, so that the body is freed at once
            self._leave_answer()  # it is charged again until it is written, and while it is unread
            self.end(answer or self.failure(problem or Unsupported("no answer")))

        self._grow_answer(size)
        return self.workbench.do(
            size, lambda charge: self._encode(response, form, charge), finish, grow, self.account
        )

    def _grow_answer(self, nbytes: int) -> None:
        self.account.grow_answer(nbytes, self._answering)
        self._answering += nbytes

    def _leave_answer(self) -> None:
        self.account.leave_answer(self._answering)
        self._answering = 0

    def fail(self, error: ServerError) -> None:
        """Send an error."""
        self.end(self.failure(error))

    def end(self, answer: Answer) -> None:
        """Send the answer."""
        raise NotImplementedError

    def failure(self, error: BaseException) -> Answer:
        """The answer to a request that failed with `error`."""
        if not isinstance(error, ServerError):
            log.error("bug while answering %s", self.head.path, exc_info=error)
            lines = JSON + _TIMING % server_timing(time_of(ServerError()))
            return Answer(INTERNAL.http, lines, [error_body(INTERNAL_TEXT)])
        lines = JSON + _TIMING % server_timing(time_of(error))
        lines += error_lines(error)
        if isinstance(error, UnsupportedEncoding):
            lines += b"accept-encoding: gzip, deflate\r\n"
        if begun := begun_field(self, error):
            lines += _BEGUN % begun.encode()
        lines += self.backend_line
        # Sent at once, not after the body; the rest of the body is skipped. Only if it is too long,
        # or of unknown size, the connection is closed instead.
        length = self.head.length
        if not self._consumed and (length is None or length > self._limit):
            lines += CLOSE
        return Answer(STATUS[type(error)].http, lines, [error_body(str(error))])

    def close(self) -> None:
        """Release the request's charge."""
        if self._answering:
            self._leave_answer()
        if self.entered:
            self.entered = False
            self.account.leave(self.nbytes)
        elif self._held:
            self._held = False
            self.account.drop(self.nbytes)

    def admit(self) -> None:
        """Charge the request, whose body is complete; raises `Overloaded`."""
        self.account.admit()
        self._held, self.entered = False, True

    def fields(self) -> dict[str, str]:
        """Fields of the access log line besides the path."""
        if self.found is None:
            return {}
        return {
            "model": self.head.model, "version": self.found.name, "request_id": self.id
        }  # fmt: skip

    def _find(self) -> Target:
        """Find the model version that serves the request; raises `ServerError`."""
        if self.head.fault:
            raise InvalidRequest(self.head.fault)
        self.found = found = self._engine.find(self.head.model, self.head.version)
        if found.decoupled and self.refusal:
            raise Unsupported(self.refusal)
        return found

    def _takes_long(self, body: Buffer, signature: Signature | None) -> bool:
        return takes_long(body, self.head.json_size, signature)

    def _read(self, body: Buffer, signature: Signature | None, charge: Charge) -> Call:
        """Decode a body, and note the form of its answer; raises `InvalidRequest`."""
        model, version, header = *self.head.key, self.head.json_size
        if self.head.arrow:
            self._form = ResponseForm()
            check_stream(body, self._limit)
            if signature is None:
                return pass_raw(model, version, body, Raw.ARROW)
            most = self.account.server.max_object_bytes
            return decode_stream(signature, model, version, body, limited(charge, most))
        json_size = None if header is None else parse_json_size(header, len(body))
        if json_size != 0:
            asked, self._form = decode_infer(model, version, body, json_size, signature, charge)
        elif signature is not None:
            asked, self._form = decode_raw(signature, model, version, body)
        else:
            asked, self._form = pass_raw(model, version, body), ResponseForm(binary=True)
        return asked

    def _decode(self, body: Buffer, signature: Signature | None, charge: Charge) -> Call:
        """Decode a body that may be compressed; runs on a thread."""
        if (encoding := self.head.content_encoding) is not None:
            body = decompress(body, encoding, self._limit, charge=charge)
        request = self._read(body, signature, charge)
        charge_objects(request.inputs.values(), charge, self.account.server.max_object_bytes)
        return request

    def _defer(
        self, body: Buffer, signature: Signature | None, after: Callable[[], None] | None
    ) -> None:
        """Decode on a thread, then queue the request."""

        def submit(asked: Call) -> None:
            found = self._find()  # the version may have been replaced meanwhile
            self._ask(asked, found)

        # An estimate: compressed data mostly becomes long.
        size = len(body) << 3 if self.head.content_encoding is not None else len(body)
        Deferred(
            self.workbench, size,
            lambda charge: self._decode(body, signature, charge), submit, self, self.charge, after,
        )  # fmt: skip

    def _encode(self, response: InferResponse, form: ResponseForm, charge: Charge) -> Answer:
        if self._timed:
            add_timing(response)
        if self.head.arrow_back:
            buffers, lines = _arrow(response, form, charge), _ARROW
        else:
            buffers, json_size = form.encode(response, charge)
            lines = JSON if json_size is None else _BINARY % json_size
        lines += _TIMING % server_timing(response.timing)
        accept = self.head.accept_encoding
        if accept is not None and (encoding := choose_encoding(accept)) != "identity":
            if charge is not uncharged:
                charge(sum(map(len, buffers)))
            buffers = [compress(b"".join(buffers), encoding)]
            lines += b"content-encoding: %b\r\n" % encoding.encode()
        return Answer(200, lines + self.backend_line, buffers)


def _arrow(response: InferResponse, form: ResponseForm, charge: Charge) -> list[Buffer]:
    """An answer as an Arrow stream; raises `InvalidRequest` for outputs in shared memory."""
    if form.shared:
        raise InvalidRequest(f"outputs in shared memory cannot be asked for as {ARROW_STREAM}")
    charge(response.nbytes)
    return encode_response(response)


def plain_lines(timing: Timing) -> bytes:
    """The header lines of a plain JSON answer."""
    return JSON + _TIMING % server_timing(timing)
