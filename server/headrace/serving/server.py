"""A server process for the models of a script or notebook.

A reaper (`headrace.placement.reaper`) runs between that process and this one, so that the server
ends with this process, however that ends. Its models are in a directory that is removed with it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Self

from headrace.client.blocking import Client
from headrace.placement import reaper
from headrace.serving.models import GivenModel, lay_out
from headrace.serving.sources import ServeError

START_SECS = 120.0
_STOP_SECS = 60.0
_LOOK_SECS = 0.02
_LAST_SECS = 1.0  # until the output is left to descendants of the server
_KEPT = 1 << 20  # bytes of output
_ADDRESS = re.compile(r"^(HTTP|gRPC|metrics) +(\S+)", re.MULTILINE)
_STARTED = re.compile(r"^(?:not )?ready after ", re.MULTILINE)
_SHOWN = 4000  # characters of the log shown in an error


class Server:
    """A server that runs until `stop`, the end of its `with` block, or the end of this process.

    `url` is its HTTP address and `grpc_url` its gRPC address, empty for doors that are closed and
    that of the Unix socket for a door without a port.
    `client` uses HTTP.
    """

    def __init__(self, command: list[str], directory: str, seconds: float) -> None:
        """Run `command`, with models in `directory`; raises `ServeError`."""
        self.url = self.grpc_url = ""
        self._directory = directory
        self._process = _start(command, directory)
        self._lock = Lock()  # of the next two
        self._log = bytearray()
        self._written = 0
        self._reader = Thread(target=self._read, name="headrace log", daemon=True)
        self._reader.start()
        try:
            self._wait(seconds)
        except BaseException:
            self.stop()
            raise
        found = dict(_ADDRESS.findall(self.log))
        if "HTTP" in found:
            self.url = found["HTTP"]
        if "gRPC" in found:
            self.grpc_url = _grpc_url(found["gRPC"])

    @property
    def log(self) -> str:
        """The last MiB that the server has written."""
        with self._lock:
            return self._log.decode(errors="replace")

    @cached_property
    def client(self) -> Client:
        """A client of the server, closed with it."""
        return Client(self.url or self.grpc_url)

    def wait(self) -> None:
        """Print the server's log until it ends, or this process is interrupted; then stop."""
        shown = 0
        with suppress(KeyboardInterrupt):
            while self._process.poll() is None:
                shown = self._show(shown)
                time.sleep(_LOOK_SECS)
        self.stop()
        self._show(shown)

    def stop(self) -> None:
        """Shut the server down, or kill it if that takes too long."""
        if client := self.__dict__.pop("client", None):
            client.close()
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with suppress(OSError), self._process.stdin as to_reaper:
            to_reaper.write(b"t")
            to_reaper.flush()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECS)
        self._process.wait()  # killed by now
        self._reader.join(_LAST_SECS)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<headrace server at {self.url or self.grpc_url}>"

    def _read(self) -> None:
        """Keep the server's output, whole until the addresses in it are known."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while new := os.read(output.fileno(), 1 << 16):
                with self._lock:
                    self._log += new
                    self._written += len(new)
                    if self.url or self.grpc_url:
                        del self._log[:-_KEPT]

    def _show(self, shown: int) -> int:
        """Print the output that follows its first `shown` bytes; returns how many those are now."""
        with self._lock:
            lost = self._written - len(self._log)
            new = self._log[max(shown - lost, 0) :]
        if self._process.returncode is None:  # whole lines only, so that they can be decoded
            del new[new.rfind(b"\n") + 1 :]
        print(new.decode(errors="replace"), end="", flush=True)
        return max(shown, lost) + len(new)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not _STARTED.search(self.log):
            if self._process.poll() is not None:
                self._reader.join(_LAST_SECS)
                raise ServeError(f"the server has ended:\n{self.log[-_SHOWN:]}")
            if time.monotonic() > until:
                text = f"the server has not started within {seconds:g} s"
                raise ServeError(f"{text}:\n{self.log[-_SHOWN:]}")
            time.sleep(_LOOK_SECS)


def serve(
    *models: GivenModel | Mapping[str, GivenModel],
    port: int = 0,
    seconds: float = START_SECS,
    **options: Any,
) -> Server:
    """Serve models in a separate process; returns once they are ready.

    A model is a function or class, as for `headrace.model`, a file, or a repository's directory; in
    a mapping, each is served under its key, and may be a fitted estimator of scikit-learn's kind.
    The server gets copies, also of the objects that a function uses: changes are not seen there.
    `port` is the HTTP port, and `options` are settings of the server such as `max_request_bytes`.
    Ports are free ones unless given.

    `headrace.serve(...).wait()` runs until interrupted. Raises `ServeError`, or its subclass
    `SourceError` for a function that cannot be moved to another process.
    """
    directory = tempfile.mkdtemp(prefix="headrace-serve-")
    try:
        files, repositories = lay_out(models, Path(directory))
        given = {"http_port": port, "grpc_port": 0, "metrics_port": 0, **options}
        command = [sys.executable, "-m", "headrace", "serve", *files]
        command += [f"--model-repository={path}" for path in repositories]
        for name, value in given.items():
            for one in value if isinstance(value, list | tuple) else [value]:
                text = str(one).lower() if isinstance(one, bool) else str(one)
                command.append(f"--{name.replace('_', '-')}={text}")
        return Server(command, directory, seconds)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _grpc_url(shown: str) -> str:
    """The URL of the first gRPC address, as the server prints it: a port's, or a Unix socket's."""
    return shown if "unix:" in shown or "://" in shown else f"grpc://{shown}"


def _start(command: list[str], directory: str) -> "subprocess.Popen[bytes]":
    """Run a server under a reaper."""
    return subprocess.Popen(
        [sys.executable, reaper.__file__, "", directory, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
