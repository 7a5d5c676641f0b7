"""Attacks a server in every way that is known, and says what became of its health and memory.

Each attack has a server of its own, with default settings. Meanwhile a process of its own asks for
the server's health every 5 ms, over a kept connection and over new ones, and for inference; and the
memory of all of the server's processes is watched beside what the server says is charged.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from benchmarks.hostile.attacks import ATTACKS, LOW_ROLE, Attack, EndlessUpstream
from benchmarks.hostile.wire import allow_connections
from benchmarks.report import table
from benchmarks.server import BenchmarkError, Target, proportional, split_cores, started

MIB = 1 << 20
GROWTH = 64 * MIB  # beside what is charged, by half as much more
KEPT = 128 * MIB  # of each process, see docs/operations.md, Sizing
RELEASE_SECS = 60.0
QUIET_MS, BUSY_MS = 100.0, 250.0
_ATTACK_SECS = 150.0
_LOOK_SECS = 0.1
_PIPE = 4096  # bytes that a pipe takes which nobody reads
_SETTLE_SECS = 1.0
_CHARGED = "headrace_admitted_bytes"
_MOST_CHARGED = "headrace_admitted_bytes_peak"
_PROBE = ("-m", "benchmarks.hostile.probe")
HEALTH_EVERY_SECS = 0.005


def may_take(charged: int) -> float:
    """Bytes of memory that a server may take for what it has charged."""
    return 1.5 * charged + GROWTH


@dataclass(frozen=True, slots=True)
class Seen:
    """State of a server under one attack; sizes in bytes, times in seconds.

    `released` is None if that took longer than it may; `alive` is whether the server still ran.
    """

    health: float
    growth: int
    charged: int
    released: float | None
    answered: int
    asked: int
    alive: bool

    def missed(self, health_ms: float) -> list[str]:
        """The bounds that were not kept, in words."""
        found = []
        if not self.alive:
            found.append("the server died")
        if self.health * 1e3 > health_ms:
            found.append("health")
        if self.growth > may_take(self.charged):
            found.append("memory")
        if self.released is None:
            found.append("release")
        return found


def main(names: Sequence[str], front_ends: int, busy: bool, low_role: bool = False) -> int:
    """Carry out the attacks with these names and print; 1 if a bound was missed.

    With a `low_role`, the server controls access, and its clients may change nothing.
    """
    allow_connections()
    bound = BUSY_MS if busy else QUIET_MS
    core, others = split_cores()
    if core is not None and not front_ends:
        os.sched_setaffinity(0, others)
    found: dict[Attack, Seen] = {}
    for name in names:
        attack = ATTACKS[name]
        more = LOW_ROLE if low_role else ()
        found[attack] = seen = _observe(attack, None if front_ends else core, front_ends, more)
        missed = ", ".join(seen.missed(bound)) or "well"
        print(f"{name:18} {seen.health * 1e3:9.1f} ms  {missed}", file=sys.stderr, flush=True)
    print(as_table(found, bound))
    return 1 if any(seen.missed(bound) for seen in found.values()) else 0


def as_table(found: Mapping[Attack, Seen], bound_ms: float) -> str:
    """A table of the results beside their bounds, a row for each attack."""
    rows = [
        (
            attack.title,
            f"{seen.health * 1e3:.0f}",
            f"{bound_ms:.0f}",
            f"{seen.growth / MIB:.0f}",
            f"{may_take(seen.charged) / MIB:.0f}",
            "never" if seen.released is None else f"{seen.released:.1f}",
            f"{seen.answered} of {seen.asked}",
            ", ".join(seen.missed(bound_ms)),
        )
        for attack, seen in found.items()
    ]
    titles = (
        "attack", "worst health, ms", "bound", "RSS growth, MiB", "bound", "released after, s",
        "inference answered", "missed",
    )  # fmt: skip
    return table(titles, rows, left=1)


def _observe(attack: Attack, core: int | None, front_ends: int, more: Sequence[str] = ()) -> Seen:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-hostile-")))
        attack.write(root)
        if attack.name == "endless-upstream":
            upstream = EndlessUpstream()
            stack.callback(upstream.close)
            upstream.write(root)
        options = ["--allow-metrics=true", "--metrics-port=0", f"--frontends={front_ends}"]
        options += dict.fromkeys((*attack.options, *more))
        log = -1
        if attack.name == "stalled-log":
            log = stack.enter_context(_unread_pipe())
            options.append("--access-log")
        target = stack.enter_context(started(root, core, options, log=log))
        fire = attack.prepare(target)
        time.sleep(_SETTLE_SECS)
        watch = stack.enter_context(Watch(target))
        probing = stack.enter_context(Probing(target))
        thread = threading.Thread(target=fire, daemon=True)
        thread.start()
        thread.join(_ATTACK_SECS)
        ended = time.monotonic()
        time.sleep(_SETTLE_SECS)  # what it has begun may go on
        released = None
        while released is None and time.monotonic() - ended < RELEASE_SECS and watch.alive:
            if watch.released():
                released = time.monotonic() - ended
            else:
                time.sleep(_LOOK_SECS)
        told = probing.report()
        watch.stop()
        growth, charged = watch.most_since_start()
        infer = told["infer"]
        health = max(told["kept"]["worst"], told["new"]["worst"])
        if not watch.alive:
            _give_up(target)
        return Seen(
            health, growth, charged + attack.allowed, released, int(infer["good"]),
            int(infer["good"] + infer["bad"]), watch.alive,
        )  # fmt: skip


@contextmanager
def _unread_pipe() -> Iterator[int]:
    """A pipe to write to that nobody reads."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE)
    try:
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


