"""One command of a build: run under a guard, read while it runs, told of in the log, bounded.

Blocks, and is for loading threads. The server may end beneath such a thread: the guard, a process
between the server and the command, notices and ends the command (see `guard`).
"""

import logging
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

from headrace.execution.environments.redaction import redact

log = logging.getLogger(__name__)

_GUARD = Path(__file__).with_name("guard.py")
_LAST_LINES = 15  # that an error shows
_LONGEST = 300  # characters of a line that are shown
_TELL_SECS = 5.0  # between two lines in the log about one build
_LOOK_SECS = 1.0  # between two looks whether the command has ended without closing its output
_PART = 64 << 10


class StepFailed(Exception):
    """A command that failed or took too long; the text ends with the last lines of its output."""


class Progress:
    """Tells of one build in the log: its begin, what it is at every few seconds, its end."""

    def __init__(self, model: str, version: str, what: str) -> None:
        self.begun = self._told = monotonic()
        self._model = model
        self._fields = {"model": model, "version": version}
        log.info("building the environment of %s: %s", model, what, extra=self._fields)

    @property
    def seconds(self) -> float:
        """Since the begin."""
        return monotonic() - self.begun

    def at(self, line: str) -> None:
        """The build is at `line`; that is told if nothing has been for a while."""
        now = monotonic()
        if line and now - self._told >= _TELL_SECS:
            self._told = now
            log.info("building the environment of %s: %.0f s, %s", self._model, self.seconds,
                     line, extra=self._fields)  # fmt: skip

    def done(self, what: str) -> None:
        """The build has come to a good end."""
        log.info("built the environment of %s in %.1f s: %s", self._model, self.seconds, what,
                 extra=self._fields)  # fmt: skip


class Steps:
    """Runs the commands of one build. `lock` is held by each until nothing of it is left."""

    def __init__(
        self, environment: Mapping[str, str], lock: int, progress: Progress, limit_secs: float
    ) -> None:
        self._environment = environment
        self._lock = lock
        self._progress = progress
        self._limit = limit_secs
        self._deadline = progress.begun + limit_secs

    def run(self, what: str, command: Sequence[str], folder: Path) -> str:
        """Run a command in a directory; what it printed last. Raises `StepFailed`, `OSError`."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(self._lock,), env=self._environment, cwd=folder, process_group=0,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            in_time = self._read(process, process.stdout.fileno(), lines)
        finally:
            process.stdin.close()  # ends what still runs
            status = process.wait()
            process.stdout.close()
        text = "\n".join(lines)
        if not in_time:
            raise StepFailed(f"{what} was ended after {self._limit:.0f} s; it said last:\n{text}")
        if status:
            raise StepFailed(f"{what} failed with status {status}:\n{text}")
        return text

    def _read(self, process: "subprocess.Popen[bytes]", output: int, lines: deque[str]) -> bool:
        """Read until the command has ended; whether it did in time."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while (left := self._deadline - monotonic()) > 0:
                if not selector.select(min(left, _LOOK_SECS)):
                    self._progress.at(lines[-1] if lines else "")
                    if process.poll() is None:
                        continue
                    return True
                data = os.read(output, _PART)
                *whole, rest = (rest + data).split(b"\n")
                if not data or len(rest) > _PART:
                    whole, rest = [*whole, rest], b""
                for line in whole:
                    if text := redact(line.decode(errors="replace").strip()):
                        lines.append(text[:_LONGEST])
                if not data:
                    return True
                self._progress.at(lines[-1] if lines else "")
        return False
