"""A worker process and its socket, on the server's side.

Loading may take minutes, so `start` and `ask` block and are for a loading thread. From `attach` on
the event loop owns it: frames are exchanged without blocking. Frames that cannot be sent at once
are queued here, with their open files. File contents are written, or copied, before a call returns,
and a file is reused only when the worker refers to nothing in it.
"""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from headrace import __version__
from headrace.core.daemon_thread import NoResources
from headrace.core.errors import Contradiction, LoadFailed
from headrace.core.turns import PIECE_SECS
from headrace.ipc.elements import Buffer
from headrace.ipc.frame_socket import CLOEXEC, READ, SPACE, FilesLost, FrameSocket, Received
from headrace.ipc.frames import (
    ANSWERS,
    IN_FILE,
    INLINE,
    LOG,
    MAX_SLOTS,
    MAX_TOLD,
    NEW_FILE,
    PLACED,
    BrokenFrame,
    FrameKind,
    FrameReader,
    Header,
    as_json,
    frame,
    pack_header,
    pack_numbers,
    told_frame,
)
from headrace.ipc.memory import BatchFiles, write_file
from headrace.observability.machine import resident_bytes
from headrace.observability.statistics import EndKind
from headrace.placement.child_process import ChildProcess, ProcessOutput
from headrace.placement.scratch import Scratch
from headrace.placement.worker.python_options import WorkerSpec
from headrace.workers.heartbeat import Heartbeat
from headrace.workers.limits import WorkerLimits

log = logging.getLogger(__name__)

CLOSED = "closed its socket"
_REST_SECS = 10.0  # without large batches after which a slot's files release their memory
_MOST_TOGETHER = 32  # frames sent together
_PENDING = 4  # files that may arrive before their frames
Take = Callable[[Header[FrameKind], bytes, Buffer], None]


