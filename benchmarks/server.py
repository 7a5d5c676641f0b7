"""The servers that are measured: one started here, pinned to a core, and others that run."""

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_ADDRESS = re.compile(r"^(HTTP|gRPC|metrics) +(?:\w+://)?([\w.\[\]:-]+:\d+)")
_START_SECS = 60
_STOP_SECS = 30
_REQUEST_SECS = 10


class BenchmarkError(Exception):
    """A requirement of the measurement is missing; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure; `pid` is None if its process cannot be seen from here.

    `metrics` is where it shows them, "" if it does not. `tls` is for both addresses.
    """

    name: str
    http: str
    grpc: str
    pid: int | None
    metrics: str = ""
    tls: ssl.SSLContext | None = None

    def address(self, transport: str) -> str:
        """The server's address as host:port; "" while it does not answer."""
        return self.grpc if transport == "grpc" else self.http

    def processes(self) -> list[psutil.Process]:
        """Its process and all that descend from it."""
        if self.pid is None:
            return []
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []

    def counts(self, model: str) -> tuple[int, int] | None:
        """Rows and executions of a model so far, by its statistics; None if it has none."""
        if not self.http or self.tls is not None:
            return None
        url = f"http://{self.http}/v2/models/{model}/stats"
        try:
            with urllib.request.urlopen(url, timeout=_REQUEST_SECS) as response:
                stats = json.load(response)["model_stats"][0]
            return int(stats["inference_count"]), int(stats["execution_count"])
        except (OSError, ValueError, LookupError):
            return None


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The body of the next answer over HTTP, which must have the status 200 and its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise BenchmarkError(f"an answer begins with {head[:200]!r}")
    size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return await reader.readexactly(size)


def cpu_secs(processes: Sequence[psutil.Process]) -> float:
    """CPU time that those of the processes that live have used."""
    return sum(cpu_times(processes))


def cpu_times(processes: Sequence[psutil.Process]) -> tuple[float, float]:
    """Their CPU time in seconds as user and as system time."""
    user = system = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            user += times.user
            system += times.system
    return user, system


def resident(processes: Sequence[psutil.Process]) -> int:
    """Their resident memory in bytes; what they share counts for each of them."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def proportional(processes: Sequence[psutil.Process]) -> int:
    """Their memory in bytes, of which what they share counts once in all.

    Where that may not be seen, their resident memory.
    """
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            try:
                total += process.memory_full_info().pss
            except psutil.AccessDenied:
                total += resident([process])
    return total


def split_address(text: str) -> tuple[str, int]:
    """Host and port of host:port; raises `BenchmarkError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise BenchmarkError(f"expected host:port, got '{text}'")
    return host.strip("[]"), int(port)


def parse_peer(text: str) -> Target:
    """A target from `name=http_host:port,grpc_host:port`, either part may be empty."""
    name, equals, addresses = text.partition("=")
    http, _, grpc = addresses.partition(",")
    if not name or not equals or not (http or grpc):
        raise BenchmarkError(f"expected name=http_host:port,grpc_host:port, got '{text}'")
    ports = [split_address(address)[1] for address in (http, grpc) if address]
    return Target(name, http, grpc, _listening_on(ports[0]))


def split_cores() -> tuple[int | None, set[int]]:
    """The server's core and those of the client; None if there is only one, or no `taskset`."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or not shutil.which("taskset"):
        return None, set(cores)
    return cores[0], set(cores[1:])


@contextmanager
def started(
    repository: Path,
    core: int | None,
    options: Sequence[str] = (),
    program: Sequence[str] = ("-m", "headrace"),
    log: int = -1,
) -> Iterator[Target]:
    """Run headrace on a repository, on one core if one is given; raises `BenchmarkError`.

    `program` is what the interpreter runs, if it is not the server itself. `log` is a descriptor
    that its standard error goes to, unless it is -1.
    """
    command = [
        *(["taskset", "-c", str(core)] if core is not None else []),
        sys.executable, *program, "serve", "--model-repository", str(repository),
        "--http-port=0", "--grpc-port=0", "--allow-metrics=false", *options,
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said if log < 0 else log, text=True,
            env=environment,
        )  # fmt: skip
        try:
            addresses = _addresses(process)
            if addresses is None:
                said.seek(0)
                raise BenchmarkError(f"the server did not start:\n{said.read()[-2000:]}")
            yield Target(
                "headrace", addresses["HTTP"], addresses["gRPC"], process.pid,
                addresses.get("metrics", ""),
            )  # fmt: skip
        finally:
            _stop(process)


def _addresses(process: subprocess.Popen[str]) -> dict[str, str] | None:
    """The server's address once it is ready; None if it does not become ready."""
    found: dict[str, str] = {}
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if match := _ADDRESS.match(line):
                    found[match[1]] = match[2]
                if line.startswith("ready after"):
                    ready.set()

    threading.Thread(target=read, daemon=True).start()
    for _ in range(_START_SECS * 10):
        if ready.wait(0.1):
            return found
        if process.poll() is not None:
            break
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _listening_on(port: int) -> int | None:
    """The process behind a port of this machine, if it may be seen."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address.port == port:
                return connection.pid
    return None
