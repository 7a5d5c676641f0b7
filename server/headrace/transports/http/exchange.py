"""One infer request over HTTP from its head to its answer, whichever route carries it.

Order of work: find the model, count the request in, take the body within its limit, decode, submit,
encode the response or the error, count the request out.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

from headrace.core.errors import (
    InvalidRequest,
    PayloadTooLarge,
    Relayed,
    ServerError,
    Unsupported,
    UnsupportedEncoding,
)
from headrace.core.requests import InferRequest, InferResponse, OpaqueResponse, Passes, Ticket
from headrace.core.tensors import Buffer
from headrace.engine.admission import Account
from headrace.engine.doors import HTTP_NOT_DECOUPLED, DoorSink, Entrance, Target
from headrace.engine.forwarding import forwarding
from headrace.transports.http.passing import answer_lines, opaque_request
from headrace.wire.compression import choose_encoding, compress, decompress, too_large
from headrace.wire.header_rules import HeaderPattern, Key
from headrace.wire.http_infer import (
    decode_infer,
    decode_raw,
    error_body,
    parse_json_size,
    pass_raw,
)
from headrace.wire.http_response import ResponseForm
from headrace.wire.status import INTERNAL, INTERNAL_TEXT, STATUS
from headrace.wire.timing import add_timing, server_timing, wants_timing

log = logging.getLogger(__name__)

# Header lines as they are written.
JSON = b"content-type: application/json\r\n"
CLOSE = b"connection: close\r\n"
_BACKEND = b"headrace-backend: %b\r\n"  # which one has answered, of a model that has several
_STATUSES = frozenset(HTTPStatus)  # those that can be told
_BAD_GATEWAY = 502
_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


@dataclass(slots=True)
class Head:
    """What the head of an infer request says; `length` is None for a chunked body.

    `version` is "" where the path names none. `json_size` and the encodings are the headers' text.
    `entrance` is where the request goes, `headers` are all that came.
    """

    entrance: Entrance
    path: str
    model: str
    version: str
    length: int | None
    json_size: str | None = None
    content_encoding: str | None = None
    accept_encoding: str | None = None
    headers: Mapping[bytes, str] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """A status, header lines without `content-length`, and the body in pieces."""

    status: int
    lines: bytes
    buffers: Sequence[Buffer]

    @property
    def closes(self) -> bool:
        """Whether the connection has to end with it."""
        return self.status != 200 and self.lines.endswith(CLOSE)

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(map(len, self.buffers))


class Exchange:
    """An infer request under way. After `open`, `close` must be called exactly once."""

    # Defaults of the class: one is made for every request, and sets what is different.
    found: Target | None = None
    request_id = ""
    nbytes = 0  # what admission has counted, so that it is counted out whatever happens
    _held = False  # whether it is a message on its way
    _entered = False
    _consumed = False
    _again = False  # look at the model when the body is there: it may have been replaced meanwhile
    _form: ResponseForm | None = None
    _more = False  # whether the answer is to say more than the response
    _timed = False  # of one that names its backend, whether it also has timings
    _backend = ""  # what answers, of a model that has several
    _passed = "/infer"  # the end of the path at another server; "" if nothing is passed on
    _one_answer = True  # whether models that answer as often as they like are refused

    def __init__(self, limit: int, head: Head, account: Account) -> None:
        """`limit` is of the body's bytes, also once it is decompressed.

        `account` is the connection's.
        """
        self.head = head
        self.account = account
        self._engine = head.entrance
        self._limit = limit

    def open(self, nbytes: int = -1) -> None:
        """Find the model and count the request in, its body of `nbytes` being there.

        Without `nbytes`, the body is yet to come. Raises `ServerError`.
        """
        head = self.head
        self._find()
        if nbytes < 0:
            declared = head.length or 0
            self._check_size(declared)
            self.account.begin(declared)
            self._held = True
            return
        if nbytes > self._limit:
            self._check_size(nbytes)
        self.account.enter(nbytes)
        self.nbytes = nbytes
        self._entered = True

    def _check_size(self, declared: int) -> None:
        if declared > self._limit:
            raise PayloadTooLarge(too_large("request body", self._limit, declared))

    def grow(self, nbytes: int) -> None:
        """Count bytes of the body in; raises `ServerError` beyond a limit."""
        if self.nbytes + nbytes > self._limit:
            raise PayloadTooLarge(too_large("request body", self._limit))
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes
        self._again = True

    def submit(self, body: Buffer, sink: DoorSink) -> Ticket:
        """Decode the whole body and queue the request; raises `ServerError`."""
        self._consumed = True
        head, found = self.head, self.found
        assert found is not None, "submit before open. This is a bug."
        if self._held:
            self.enter()
        if self._again:
            found = self._find()
            if found.passes is Passes.HTTP and self._passed:
                return self._pass_on(found, body, sink)
        if head.content_encoding is not None:
            packed = len(body)
            body = decompress(body, head.content_encoding, self._limit)
            if len(body) > packed:
                self.account.grow(len(body) - packed, self.nbytes)
                self.nbytes += len(body) - packed
        json_size = parse_json_size(head.json_size, len(body))
        signature = found.signature
        if json_size != 0:
            request, form = decode_infer(head.model, head.version, body, json_size, signature)
        elif signature is not None:
            request, form = decode_raw(signature, head.model, head.version, body)
        else:
            request, form = pass_raw(head.model, head.version, body)
        self.request_id = request.id
        self._form = form
        self._more = wants_timing(request)
        return found.submit(request, sink)

    def header(self, name: str) -> str:
        """What the client sent under a name in lower case, "" for nothing."""
        return self.head.headers.get(name.encode("latin-1"), "")

    def routed(self, request: InferRequest, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.found = target

    def answered_by(self, backend: str) -> None:
        """Take which backend answers."""
        if not self._backend:
            self._timed, self._more = self._more, True
        self._backend = backend

    @property
    def timed(self) -> bool:
        """Whether timings are wanted in the answer."""
        return self._timed if self._backend else self._more

    @property
    def backend_line(self) -> bytes:
        """The header that names the backend, if there are several."""
        return _BACKEND % self._backend.encode() if self._backend else b""

    def success(self, response: InferResponse) -> Answer:
        """The answer with a response in it; an error's if it has no form that was asked for."""
        try:
            return self._encode(response)
        except Exception as error:
            return self.failure(error)

    def failure(self, error: BaseException) -> Answer:
        """The answer to a request that failed with `error`."""
        if not isinstance(error, ServerError):
            log.error("bug while answering %s", self.head.path, exc_info=error)
            return Answer(INTERNAL.http, JSON, [error_body(INTERNAL_TEXT)])
        if isinstance(error, Relayed) and isinstance(error.answer, OpaqueResponse):
            return self.passed_answer(error.answer)
        status = STATUS[type(error)]
        lines = JSON
        if status.retry_after:
            lines += b"retry-after: %d\r\n" % status.retry_after
        if isinstance(error, UnsupportedEncoding):
            lines += b"accept-encoding: gzip, deflate\r\n"
        lines += self.backend_line
        # Answered at once, not when the body is there; the rest of it is passed over. Only where
        # that is too much, or of unknown size, the connection is given up instead.
        length = self.head.length
        if not self._consumed and (length is None or length > self._limit):
            lines += CLOSE
        return Answer(status.http, lines, [error_body(str(error))])

    def passed_answer(self, response: OpaqueResponse) -> Answer:
        """The answer of another server, as it came."""
        lines = answer_lines(response)
        if response.status == 200:
            lines += b"server-timing: %b\r\n" % server_timing(response.timing)
        status = response.status if response.status in _STATUSES else _BAD_GATEWAY
        return Answer(status, lines, [response.body])

    def close(self) -> None:
        """Count the request out."""
        if self._entered:
            self._entered = False
            self.account.leave(self.nbytes)
        elif self._held:
            self._held = False
            self.account.drop(self.nbytes)

    def enter(self) -> None:
        """The body is there as a whole: count it as a request; raises `Overloaded`."""
        self.account.admit()
        self._held, self._entered = False, True

    def fields(self) -> dict[str, str]:
        """What the access log says of the request besides its path."""
        if self.found is None:
            return {}
        return {
            "model": self.head.model, "version": self.found.name, "request_id": self.request_id
        }  # fmt: skip

    def _find(self) -> Target:
        """What serves the request now; raises `ServerError`."""
        self.found = found = self._engine.find(self.head.model, self.head.version)
        if not found.plain:
            if found.decoupled and self._one_answer:
                raise Unsupported(HTTP_NOT_DECOUPLED)
            self._again = True
        return found

    def _pass_on(self, found: Target, body: Buffer, sink: DoorSink) -> Ticket:
        """Queue a request that nobody here reads."""
        head = self.head
        self._more = True
        request = opaque_request(
            head.model, head.version, self._passed, body, self.nbytes, head.headers
        )
        return found.submit(request, sink)

    def _encode(self, response: InferResponse) -> Answer:
        form, accept = self._form, self.head.accept_encoding
        if self._more:
            return self._encode_more(response)
        assert form is not None, "an answer to what was not submitted. This is a bug."
        buffers, json_size = form.encode(response)
        lines = JSON if json_size is None else _BINARY % json_size
        lines += b"server-timing: %b\r\n" % server_timing(response.timing)
        if accept is not None and (encoding := choose_encoding(accept)) != "identity":
            buffers = [compress(b"".join(buffers), encoding)]
            lines += b"content-encoding: %b\r\n" % encoding.encode()
        return Answer(200, lines, buffers)

    def _encode_more(self, response: InferResponse) -> Answer:
        """An answer that says more than the response, or is one of another server."""
        if isinstance(response, OpaqueResponse):
            return self.passed_answer(response)
        if self.timed:
            add_timing(response)
        self._more = False
        answer = self._encode(response)
        answer.lines += self.backend_line
        return answer


