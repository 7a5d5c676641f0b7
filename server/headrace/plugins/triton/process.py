"""One managed Triton process, across restarts: started, watched, restarted, ended.

It is started when the first model needs it. When it ends it is restarted: at once if it had run for
a while, else after a growing delay; after a loop of early ends restarts are paused. Its liveness is
checked once a second; one that has been silent for too long is killed. A reaper
(`headrace.placement.reaper`) between it and the server ends it with the server.

Owned by the event-loop thread.
"""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from headrace.connections.grpc_channel import receive_buffer
from headrace.core.daemon_thread import run_in_daemon_thread
from headrace.placement.child_process import (
    ChildProcess,
    ProcessOutput,
    RestartPolicy,
    passed_variables,
)
from headrace.placement.upstream.grpc_client import LIVE, GrpcClient, GrpcMessages
from headrace.placement.upstream.options import Credentials, RemoteOptions
from headrace.placement.upstream.triton_options import NumberedProcess, TritonOptions

log = logging.getLogger(__name__)

# Further environment variables for Triton; others may be secret.
_PASSED = (
    "CUDA_*", "NVIDIA_*", "NCCL_*", "TRITON*", "HF_*", "TRANSFORMERS_*", "TORCH_*", "TF_*", "OMP_*",
    "MKL_*", "OPENBLAS_*", "XDG_CACHE_*",
)  # fmt: skip
_PROTOCOLS = (
    "health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging"
)
_KEY = "headrace-key"


@dataclass(frozen=True, slots=True)
class Secret:
    """The key required of calls to managed Tritons, so that no other process can call them."""

    value: str

    @property
    def argument(self) -> str:
        """The argument that makes Triton require it."""
        return f"--grpc-restricted-protocol={_PROTOCOLS}:{_KEY}={self.value}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of calls."""
        return ((f"triton-grpc-protocol-{_KEY}", self.value),)


def arguments(
    program: str, options: TritonOptions, models: Path, port: int, region: str, secret: Secret
) -> list[str]:
    """The command line; `region` is the prefix of its Python models' shared memory.

    It listens on one local port, which the server reserves for it. Models are only loaded on
    request. The operator's arguments come last.
    """
    return [
        program,
        f"--model-repository={models}",
        "--model-control-mode=explicit",
        "--exit-on-error=false",
        f"--exit-timeout-secs={max(int(options.exit_secs), 1)}",
        "--allow-http=false",
        "--allow-metrics=false",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--reuse-grpc-port=true",
        f"--backend-config=python,shm-region-prefix-name={region}",
        secret.argument,
        *options.arguments,
    ]


def environment(
    own: Mapping[str, str], options: TritonOptions, place: NumberedProcess
) -> dict[str, str]:
    """The environment variables of a process, derived from the server's `own`."""
    found = passed_variables(own, (*_PASSED, *options.passed))
    if place.visible is not None:
        # Otherwise CUDA may number GPUs by speed, unlike the operator.
        found.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        found["CUDA_VISIBLE_DEVICES"] = place.visible
    found.setdefault("PATH", os.defpath)
    return found


_LOOK_SECS, _START_LOOK_SECS = 1.0, 0.1
_ANSWER_SECS = 5.0
_LOG_LINE = re.compile(rb"^([IWEF])\d{4} [\d:.]+ \d+ ")  # Triton's log format
_LEVELS = {b"I": logging.INFO, b"W": logging.WARNING, b"E": logging.ERROR, b"F": logging.CRITICAL}
_EXIT_SLACK_SECS = 2.0  # beyond Triton's own exit timeout

Start = Callable[[ProcessOutput], ChildProcess]


class TritonOutput(ProcessOutput):
    """Determines the level of a line from the line itself."""

    def __init__(self, label: str) -> None:
        super().__init__(label, {"triton": label})
        self.last = ""  # the last line above level INFO

    def line(self, line: bytes) -> None:
        """Log a line."""
        found = _LOG_LINE.match(line)
        level = _LEVELS[found[1]] if found else logging.INFO
        text = line[found.end() if found else 0 :].decode(errors="replace").strip()
        if not text:
            return
        if not found or level > logging.WARNING:
            self.last = text[:300]
        self.note(level, text)


