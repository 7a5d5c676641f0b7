"""Builds of environments: by uv, or from an archive.

Builders fill a directory provided by the cache, and raise `StepFailed` or `OSError`. They run on
loading threads. The output of each command is read while it runs, logged, and bounded. If the
server ends during a build, a reaper between it and the command kills the command.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
from uv import find_uv_bin

from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.placement.child_process import ChildProcess, ProcessOutput, Reaping
from headrace.plugins.environments.cache import Built, key_of
from headrace.plugins.environments.interpreters import Interpreter, own, probe
from headrace.plugins.environments.requirements import Requirements, read_requirements, redact
from headrace.plugins.environments.surroundings import build_surroundings

log = logging.getLogger(__name__)

_LAST_LINES = 15  # lines shown in an error
_LONGEST = 300  # characters shown of a line
_TELL_SECS = 5.0  # between two log lines about one build
_LOOK_SECS = 1.0  # between checks of a silent command


class StepFailed(Exception):
    """A command failed or took too long; the text ends with the last lines of its output."""


class BuildLog:
    """Logs one build: its start, its current step every few seconds, its end."""

    def __init__(self, model: str, version: str, what: str) -> None:
        self.begun = self._told = monotonic()
        self._model = model
        self._fields = {"model": model, "version": version}
        log.info("building the environment of %s: %s", model, what, extra=self._fields)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.begun

    def at(self, line: str) -> None:
        """Note that the build is at `line`; logged if nothing was for a while."""
        now = monotonic()
        if line and now - self._told >= _TELL_SECS:
            self._told = now
            log.info("building the environment of %s: %.0f s, %s", self._model, self.seconds,
                     line, extra=self._fields)  # fmt: skip

    def done(self, what: str) -> None:
        """Log the successful end of the build."""
        log.info("built the environment of %s in %.1f s: %s", self._model, self.seconds, what,
                 extra=self._fields)  # fmt: skip


class Steps:
    """Runs the commands of one build. Each holds `lock` until its processes are gone."""

    def __init__(
        self, environment: Mapping[str, str], lock: int, progress: BuildLog, limit_secs: float
    ) -> None:
        self.environment = environment
        self._lock = lock
        self._progress = progress
        self._limit = limit_secs
        self._deadline = progress.begun + limit_secs

    def run(self, what: str, command: Sequence[str], folder: Path) -> str:
        """Run a command in a directory; returns its last output. Raises `StepFailed`, `OSError`."""
        output = _LastLines(self._progress)
        status = asyncio.run(self._run(command, folder, output))
        text = "\n".join(output.lines)
        if status is None:
            raise StepFailed(f"{what} was ended after {self._limit:.0f} s; it said last:\n{text}")
        if status:
            raise StepFailed(f"{what} failed with status {status}:\n{text}")
        return text

    async def _run(self, command: Sequence[str], folder: Path, output: "_LastLines") -> int | None:
        """The status of a command; None if it exceeded the time limit and was killed."""
        child = ChildProcess(
            command, self.environment, output, descriptors=(self._lock,), folder=folder,
            reaping=Reaping(),
        )  # fmt: skip
        try:
            exited = asyncio.Event()
            child.attach(asyncio.get_running_loop(), exited.set)
            while not child.ended and (left := self._deadline - monotonic()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, _LOOK_SECS)):
                        await exited.wait()
                output.tell()
            return child.status if child.ended else None
        finally:
            child.detach()
            child.kill()


class _LastLines(ProcessOutput):
    """The last lines of a command's output, without secrets; some of them are logged."""

    def __init__(self, progress: BuildLog) -> None:
        super().__init__("")
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._progress = progress

    def line(self, line: bytes) -> None:
        """Keep a line."""
        if text := redact(line.decode(errors="replace").rstrip()):
            self.lines.append(text[:_LONGEST])
        self.tell()

    def tell(self) -> None:
        """Report the last line as the current step."""
        self._progress.at(self.lines[-1] if self.lines else "")


