"""A worker process as its parent sees it: started and asked on a thread, then on the event loop.

Loading may take minutes, so `start` and `ask` block and are for a loading thread. From `attach` on
the event loop owns it.
"""

import array
import asyncio
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.core.errors import LoadFailed
from headrace.execution.worker_output import WorkerOutput
from headrace.execution.worker_spec import WorkerSpec
from headrace.workers.elements import Buffer
from headrace.workers.frames import (
    IN_FILE,
    INLINE,
    KEPT,
    MAX_TOLD,
    NEW_FILE,
    BrokenFrame,
    FrameReader,
    Header,
    Kind,
    frame,
    pack_header,
)
from headrace.workers.memory import InFile, OutFile, descriptors

log = logging.getLogger(__name__)

_PACKAGES = Path(__file__).parents[1]
# The package without what its root imports, and without whatever else lies beside it: the worker
# may belong to another environment. Nothing is imported from the working directory.
_BOOT = (
    "import sys,types;"
    "sys.path[:]=[p for p in sys.path if p];"
    "m=types.ModuleType('headrace');m.__path__=[sys.argv[2]];sys.modules['headrace']=m;"
    "from headrace.workers.main import main;main(int(sys.argv[1]))"
)
_READ = 256 << 10
_SPACE = socket.CMSG_SPACE(4 * 16)
_LAST_READS = 64  # of what a worker has left behind
_PENDING = 4  # files that may have come before their frames
_STOP_SECS = 5.0
Take = Callable[[Header, bytes, Buffer], None]


