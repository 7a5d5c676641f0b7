"""Processes of the `headrace` command, forked from one that has imported what a server needs.

A server that starts from nothing takes a third of a second to import its modules, which is most of
what a test with a server of its own costs. Tests of the start itself have processes of their own.

`python -m tests.support.template DESCRIPTOR` is the template. It reads from that Unix socket a
connection for each process, and from the connection what to run; it answers with the process id,
and with the status once the process has ended.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import IO

# Beginnings of names of variables that have an effect while modules are imported, or before.
_EARLY = (
    "GLIBC", "LANG", "LC_", "LD_", "MALLOC", "MKL", "NPY", "NUMPY", "OMP", "OPENBLAS", "ORT",
    "PATH", "PYDANTIC", "PYTHON", "TMPDIR", "TZ",
)  # fmt: skip
_RUN_SECS = 120.0
_MOST = 1 << 20  # bytes of a command line and environment
# What servers import until they are ready, and for their first operations.
_MODULES = (
    "headrace.cli.serve", "headrace.app", "headrace.build", "headrace.doors.http.app",
    "headrace.placement.local.onnx_options", "headrace.placement.worker.python_options",
    "headrace.plugins.ensembles.scheduler", "headrace.plugins.openapi.document",
    "headrace.plugins.traffic.router", "onnxruntime", "fastapi", "pydantic.v1",
)  # fmt: skip


class TemplateProcess:
    """A process of the template's, with the interface of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        errors: int,
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Runs `headrace WORDS`, with further variables in its `environment`.

        Standard error goes to the descriptor `errors`, standard output to `output`; without, it
        can be read from `stdout`.
        """
        self.args = ["headrace", *words]
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        theirs = output
        if theirs is None:
            read, theirs = os.pipe()
            self.stdout = os.fdopen(read, encoding="utf-8")
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status = select.poll()  # `select` takes no descriptors above 1023
        self._status.register(self._socket, select.POLLIN)
        with other:
            socket.send_fds(_template(), [b"."], [other.fileno()])
        variables = os.environ | dict(environment or {})
        document = json.dumps([words, os.getcwd(), variables]).encode()
        socket.send_fds(self._socket, [document], [theirs, errors])
        if output is None:
            os.close(theirs)
        self.pid = int(self._socket.recv(16))

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._awaited(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self._awaited(1)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def _awaited(self, seconds: float) -> int | None:
        with self._lock:
            if self.returncode is None and self._status.poll(seconds * 1000):
                self.returncode = int(self._socket.recv(16))
                self._socket.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


def run_forked(
    words: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run `headrace WORDS` until it ends, without standard input."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = TemplateProcess(words, errors.fileno(), output.fileno(), environment)
        try:
            status = process.wait(_RUN_SECS)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, status, output.read(), errors.read())


def can_fork(environment: Mapping[str, str] | None = None) -> bool:
    """True unless the template has read a variable that now has another value."""
    _template()
    now = os.environ | dict(environment or {})
    return not any(
        now.get(name) != _first.get(name)
        for name in {*now, *_first} if name.startswith(_EARLY)
    )  # fmt: skip


_first: dict[str, str] = {}


@cache
def _template() -> socket.socket:
    """The socket of this process's template, which starts now, and ends with this process."""
    _first.update(os.environ)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.template", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(sock: socket.socket) -> list[str]:
    """Fork processes until nobody asks any more. Returns in each of them, with its words."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor for its end
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != sock.fileno():
                poll.unregister(descriptor)
                pid, asked = running.pop(descriptor)
                os.close(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with asked, contextlib.suppress(OSError):  # it need not be awaited
                    asked.send(str(status).encode())
                continue
            _, found, _, _ = socket.recv_fds(sock, 16, 1)
            if not found:
                os._exit(0)
            asked = socket.socket(fileno=found[0])
            document, files, _, _ = socket.recv_fds(asked, _MOST, 2)
            words, directory, environment = json.loads(document)
            pid = os.fork()
            if not pid:
                for number, file in enumerate(files, 1):
                    os.dup2(file, number)
                os.closerange(3, 1024)
                sock.detach()
                asked.detach()
                os.chdir(directory)
                os.environ.clear()
                os.environ.update(environment)
                return [*words]
            for file in files:
                os.close(file)
            end = os.pidfd_open(pid)
            running[end] = pid, asked
            poll.register(end, select.POLLIN)
            asked.send(str(pid).encode())


def _main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # a server without plugins is tested, too
            import_module(name)
    gc.collect()
    gc.freeze()
    words = _serve(socket.socket(fileno=descriptor))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()
    sys.argv = ["headrace", *words]
    import_module("headrace.cli").main()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
