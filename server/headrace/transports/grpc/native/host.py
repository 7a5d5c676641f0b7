"""What all connections of a server share."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.engine.admission import Admission, ConnectionAccount
from headrace.transports.grpc.access import UNIMPLEMENTED
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.categories import operation_of, without_key
from headrace.transports.grpc.native.head import CallHead, preferred, read_head, refusal
from headrace.transports.grpc.native.infer import InferRpc
from headrace.transports.grpc.native.rpc import RefusedRpc, Rpc
from headrace.transports.grpc.native.sessions import SessionRpc
from headrace.transports.grpc.native.tasks import BidiStreamRpc, ServerStreamRpc, TaskRpc
from headrace.transports.grpc.options import INFERENCE, LEVELS, GrpcOptions
from headrace.wire.compression import DEFAULT_LEVEL
from headrace.wire.http2.block_reader import Headers
from headrace.wire.http2.budget import Limits
from headrace.wire.status import STATUS

if TYPE_CHECKING:
    from headrace.transports.grpc.native.link import Link

# Bytes read of one connection before others have their turn: with 256 KiB, 20 clients of long
# messages held health up for 0.2 s.
_BUFFER = 64 << 10


class Host:
    """Handlers, limits, and what is to be written at the end of this turn of the loop."""

    def __init__(
        self,
        handlers: Handlers,
        admission: Admission,
        max_message: int,
        access_log: bool,
        options: GrpcOptions,
        limits: Limits,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.admission = admission
        self.nobody = ConnectionAccount(admission, "")  # for connections that are not taken
        self.max_message = max_message
        self.access_log = access_log
        self.limits = limits
        self.keep_alive = options.keep_alive
        self.patience_secs = options.patience_secs
        self.idle_secs = options.idle_secs
        self._level = LEVELS[options.compression]
        # Where the client decides, by what it does itself, a level that pays on tensors.
        self.compression_level = self._level or DEFAULT_LEVEL
        # Calls that only their client ends. What they wait for holds nobody up at a stop.
        self.endless: set[Rpc] = set()
        # Received bytes are here only while they are being taken in, so one is enough for all.
        self.buffer = memoryview(bytearray(_BUFFER))
        self.links: set[Link] = set()  # connections
        self.draining = False  # no call is to come any more
        self.on_empty: Callable[[], object] | None = None  # called when the last one has closed
        self._dirty: list[Callable[[], None]] = []
        self._keys = handlers.keys
        self._procedures: dict[str, tuple[type[Rpc], object]] = {}
        for kind, table in (
            (InferRpc, handlers.direct),
            (TaskRpc, handlers.unary),
            (ServerStreamRpc, handlers.server_stream),
            (BidiStreamRpc, handlers.bidi_stream),
            (SessionRpc, handlers.sessions),
        ):
            for path, handler in table.items():
                self._procedures[path] = (kind, handler)

    def interpret(self, link: "Link", headers: Headers) -> CallHead:
        """The head of a call, with who handles it; raises `StreamFailure`."""
        head = read_head(headers)
        head.answers = self.admission.answers.of("grpc", operation_of(head.path))
        head.link = link
        head.kind, head.handler = self._procedures.get(head.path, (RefusedRpc, None))
        if self._level and head.path in INFERENCE:
            head.packing = head.packing or preferred(head.accepts)
        if head.refusal is not None:
            head.kind = RefusedRpc
        elif head.handler is None:
            head.refusal = refusal(UNIMPLEMENTED, f"unknown method {head.path[:200]}")
        elif (key := self._keys.get(head.path)) is not None:
            error = without_key(key, head.metadata)
            if error is not None:
                head.kind = RefusedRpc
                head.refusal = refusal(STATUS[type(error)].grpc, str(error))
        return head

    def lost(self, link: "Link") -> None:
        """A connection has closed: what it would still write goes nowhere."""
        self.links.discard(link)
        with suppress(ValueError):
            self._dirty.remove(link.flush)
        if not self.links and self.on_empty is not None:
            self.on_empty()

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Call `flush` at the end of this turn of the loop."""
        self._dirty.append(flush)
        if len(self._dirty) == 1:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for flush in dirty:
            flush()