def header_entrance(
    engine: Entrance, pattern: HeaderPattern, headers: Sequence[tuple[bytes, bytes]]
) -> Entrance:
    """The way to the engine for requests with these headers."""
    pairs = ((name.decode("latin-1"), _text(value)) for name, value in headers)
    return forwarding(engine, pattern, pairs)


def opens(key: Key, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a request with these headers, their names in lower case, may be answered."""
    name = key.header.encode()
    return key.opens([value for given, value in headers if given == name])


def infer_target(path: str) -> tuple[str, str] | None:
    """Model name and version (or "") of an infer path; None for any other path."""
    return model_target(path, "/infer")


def model_target(path: str, suffix: str) -> tuple[str, str] | None:
    """Model name and version (or "") of a model's path with this end; None for any other path."""
    if not path.startswith("/v2/models/") or not path.endswith(suffix):
        return None
    parts = path[len("/v2/models/") : -len(suffix)].split("/")
    if len(parts) == 1 and parts[0]:
        return parts[0], ""
    if len(parts) == 3 and parts[0] and parts[1] == "versions" and parts[2].isdigit():
        return parts[0], parts[2]
    return None


def read_head(entrance: Entrance, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Head | None:
    """The head of a request for `path` (unquoted), with header names in lower case.

    None if it is no infer request; raises `InvalidRequest`.
    """
    target = infer_target(path)
    return None if target is None else head_of(entrance, path, target, headers)


def head_of(
    entrance: Entrance, path: str, target: tuple[str, str], headers: Sequence[tuple[bytes, bytes]]
) -> Head:
    """The head of a request to a model and version; raises `InvalidRequest`."""
    values = {name: value.decode("latin-1") for name, value in headers}
    length: int | None = None
    if b"transfer-encoding" not in values:
        text = values.get(b"content-length", "0").strip(" \t")
        if not (text.isascii() and text.isdigit()) or len(text) > 19:
            raise InvalidRequest(f"Content-Length must be a number of bytes, got {text[:40]!r}")
        length = int(text)
    return Head(
        entrance,
        path,
        *target,
        length,
        values.get(b"inference-header-content-length"),
        values.get(b"content-encoding"),
        values.get(b"accept-encoding"),
        values,
    )


def _text(value: bytes) -> str:
    """A header's value: UTF-8 where it can be."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def unquoted(raw_path: bytes) -> str:
    """A path as it comes in a request line, with its percent encoding undone."""
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path