class Probing:
    """The process that asks for health and inference all the time."""

    def __init__(
        self, target: Target, busy: bool = False, every: float = HEALTH_EVERY_SECS
    ) -> None:
        """On a `busy` machine, the time that the server waited for a core does not count.

        Nor does, on any, what the machine's host has taken from it.
        """
        kind = "busy" if busy else "quiet"
        command = [sys.executable, *_PROBE, target.http, kind, str(every)]
        command += [str(process.pid) for process in target.processes()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._answer() != "asking\n":
            raise BenchmarkError("the process that asks for health did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def report(self) -> dict[str, dict[str, float]]:
        """Results of each probe since the last report."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told: dict[str, dict[str, float]] = json.loads(self._answer())
        return told

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _give_up(target: Target) -> None:
    for process in target.processes():
        with suppress(psutil.Error):
            process.kill()


class Watch:
    """Looks at a server's memory, and at what it says is charged, on threads."""

    def __init__(self, target: Target) -> None:
        self._processes = target.processes()
        self._url = f"http://{target.metrics}/metrics"
        self._before = self._now = proportional(self._processes)
        self._most = self._charged = self._most_charged = self._peak = 0
        self._base = self._before  # of `most`
        self._asked = 0  # answers of the metrics since `forget`
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(look,), daemon=True)
            for look in (self._look, self._ask)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """True if the server itself runs."""
        return _runs(self._processes[0])

    def same_processes(self) -> bool:
        """True if all processes that the server had at the beginning run."""
        return all(_runs(process) for process in self._processes)

    def released(self) -> bool:
        """True if nothing is charged, and no more memory kept than is documented."""
        kept = KEPT * len(self._processes) + GROWTH
        return not self._charged and self._now - self._before <= kept

    def idle(self) -> bool:
        """True if the metrics have said since `forget` that nothing is charged."""
        return self._asked > 1 and not self._charged

    def forget(self) -> None:
        """Begin anew with what is seen at most."""
        self._base = self._now = proportional(self._processes)
        self._most = self._most_charged = self._asked = 0

    def most(self) -> tuple[int, int]:
        """The most bytes that memory has grown by since `forget`, and that were charged."""
        return self._most, self._most_charged

    def most_since_start(self) -> tuple[int, int]:
        """The same since the beginning, with what the server says was charged at most."""
        return self._most, self._peak

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, look: Callable[[], None]) -> None:
        while not self._stopped.wait(_LOOK_SECS):
            look()

    def _look(self) -> None:
        self._now = proportional(self._processes)
        self._most = max(self._most, self._now - self._base)

    def _ask(self) -> None:
        with suppress(OSError), urllib.request.urlopen(self._url, timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.partition(" ")
                if name == _CHARGED:
                    self._charged = int(float(value))
                    self._most_charged = max(self._most_charged, self._charged)
                elif name == _MOST_CHARGED and int(float(value)) > self._peak:
                    self._peak = self._most_charged = int(float(value))
            self._asked += 1


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
