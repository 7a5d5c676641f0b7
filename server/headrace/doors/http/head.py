"""Heads of infer requests: parsed once, then recognised by their bytes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import httptools

from headrace.api.gate import Gate, Values, check
from headrace.api.header_rules import HeaderPattern
from headrace.api.operations import ARROW_STREAM, NAMED, Operation
from headrace.core.call import NO_CONTEXT, CallContext, context_of
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.identity import NO_PEER, PeerFacts
from headrace.core.turns import PACKED, TEXT_BITS
from headrace.engine.entrance import Entrance
from headrace.protocol.parameters import timeout_of

URL_LIMIT = 8 << 10  # bytes: each route compares it with a pattern
MOST_HEADERS = 256  # of a request: the application reads each of them several times
END = b"\r\n\r\n"  # of a head
# A server may ignore an upgrade request, which clients such as Java's send with every request. The
# parser would accept it and end the request before its body.
_UPGRADE = re.compile(rb"(?im)^(?:upgrade|http2-settings)[ \t]*:[^\r\n]*\r\n")
_HOPS = frozenset({b"forwarded", b"x-forwarded-for"})
_UNITS = 4  # of `Turns.share`, of a request with a short body


@dataclass(slots=True)
class InferHead:
    """The head of an infer request; `length` is None for a chunked body.

    `version` is "" if the path names none. `json_size` and the encodings are the headers' text.
    `arrow` is true for an Arrow stream as the body, `arrow_back` for one as the answer. `client` is
    the address that a proxy names, to be believed if it is trusted. `entrance` is the request's
    entrance to the engine, `headers` are all headers. `timeout` is as in `Call`: microseconds, 0
    for none. `told` are parameters for models, made from headers, unless a `fault` is set, for
    which the request is refused. `context` has the client, who may run the model.
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
    timeout: int = 0
    told: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""
    arrow: bool = False
    arrow_back: bool = False
    client: str = ""
    context: CallContext = NO_CONTEXT

    key: tuple[str, str] = field(init=False)  # model and version
    is_plain: bool = field(init=False)  # nothing but the length of a JSON body
    work: int = field(init=False)  # units of `Turns.share`

    def __post_init__(self) -> None:
        self.key = self.model, self.version
        self.work = _UNITS if self.content_encoding is None else PACKED
        self.work += (self.length or 0) >> TEXT_BITS
        said = self.json_size, self.content_encoding, self.accept_encoding
        self.is_plain = (
            said == (None, None, None)
            and self.length is not None
            and not (self.timeout or self.told or self.fault or self.arrow or self.arrow_back)
        )


