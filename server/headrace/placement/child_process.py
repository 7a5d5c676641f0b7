"""Child processes of the server: workers, front ends, Tritons, and build steps.

Each is in a process group of its own, so that a signal from a terminal reaches only the server,
which ends them in order; all descendants end with a process. Its output goes to the log line by
line, and its end is noticed at once, by its process descriptor. It gets only those environment
variables that are not secret and that it needs (`passed_variables`), and no more rights than its
`Confinement` leaves, if it has one. A program that would outlive
the server, since it does not know about it, runs under a reaper (see `reaper`).

A process may be created on any thread. From `attach` to `detach` an event loop owns it.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.placement.confinement import Confinement
from headrace.placement.scratch import Scratch
from headrace.workers.confine import REFUSED

_printed = logging.getLogger("headrace.model")
_REAPER = Path(__file__).with_name("reaper.py")
_LAST_READS = 64  # portions of the remaining output of an ended process
_PORTION = 64  # lines logged per turn of the event loop: a millisecond or two
_LINE = 16 << 10  # bytes of output after which a line is split
_TEXT = 96 << 10  # characters of a group of lines
_OUTPUT = 16 << 10  # bytes of output per read
# Limits per process and window. A line takes its bytes in this server's log, too.
_MOST_LINES, _MOST_BYTES, _WINDOW_SECS = 2000, 1 << 20, 1.0
_LOOP = 5  # consecutive early ends after which restarts are paused
# Environment variables for any program.
_COMMON = (
    "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LC_*",
)  # fmt: skip


class Backoff:
    """Exponential back-off in seconds: `first`, doubled with each failure, up to `longest`."""

    def __init__(self, first: float = 0.1, longest: float = 10.0) -> None:
        self.failures = 0
        self._first = first
        self._longest = longest

    @property
    def delay(self) -> float:
        """The delay after the failures so far; 0 after none."""
        if not self.failures:
            return 0.0
        return float(min(self._first * 2.0 ** min(self.failures - 1, 20), self._longest))

    def failed(self) -> float:
        """Count a failure; returns the delay until the next attempt."""
        self.failures += 1
        return self.delay

    def succeeded(self) -> None:
        """Reset after a success."""
        self.failures = 0


class RestartPolicy:
    """Delays between restarts of a process that has ended.

    The first restart is immediate; delays grow with each early end, that is an end before the
    process was `STEADY_SECS` old. After a loop of early ends restarts are paused for `pause`
    seconds.
    """

    STEADY_SECS = 10.0

    def __init__(self, pause: float = 30.0) -> None:
        self._pause = pause
        self._backoff = Backoff()
        self.early = 0  # consecutive early ends

    @property
    def looping(self) -> bool:
        """True if restarts are paused after a loop of early ends."""
        return self.early >= _LOOP

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if self.looping:
            return self._pause
        self._backoff.failures = max(self.early - 1, 0)
        return self._backoff.delay

    def steady(self) -> None:
        """Reset early ends: the process has run well."""
        self.early = 0

    def ended(self, to_blame: bool = True) -> None:
        """Count an end; one without `to_blame` never counts towards a loop."""
        count = self.early + 1
        self.early = count if to_blame else min(count, _LOOP - 1)


class ProcessOutput:
    """Forwards a process's standard output and error to the log, in bounded portions."""

    def __init__(self, name: str, fields: Mapping[str, object] | None = None) -> None:
        """`name` precedes each line, and `fields` are added to its record."""
        self.name = name
        self.fields = dict(fields or {})
        self.ended = False  # no more output will follow
        self.last = ""  # the last line
        self.descriptor = -1  # non-blocking; closed by the process object
        self._text = b""
        self._unlogged: deque[bytes] = deque()  # lines that were read
        self._lines = self._bytes = self._dropped = 0  # in the current `_WINDOW_SECS`
        self._window = 0.0

    @property
    def waiting(self) -> bool:
        """True if lines that were read are still to be logged."""
        return bool(self._unlogged)

    def read(self) -> bool:
        """Log a portion of the output; returns True if there may be more."""
        lines = self._unlogged
        if not lines and not self._receive():
            return False
        for _ in range(min(len(lines), _PORTION)):
            self.line(lines.popleft())
        return bool(lines) or not self.ended

    def _receive(self) -> bool:
        """Read lines; returns False if there are no bytes yet."""
        try:
            data = os.read(self.descriptor, _OUTPUT)
        except BlockingIOError:
            return False
        self.ended = not data
        *lines, self._text = (self._text + data).split(b"\n")
        if self._text and (self.ended or len(self._text) > _LINE):
            lines.append(self._text)
            self._text = b""
        self._unlogged.extend(lines)
        return True

    def line(self, line: bytes) -> None:
        """Log a line of the process's output."""
        self.last = line.decode(errors="replace").rstrip()
        self.note(logging.INFO, self.last)

    def note(self, level: int, text: str, fields: dict[str, object] | None = None) -> None:
        """Log a line, and the lines below it, within the limits."""
        now = monotonic()
        if now - self._window >= _WINDOW_SECS:
            if self._dropped:
                _printed.warning("%d lines were left out", self._dropped, extra=self.fields)
            self._window = now
            self._lines = self._bytes = self._dropped = 0
        if self._lines == _MOST_LINES or self._bytes >= _MOST_BYTES:
            self._dropped += 1
        else:
            self._lines += 1
            self._bytes += min(len(text), _TEXT)
            head, _, rest = text[:_TEXT].partition("\n")
            trace = {"trace": rest} if rest else {}
            _printed.log(
                level, "%s: %s", self.name, head[:_LINE],
                extra=self.fields | trace | (fields or {}),
            )  # fmt: skip


