"""Looks for requests that hurt other clients: `scripts/bench --hostile --search MINUTES`.

Strategy:
- Cases are composed from the table of operations and the descriptors of messages
  (`benchmarks.hostile.grammar`): every field of every operation changed in some ways, and
  changes of what was worst so far.
- They are sent one after the other to one server, while the process of `benchmarks.hostile.probe`
  asks for its health and for inference from another address.
- What exceeds a bound is sent again to servers of its own, since a shared machine has stalls too.
  If it does so in most of these, it is made as simple as it can be, and printed as a line for
  `benchmarks.hostile.found`, from where it becomes an attack of `--hostile` and a test.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.hostile.case import Case, simpler, to_json
from benchmarks.hostile.grammar import mutated, singles
from benchmarks.hostile.models import write_models
from benchmarks.hostile.replay import LONGEST_SECS
from benchmarks.hostile.run import HEALTH_EVERY_SECS, MIB, Probing, Watch, may_take
from benchmarks.report import table
from benchmarks.server import Target, split_cores, started

HEALTH_SECS = 0.1
WAIT_SECS = 1.0
_RELEASE_SECS = 20.0
_CASES_OF_A_SERVER = 40
_AGAIN, _OF = 2, 3  # how often a finding has to be seen again
_SIMPLER_SECS = 90.0
_KEPT = 24  # cases that are worth a change


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effects of a case: seconds of the worst answers, bytes of memory taken and charged.

    `wait` is that of an innocent request; `refused` of `asked` of these were not served.
    """

    health: float
    wait: float
    taken: int
    charged: int
    refused: int
    asked: int
    alive: bool

    @property
    def ratio(self) -> float:
        """Memory taken, over what may be taken for what is charged."""
        return self.taken / may_take(self.charged)

    @property
    def badness(self) -> float:
        """The worst of all measures over its bound; more than 1 is a finding."""
        refused = 2.0 if self.asked >= 4 and self.refused * 2 > self.asked else 0.0
        dead = 0.0 if self.alive else 99.0
        return max(self.health / HEALTH_SECS, self.wait / WAIT_SECS, self.ratio, refused, dead)

    @property
    def harmed(self) -> bool:
        """True if the next case would find another server: it kept memory, or a process ended."""
        return self.ratio > 1 or not self.alive

    def missed(self) -> str:
        """The bounds that were exceeded, in words."""
        found = []
        if not self.alive:
            found.append("a process of the server ended")
        if self.health > HEALTH_SECS:
            found.append(f"health answered after {self.health * 1e3:.0f} ms")
        if self.wait > WAIT_SECS:
            found.append(f"an innocent request waited for {self.wait:.1f} s")
        if self.ratio > 1:
            found.append(f"{self.taken / MIB:.0f} MiB taken, {self.charged / MIB:.0f} charged")
        if self.asked >= 4 and self.refused * 2 > self.asked:
            found.append(f"{self.refused} of {self.asked} innocent requests were refused")
        return ", ".join(found)


class Bench:
    """A server that cases are sent to, with its probe and watch; opened anew when it is spent."""

    def __init__(
        self,
        core: int | None,
        front_ends: int,
        busy: bool = False,
        every: float = HEALTH_EVERY_SECS,
    ) -> None:
        """`every` is the pause in seconds between questions for health."""
        self._core = core
        self._front_ends = front_ends
        self._busy = busy
        self._every = every
        self._stack = ExitStack()
        self._target: Target | None = None
        self._sent = 0
        self._explicit = False

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, case: Case, fresh: bool = False) -> Outcome:
        """Send a case; to a `fresh` server if it has to be alone."""
        spent = self._sent >= _CASES_OF_A_SERVER or self._explicit != case.explicit
        if fresh or self._target is None or spent:
            self._open(case.explicit)
        self._sent += 1
        target = self._target
        assert target is not None
        watch, probing = self._watch, self._probing
        probing.report()  # forgets what was before
        watch.forget()
        command = [sys.executable, "-m", "benchmarks.hostile.replay", target.http, target.grpc]
        with subprocess.Popen([*command, to_json(case)], stderr=subprocess.PIPE, text=True) as sent:
            try:
                _, said = sent.communicate(timeout=LONGEST_SECS + 20)
            except subprocess.TimeoutExpired:
                sent.kill()
                said = ""
        if said:
            print(f"{case!r}\n{said}", file=sys.stderr)
        ended = time.monotonic()
        time.sleep(0.15)
        while time.monotonic() - ended < _RELEASE_SECS and watch.alive and not watch.idle():
            time.sleep(0.1)
        told = probing.report()
        innocent = [told["infer"], told["large"]]
        taken, charged = watch.most()
        outcome = Outcome(
            max(told["kept"]["worst"], told["new"]["worst"]),
            max(each["worst"] for each in innocent),
            taken,
            charged,
            int(sum(each["bad"] for each in innocent)),
            int(sum(each["bad"] + each["good"] for each in innocent)),
            watch.alive and watch.same_processes(),
        )
        if outcome.harmed or not watch.idle():
            self._sent = _CASES_OF_A_SERVER  # the next one gets another server
        return outcome

    def _open(self, explicit: bool) -> None:
        self._stack.close()
        self._stack = stack = ExitStack()
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-search-")))
        write_models(root)
        options = ["--allow-metrics=true", "--metrics-port=0", f"--frontends={self._front_ends}"]
        if explicit:
            options += ["--model-control-mode=explicit", "--load-model=*"]
        core = None if self._front_ends else self._core
        self._target = stack.enter_context(started(root, core, options))
        self._watch = stack.enter_context(Watch(self._target))
        self._probing = stack.enter_context(Probing(self._target, self._busy, self._every))
        self._sent, self._explicit = 0, explicit
        time.sleep(0.3)


