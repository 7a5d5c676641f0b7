"""A real headrace server in a process of its own, on free ports of 127.0.0.1."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from tests.support.scrape import until
from tests.support.template import TemplateProcess, can_fork

EXAMPLES = Path(__file__).parents[2] / "model_repository"
_ADDRESS = re.compile(r"^(HTTP|gRPC|metrics) +(?:(\w+)://)?(127\.0\.0\.1:\d+)")
_START_SECS = 120
# Some tests read the list of a server's open files, which needs root unless this is set.
_DEBUGGING = {} if os.geteuid() == 0 else {"HEADRACE_ALLOW_DEBUGGING": "true"}


def examples(folder: Path, name: str = "") -> Path:
    """Copies of the examples, or of one of them, in `folder`, without their requirements.

    Requirements would have environments built; their packages are among the tests'.
    """
    ignored = shutil.ignore_patterns("requirements.txt")
    shutil.copytree(EXAMPLES / name, folder / name, ignore=ignored, dirs_exist_ok=True)
    return folder


def onnx_examples(folder: Path, *more: str) -> Path:
    """The small examples without workers, and those named, in `folder`.

    They load at once; `text_language` alone takes half a second.
    """
    for name in ("digits", "simple", "simple_identity", "simple_string", *more):
        (folder / name).symlink_to(EXAMPLES / name, target_is_directory=True)
    return folder


class ServerProcess:
    """A server that has printed its start-up lines when entered, and ends by SIGTERM.

    `http`, `grpc` and `metrics` are addresses as host:port. `output` is its standard output so
    far, `log` its standard error, `secure` the names of doors with TLS.
    """

    def __init__(
        self,
        *repositories: Path | str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        prefix: Sequence[str] = (),
        errors: IO[bytes] | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """With `wait` False, entering returns once the doors are open, before models are loaded.

        `prefix` is a command that runs the given one. Standard error goes to `errors` instead of
        `log`. `program` replaces the server as the interpreter's program. With a prefix or program
        the interpreter is started for it, otherwise the server is forked from the template.
        """
        self._words = [
            "serve", *(["--model-repository", *map(str, repositories)] if repositories else []),
            "--http-port=0", "--grpc-port=0", "--metrics-port=0", *options,
        ]  # fmt: skip
        self._command = [*prefix, sys.executable, *(program or ("-m", "headrace")), *self._words]
        self._environment = _DEBUGGING | dict(environment or {})
        self._own = bool(prefix or program)
        self._last_line = re.compile(r"ready after" if wait else r"metrics +http")
        self._lines: list[str] = []
        self._owns_log = errors is None
        self._errors = errors or tempfile.TemporaryFile()  # noqa: SIM115
        self.http = self.grpc = self.metrics = ""
        self.secure: set[str] = set()  # those with TLS
        self.process: subprocess.Popen[str] | TemplateProcess | None = None

    @property
    def url(self) -> str:
        """The base URL of HTTP requests."""
        return f"{'https' if 'http' in self.secure else 'http'}://{self.http}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self.process is not None
        return self.process.pid

    @property
    def output(self) -> str:
        """Standard output so far."""
        return "".join(self._lines)

    @property
    def log(self) -> str:
        """Standard error so far."""
        # Not by seek and read: the server writes where this file stands, through the same open
        # file.
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode()

    def door(self, name: str) -> str:
        """The URL of a further door, from standard output."""
        found = re.search(rf"^{name} +(\S+)", self.output, re.MULTILINE)
        assert found is not None, self.output
        return found[1]

    def await_logged(self, text: str) -> None:
        """Wait until `text` is in the log: a thread of the server writes it, after the answer."""
        until(lambda: text in self.log, f"{text!r} in the log")

    def __enter__(self) -> Self:
        if self._own or not can_fork(self._environment):
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env=os.environ | self._environment,
            )  # fmt: skip
        else:
            self.process = TemplateProcess(
                self._words, self._errors.fileno(), environment=self._environment
            )
        started = threading.Event()
        threading.Thread(target=self._read, args=(started,), daemon=True).start()
        started.wait(_START_SECS)
        if not self._last_line.search(self.output):
            self.stop(signal.SIGKILL)
            raise AssertionError(f"the server did not start:\n{self.output}\n{self.log}")
        return self

    def _read(self, started: threading.Event) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line)
                if match := _ADDRESS.match(line):
                    door, scheme, address = match.groups("")
                    setattr(self, door.lower(), address)
                    if scheme in ("https", "grpcs"):
                        self.secure.add(door.lower())
                if self._last_line.search(line):
                    started.set()
        started.set()

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal and wait; the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            if self._owns_log:
                print(self.log)  # which pytest shows for a test that has failed
            self._errors.close()


@contextmanager
def kept_port() -> Iterator[tuple[str, ...]]:
    """Options for servers, one after the other, on a port that no one else gets meanwhile."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        yield f"--http-port={kept.getsockname()[1]}", "--reuse-http-port"


@contextmanager
def clean_server(
    *repositories: Path | str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    tracebacks: bool = True,
) -> Iterator[ServerProcess]:
    """A server that must end with status 0 and without a logged bug.

    With `tracebacks` False its log must have no traceback either, not even a model's.
    """
    with ServerProcess(*repositories, options=options, environment=environment) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log, process.log
        assert tracebacks or "Traceback" not in process.log, process.log