def passed_variables(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Environment variables for any program, and those whose names match one of `patterns`."""
    every = (*_COMMON, *patterns)
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in every)
    }


@dataclass(frozen=True, slots=True)
class Reaping:
    """Clean-up by a reaper: shared memory with the name prefix `region` after the command's end,
    and `directory` if the server ends first; "" for none.
    """

    region: str = ""
    directory: str = ""


class ChildProcess:
    """A process, from its start to its end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: ProcessOutput | None = None,
        *,
        descriptors: Sequence[int] = (),
        folder: Path | None = None,
        reaping: Reaping | None = None,
        lifeline: bool = False,
        confinement: Confinement | None = None,
    ) -> None:
        """Start a process, under a reaper if `reaping` is given; raises `OSError`.

        One with a `confinement` works in a scratch directory, which is removed at its end.
        The process inherits `descriptors`, and the server's output unless `output` is given. Its
        standard input is a `lifeline`, see `headrace.workers.lifeline`, or empty.
        """
        self.scratch: Scratch | None = None
        identity: Mapping[str, Any] = {}
        if confinement is not None:
            user = confinement.user
            self.scratch = Scratch(*((user.uid, user.gid) if user else (None,)))
            folder, identity = self.scratch.path, confinement.identity
            environment = {**environment, **confinement.variables(folder)}
            command = confinement.command(folder, command)
        self.output = output
        self.ended = False
        self.status = 0  # exit status once ended; negative for a signal number
        self._reaped = reaping is not None
        if reaping is not None:
            given = reaping.region, reaping.directory
            command = [sys.executable, "-I", "-S", str(_REAPER), *given, *command]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if self._reaped or lifeline else subprocess.DEVNULL,
                stdout=None if output is None else subprocess.PIPE,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=descriptors, env=environment, cwd=folder, process_group=0, **identity,
            )  # fmt: skip
        except OSError:
            self._remove_scratch()
            raise
        self.pid = self._process.pid
        try:
            self._watch = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.communicate()
            self._remove_scratch()
            raise
        if output is not None:
            assert self._process.stdout is not None
            output.descriptor = self._process.stdout.fileno()
            os.set_blocking(output.descriptor, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_exit: Callable[[], None] | None = None
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def end(self) -> str:
        """A description of how the process ended."""
        if self.status == REFUSED and self.scratch is not None and self.output is not None:
            return f"could not be confined: {self.output.last}"
        number = self.status - 128 if self._reaped and self.status > 128 else -self.status
        if number > 0:
            with suppress(ValueError):
                return f"was ended by {signal.Signals(number).name}"
        return f"ended with status {self.status}"

    def attach(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        """Attach to an event loop; `on_exit` is called there once the process has ended."""
        self._loop, self._on_exit = loop, on_exit
        if self.output is not None:
            if self.output.waiting:
                loop.call_soon(self._on_output, loop)
            elif not self.output.ended:
                loop.add_reader(self.output.descriptor, self._on_output, loop)
        loop.add_reader(self._watch, self._reap)

    def detach(self) -> None:
        """Detach from the event loop; call it on that loop."""
        loop, self._loop, self._on_exit = self._loop, None, None
        if loop is not None:
            loop.remove_reader(self._watch)
            if self.output is not None:
                loop.remove_reader(self.output.descriptor)
        if self._kill_timer is not None:
            self._kill_timer.cancel()

    def terminate(self) -> None:
        """Send SIGTERM to a process under a reaper."""
        self._tell(b"t")

    def kill_after(self, seconds: float) -> None:
        """Kill the process if it has not ended after `seconds`; on its event loop."""
        if self._loop is not None and not self.ended:
            self._kill_timer = self._loop.call_later(seconds, self.kill)

    def kill(self) -> bool:
        """Kill the process and its descendants; without an event loop, wait for the end.

        Returns True if it has ended.
        """
        if self.ended:
            return True
        if self._reaped:
            self._tell(b"k")
        else:
            self._kill_group()
        if self._loop is None:
            self._reap()
        return self._loop is None

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        if not self.ended:
            with suppress(OSError):  # already ended
                os.write(self._process.stdin.fileno(), word)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _on_output(self, loop: asyncio.AbstractEventLoop) -> None:
        """Log a portion, and read on once nothing of it waits."""
        output = self.output
        if loop is not self._loop or output is None:  # detached meanwhile
            return
        paused = output.waiting
        output.read()
        if output.waiting:
            if not paused:
                loop.remove_reader(output.descriptor)
            loop.call_soon(self._on_output, loop)
        elif output.ended:
            loop.remove_reader(output.descriptor)
        elif paused:
            loop.add_reader(output.descriptor, self._on_output, loop)

    def _remove_scratch(self) -> None:
        if self.scratch is not None:
            self.scratch.remove()

    def _reap(self) -> None:
        if not self._reaped:
            self._kill_group()  # kill descendants before the process id can be reused
        self.status = self._process.wait()
        for _ in range(_LAST_READS):
            if self.output is None or not self.output.read():
                break
        self.ended = True
        on_exit = self._on_exit
        self.detach()
        self._remove_scratch()
        os.close(self._watch)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if on_exit is not None:
            on_exit()