@dataclass(slots=True)
class _Search:
    """State of a search: cases tried, the worst of them, findings."""

    bench: Bench
    random: Random
    deadline: float
    tried: Counter[str]
    worst: dict[str, tuple[Outcome, Case]]
    kept: list[tuple[float, Case]]
    found: list[tuple[Outcome, Case]]

    def run(self) -> None:
        """Send cases until the time is over."""
        known: set[tuple[str, str, str]] = set()
        first = singles(self.random)
        while time.monotonic() < self.deadline:
            case = self._next(first)
            outcome = self.bench.send(case)
            self._note(case, outcome)
            kind = (
                case.door,
                case.operation,
                " ".join(f"{c.field} {c.kind}" for c in case.changes),
            )
            if outcome.badness > 1 and kind not in known and self._seen_again(case):
                known.add(kind)
                self._find(case)

    def _next(self, first: Iterator[Case]) -> Case:
        if self.kept and self.random.random() < 0.35:
            return mutated(self.random.choice(self.kept)[1], self.random)
        case = next(first, None)
        return case or mutated(self.random.choice(self.kept)[1], self.random)

    def _note(self, case: Case, outcome: Outcome) -> None:
        self.tried[f"{case.operation} ({case.door})"] += 1
        measures: dict[str, Callable[[Outcome], float]] = {
            "health": lambda each: each.health,
            "wait": lambda each: each.wait,
            "memory": lambda each: each.ratio,
        }
        for name, measure in measures.items():
            if name not in self.worst or measure(outcome) > measure(self.worst[name][0]):
                self.worst[name] = outcome, case
        self.kept.append((outcome.badness, case))
        self.kept.sort(key=lambda each: -each[0])
        del self.kept[_KEPT:]

    def _seen_again(self, case: Case) -> bool:
        seen = sum(self.bench.send(case, fresh=True).badness > 1 for _ in range(_OF))
        return seen >= _AGAIN

    def _find(self, case: Case) -> None:
        """Make a finding as simple as it can be, and print it."""
        until = time.monotonic() + _SIMPLER_SECS
        outcome = self.bench.send(case, fresh=True)
        smaller = True
        while smaller and time.monotonic() < until:
            smaller = False
            for candidate in simpler(case):
                if time.monotonic() > until:
                    break
                seen = self.bench.send(candidate, fresh=True)
                if seen.badness > 1 and self.bench.send(candidate, fresh=True).badness > 1:
                    case, outcome, smaller = candidate, seen, True
                    break
        self.found.append((outcome, case))
        print(f"FOUND {outcome.missed() or 'not in the last run'}\n  {case!r}", file=sys.stderr)


def main(minutes: float, front_ends: int | None, seed: int, busy: bool = False) -> int:
    """Search and print, also once interrupted; 1 if anything was found beyond a bound.

    Without a number of front ends, a third of the time goes to a server with one.
    """
    core, _ = split_cores()
    parts = [(0, 2 / 3), (1, 1 / 3)] if front_ends is None else [(front_ends, 1.0)]
    found, interrupted = 0, False
    for number, share in parts:
        if interrupted:
            break
        with Bench(None if busy else core, number, busy) as bench:
            deadline = time.monotonic() + minutes * 60 * share
            search = _Search(bench, Random(seed), deadline, Counter(), {}, [], [])
            try:
                search.run()
            except KeyboardInterrupt:
                interrupted = True
        print(_report(search, number))
        found += len(search.found)
    return 1 if found else 0


def _report(search: _Search, front_ends: int) -> str:
    rows = [
        (
            name,
            f"{seen.health * 1e3:.0f}",
            f"{seen.wait * 1e3:.0f}",
            f"{seen.taken / MIB:.0f}",
            f"{seen.charged / MIB:.0f}",
            repr(case),
        )
        for name, (seen, case) in search.worst.items()
    ]
    titles = ("worst", "health, ms", "wait, ms", "taken, MiB", "charged, MiB", "case")
    doors = f"with {front_ends} front ends" if front_ends else "without front ends"
    lines = [
        f"{search.tried.total()} cases of {len(search.tried)} operations {doors},"
        f" {len(search.found)} beyond a bound",
        "",
        table(titles, rows, left=1),
        *(f"{outcome.missed()}\n  {case!r}" for outcome, case in search.found),
    ]
    return "\n".join(lines)