class WorkerProcess:
    """One process, from its start to its end."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Start the process; raises `LoadFailed`."""
        self.spec = spec
        opened: list[int] = []
        try:
            ours, theirs = (end.detach() for end in socket.socketpair())
            opened += (ours, theirs)
            output, theirs_output = os.pipe()
            opened += (output, theirs_output)
            self._process = subprocess.Popen(
                [spec.python, "-c", _BOOT, str(theirs), str(_PACKAGES)],
                stdin=subprocess.DEVNULL,
                stdout=theirs_output,
                stderr=theirs_output,
                pass_fds=(theirs,),
                env=spec.environment(),
                process_group=0,
            )
            self._watch = os.pidfd_open(self._process.pid)
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            raise LoadFailed(f"cannot start {spec.python}: {error.strerror}") from error
        os.close(theirs)
        os.close(theirs_output)
        self._sock = socket.socket(fileno=ours)
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        os.set_blocking(output, False)
        self._output = WorkerOutput(output, spec, self._process.pid)
        self._frames = FrameReader(MAX_TOLD)
        self._descriptors: deque[int] = deque()
        self._in: dict[int, InFile] = {}
        self._out: dict[int, OutFile] = {}
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._on_exit: Callable[[str], None] | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self.ended = False
        self._given_up = False

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    # --- on a loading thread

    def ask(self, kind: Kind, document: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a question and wait for its answer.

        Raises `LoadFailed`, after which the process has ended, if it says that it failed, ends, or
        takes longer than `timeout` seconds.
        """
        try:
            self._sock.sendall(frame(kind, json.dumps(document).encode()))
            return self._await_answer(monotonic() + timeout)
        except Exception as error:  # reading nonsense may raise anything
            self.kill()
            if isinstance(error, LoadFailed):
                raise
            problem = "cannot be reached" if isinstance(error, OSError) else "sent nonsense"
            raise LoadFailed(f"the worker {problem}: {error}") from error

    def _await_answer(self, deadline: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._output.descriptor, selectors.EVENT_READ)
            while (left := deadline - monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is not self._sock:
                        self._output.read()
                        if self._output.ended:
                            selector.unregister(self._output.descriptor)
                        continue
                    data = self._sock.recv(_READ)
                    if not data:
                        raise LoadFailed(f"the worker {self._describe_end()}")
                    answers: list[dict[str, Any]] = []
                    for header, meta, _ in self._frames.feed(data):
                        if header.kind is Kind.LOG:
                            self._log(meta)
                        else:
                            answers.append(self._answer(header.kind, meta))
                    if answers:
                        return answers[0]
        raise LoadFailed("the worker did not answer in time")

    def _answer(self, kind: Kind, meta: bytes) -> dict[str, Any]:
        """What a worker has answered; raises `LoadFailed` if that is a failure."""
        answer = json.loads(meta)
        if kind is Kind.FAILED:
            log.error("%s", answer["traceback"].rstrip(), extra=self._fields())
            raise LoadFailed(str(answer["text"]))
        return dict(answer or {})

    def _describe_end(self) -> str:
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        for _ in range(_LAST_READS):
            if not self._output.read():
                break
        return _describe(status)

    def kill(self) -> None:
        """End the process, and those that it has started, without waiting for what they do."""
        if self.ended:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._loop is None:
            self.ended = True
            self._process.wait()
            os.close(self._watch)
            self._close()

    # --- on the event loop

    def attach(
        self, loop: asyncio.AbstractEventLoop, take: Take, on_exit: Callable[[str], None]
    ) -> None:
        """From now on hand frames to `take`, and say to `on_exit`, once, how the process ended."""
        self._loop = loop
        self._take = take
        self._on_exit = on_exit
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._receive)
        loop.add_reader(self._output.descriptor, self._on_output)
        loop.add_reader(self._watch, self._on_ended)

    def send(self, kind: Kind, meta: bytes = b"") -> None:
        """Send a frame without data."""
        self._write(frame(kind, meta), -1)

    def send_data(
        self, kind: Kind, slot: int, meta: bytes, pieces: Sequence[Buffer], size: int
    ) -> None:
        """Send a frame with data, which are written or copied before this returns.

        Raises `OSError` if there is no memory for them.
        """
        flags = KEPT if slot in self._in and self._in[slot].in_use else 0
        if size <= INLINE:
            head = pack_header(kind, flags, slot, len(meta), size)
            self._write(b"".join([head, meta, *pieces]), -1)
            return
        file = self._out.get(slot)
        if file is None:
            file = self._out[slot] = OutFile()
        descriptor = file.write(pieces, size)
        flags |= IN_FILE | (NEW_FILE if descriptor >= 0 else 0)
        head = pack_header(kind, flags, slot, len(meta), size) + meta
        try:
            # The file may be replaced before what waits is sent.
            self._write(head, os.dup(descriptor) if descriptor >= 0 else -1)
        except OSError:
            file.close()  # the worker has not got it
            raise

    def stop(self) -> None:
        """Have it finish and end; it is killed if that takes long."""
        if self._loop is not None and not self.ended:
            self.send(Kind.STOP)
            self._kill_timer = self._loop.call_later(_STOP_SECS, self.kill)

    def _write(self, data: bytes, descriptor: int) -> None:
        """Send a frame as soon as it can go, with an open file, which is closed then."""
        if self.ended:
            if descriptor >= 0:
                os.close(descriptor)
            return
        self._unsent.append((memoryview(data), descriptor))
        if len(self._unsent) == 1:
            self._flush()
            if self._unsent:
                assert self._loop is not None
                self._loop.add_writer(self._sock, self._on_writable)

    def _send_some(self, data: Buffer, descriptor: int) -> int:
        try:
            if descriptor < 0:
                return self._sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self._sock.sendmsg([data], [rights])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._give_up(f"cannot be written to: {error}")
            return len(data)

    def _flush(self) -> None:
        """Send of what waits as much as can go now."""
        while self._unsent:
            data, descriptor = self._unsent[0]
            sent = self._send_some(data, descriptor)
            if sent and descriptor >= 0:
                os.close(descriptor)
                descriptor = -1
            if sent < len(data):
                self._unsent[0] = (data[sent:], descriptor)
                return
            self._unsent.popleft()

    def _on_writable(self) -> None:
        self._flush()
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._sock)

    def _receive(self) -> bool:
        """Take in what has come; whether there may be more."""
        if self._given_up:
            return False
        try:
            data, control, _, _ = self._sock.recvmsg(_READ, _SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            data, control = b"", []
        self._descriptors.extend(descriptors(control))
        if not data or len(self._descriptors) > _PENDING:
            self._give_up("sent too many files" if data else "closed its socket")
            return False
        try:
            for header, meta, content in self._frames.feed(data):
                self._hand_on(header, meta, content)
        except Exception as error:  # what reading nonsense may raise, or a bug of ours
            level = logging.DEBUG if isinstance(error, BrokenFrame) else logging.ERROR
            log.log(level, "worker %d sent what makes no sense", self.pid, exc_info=error,
                    extra=self._fields())  # fmt: skip
            self._give_up(f"sent what makes no sense ({type(error).__name__}: {error})")
        return not self._given_up

    def _hand_on(self, header: Header, meta: bytes, content: Buffer) -> None:
        if self._take is None:
            return
        if header.kind is Kind.LOG:
            self._log(meta)
            return
        if header.flags & KEPT and header.slot in self._out:
            self._out[header.slot].retired = True
        if header.flags & NEW_FILE:
            file = self._in[header.slot] = InFile()
            file.map(self._descriptors.popleft())
        if header.flags & IN_FILE:
            mapped = self._in[header.slot].bytes
            if mapped is None or len(mapped) < header.data:
                raise BrokenFrame("data beyond its file")
            content = mapped.data
        self._take(header, meta, content)

    def _give_up(self, reason: str) -> None:
        """It is of no more use: end it, and say so."""
        if self.ended or self._given_up or self._loop is None:
            return
        self._given_up = True
        self._loop.remove_reader(self._sock)
        self.kill()
        log.debug("worker %d %s", self.pid, reason, extra=self._fields())

    def _on_output(self) -> None:
        self._output.read()
        if self._output.ended and self._loop is not None:
            self._loop.remove_reader(self._output.descriptor)

    def _on_ended(self) -> None:
        assert self._loop is not None
        self.kill()  # what it has started does not outlive it; before its number is free again
        status = self._process.wait()
        for _ in range(_LAST_READS):  # what it has sent last
            if not self._receive():
                break
        for _ in range(_LAST_READS):
            if not self._output.read():
                break
        self.ended = True
        for source in (self._sock, self._output.descriptor, self._watch):
            self._loop.remove_reader(source)
        self._loop.remove_writer(self._sock)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        os.close(self._watch)
        self._close()
        on_exit, self._on_exit, self._take = self._on_exit, None, None
        if on_exit is not None:
            on_exit(_describe(status))

    def _close(self) -> None:
        self._sock.close()
        os.close(self._output.descriptor)
        for file in self._out.values():
            file.close()
        for descriptor in (*self._descriptors, *(d for _, d in self._unsent if d >= 0)):
            os.close(descriptor)
        self._out.clear()
        self._in.clear()
        self._descriptors.clear()
        self._unsent.clear()

    def _log(self, meta: bytes) -> None:
        level, name, text = json.loads(meta)
        self._output.note(
            int(level), f"{str(name)[:80]}: {text}" if name != "triton" else str(text)
        )

    def _fields(self) -> dict[str, object]:
        return self._output.fields


def _describe(status: int) -> str:
    """How a process ended, by its status."""
    if status < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
