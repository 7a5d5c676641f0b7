"""Gives each peer an environment of its own, below `build/bench`, from the package index."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from benchmarks.scorecard.peer import Peer
from benchmarks.server import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
_INSTALL_SECS = 1800
_LINES = 6  # of an installer's output that explain why it failed


def interpreter(peer: Peer) -> Path:
    """The Python that a peer's service runs with; for a fetched one, beside what was fetched."""
    if peer.requirements is None:
        return Path(sys.executable)
    return _folder(peer) / "bin" / "python"


def prepare(peer: Peer) -> None:
    """Make a peer's environment, unless it is there; raises `BenchmarkError` with the reason."""
    if peer.requirements is None:
        return
    stamp = _folder(peer) / "installed"
    wanted = sha256(peer.requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {peer.title} below {BUILD.relative_to(ROOT)}", file=sys.stderr)
    if peer.fetch is not None:
        _run([str(peer.fetch), str(_folder(peer).parent)])
    else:
        python = str(interpreter(peer))
        _run([sys.executable, "-m", "venv", "--clear", str(_folder(peer))])
        _run([
            python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--requirement", str(peer.requirements),
        ])  # fmt: skip
    stamp.write_text(wanted)


def fetch_perf_analyzer() -> None:
    """Run `scripts/bench_tools`; if it fails, perf_analyzer's workloads are skipped."""
    try:
        _run([str(ROOT / "scripts" / "bench_tools"), str(BUILD)])
    except BenchmarkError as error:
        print(f"perf_analyzer {error}", file=sys.stderr)


def _folder(peer: Peer) -> Path:
    return BUILD / peer.name / "venv"


def _run(command: list[str]) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_SECS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"cannot be installed: {error}") from None
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        lines = [line for line in lines if not line.startswith("WARNING")]
        raise BenchmarkError("cannot be installed: " + " / ".join(lines[-_LINES:]))
