"""Server calls of processes that a model forks, relayed by the worker.

Only the worker uses the socket to the server. Each fork creates a pair of sockets: the child has a
session on one end, and a thread of the worker serves the other until it is closed. A child that
forks does the same for its own children.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headrace.ipc.elements import Buffer
from headrace.ipc.frames import FrameKind, offsets
from headrace.workers.channel import WorkerChannel
from headrace.workers.session import NOT_NOW, Session
from headrace.workers.triton_calls import ServerCall
from headrace.workers.triton_requests import TritonError, connect
from headrace.workers.triton_tensors import TritonModelException


class Forks:
    """Gives every forked child a session; see `register`."""

    def __init__(
        self,
        link: WorkerChannel,
        session: Callable[[], Session | None],
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`session` returns this process's, once it has one; `tell` receives metric updates."""
        self._link = link
        self._session = session
        self._tell = tell
        self._children: set[socket.socket] = set()
        self._pair = threading.local()  # the pair for the fork in progress on a thread

    def register(self) -> None:
        """Handle every fork from now on."""
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def _before(self) -> None:
        self._pair.ends = None  # without descriptors, the child has no session
        self._pair.ends = socket.socketpair()

    def _in_parent(self) -> None:
        if self._pair.ends is None:
            return
        ours, theirs = self._pair.ends
        theirs.close()
        self._children.add(ours)
        child = _Child(ours, self._session, self._tell, self._children.discard)
        threading.Thread(target=child.serve, name="forked", daemon=True).start()

    def _in_child(self) -> None:
        self._link.disown()
        for sock in self._children:
            sock.close()
        self._children.clear()
        connect(None)
        if self._pair.ends is None:
            return
        theirs, ours = self._pair.ends
        theirs.close()
        self._link = WorkerChannel(ours)
        session = Session(self._link, lambda form: None)
        session.open = True
        self._session, self._tell = (lambda: session), session.tell
        connect(session)


class _Child:
    """Relays one child's calls, each on a thread of its own."""

    def __init__(
        self,
        sock: socket.socket,
        session: Callable[[], Session | None],
        tell: Callable[[Mapping[str, Any]], None],
        on_end: Callable[[socket.socket], None],
    ) -> None:
        self._sock = sock
        self._link = WorkerChannel(sock)
        self._session = session
        self._tell = tell
        self._on_end = on_end
        self._calls: dict[int, ServerCall] = {}

    def serve(self) -> None:
        """Relay the calls of the child until it has ended."""
        with self._sock, suppress(OSError):
            while (received := self._link.receive()) is not None:
                for header, meta, data in received:
                    self._take(header.kind, json.loads(meta), data, header.data)
        self._on_end(self._sock)
        # Not only cancelled: a model whose responses wait for this child would wait for ever.
        for call in list(self._calls.values()):
            call.drop()

    def _take(self, kind: FrameKind, document: dict[str, Any], data: Buffer, size: int) -> None:
        if kind is FrameKind.CALL:
            number = document.pop("call")
            session = self._session()
            try:
                if session is None:
                    raise TritonModelException(NOT_NOW)
                call = session.begin(document, _blocks(document.pop("sizes"), data, size))
            except TritonModelException as error:
                told = TritonError.INTERNAL, str(error)
                failed = {"error": told, "response": {"error": told}}
                self._link.send_loose(
                    FrameKind.REPLY, {"call": number, "final": True, **failed}, []
                )
                return
            self._calls[number] = call
            threading.Thread(target=self._pass_on, args=(number, call), daemon=True).start()
        elif kind is FrameKind.DROP_CALL:
            dropped = self._calls.get(document["call"])
            if dropped is not None:
                stop = dropped.cancel if document["answers"] else dropped.drop
                stop()
        elif kind is FrameKind.METRIC:
            self._tell(document)

    def _pass_on(self, number: int, call: ServerCall) -> None:
        """Send the child all replies to a call; blocks while the child does not read."""
        with suppress(OSError):  # the child has ended
            while (reply := call.next()) is not None:
                told, data, size = reply
                blocks = _blocks(told["sizes"], data, size)
                self._link.send_loose(FrameKind.REPLY, {**told, "call": number}, blocks)
        call.drop()
        self._calls.pop(number, None)


def _blocks(sizes: list[int], data: Buffer, size: int) -> list[list[Buffer]]:
    view = memoryview(data)
    starts = offsets(sizes, size)
    return [[view[start : start + n]] for start, n in zip(starts, sizes, strict=True)]
