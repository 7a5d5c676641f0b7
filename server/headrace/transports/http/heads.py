"""Heads of infer requests, parsed once and then known by their bytes."""

from typing import Any

import httptools

from headrace.core.errors import InvalidRequest
from headrace.engine.doors import Entrance
from headrace.transports.http.head import Head, opens, read_head, told, unquoted
from headrace.transports.http.protocol import without_upgrade
from headrace.wire.header_rules import HeaderPattern, Key

_START = b"POST /v2/models/"
_KNOWN_HEADS = 1024
_KNOWN_HEAD_SIZE = 4096


class Heads:
    """Heads by their bytes; None for those that are not for the fast path."""

    def __init__(
        self, engine: Entrance, pattern: HeaderPattern | None = None, key: Key | None = None
    ) -> None:
        """`pattern` picks headers for models; without `key`, heads are for the plain route."""
        self.known: dict[bytes, Head | None] = {}  # those that `read` was asked for
        self._engine = engine
        self._pattern = pattern
        self._key = key

    def read(self, raw: bytes) -> Head | None:
        """What `raw`, up to and with its empty line, says."""
        if not raw.startswith(_START):
            return None
        try:
            return self.known[raw]
        except KeyError:
            head = self._parse(raw)
        if len(raw) <= _KNOWN_HEAD_SIZE:
            if len(self.known) >= _KNOWN_HEADS:
                self.known.clear()
            self.known[raw] = head
        return head

    def _parse(self, raw: bytes) -> Head | None:
        """The head of an infer request for the fast path, else None."""
        reader = _HeadReader()
        parser = httptools.HttpRequestParser(reader)
        try:
            parser.feed_data(without_upgrade(raw))
            path = unquoted(httptools.parse_url(reader.url).path)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, UnicodeDecodeError):
            return None
        headers = [(name.lower(), value) for name, value in reader.headers]
        if not _is_plain(reader, parser, [name for name, _ in headers]):
            return None
        if self._key is not None and not opens(self._key, headers):
            return None
        try:
            return read_head(self._engine, path, headers, told(self._pattern, reader.headers))
        except InvalidRequest:  # which the plain route tells
            return None


class _HeadReader:
    """Collects what the parser finds in a head, and notices if it ends before the bytes do."""

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
    """Whether a head means the same whenever it comes."""
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
