"""A worker process as its parent sees it: started and asked on a thread, then on the event loop.

Loading may take minutes, so `start` and `ask` block and are for a loading thread. From `attach` on
the event loop owns it.
"""

import asyncio
import errno
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from headrace import __version__
from headrace.core.errors import Contradiction, LoadFailed
from headrace.execution.process_output import ProcessOutput
from headrace.execution.python_options import WorkerSpec
from headrace.execution.worker_socket import CLOSED, Take, WorkerSocket
from headrace.observability.machine import resident_bytes
from headrace.observability.statistics import EndKind
from headrace.workers.elements import Buffer
from headrace.workers.frames import BrokenFrame, Header, Kind, frame
from headrace.workers.heartbeat import Heartbeat
from headrace.workers.limits import Limits

_PACKAGES = Path(__file__).parents[1]
# The package without what its root imports, and without whatever else lies beside it: the worker
# may belong to another environment. Nothing is imported from the working directory. Limits are set
# and signs of life are given before anything large is imported.
_BOOT = (
    "import sys,types;"
    "given=sys.argv[1:];sys.argv[:]=[''];"  # as in Triton: models may read the command line
    "sys.path[:]=[p for p in sys.path if p];"
    "m=types.ModuleType('headrace');m.__path__=[given[1]];m.__version__=given[4];sys.modules['headrace']=m;"
    "from headrace.workers.limits import apply_limits;apply_limits(given[3]);"
    "from headrace.workers.heartbeat import beat;beat(int(given[2]));"
    "from headrace.workers.main import main;main(int(given[0]))"
)


def command(python: str, socket: int, heartbeat: int, limits: Limits) -> list[str]:
    """What to run; `socket` and `heartbeat` are descriptors that the process inherits."""
    given = str(socket), str(_PACKAGES), str(heartbeat), limits.encode(), __version__
    return [python, "-c", _BOOT, *given]


log = logging.getLogger(__name__)

_LAST_READS = 64  # of what a worker has left behind
_STOP_SECS = 5.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class NoResources(LoadFailed):
    """The system has no process, thread or descriptor for a worker.

    Which says nothing of its model.
    """


