"""uvicorn's HTTP/1.1 protocol with bounds on unfinished requests and unread answers.

uvicorn's parser collects heads of any size, and waits for the rest of a request for ever; its
transport keeps unread answers for ever, even when it is to be closed.
"""

import logging
import re
from collections import deque
from collections.abc import Mapping
from math import inf
from time import perf_counter
from typing import Any, NoReturn, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.api.header_rules import DoorRules
from headrace.core.limits import SLOWEST, Patience
from headrace.doors.acceptor import undelivered
from headrace.engine.admission import Admission, ConnectionAccount
from headrace.engine.entrance import Progress
from headrace.observability.statistics import OTHER
from headrace.protocol.v2_json import error_body

access = logging.getLogger("headrace.access")

# A server may ignore an upgrade request, which clients such as Java's send with every request. The
# parser would accept it and end the request before its body.
_UPGRADE = re.compile(rb"(?im)^(?:upgrade|http2-settings)[ \t]*:[^\r\n]*\r\n")
_END = b"\r\n\r\n"
_CLOSE = (b"connection", b"close")
_LAST_SECS = 0.05  # that an idle connection stays open for a request in transit at shutdown
ACCOUNT = "headrace.account"  # in a scope: the connection's account
OPERATION = "headrace.operation"  # in a scope: the request's metrics label
NAMES = "headrace.headers"  # in a scope: headers with names in original case, if needed
_PIPELINED = 4 << 10  # bytes of objects of a pipelined request
_HEADS = 1 << 10  # bytes that are parsed at once: they may be requests of 18 bytes
_BODY = 16 << 10  # ... of a body
_PART_UNITS = 32  # of `Turns.share`, for either: a body may come in chunks of a byte
_LONG_READ = 128 << 10  # bytes read at once after which others have their turn
GONE = 499  # in place of a status: the client disconnected before its answer
URL_LIMIT = 8 << 10  # bytes: each route compares it with a pattern
HEAD_LIMIT = 64 << 10  # bytes of a request line and headers that are still incomplete
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class _Flow(FlowControl):
    """Flow control of a connection, which reads nothing while it holds what it has read.

    uvicorn resumes reading whenever the application asks for a body, and after each answer.
    """

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self._holds = False
        self._wanted = True  # by uvicorn: it has not enough of a body

    def hold(self, holds: bool) -> None:
        """Pause reading until `hold(False)`."""
        if holds:
            if not self._holds:
                self._holds, self._wanted = True, not self.read_paused
            super().pause_reading()
        else:
            self._holds = False
            if self._wanted:
                super().resume_reading()

    def pause_reading(self) -> None:
        self._wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        if not self._holds:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its server calls `check` periodically."""

    flow: _Flow

    account: ConnectionAccount
    _progress: Progress

    def __init__(
        self,
        patience_secs: float,
        rules: DoorRules | None = None,
        admission: Admission | None = None,
        read_secs: float = 60.0,
        **given: Any,
    ) -> None:
        """`patience_secs`: maximum wait for the next part of an unfinished request.

        If `rules` forward headers, those in original case are under `NAMES`. `admission` counts
        connections and what they hold. The connection is closed if the client does not read an
        answer for `read_secs`. `given` are uvicorn's arguments for its protocol class.
        """
        super().__init__(**given)
        self._admission = admission or Admission(0, 0)
        self._sending = Patience(patience_secs)  # for the client's requests
        self._read_secs = read_secs
        self._stalled = False  # answers are unread, or were until just now
        self._added = 0  # bytes written while earlier ones were unread
        self.unsent = 0  # bytes of these that the transport does not have yet
        self._retire_at = inf
        self._retired = False  # the connection closes after the next answer
        self._rules = rules
        self._touched = self.loop.time()  # time of the last received byte or answer
        self._begun = self._touched  # start of the request being received
        self._message_size = 0
        self._upgrades = False
        self._fault = 400, ""  # a problem with a head other than its syntax
        self._in_head = False
        self._in_message = False
        self._head_size = 0
        self._cycles: deque[RequestResponseCycle] | None = None  # unanswered requests, in order
        self._held = b""  # received, but to be processed later, from `_held_at` on
        self._held_at = 0

    @property
    def answering(self) -> bool:
        """True if the application has an unanswered request of this connection."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def idle(self) -> bool:
        """True if no request on this connection is unanswered."""
        return not self.answering

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport)
        account = self._admission.connect("http", self.client[0] if self.client else "")
        self.account = account or ConnectionAccount(self._admission, "")
        self._progress = Progress(self.account, self._read_secs)
        if account is None:
            text = "the server has as many connections as it may (--max-connections)"
            self.refuse(503, text, counted=False)

    def check(self, now: float) -> None:
        """Close the connection if its client makes no progress; `now` as the loop's clock."""
        if not self._unread_too_long(now):
            self.check_time(now)

    def check_time(self, now: float) -> None:
        """Close on a request that arrives too slowly, and a connection idle for too long."""
        # While earlier requests are unanswered, it is this side that does not read.
        reading = not self.pipeline and not (self._in_head and self.answering)
        if self._in_message:
            if reading and (fault := self.lateness(now, self._message_size)):
                self.abandon(408, fault)
        elif self.idle and self._progress.idles(self._touched, now, self.timeout_keep_alive):
            if now - self._touched > self.timeout_keep_alive:
                self.transport.close()
            else:
                self.shutdown()

    @property
    def _waiting(self) -> int:
        """Bytes that were written but not read by the client."""
        if self.flow.write_paused or self.transport.is_closing():
            waiting: int = self.transport.get_write_buffer_size()
            return waiting + self.unsent
        return 0

    @property
    def held(self) -> int:
        """Received bytes that wait to be processed, or for the rest of their head."""
        if self.transport.is_closing():
            return 0
        waiting = len(self._held) - self._held_at if self._held else 0
        return waiting + self._message_size * self._in_head + len(self.pipeline) * _PIPELINED

    def count_waiting(self) -> bool:
        """Charge unread and unprocessed bytes; closes the connection beyond its share (False)."""
        if self._progress.within(self._waiting, self.held):
            return True
        self.transport.abort()
        return False

    def _unread_too_long(self, now: float) -> bool:
        """True if the connection was closed because its client does not read."""
        waiting = self._waiting
        if not waiting and not self._stalled:
            return False
        self._stalled = waiting > 0
        if not waiting:
            self._added = 0
        moved = self._added - self.unsent - undelivered(self.transport)
        if self._progress.reads(waiting, self.held, moved, now):
            return False
        self.transport.abort()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = True
        self.count_waiting()

    def resume_writing(self) -> None:
        self._resumed()
        self._go_on()

    def _resumed(self) -> None:
        super().resume_writing()
        self.count_waiting()

    def live_until(self, at: float) -> None:
        """Retire the connection at that time, or at the next `check_age` after it."""
        self._retire_at = at

    def check_age(self, now: float) -> None:
        """Close the connection after its next answer, if it is old enough."""
        if now >= self._retire_at:
            self.retire()

    def awaited(self, since: float) -> bool:
        """True if the client was active since `since`, and nothing is unanswered."""
        return self.idle and self._touched > since and not self.transport.is_closing()

    def retire(self) -> None:
        """Close the connection after its next answer; an idle one waits for one more request.

        Closing it at once could lose a request in transit.
        """
        self._retired = True

    def shutdown(self) -> None:
        """Close the connection after its next answer; an idle one soon, after another read.

        A client whose request gets no answer may assume that it was executed.
        """
        self.retire()
        if self.answering:
            super().shutdown()
        else:
            self.loop.call_later(_LAST_SECS, self._close_idle, 2)

    def _close_idle(self, turns: int) -> None:
        if turns:  # turns of the loop, one of which reads received bytes
            self.loop.call_soon(self._close_idle, turns - 1)
        elif self.idle and not self.transport.is_closing():
            self.transport.close()

    def lateness(self, now: float, size: int) -> str:
        """The reason to stop waiting for the rest of a request; "" if there is none.

        `size` bytes of it have arrived.
        """
        patience = self._sending
        if self._progress.sends(patience, self._begun, size, now):
            return ""
        if now - self._touched > patience.secs:
            return f"no more of the request came for {patience.secs:g} s"
        return f"the request comes more slowly than {SLOWEST} bytes/s"

    def end_unfinished(self) -> None:
        """Abandon an incomplete request: the server is about to end."""
        if self._in_message:
            self.abandon(503, "Server exiting")

    def abandon(self, status: int, text: str) -> None:
        """Abandon the request that is being received."""
        if self.answering and self.cycle.response_started:
            self._hang_up()
        else:
            self.refuse(status, text)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_gone()
        super().connection_lost(exc)
        self.account.close()
        self.cycle = None  # type: ignore[assignment]  # it refers to this connection, as do these
        self.pipeline.clear()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio allows both
        """Close the socket, as the transport does if this returns False."""
        if self.transport.get_extra_info("ssl_object") is not None:
            return False
        return self._admission.turns.end_later(self.transport.close)

    def _hang_up(self) -> None:
        self.transport.close()
        self._tell_gone()

    def _tell_gone(self) -> None:
        """Notify the application of the disconnection for every unanswered request.

        uvicorn does so for the last one only, and lets it answer the others in vain.
        """
        cycles, self._cycles = self._cycles or (), None
        self._held = b""
        for cycle in cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        self._upgrades = False
        self._head_size = self._message_size = 0
        self._begun = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._upgrades = self.parser.should_upgrade()
        cast(dict[str, Any], self.scope)[ACCOUNT] = self.account
        self._check_host()
        if self._retired:
            self.headers.append(_CLOSE)  # as if the client had asked for it
        if not self._upgrades:
            super().on_headers_complete()
            cycles = self._cycles = self._cycles or deque()
            while cycles and cycles[0].response_complete:  # they are answered in order
                cycles.popleft()
            cycles.append(self.cycle)
            if self._retired:  # newer versions of uvicorn consult the parser, not the headers
                self.cycle.keep_alive = False

    def _check_host(self) -> None:
        """Refuse a head whose host other servers could interpret differently."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or not (hosts or self.parser.get_http_version() == "1.0"):
            self._refuse_head(400, f"a request has one Host header, got {len(hosts)}")

    def _refuse_head(self, status: int, text: str) -> NoReturn:
        self._fault = status, text
        raise ValueError(text)  # the parser turns it into a refusal

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_LIMIT:
            self._refuse_head(414, f"a request's path and query may have {URL_LIMIT} bytes")

    def on_message_complete(self) -> None:
        self._in_message = False
        if not self._upgrades:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._touched = self.loop.time()
        super().on_response_complete()
        self.count_waiting()
        self._go_on()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer behind a chunked body, which is ignored
            self._head_size += len(name) + len(value)
            if self._head_size > HEAD_LIMIT:
                raise ValueError("too many trailers")  # the parser turns it into a refusal
            return
        if self._rules is not None and self._rules.pattern is not None:
            scope: dict[str, Any] = cast(dict[str, Any], self.scope)
            scope.setdefault(NAMES, []).append((name, value))
        super().on_header(name, value)

    def data_received(self, data: bytes, position: int = 0) -> None:
        """Parse received bytes from `position` on, until a request waits for an earlier one.

        A read may have thousands of requests: they are parsed as they are answered. It may have
        a body in thousands of chunks: others have their turn in between.
        """
        if self._held:
            self._held += data  # one piece may still arrive after reading was paused
            return
        size, left = len(data), self._admission.turns.begin(self.loop)
        while position < size and not self.transport.is_closing():
            if self.pipeline:
                self._hold(data, position)
                return
            if left <= 0:
                self._hold(data, position)
                self._admission.turns.put_off(self._go_on)
                return
            if self._in_message and not self._in_head:
                # Heads may follow it, behind these bytes if it comes in chunks.
                found = data.find(_END, position, position + _BODY)
                stop = position + _BODY if found < 0 else found + len(_END)
                left -= 1 + (stop - position) * _PART_UNITS // _BODY
            else:
                # A whole head, since an upgrade is removed from whole ones only.
                end = data.find(_END, position, position + HEAD_LIMIT) + len(_END)
                stop = max(position + _HEADS, end)
                left -= _PART_UNITS
            self._parse(data[position:stop])
            position = stop

    def _let_others(self, nbytes: int) -> None:
        """Read on in a turn of its own, after `nbytes` of a body.

        A transport reads up to 32 times in a turn, 8 MB for each connection.
        """
        if nbytes >= _LONG_READ and not self.transport.is_closing():
            self.transport.pause_reading()
            self._admission.turns.read_later(self._read_on)

    def _read_on(self) -> None:
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _hold(self, data: bytes, position: int) -> None:
        """Process received bytes from `position` on later."""
        self._held, self._held_at = data, position
        self._touched = self.loop.time()
        self.flow.hold(True)
        self.count_waiting()

    def _may_go_on(self) -> bool:
        return bool(self._held) and not (self.flow.write_paused or self.transport.is_closing())

    def _go_on(self) -> None:
        """Process held bytes if any of them can be processed now."""
        if self._may_go_on():
            data, self._held = self._held, b""
            self.data_received(data, self._held_at)
            if not self._held:
                self.flow.hold(False)
                self.count_waiting()

    def _parse(self, data: bytes) -> None:
        continued = self._in_head
        if not continued:
            # The clock of a head is not reset: it has to arrive in time as a whole.
            self._touched = self.loop.time()
        if not self._in_message:
            data = without_upgrade(data)
        self._message_size += len(data)
        super().data_received(data)
        if self._in_head and not continued:
            self._message_size = min(len(data), HEAD_LIMIT)  # upper bound of this head's part
        if self._upgrades:
            self.refuse(400, "the protocol of a connection cannot be changed")
            return
        if continued and self._in_head:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT and not self.transport.is_closing():
                self.refuse(431, f"the request line and headers exceed {HEAD_LIMIT} bytes")
        self.count_waiting()

    def send_400_response(self, msg: str) -> None:
        status, text = self._fault
        self.refuse(status, text or msg)

    def refuse(self, status: int, text: str, counted: bool = True) -> None:
        """Answer an invalid request, and close the connection."""
        if counted and not self.answering:  # the application counts its own
            self._admission.answers.of("http", OTHER)[status] += 1
        body = error_body(text)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
        )
        self._hang_up()


def without_upgrade(data: bytes) -> bytes:
    """Remove an upgrade request from the head at the start of `data`."""
    end = data.find(_END)
    if end < 0 or not _UPGRADE.search(data, 0, end + 2):
        return data
    return _UPGRADE.sub(b"", data[: end + 2]) + data[end + 2 :]


def log_access(
    client: str, method: str, path: str, status: int, begun: float, more: Mapping[str, str]
) -> None:
    """Write the access log line of a request that began at `begun`, by `perf_counter`."""
    fields: dict[str, object] = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round((perf_counter() - begun) * 1_000, 3),
    }
    access.info(
        "%(client)s %(method)s %(path)s %(status)s %(duration_ms)s ms",
        fields,
        extra={**fields, **more},
    )
