"""Asks a server for its health and for inference all the time: in a process of its own.

`python -m benchmarks.hostile.probe HOST:PORT busy|quiet SECONDS PID...` asks until its standard
input ends, for health after so many seconds each. For each line that it gets, and at the end, it
prints what it saw since the last one as a line of JSON. It imports nothing large, so that it
measures the server and not itself. Its address is another one than that of attacks: what a server
allows to one address is not what it allows to others. Of an answer's time it takes off what the
machine's host has taken from the main threads of the given processes and, on a busy machine, how
long these waited for a core: what others do on a shared machine is not the server's fault.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

_INFER_EVERY_SECS = 0.1
_LARGE_EVERY_SECS = 0.2
_COUNTED_SECS = 0.01  # after which the system has counted what its host has taken before
_LONGEST_SECS = 30.0  # a probe that takes longer counts as long
_FROM = "127.0.0.2", 0
_HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
_BODY = (
    '{"inputs":[{"name":"input","datatype":"FP32","shape":[1,64],"data":['
    + ",".join(["1"] * 64)
    + "]}]}"
).encode()
_VALUES = 40_000
_LARGE_BODY = (
    f'{{"inputs":[{{"name":"input","datatype":"FP32","shape":[{_VALUES}],"data":['
    + ",".join(["1.5"] * _VALUES)
    + "]}]}"
).encode()
_HEAD = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
_INFER = _HEAD % len(_BODY) + _BODY
_LARGE = _HEAD.replace(b"mlp", b"echo") % len(_LARGE_BODY) + _LARGE_BODY


class Probe:
    """Answers to one kind of probe: seconds of the slowest, numbers of good and bad ones."""

    def __init__(self, ask: Callable[[], bool], every: float, waits: "Waits | None" = None) -> None:
        self.worst = 0.0
        self.good = self.bad = 0
        self._ask = ask
        self._every = every
        self._waits = waits or Waits(())
        self._begun = 0.0  # of the question under way, 0 for none

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop` is set."""
        while not stop.wait(self._every):
            waited = self._waits()
            self._begun = time.monotonic()
            try:
                good = self._ask()
            except OSError:
                good = False
            took = time.monotonic() - self._begun
            self._begun = 0.0
            if took > self.worst:
                self.worst = max(self.worst, took - self._lost(waited))
            if good:
                self.good += 1
            else:
                self.bad += 1

    def _lost(self, before: "Waited") -> float:
        now = self._waits()
        time.sleep(_COUNTED_SECS)
        return lost(before, replace(now, stolen=self._waits().stolen))

    def report(self) -> dict[str, float]:
        """The results as a JSON object; an unanswered question counts with its time so far."""
        begun = self._begun
        now = time.monotonic() - begun if begun else 0.0
        return {"worst": max(self.worst, now), "good": self.good, "bad": self.bad}

    def forget(self) -> None:
        """Begin anew; a question under way counts from its beginning."""
        self.worst = 0.0
        self.good = self.bad = 0


class KeepAlive:
    """Asks over one connection, opened anew once it has ended."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def __call__(self) -> bool:
        """Ask once."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, _LONGEST_SECS, _FROM)
        try:
            self._socket.sendall(_HEALTH + b"\r\n")
            good = _is_good(self._socket)
        except OSError:
            good = False
        if not good:
            self._socket.close()
            self._socket = None
        return good


def _once(address: tuple[str, int], request: bytes) -> bool:
    with socket.create_connection(address, _LONGEST_SECS, _FROM) as made:
        made.sendall(request)
        return _is_good(made)


def _is_good(sock: socket.socket) -> bool:
    """Receive an answer, whole: its parts may come one by one. True if its status is 200."""
    answer = b""
    while (end := answer.find(b"\r\n\r\n")) < 0 or len(answer) < end + 4 + _length(answer[:end]):
        if not (part := sock.recv(65536)):
            return False
        answer += part
    return answer.startswith(b"HTTP/1.1 200")


def _length(head: bytes) -> int:
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds so far that threads have waited for a core, and that were taken from each core.

    `cores` are those that the threads run on, or ran on last.
    """

    waited: float = 0.0
    stolen: Sequence[float] = ()
    cores: Sequence[int] = ()


class Waits:
    """Observes the main threads of processes, and this thread; nothing without processes."""

    def __init__(self, processes: Sequence[str], busy: bool = False) -> None:
        self._busy = busy  # waiting for a core counts
        found = [f"/proc/{each}/task/{each}" for each in processes]
        self._threads = [*found, "/proc/thread-self"] if found else []

    def __call__(self) -> Waited:
        waited = 0
        cores = []
        for path in self._threads:
            with suppress(OSError):
                if self._busy:
                    waited += int(_read(f"{path}/schedstat").split()[1])
                cores.append(int(_read(f"{path}/stat").rpartition(")")[2].split()[36]))
        return Waited(waited / 1e9, _stolen() if self._threads else (), cores)


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as text:
        return text.read()


def _stolen() -> list[float]:
    """Seconds that the machine's host has taken from each core."""
    cores = [line.split() for line in _read("/proc/stat").splitlines() if line.startswith("cpu")]
    return [int(core[8]) / os.sysconf("SC_CLK_TCK") for core in cores[1:]]


def lost(before: Waited, now: Waited) -> float:
    """Seconds in between in which work could not go on.

    What the host has taken counts for the cores of the threads: an attack may be the only one that
    is busy on another.
    """
    cores = {*before.cores, *now.cores}
    stolen = max((now.stolen[each] - before.stolen[each] for each in cores), default=0.0)
    return now.waited - before.waited + stolen


def main() -> None:
    """Ask and print."""
    host, _, port = sys.argv[1].rpartition(":")
    address = host, int(port)
    new = _HEALTH + b"Connection: close\r\n\r\n"
    every, waits = float(sys.argv[3]), Waits(sys.argv[4:], busy=sys.argv[2] == "busy")
    probes = {
        "kept": Probe(KeepAlive(address), every, waits),
        "new": Probe(lambda: _once(address, new), every, waits),
        "infer": Probe(lambda: _once(address, _INFER), _INFER_EVERY_SECS, waits),
        "large": Probe(lambda: _once(address, _LARGE), _LARGE_EVERY_SECS, waits),
    }
    stop = threading.Event()
    threads = [threading.Thread(target=p.run, args=(stop,), daemon=True) for p in probes.values()]
    for thread in threads:
        thread.start()
    print("asking", flush=True)
    with suppress(KeyboardInterrupt):
        while sys.stdin.readline():
            print(_reports(probes), flush=True)
            for probe in probes.values():
                probe.forget()
    stop.set()
    print(_reports(probes), flush=True)


def _reports(probes: Mapping[str, Probe]) -> str:
    return json.dumps({name: probe.report() for name, probe in probes.items()})


if __name__ == "__main__":
    main()