class WorkerSocket:
    """Frames to and from one worker."""

    def __init__(
        self,
        descriptor: int,
        log: Callable[[bytes], None],
        lost: Callable[[str, Exception | None], None],
    ) -> None:
        """`log` receives the meta of LOG; `lost` is called when the worker is unusable."""
        self.socket = FrameSocket(socket.socket(fileno=descriptor))
        self._feed = FrameReader(FrameKind, MAX_TOLD, MAX_SLOTS).feed
        self.sock = self.socket.sock
        self.closed = False
        self.on_empty: Callable[[], None] = _nothing  # called when no frames are queued
        self._log, self._lost = log, lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._reading = False
        self._later: Iterator[Received] | None = None  # frames left for the next turn of the loop
        self._files = BatchFiles(ANSWERS)
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self._together: list[bytes] = []  # frames that are sent at the end of the loop's turn
        self._resting: asyncio.TimerHandle | None = None

    @property
    def unsent(self) -> int:
        """The number of queued frames."""
        return len(self._unsent)

    def attach(self, loop: asyncio.AbstractEventLoop, take: Take) -> None:
        """Read on the event loop, and pass frames to `take`."""
        self._loop = loop
        self._take = take
        self.sock.setblocking(False)
        self._reading = True
        loop.add_reader(self.sock, self.receive)
        if self._later is not None:
            self._put_off(self._later)
        if self._unsent:
            loop.add_writer(self.sock, self._on_writable)

    def detach(self) -> None:
        """Detach from the event loop; frames that arrive wait for the next one."""
        self.give_up()
        self._write_together()
        self._stop_resting()
        if self._loop is not None:
            self._loop.remove_writer(self.sock)
        self._loop = self._take = None

    def give_up(self) -> None:
        """Stop receiving."""
        if self._reading and self._loop is not None:
            self._reading = False
            self._loop.remove_reader(self.sock)

    def send(self, kind: FrameKind, meta: bytes = b"") -> None:
        """Send a frame without data."""
        self._write(frame(kind, meta), -1)

    def send_data(
        self, kind: FrameKind, slot: int, meta: bytes, pieces: Sequence[Buffer], size: int
    ) -> None:
        """Send a frame with data, which is written or copied before this returns.

        Raises `OSError` without enough memory.
        """
        known = self._files.slots.get(slot)
        flags = known.used() if known is not None else 0
        if size <= INLINE:
            head, file = pack_header(kind, flags, slot, len(meta), size), -1
            data = b"".join([head, meta, *pieces])
        else:
            where, file = self._files.put(slot, pieces, size)
            data = pack_header(kind, flags | where, slot, len(meta), size) + meta
            known = self._files.slots.get(slot)
            self._rest_later()
        if known is not None:
            known.lend()
        sent = 0
        if file < 0 and not self._unsent:  # the usual case
            try:
                sent = self.sock.send(data)
            except OSError:
                sent = 0  # tried again, and then reported
        if sent < len(data):
            self._write(memoryview(data)[sent:], file)

    def send_placed(self, kind: FrameKind, slot: int, meta: bytes) -> None:
        """Send a frame whose data is in shared blocks, as its meta says."""
        known = self._files.slots.get(slot)
        flags = PLACED
        if known is not None:
            flags |= known.used()
            known.lend()
        self._write(pack_header(kind, flags, slot, len(meta), 0) + meta, -1)

    def share(self, number: int, descriptor: int, size: int) -> None:
        """Let the worker map a block of shared memory; the descriptor is duplicated."""
        header = pack_header(FrameKind.SHARED, IN_FILE | NEW_FILE, number, 0, size)
        self._write(header, os.dup(descriptor))

    def unshare(self, numbers: Sequence[int]) -> None:
        """Let the worker forget blocks of shared memory."""
        self.send(FrameKind.DROP_SHARED, pack_numbers(numbers))

    def _rest_later(self) -> None:
        """Schedule a check for slots that no longer use their files' memory."""
        if self._resting is None and self._loop is not None:
            self._resting = self._loop.call_later(_REST_SECS, self._rest)

    def _rest(self) -> None:
        self._resting = None
        if self._files.rest():
            self._rest_later()

    def _stop_resting(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def send_loose(
        self, kind: FrameKind, document: dict[str, Any], blocks: Sequence[Sequence[Buffer]],
        encode: Callable[[object], bytes] = as_json,
    ) -> None:  # fmt: skip
        """Send a frame whose data, of the sizes in its meta, belongs to no slot.

        Small ones of one turn of the event loop are sent together at its end: a worker that waits
        for several is woken once, which takes 3 times less than for each. Raises `OSError` without
        enough memory.
        """
        told, pieces, size = told_frame(kind, document, blocks, encode=encode)
        if size or self._loop is None:
            descriptor = write_file(pieces, size) if size else -1
            self._write_together()
            self._write(told, descriptor)
            return
        self._together.append(told)
        if len(self._together) == 1:
            self._loop.call_soon(self._write_together)
        elif len(self._together) >= _MOST_TOGETHER:
            self._write_together()

    def _write_together(self) -> None:
        """Send the small frames of this turn of the event loop."""
        if self._together:
            data, self._together = b"".join(self._together), []
            self._write(data, -1)

    def _write(self, data: bytes | memoryview, descriptor: int) -> None:
        """Send or queue a frame, with an open file, which is closed afterwards."""
        if self.closed:
            if descriptor >= 0:
                os.close(descriptor)
            return
        self._unsent.append((memoryview(data), descriptor))
        if len(self._unsent) == 1:
            self._flush()
            if self._unsent:
                assert self._loop is not None
                self._loop.add_writer(self.sock, self._on_writable)

    def _send_some(self, data: Buffer, descriptor: int) -> int:
        try:
            return self.socket.send(data, [descriptor] if descriptor >= 0 else ())
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)  # the worker has ended: its last frames are still to be read
        except OSError as error:
            self._lost(f"cannot be written to: {error}", None)
            return len(data)

    def _flush(self) -> None:
        """Send as many queued frames as possible."""
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
            self._loop.remove_writer(self.sock)
            self.on_empty()

    def receive(self) -> bool:
        """Process received bytes; returns True if there may be more.

        A worker may send thousands of small frames at once: lines for the log, or responses. What
        takes longer than `PIECE_SECS` waits for a later turn of the event loop.
        """
        if not self._reading:
            return False
        files, until = self.socket.files, perf_counter() + PIECE_SECS
        try:
            if self._later is not None:
                frames, self._later = self._later, None
            else:
                received, control, told, _ = self.sock.recvmsg(READ, SPACE, CLOEXEC)
                if control or told != CLOEXEC:
                    self.socket.keep(control, told)
                if not received or len(files) > _PENDING:
                    lies = BrokenFrame("too many files") if received else None
                    self._lost("sent too many files" if lies else CLOSED, lies)
                    return False
                frames = iter(self._feed(received))
            for header, meta, data in frames:
                if header.flags or header.number in self._files.slots:
                    data = self._files.data(header, self._files.take(header, data, files))
                    if header.flags:
                        self._rest_later()
                if header.kind is LOG:
                    self._log(meta)
                elif self._take is not None:
                    self._take(header, meta, data)
                if perf_counter() > until:
                    self._put_off(frames)
                    break
        except BlockingIOError:
            return False
        except FilesLost:
            self._lost("has sent a file that the server has no descriptor left for", None)
            return False
        except ConnectionError:
            self._lost(CLOSED, None)
            return False
        except Exception as error:  # from a malformed frame, or a bug
            self._lost(f"sent an invalid message ({type(error).__name__}: {error})", error)
        return self._reading

    def _put_off(self, frames: Iterator[Received]) -> None:
        """Leave frames for the next turn of the event loop, and read nothing until then."""
        self._later = frames
        if self._loop is not None:
            self._loop.remove_reader(self.sock)
            self._loop.call_soon(self._go_on, self._loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:  # detached meanwhile
            return
        if self._later is not None:
            self.receive()
        if self._later is None and self._reading:
            loop.add_reader(self.sock, self.receive)

    def close(self) -> None:
        """Close the socket and all files."""
        self.closed = True
        self._stop_resting()
        if self._loop is not None:
            self.give_up()
            self._loop.remove_writer(self.sock)
        self.socket.close()
        self._files.close()
        for _, descriptor in self._unsent:
            if descriptor >= 0:
                os.close(descriptor)
        self._unsent.clear()
        self._take = None


def _nothing() -> None:
    pass


_PACKAGES = Path(__file__).parents[2]
# Imports the package without its root module's imports, and nothing else from its directory: the
# worker may belong to another environment. Nothing is imported from the working directory. Limits
# are set and heartbeats start before anything large is imported.
_BOOT = (
    "import sys,types;"
    "given=sys.argv[1:];sys.argv[:]=[''];"  # as in Triton: models may read the command line
    "sys.path[:]=[p for p in sys.path if p];"
    "m=types.ModuleType('headrace');m.__path__=[given[1]];m.__version__=given[4];sys.modules['headrace']=m;"
    "from headrace.workers.lifeline import end_with_server;end_with_server();"
    "from headrace.workers.limits import apply_limits;apply_limits(given[3]);"
    "from headrace.workers.heartbeat import beat;beat(int(given[2]));"
    "from headrace.workers.main import main;main(int(given[0]))"
)


def command(python: str, socket: int, heartbeat: int, limits: WorkerLimits | None) -> list[str]:
    """The command line; `socket` and `heartbeat` are inherited descriptors."""
    limited = "" if limits is None else limits.encode()
    given = str(socket), str(_PACKAGES), str(heartbeat), limited, __version__
    return [python, "-c", _BOOT, *given]


_LAST_READS = 256  # pieces of an ended worker's last frames
_STOP_SECS = 5.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class WorkerProcess:
    """One worker process, from its start to its end."""

    def __init__(self, spec: WorkerSpec, deadline: float = inf) -> None:
        """Start the process, which may take until `deadline` to answer; raises `LoadFailed`."""
        self.spec = spec
        self._begun = monotonic()
        self.start_secs = 0.0  # duration of the start, until `attach`
        self._deadline = deadline
        fields = {"model": spec.model, "version": spec.version}
        self._output = ProcessOutput("", fields)
        confinement = spec.confinement
        with ExitStack() as ours, ExitStack() as theirs:
            try:
                own, other = (end.detach() for end in socket.socketpair())
                ours.callback(os.close, own)
                theirs.callback(os.close, other)
                self._heartbeat = Heartbeat()
                ours.callback(self._heartbeat.close)
                beats = self._heartbeat.descriptor
                theirs.callback(os.close, beats)
                limits = spec.limits if confinement is None else None
                self._child = ChildProcess(
                    command(spec.python, other, beats, limits), spec.environment(), self._output,
                    descriptors=(other, beats), lifeline=True, confinement=confinement,
                )  # fmt: skip
            except OSError as error:
                kind = NoResources if error.errno in _EXHAUSTED else LoadFailed
                program = error.filename or spec.python
                user = confinement.user if confinement is not None else None
                whose = f" as user {user.name!r}" if user is not None else ""
                if isinstance(error, PermissionError) and whose:
                    whose += ", who must be able to reach and execute it"
                raise kind(f"cannot start {program}{whose}: {error.strerror}") from error
            ours.pop_all()
        # The scheduler must not preempt the server in favour of a worker that it wakes: the server
        # continues with other work first. Where this is not permitted it is merely slower.
        with suppress(OSError):
            os.sched_setscheduler(self.pid, os.SCHED_BATCH, os.sched_param(0))
        self._output.name = f"{spec.model} worker {self.pid}"
        self._output.fields["worker"] = self.pid
        self.link = WorkerSocket(own, self._log, self._give_up)
        self._early: list[tuple[Header[FrameKind], bytes]] = []  # frames kept for the next owner
        self._take: Take | None = None
        self._on_exit: Callable[[str], None] | None = None
        self.ended = False
        self.end_kind = EndKind.EXIT  # the kind of its end
        self.killed = False  # ended by SIGKILL, from whomever
        self._given_up = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def scratch(self) -> Scratch | None:
        """The scratch directory of a confined process."""
        return self._child.scratch

    @property
    def beats(self) -> int:
        """The number of heartbeats so far."""
        return self._heartbeat.count

    @property
    def patience(self) -> float | None:
        """Seconds that the start may still take; None for no limit."""
        return None if self._deadline == inf else self._deadline - monotonic()

    def resident(self) -> int:
        """Bytes of memory in use, including shared memory; 0 if it has ended."""
        return 0 if self.ended else resident_bytes(self.pid)

    def answer(self, kind: FrameKind, meta: bytes) -> dict[str, Any]:
        """The answer of the worker; raises `LoadFailed` if it is a failure."""
        answer = json.loads(meta)
        if kind is FrameKind.FAILED:
            if answer["problems"]:
                raise Contradiction([(str(path), str(text)) for path, text in answer["problems"]])
            self.note(logging.ERROR, str(answer["text"]), str(answer["traceback"]))
            raise LoadFailed(str(answer["text"]))
        return dict(answer or {})

    def kill(self) -> None:
        """Kill the process and its descendants; without an event loop, wait for the end."""
        if not self._child.ended and self._child.kill():
            self._close()

    def attach(
        self, loop: asyncio.AbstractEventLoop, take: Take, on_exit: Callable[[str], None]
    ) -> None:
        """Pass frames to `take`, and call `on_exit`, once, with a description of the end."""
        self._take, self._on_exit = take, on_exit
        self.start_secs = monotonic() - self._begun
        early, self._early = self._early, []
        for header, meta in early:
            take(header, meta, b"")
        self.link.attach(loop, take)
        self._child.attach(loop, self._on_ended)

    def detach(self) -> None:
        """Detach from the event loop; call it on that loop."""
        if not self.ended:
            self._child.detach()
            self.link.detach()
        self._take = self._on_exit = None

    def keep(self, header: Header[FrameKind], meta: bytes) -> None:
        """Keep a frame for the next owner, too."""
        self._early.append((header, meta))

    def send(self, kind: FrameKind, meta: bytes = b"") -> None:
        """Send a frame without data."""
        self.link.send(kind, meta)

    def stop(self) -> None:
        """Send STOP, which ends the process in order; it is killed if that takes too long."""
        if not self.ended:
            self.send(FrameKind.STOP)
            self._child.kill_after(_STOP_SECS)

    def _give_up(self, reason: str, error: Exception | None) -> None:
        """Kill an unusable process, and log the reason."""
        if self.ended or self._given_up or self._take is None:
            return
        self._given_up = True
        if error is not None:
            self.end_kind = EndKind.NONSENSE
        self.link.give_up()
        self.kill()
        # Malformed frames are the worker's fault, other errors bugs; a closed socket is only its
        # end.
        bug = None if isinstance(error, BrokenFrame) else error
        level = logging.DEBUG if reason == CLOSED else logging.ERROR
        log.log(level, "%s worker %d %s, and is killed", self.spec.model, self.pid, reason,
                exc_info=bug, extra=self._output.fields)  # fmt: skip

    def _on_ended(self) -> None:
        for _ in range(_LAST_READS):  # its last frames
            if not self.link.receive():
                break
        status = self._child.status
        if self.end_kind is not EndKind.NONSENSE and status < 0:
            self.end_kind = EndKind.SIGNAL
            self.killed = status == -signal.SIGKILL
        on_exit = self._on_exit
        self._close()
        if on_exit is not None:
            on_exit(self._child.end)

    def _close(self) -> None:
        self.ended = True
        self._take = self._on_exit = None
        self.link.close()
        self._heartbeat.close()

    def _log(self, meta: bytes) -> None:
        level, name, text = json.loads(meta)
        self._output.note(
            int(level), f"{str(name)[:80]}: {text}" if name != "triton" else str(text)
        )

    def note(self, level: int, text: str, trace: str = "", request_id: str = "") -> None:
        """Log something that the model has reported or done."""
        fields: dict[str, object] = {"request_id": request_id} if request_id else {}
        self._output.note(level, f"{text}\n{trace}" if trace else text, fields)
