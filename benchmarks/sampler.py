"""Runs the server and notes where its main thread spends CPU time: for `scripts/bench --profile`.

Usage: python -m benchmarks.sampler FILE [the server's own arguments]

A timer that runs with the process's CPU time interrupts the main thread about every millisecond;
the innermost frame of the server's own code, or of the libraries below it, is counted. C code
has no frame: it counts for the Python function that called it. What the event loop does between
callbacks, system calls above all, is seen when the next callback begins, at its first instruction.

SIGUSR1 forgets what was counted; the counts go to FILE, as JSON, when the server ends.
"""

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

PERIOD_SECS = 0.001
LOOP = "event loop and system calls"
_RUNNERS = ("asyncio.", "uvloop", "headrace.app", "headrace.cli", "uvicorn.server")
_FIRST = 6  # bytes of instructions that come before a function's own
_KNOWN = ("headrace.", "uvicorn.", "grpc.", "fastapi.", "starlette.", "asyncio.")


def place(frame: FrameType | None) -> tuple[str, str]:
    """Module and function that a sample counts for."""
    if frame is None:
        return LOOP, ""
    if frame.f_lasti <= _FIRST and _is_runner(frame.f_back):
        return LOOP, ""
    current: FrameType | None = frame
    while current is not None:
        module = str(current.f_globals.get("__name__", ""))
        if module.startswith(_KNOWN):
            # A runner is at work itself only while the loop is: in C.
            if _is_runner(current):
                return LOOP, ""
            return module, current.f_code.co_qualname
        current = current.f_back
    return "other", frame.f_code.co_qualname


def _is_runner(frame: FrameType | None) -> bool:
    return frame is None or str(frame.f_globals.get("__name__", "")).startswith(_RUNNERS)


def main() -> None:
    """Run `python -m headrace` with the timer on."""
    target = Path(sys.argv.pop(1))
    counts: Counter[tuple[str, str]] = Counter()

    def sample(number: int, frame: FrameType | None) -> None:
        counts[place(frame)] += 1

    signal.signal(signal.SIGPROF, sample)
    signal.signal(signal.SIGUSR1, lambda number, frame: counts.clear())
    signal.setitimer(signal.ITIMER_PROF, PERIOD_SECS, PERIOD_SECS)
    try:
        runpy.run_module("headrace", run_name="__main__", alter_sys=True)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        found = [[module, function, count] for (module, function), count in counts.items()]
        target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