class WorkerProcess:
    """One process, from its start to its end."""

    def __init__(self, spec: WorkerSpec, deadline: float = inf) -> None:
        """Start the process, which may take until `deadline` for answers; raises `LoadFailed`."""
        self.spec = spec
        self._begun = monotonic()
        self.start_secs = 0.0  # that it has taken to be given to an event loop
        self._deadline = deadline
        opened: list[int] = []
        try:
            ours, theirs = (end.detach() for end in socket.socketpair())
            opened += (ours, theirs)
            output, theirs_output = os.pipe()
            opened += (output, theirs_output)
            self._heartbeat = Heartbeat()
            beats = self._heartbeat.descriptor
            opened.append(beats)
            self._process = subprocess.Popen(
                command(spec.python, theirs, beats, spec.limits),
                stdin=subprocess.DEVNULL,
                stdout=theirs_output,
                stderr=theirs_output,
                pass_fds=(theirs, beats),
                env=spec.environment(),
                process_group=0,
            )
            self._watch = os.pidfd_open(self._process.pid)
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            kind = NoResources if error.errno in _EXHAUSTED else LoadFailed
            raise kind(f"cannot start {spec.python}: {error.strerror}") from error
        for descriptor in (theirs, theirs_output, beats):
            os.close(descriptor)
        # A worker that wakes up does not take the core from whoever has woken it: the server goes
        # on with what else has come. Where that is not allowed it is merely slower.
        with suppress(OSError):
            os.sched_setscheduler(self._process.pid, os.SCHED_BATCH, os.sched_param(0))
        self.link = WorkerSocket(ours, self._give_up)
        os.set_blocking(output, False)
        self._output = ProcessOutput(
            output, f"{spec.model} worker {self.pid}",
            {"model": spec.model, "version": spec.version, "worker": self.pid},
        )  # fmt: skip
        self._early: list[tuple[Header[Kind], bytes]] = []  # frames for who is attached next
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._on_exit: Callable[[str], None] | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self.ended = False
        self.end_kind = EndKind.EXIT  # once it has ended
        self.killed = False  # it was ended by SIGKILL, whoever has sent that
        self._given_up = False

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def beats(self) -> int:
        """How often it has given a sign of life."""
        return self._heartbeat.count

    @property
    def patience(self) -> float | None:
        """For how many seconds it may still start; None for as long as it takes."""
        return None if self._deadline == inf else self._deadline - monotonic()

    def resident(self) -> int:
        """Bytes of memory that it has in use, shared ones counted; 0 if it has ended."""
        return 0 if self.ended else resident_bytes(self.pid)

    # --- on a loading thread

    def ask(self, kind: Kind, document: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a question and wait for its answer.

        Raises `LoadFailed`, after which the process has ended, if it says that it failed, ends, or
        takes longer than `timeout` seconds.
        """
        try:
            self.link.sock.sendall(frame(kind, json.dumps(document).encode()))
            return self._await_answer(min(monotonic() + timeout, self._deadline))
        except Exception as error:  # reading nonsense may raise anything
            end = self._describe_end() if isinstance(error, ConnectionError) else ""
            self.kill()
            if isinstance(error, LoadFailed):
                raise
            problem = "cannot be reached" if isinstance(error, OSError) else "sent nonsense"
            raise LoadFailed(f"the worker {end or f'{problem}: {error}'}") from error
        except KeyboardInterrupt:
            self.kill()
            raise

    def _await_answer(self, deadline: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self.link.sock, selectors.EVENT_READ)
            selector.register(self._output.descriptor, selectors.EVENT_READ)
            while (left := deadline - monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is not self.link.sock:
                        self._output.read()
                        if self._output.ended:
                            selector.unregister(self._output.descriptor)
                        continue
                    received = self.link.socket.receive()
                    if received is None:
                        raise LoadFailed(f"the worker {self._describe_end()}")
                    answers: list[dict[str, Any]] = []
                    for header, meta, _ in received:
                        if header.kind is Kind.LOG:
                            self._log(meta)
                        elif header.kind is Kind.METRIC:
                            self._early.append((header, meta))
                        else:
                            answers.append(self.answer(header.kind, meta))
                    if answers:
                        return answers[0]
        raise LoadFailed("the worker did not answer in time")

    def answer(self, kind: Kind, meta: bytes) -> dict[str, Any]:
        """What a worker has answered; raises `LoadFailed` if that is a failure."""
        answer = json.loads(meta)
        if kind is Kind.FAILED:
            if answer["problems"]:
                raise Contradiction([(str(path), str(text)) for path, text in answer["problems"]])
            self.note(logging.ERROR, str(answer["text"]), str(answer["traceback"]))
            raise LoadFailed(str(answer["text"]))
        return dict(answer or {})

    def _describe_end(self) -> str:
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return CLOSED
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
        self.start_secs = monotonic() - self._begun
        early, self._early = self._early, []
        for header, meta in early:
            take(header, meta, b"")
        self.link.attach(loop, self._hand_on)
        loop.add_reader(self._output.descriptor, self._on_output)
        loop.add_reader(self._watch, self._on_ended)

    def detach(self) -> None:
        """Belong to no event loop any more; to be called on the one that it belongs to."""
        if self._loop is not None and not self.ended:
            for source in (self._output.descriptor, self._watch):
                self._loop.remove_reader(source)
            self.link.detach()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._loop = self._take = self._on_exit = None

    def keep(self, header: Header[Kind], meta: bytes) -> None:
        """Hand a frame to whom the process is attached to next, too."""
        self._early.append((header, meta))

    def send(self, kind: Kind, meta: bytes = b"") -> None:
        """Send a frame without data."""
        self.link.send(kind, meta)

    def stop(self) -> None:
        """Have it finish and end; it is killed if that takes long."""
        if self._loop is not None and not self.ended:
            self.send(Kind.STOP)
            self._kill_timer = self._loop.call_later(_STOP_SECS, self.kill)

    def _hand_on(self, header: Header[Kind], meta: bytes, content: Buffer) -> None:
        if header.kind is Kind.LOG:
            self._log(meta)
        elif self._take is not None:
            self._take(header, meta, content)

    def _give_up(self, reason: str, error: Exception | None) -> None:
        """It is of no more use: end it, and say so."""
        if self.ended or self._given_up or self._loop is None:
            return
        self._given_up = True
        if error is not None:
            self.end_kind = EndKind.NONSENSE
        self.link.give_up()
        self.kill()
        # What is not the worker's nonsense is a bug of ours; a closed socket is only how it ends.
        bug = None if isinstance(error, BrokenFrame) else error
        level = logging.DEBUG if reason == CLOSED else logging.ERROR
        log.log(level, "%s worker %d %s, and is killed", self.spec.model, self.pid, reason,
                exc_info=bug, extra=self._fields())  # fmt: skip

    def _on_output(self) -> None:
        self._output.read()
        if self._output.ended and self._loop is not None:
            self._loop.remove_reader(self._output.descriptor)

    def _on_ended(self) -> None:
        assert self._loop is not None
        self.kill()  # what it has started does not outlive it; before its number is free again
        status = self._process.wait()
        for _ in range(_LAST_READS):  # what it has sent last
            if not self.link.receive():
                break
        for _ in range(_LAST_READS):
            if not self._output.read():
                break
        self.ended = True
        if self.end_kind is not EndKind.NONSENSE and status < 0:
            self.end_kind = EndKind.SIGNAL
            self.killed = status == -signal.SIGKILL
        for source in (self._output.descriptor, self._watch):
            self._loop.remove_reader(source)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        os.close(self._watch)
        self._close()
        on_exit, self._on_exit, self._take = self._on_exit, None, None
        if on_exit is not None:
            on_exit(_describe(status))

    def _close(self) -> None:
        self.link.close()
        self._heartbeat.close()
        os.close(self._output.descriptor)

    def _log(self, meta: bytes) -> None:
        level, name, text = json.loads(meta)
        self._output.note(
            int(level), f"{str(name)[:80]}: {text}" if name != "triton" else str(text)
        )

    def note(self, level: int, text: str, trace: str = "", request_id: str = "") -> None:
        """Put what the model has said or done into the log."""
        fields: dict[str, object] = {"request_id": request_id} if request_id else {}
        self._output.note(level, f"{text}\n{trace}" if trace else text, fields)

    def _fields(self) -> dict[str, object]:
        return self._output.fields


def _describe(status: int) -> str:
    """How a process ended, by its status."""
    if status < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