def told(
    pattern: HeaderPattern | None, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[dict[str, str], str]:
    """Parameters for models made from these headers, and the reason to refuse them, or ""."""
    if pattern is None:
        return {}, ""
    try:
        return pattern.parameters((n.decode("latin-1"), _text(v)) for n, v in headers), ""
    except InvalidRequest as error:
        return {}, str(error)


def values_in(headers: Sequence[tuple[bytes, bytes]]) -> Values:
    """The values of headers, which have lower-case names, by name."""

    def values(name: str) -> list[bytes]:
        wanted = name.encode()
        return [value for given, value in headers if given == wanted]

    return values


def head_of(
    entrance: Entrance,
    path: str,
    parts: Mapping[str, str],
    headers: Sequence[tuple[bytes, bytes]],
    told: tuple[Mapping[str, str], str] = ({}, ""),
) -> InferHead:
    """The head of a request to the model and version of a path; raises `InvalidRequest`."""
    values = {name: value.decode("latin-1") for name, value in headers}
    proxies = entrance.admission.proxies
    client = "" if proxies is None else proxies.client(hops(headers))
    length: int | None = None
    if b"transfer-encoding" not in values:
        text = values.get(b"content-length", "0").strip(" \t")
        if not (text.isascii() and text.isdigit()) or len(text) > 19:
            raise InvalidRequest(f"Content-Length must be a number of bytes, got {text[:40]!r}")
        length = int(text)
    arrow = values.get(b"content-type", "").partition(";")[0].strip().lower() == ARROW_STREAM
    accepted = values.get(b"accept", "").lower()
    arrow_back = ARROW_STREAM in accepted or (arrow and "application/json" not in accepted)
    return InferHead(
        entrance,
        path,
        parts["name"],
        parts.get("version", ""),
        length,
        values.get(b"inference-header-content-length"),
        values.get(b"content-encoding"),
        values.get(b"accept-encoding"),
        values,
        timeout_of(values),
        *told,
        arrow,
        arrow_back,
        client,
    )


def hops(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers by which proxies name clients, each as one list."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in _HOPS:
            key, text = name.decode(), value.decode("latin-1")
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


def passed(
    gate: Gate,
    operation: Operation,
    entrance: Entrance,
    path: str,
    parts: Mapping[str, str],
    headers: Sequence[tuple[bytes, bytes]],
    names: Sequence[tuple[bytes, bytes]],
    peer: PeerFacts,
    again: bool = False,
) -> InferHead:
    """The head of a request that passes the gate; `names` are the headers in original case.

    Requests that are refused pass the gate `again`. Raises `ServerError`.
    """
    values = values_in(headers)
    asked = parts["name"], parts.get("version", "")
    if again:
        identity = gate.examine(operation, values, peer)
        check(identity, operation.permission, *asked)
    else:
        identity = gate.enter(operation, values, peer)
        gate.check(operation, identity, values, peer, *asked)
    head = head_of(entrance, path, parts, headers, told(gate.pattern, names))
    head.context = context_of(identity)
    return head


def _text(value: bytes) -> str:
    """A header's value, decoded as UTF-8 if possible."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def without_upgrade(data: bytes) -> bytes:
    """Remove an upgrade request from the head at the start of `data`."""
    end = data.find(END)
    if end < 0 or not _UPGRADE.search(data, 0, end + 2):
        return data
    return _UPGRADE.sub(b"", data[: end + 2]) + data[end + 2 :]


def unquoted(raw_path: bytes) -> str:
    """The path of a request line with percent encoding undone."""
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path


_INFER = NAMED["ModelInfer"].routes[0]
_START = b"POST /v2/models/"
_KNOWN_HEADS = 1024
_OWN_HEADS = 32  # ... of one connection
_KNOWN_HEAD_SIZE = 4096


class Heads:
    """Heads by their bytes; None for those that the fast path does not handle."""

    def __init__(self, engine: Entrance, gate: Gate, peer: PeerFacts = NO_PEER) -> None:
        """Heads of requests that do not pass the `gate` go to the plain route, which says why.

        Without a `peer`, they are of all connections whose clients are told apart by heads alone.
        """
        self.known: dict[bytes, InferHead | None] = {}  # the cache of `read`
        self.gate = gate
        self._engine = engine
        self._peer = peer
        self._most = _KNOWN_HEADS if peer is NO_PEER else _OWN_HEADS
        gate.watch(self.known.clear)

    def of(self, peer: PeerFacts) -> "Heads":
        """The heads of a connection, whose other end may prove who the client is; see `close`."""
        if self.gate.access is None or (peer.certificate is None and peer.uid < 0):
            return self
        return Heads(self._engine, self.gate, peer)

    def close(self) -> None:
        """Stop following the gate, if the heads are those of one connection."""
        if self._peer is not NO_PEER:
            self.gate.unwatch(self.known.clear)

    def read(self, raw: bytes) -> InferHead | None:
        """The head whose bytes, including the empty line, are `raw`."""
        if not raw.startswith(_START):
            return None
        try:
            return self.known[raw]
        except KeyError:
            head = self._parse(raw)
        if len(raw) <= _KNOWN_HEAD_SIZE:
            if len(self.known) >= self._most:
                self.known.clear()
            self.known[raw] = head
        return head

    def _parse(self, raw: bytes) -> InferHead | None:
        """Parse the head of an infer request for the fast path; None for any other."""
        if raw.count(b"\n") > MOST_HEADERS:  # refused by the plain route, if they are that many
            return None
        reader = _HeadReader()
        parser = httptools.HttpRequestParser(reader)
        try:
            parser.feed_data(without_upgrade(raw))
            if len(reader.url) > URL_LIMIT:
                return None
            path = unquoted(httptools.parse_url(reader.url).path)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, UnicodeDecodeError):
            return None
        headers = [(name.lower(), value) for name, value in reader.headers]
        if not _is_plain(reader, parser, [name for name, _ in headers]):
            return None
        try:
            if (parts := _INFER.match(path)) is None:
                return None
            return passed(
                self.gate, NAMED["ModelInfer"], self._engine, path, parts, headers, reader.headers,
                self._peer, again=True,
            )  # fmt: skip
        except ServerError:  # reported by the plain route
            return None


class _HeadReader:
    """Collects the parser's results for a head, and notes if it ends before the bytes do."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.messages = 0
        self.complete = False
        self.body = False

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, body: bytes) -> None:
        self.body = True


def _is_plain(reader: _HeadReader, parser: Any, names: list[bytes]) -> bool:
    """True if a head has a fixed meaning."""
    return (
        reader.complete
        and reader.messages == 1
        and not reader.body
        and parser.get_method() == b"POST"
        and parser.get_http_version() == "1.1"
        and parser.should_keep_alive()
        and names.count(b"content-length") == 1
        and names.count(b"host") == 1
        and not {b"transfer-encoding", b"expect", b"upgrade"}.intersection(names)
    )
