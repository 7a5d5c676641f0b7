"""A real Triton, for the CPU and with its Python backend.

The program is taken from the environment variable HEADRACE_TRITON, or from build/bench, where
`scripts/bench_triton` installs it. Tests that need it are skipped without it.
"""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from tests.support.managed import descendants
from tests.support.remote import free_ports
from tests.support.started import until_answers

_FETCHED = Path(__file__).parents[2] / "build" / "bench" / "triton" / "tritonserver"
_PROGRAM = Path(os.environ.get("HEADRACE_TRITON", _FETCHED))
_REGION = re.compile(r"triton_python_backend_shm_region_[0-9a-f-]+")
_START_SECS = 60
_STOP_SECS = 60


def real_program() -> Path:
    """Path of the program; the test is skipped without it."""
    if not _PROGRAM.is_file():
        pytest.skip("Triton is not here; scripts/bench_triton fetches it")
    return _PROGRAM


class Triton:
    """A running tritonserver; `http` and `grpc` are addresses."""

    def __init__(
        self, program: Path, models: Path, log: Path, options: Sequence[str] = (),
        ports: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`ports` are those for HTTP and gRPC, free ones unless given."""
        http, grpc = ports or free_ports(2)
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.secure = set[str]()  # without TLS
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    program, f"--model-repository={models}", "--allow-metrics=false",
                    f"--http-port={http}", f"--grpc-port={grpc}", "--http-address=127.0.0.1",
                    "--grpc-address=127.0.0.1", *options,
                ],
                stdout=file, stderr=file,
            )  # fmt: skip
        self._log = log

    def wait(self) -> None:
        """Wait until it is ready."""
        until_answers(f"{self.url}/v2/health/ready", self.process, self._log, _START_SECS)

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The base URL of HTTP requests."""
        return f"http://{self.http}"

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait; the exit status.

        Its workers, which outlive a killed Triton, are ended, and their memory is removed.
        """
        found = dict(descendants(self.process.pid))
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(_STOP_SECS)
        for pid, command in found.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            for region in _REGION.findall(command):
                Path("/dev/shm", region).unlink(missing_ok=True)
        return status
