"""Runs one server: starts it on its core, stops it, and keeps it still while another is measured.

All servers of a workload live at the same time, so that they can be measured in turn without a
start between. One that is not at its turn is stopped with SIGSTOP, with all its processes: it uses
no CPU then, whatever it does when idle.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter, sleep
from typing import IO

import psutil

from benchmarks.messages import PROTOCOLS, Exchange
from benchmarks.models import ALL_MODELS
from benchmarks.scorecard.environments import interpreter
from benchmarks.scorecard.peer import GRPC, Peer, Place
from benchmarks.server import BenchmarkError, Target, split_address

START_SECS = 120.0
STOP_SECS = 15.0
_POLL_SECS = 0.01
_TAIL = 1500  # characters of a server's output that explain why it did not start


@dataclass(slots=True)
class Server:
    """A server that runs; `ready_after` is the time from its start until it has
    given a right answer over each protocol."""

    peer: Peer
    target: Target
    ready_after: float
    _process: subprocess.Popen[bytes]
    _stack: ExitStack

    def freeze(self) -> None:
        """Let none of its processes run."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.target.processes():
            with suppress(psutil.Error):
                process.send_signal(number)

    def alive(self) -> bool:
        """True if its first process lives."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and all its processes."""
        self.thaw()
        end(self._process, self.target.processes())
        self._stack.close()


def end(process: subprocess.Popen[bytes], family: Sequence[psutil.Process]) -> None:
    """Ask a process to end, then see to it that all of its `family` has."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECS)
    for member in family:
        with suppress(psutil.Error):
            member.kill()
    process.wait()


def start(
    peer: Peer, home: Path, models: frozenset[str], core: int | None, probes: Sequence[str]
) -> Server:
    """Start a server; wait for a right answer of each model in `probes` over each protocol.

    Raises `BenchmarkError` with the end of its output if that does not come about.
    """
    repository = home / "models"
    repository.mkdir(parents=True, exist_ok=True)
    peer.write_models(models, repository)
    http, grpc = free_ports(2)
    place = Place(interpreter(peer), home, repository, http, grpc)
    command = peer.command(place)
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    with ExitStack() as stack:
        log = stack.enter_context((home / "log").open("w+b"))
        begun = perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home,
            env=_environment(peer, place), start_new_session=True,
        )  # fmt: skip
        target = Target(
            peer.name,
            f"127.0.0.1:{http}" if peer.protocols - {GRPC} else "",
            f"127.0.0.1:{grpc}" if GRPC in peer.protocols else "",
            process.pid,
        )
        try:
            _await(peer, target, probes, process, begun)
        except BenchmarkError as error:
            end(process, target.processes())
            raise BenchmarkError(f"{error}: {_tail(log)}") from None
        except BaseException:
            end(process, target.processes())
            raise
        return Server(peer, target, perf_counter() - begun, process, stack.pop_all())
    raise AssertionError("unreachable")


def _await(
    peer: Peer,
    target: Target,
    probes: Sequence[str],
    process: subprocess.Popen[bytes],
    begun: float,
) -> None:
    for model, name in product(probes, sorted(peer.protocols)):
        protocol = PROTOCOLS[name]
        host = target.address(protocol.transport)
        exchange = protocol.exchanges(host, ALL_MODELS[model])[0]
        while fault := ask(host, protocol.name, exchange):
            if process.poll() is not None:
                raise BenchmarkError(f"it ended with {process.returncode}")
            if perf_counter() - begun > START_SECS:
                raise BenchmarkError(f"not ready after {START_SECS:g} s, last: {fault}")
            sleep(_POLL_SECS)


def ask(host: str, protocol: str, exchange: Exchange, timeout: float = 30.0) -> str:
    """Put one request: what is wrong with the answer, or why none came; empty if it is right."""
    wire = PROTOCOLS[protocol].wire(host, 1)
    try:
        with socket.create_connection(split_address(host), timeout) as connection:
            connection.sendall(wire.start())
            sent = False
            while True:
                if wire.ready and not sent:
                    connection.sendall(wire.send(exchange.message)[1])
                    sent = True
                data = connection.recv(1 << 20)
                if not data:
                    return "the server closed the connection"
                answers, reply = wire.receive(data)
                if answers:
                    return answers[0].error or exchange.fault(answers[0])
                connection.sendall(reply)
    except Exception as error:  # refused, reset, timed out, not the protocol: all mean "not yet"
        return f"{type(error).__name__}: {error}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _environment(peer: Peer, place: Place) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "PYTHONPATH"))}
    path = os.pathsep.join((str(place.python.parent), os.environ.get("PATH", "")))
    return kept | {"PATH": path} | dict(peer.environment)


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-_TAIL:].decode(errors="replace").strip()