_LAYOUT = 3  # incremented when the build procedure changes
_UNPACK = Path(__file__).with_name("unpack.py")
_MOST_UNPACKED = 64 << 30  # maximum bytes of an unpacked archive
_LEAST_NUMPY = "numpy>=1.23"  # for workers, if the requirements include none
_LINKED = "headrace-numpy"
UNFIT = "the model's environment lacks an interpreter, or numpy"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The plan for building an environment; equal keys mean equal environments.

    Those linked to a numpy outside of them also have to have it in common, which is known after
    the build: `numpy` names the server's.
    """

    key: str
    build: Callable[[Path, int], Built]
    numpy: str = ""


def packages_plan(
    spec: LoadSpec, requirements: Requirements, interpreter: Interpreter
) -> BuildPlan:
    """A virtual environment of an interpreter with the required packages."""
    wheelhouse = spec.environments.wheelhouse and os.path.abspath(spec.environments.wheelhouse)
    identity = [
        _LAYOUT, interpreter.real, interpreter.version, interpreter.abi,
        requirements.identity, wheelhouse,
    ]  # fmt: skip
    return BuildPlan(
        key_of(identity),
        lambda path, lock: _install(spec, interpreter, requirements, path, lock),
        _own_numpy(),
    )


def archive_plan(spec: LoadSpec, archive: Path) -> BuildPlan:
    """The environment in an archive, as made by conda-pack; raises `OSError`."""
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return BuildPlan(
        key_of([_LAYOUT, "archive", digest]), lambda path, lock: _unpack(spec, archive, path, lock)
    )


def check_ready(directory: Path) -> Interpreter:
    """The interpreter of an existing environment; raises `LoadFailed`."""
    python = directory / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise LoadFailed(f"{directory} is no environment: it has no bin/python", UNFIT)
    found = probe(str(python))
    if not found.has_numpy:
        text = f"the environment {directory} has no numpy, which every model needs"
        raise LoadFailed(text, UNFIT)
    return found


def _install(
    spec: LoadSpec, interpreter: Interpreter, requirements: Requirements, path: Path, lock: int
) -> Built:
    """A virtual environment with packages; raises `StepFailed`, `LoadFailed` or `OSError`."""
    wanted = tuple(redact(line.partition(" --")[0]) for line in requirements.wanted)
    wheelhouse = spec.environments.wheelhouse
    if wheelhouse and not Path(wheelhouse).is_dir():
        raise StepFailed(f"there is no wheelhouse {wheelhouse}")
    need = "it needs" if len(wanted) == 1 else "they need"
    what = f"{_count(len(wanted))} and what {need}" if wanted else "numpy"
    progress = _progress(spec, f"{what}, {interpreter}")
    temporary = path / "tmp"
    temporary.mkdir(mode=0o700)  # requirements may hold passwords
    steps = _steps(spec, lock, progress, temporary, bool(wheelhouse))
    uv = _uv_command(steps.environment, temporary, bool(wheelhouse))
    venv = ["venv", "--no-project", "--allow-existing", "--python", interpreter.path, str(path)]
    steps.run("uv venv", [*uv, *venv], temporary)
    # An image, for example, cannot add byte code later.
    python = str(path / "bin" / "python")
    install = [*uv, "pip", "install", "--compile-bytecode", "--python", python]
    if wheelhouse:
        install += ["--no-index", "--find-links", os.path.abspath(wheelhouse)]
    if requirements.wanted:
        file = requirements.file or temporary / "requirements.txt"
        if not requirements.file:
            file.write_text("\n".join(requirements.wanted) + "\n", "utf-8")
        # One hash requires all, as with pip.
        hashes = ["--require-hashes"] * any(" --hash" in line for line in requirements.wanted)
        steps.run("uv", [*install, *hashes, "-r", str(file)], requirements.folder)
        # Otherwise the key is that of another environment.
        if requirements.file and read_requirements(file, spec.root) != requirements:
            raise StepFailed("the requirements changed while they were installed")
    [site] = path.glob("lib/*/site-packages")
    linked = ""
    if not (site / "numpy").is_dir():
        if interpreter.abi == own().abi:
            _link_numpy(path, site)
            linked = _own_numpy()
        else:
            steps.run("uv", [*install, _LEAST_NUMPY], temporary)
    shutil.rmtree(temporary)
    installed = len(list(site.glob("*.dist-info")))
    progress.done(f"{_count(installed)}, {interpreter}")
    return Built(wanted, str(interpreter), linked)


def _uv_command(environment: Mapping[str, str], folder: Path, offline: bool) -> list[str]:
    """uv's command; its project is `folder`, so that files beside the model configure nothing."""
    command = [find_uv_bin(), "--no-python-downloads", "--project", str(folder)]
    cache = environment.get("UV_CACHE_DIR") or environment.get("XDG_CACHE_HOME") or "~/.cache"
    if offline or not os.access(os.path.expanduser(cache), os.W_OK):
        command.append("--no-cache")
    return [*command, "--offline", "--no-config"] if offline else command


def _unpack(spec: LoadSpec, archive: Path, path: Path, lock: int) -> Built:
    """Unpack an archive, adapt it to its location, and inspect it."""
    progress = _progress(spec, f"from the archive {archive.name}")
    steps = _steps(spec, lock, progress, None, True)
    command = [str(_UNPACK), str(archive), str(path), str(_MOST_UNPACKED)]
    steps.run(f"unpacking {archive.name}", [sys.executable, "-I", "-S", *command], path)
    adapt = path / "bin" / "conda-unpack"
    if adapt.is_file():
        steps.run("conda-unpack", [str(path / "bin" / "python"), str(adapt)], path)
    found = check_ready(path)
    progress.done(str(found))
    return Built((archive.name,), str(found))


def _count(packages: int) -> str:
    return f"{packages} package{'' if packages == 1 else 's'}"


def _progress(spec: LoadSpec, what: str) -> BuildLog:
    return BuildLog(spec.model, str(spec.version), what)


def _steps(
    spec: LoadSpec, lock: int, progress: BuildLog, temporary: Path | None, offline: bool
) -> Steps:
    surroundings = build_surroundings(os.environ, offline)
    if temporary is not None:  # in the cache, which has room, unlike perhaps the system's
        surroundings["TMPDIR"] = str(temporary)
    return Steps(surroundings, lock, progress, spec.environments.build_secs)


def _own_numpy() -> str:
    """The place and version of the server's numpy."""
    return f"{Path(np.__file__).parent} {np.__version__}"


def _link_numpy(path: Path, site: Path) -> None:
    """Make the server's numpy, and no other package of it, available in an environment."""
    home = Path(np.__file__).parent
    folder = path / _LINKED
    folder.mkdir()
    beside = [home, home.with_name("numpy.libs"), *home.parent.glob("numpy-*.dist-info")]
    for part in beside:
        if part.is_dir():
            (folder / part.name).symlink_to(part)
    # Behind the environment's own packages.
    (site / f"{_LINKED}.pth").write_text(f"{folder}\n", "utf-8")