class TritonProcess:
    """`port` is its port on 127.0.0.1, across restarts."""

    def __init__(self, place: NumberedProcess, options: TritonOptions, secret: Secret) -> None:
        """Raises `OSError` if no port is free."""
        self.place = place
        self.live = asyncio.Event()
        self.failed = asyncio.Event()  # set while it has ended and is not restarted yet
        self.problem = ""  # the description of its end
        self.starts = 0
        self._options = options
        # Triton listens on the port together with this socket, which accepts nothing: so no other
        # process can take the port between two starts, and it need not change.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        given = {"endpoints": f"grpc://127.0.0.1:{self.port}"}
        remote = RemoteOptions.of(given, self.label, 0, Path())
        credentials = Credentials(metadata=secret.metadata)
        self._messages = GrpcMessages(replace(remote, credentials=credentials), self.label)
        [self._endpoint] = remote.resolve()
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._child: ChildProcess | None = None
        self._live_since = inf

    @property
    def label(self) -> str:
        """The name of the process in logs and metrics."""
        return self.place.label

    def begin(self, start: Start) -> None:
        """Run the process from now on, until `close`; `start` starts it, and may block."""
        self._task = asyncio.get_running_loop().create_task(self._live(start))

    async def settled(self) -> None:
        """Wait until it is live, or has failed."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.live, self.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def close(self) -> None:
        """End the process, and wait for it."""
        self._ending.set()
        if self._task is not None:
            if self._child is not None:  # otherwise it is stopped, or being started
                self._child.terminate()
                seconds = self._options.exit_secs + _EXIT_SLACK_SECS
                done, _ = await asyncio.wait([self._task], timeout=seconds)
                if not done:
                    log.error("%s has not ended within %.0f s, and is killed", self.label, seconds)
                    self._child.kill()
            await asyncio.wait([self._task])
        self._reserved.close()
        self.problem = "has been told to end"
        self.failed.set()  # for callers that still wait until it is live

    def _is_ending(self) -> bool:
        return self._ending.is_set()

    # --- restarts

    async def _live(self, start: Start) -> None:
        restarts = RestartPolicy()
        loop = asyncio.get_running_loop()
        while not self._is_ending():
            self.failed.clear()
            self._live_since = inf
            try:
                how = await self._run(start)
            except OSError as error:
                how = f"cannot be started: {error.strerror}"
            except Exception:
                log.exception("bug while watching %s", self.label)
                how = "is not watched any more"
            self.live.clear()
            self._child = None
            if self._is_ending():
                return
            if loop.time() - self._live_since >= restarts.STEADY_SECS:
                restarts.steady()
            restarts.ended()
            self.problem = how
            self.failed.set()
            later = f"; it is tried again in {restarts.delay:.0f} s" if restarts.looping else ""
            log.error("%s %s%s", self.label, how, later, extra={"triton": self.label})
            await _wait(self._ending, restarts.delay)

    async def _run(self, start: Start) -> str:
        """Run once; returns a description of the end. Raises `OSError` if it cannot be started."""
        output = TritonOutput(self.label)
        child = await run_in_daemon_thread(
            lambda: start(output), f"start {self.label}", ChildProcess.kill
        )
        self.starts += 1
        self._child = child
        exited = asyncio.Event()
        child.attach(asyncio.get_running_loop(), exited.set)
        connection = GrpcClient(self._endpoint, self._messages, None, receive_buffer())
        if self._is_ending():  # ended meanwhile
            child.kill()
        try:
            why = "" if self._is_ending() else await self._watch(child, exited, connection)
        except asyncio.CancelledError:
            child.kill()
            raise
        finally:
            await connection.close()
            await exited.wait()
        said = "" if self.live.is_set() else output.last
        last = f"; it said last: {said}" if said else ""
        return f"{why} and {child.end}" if why else f"{child.end}{last}"

    async def _watch(
        self, child: ChildProcess, exited: asyncio.Event, connection: GrpcClient
    ) -> str:
        """Watch until it has ended; returns the reason if it was killed."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while not child.ended:
            if await self._answers(connection):
                heard = loop.time()
                if not self.live.is_set():
                    self.live.set()
                    self._live_since = heard
                    log.info("%s is live as process %d", self.label, child.pid,
                             extra={"triton": self.label})  # fmt: skip
            silent = loop.time() - heard
            started = self.live.is_set()
            limit = self._options.hang_secs if started else self._options.start_secs
            if limit and silent >= limit and not self._is_ending():
                child.kill()
                await exited.wait()
                what = "has given no sign of life for" if started else "was not live after"
                return f"{what} {silent:.0f} s"
            await _wait(exited, _LOOK_SECS if started else _START_LOOK_SECS)
        return ""

    async def _answers(self, connection: GrpcClient) -> bool:
        # ServerLiveRequest has no fields, and ServerLiveResponse one, a bool.
        answer, _ = await connection.ask(LIVE, b"", _ANSWER_SECS)
        return bool(answer)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, for at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
