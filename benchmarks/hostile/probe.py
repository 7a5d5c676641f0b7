"""Asks a server for its health and for inference all the time: in a process of its own.

`python -m benchmarks.hostile.probe HOST:PORT` asks until its standard input ends, and prints what
it saw as JSON. It imports nothing large, so that it measures the server and not itself.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_EVERY_SECS = 0.005
_INFER_EVERY_SECS = 0.1
_LONGEST_SECS = 30.0  # a probe that takes longer counts as long
_HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
_BODY = (
    '{"inputs":[{"name":"input","datatype":"FP32","shape":[1,64],"data":['
    + ",".join(["1"] * 64)
    + "]}]}"
).encode()
_HEAD = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
_INFER = _HEAD % len(_BODY) + _BODY


class Probe:
    """Answers to one kind of probe: seconds of the slowest, numbers of good and bad ones."""

    def __init__(self, ask: Callable[[], bool], every: float) -> None:
        self.worst = 0.0
        self.good = self.bad = 0
        self._ask = ask
        self._every = every
        self._begun = 0.0  # of the question under way, 0 for none

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop` is set."""
        while not stop.wait(self._every):
            self._begun = time.monotonic()
            try:
                good = self._ask()
            except OSError:
                good = False
            self.worst = max(self.worst, time.monotonic() - self._begun)
            self._begun = 0.0
            if good:
                self.good += 1
            else:
                self.bad += 1

    def report(self) -> dict[str, float]:
        """The results as a JSON object; an unanswered question counts with its time so far."""
        now = time.monotonic() - self._begun if self._begun else 0.0
        return {"worst": max(self.worst, now), "good": self.good, "bad": self.bad}


class KeepAlive:
    """Asks over one connection, opened anew once it has ended."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def __call__(self) -> bool:
        """Ask once."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, _LONGEST_SECS)
        try:
            self._socket.sendall(_HEALTH + b"\r\n")
            answer = self._socket.recv(4096)
        except OSError:
            answer = b""
        if not answer:
            self._socket.close()
            self._socket = None
        return answer.startswith(b"HTTP/1.1 200")


def _once(address: tuple[str, int], request: bytes) -> bool:
    with socket.create_connection(address, _LONGEST_SECS) as made:
        made.sendall(request)
        return made.recv(4096).startswith(b"HTTP/1.1 200")


def main() -> None:
    """Ask and print."""
    host, _, port = sys.argv[1].rpartition(":")
    address = host, int(port)
    new = _HEALTH + b"Connection: close\r\n\r\n"
    probes = {
        "kept": Probe(KeepAlive(address), _EVERY_SECS),
        "new": Probe(lambda: _once(address, new), _EVERY_SECS),
        "infer": Probe(lambda: _once(address, _INFER), _INFER_EVERY_SECS),
    }
    stop = threading.Event()
    threads = [threading.Thread(target=p.run, args=(stop,), daemon=True) for p in probes.values()]
    for thread in threads:
        thread.start()
    print("asking", flush=True)
    with suppress(KeyboardInterrupt):
        sys.stdin.read()
    stop.set()
    print(json.dumps({name: probe.report() for name, probe in probes.items()}), flush=True)


if __name__ == "__main__":
    main()
