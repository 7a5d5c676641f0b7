"""The server as a process: signals, doors, the order of start and end, and the exit.

Start: the doors open first, so that probes get answers; then models are loaded; then the server is
ready. End, on SIGTERM or SIGINT: report not ready, wait for `shutdown_delay_secs` so that load
balancers notice, announce the end to clients, admit nothing new, finish admitted requests, close
the doors, free the models, exit 0. A second signal exits at once. Loads in progress are abandoned,
and so is what runs past `exit_timeout_secs`: threads cannot be stopped, so the process exits
despite them.

On SIGHUP, settings, TLS files and repositories are read again, unless the terminal is gone to which
the server belonged: that ends it like SIGTERM, as a server in the foreground of a closed window
would stay and keep its ports.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from time import monotonic
from typing import NoReturn

import uvloop

from headrace import __version__
from headrace.build import (
    build_engine,
    make_audit,
    make_capture,
    make_tracing,
    sources_at_start,
    watches,
)
from headrace.cli.text import table
from headrace.core.errors import LoadFailed, RepositoryError
from headrace.core.limits import ABANDONED_SECS
from headrace.core.process import allow_many_files, serve_promptly
from headrace.doors.server import ServerDoors
from headrace.engine.tracing import Tracing
from headrace.engine.version import ModelVersion
from headrace.ipc.allocation import keep_memory
from headrace.observability.audit import OPERATOR, Audit, AuditEntry, AuditOutcome
from headrace.observability.capture import Capture
from headrace.observability.logs import LogControl, Logs
from headrace.options import SettingsError
from headrace.repository.layout import ModelSource
from headrace.settings import Settings

log = logging.getLogger(__name__)

_STEP_SECS = 0.02  # between collections at start-up
_TRACES_SECS = 5  # time limit for writing the last traces
_UNFINISHED_SECS = 2  # time limit for incomplete requests at shutdown


# Settings of the log that SIGHUP puts into effect, by their names in the protocol.
_LOG_SETTINGS: Mapping[str, str] = {
    "log_verbose": "log_verbose_level", "log_info": "log_info", "log_warning": "log_warning",
    "log_error": "log_error", "log_format": "log_format",
}  # fmt: skip
# Settings of the doors' header rules, which SIGHUP puts into effect, too.
_HEADER_RULES = frozenset({
    "restricted_api", "http_restricted_api", "grpc_restricted_protocol", "http_allowed_origin",
    "http_header_forward_pattern", "grpc_header_forward_pattern",
})  # fmt: skip


def run(
    settings: Settings, note: str = "", reread: Callable[[], Settings] | None = None,
    program: str = "headrace serve",
) -> int:  # fmt: skip
    """Serve until a signal; returns the exit status.

    `note` is logged first. `reread` returns the current settings or raises `SettingsError`; without
    it, they stay on SIGHUP. `program` begins messages about failures.
    """
    try:
        logs = Logs(settings.logs)
    except OSError as error:
        print(
            f"{program}: cannot write the log {settings.log_file}: {error.strerror}",
            file=sys.stderr,
        )
        return 1
    if note:
        log.info(note)
    allow_many_files()
    control = LogControl(settings.logs, logs.apply)
    control.drops.append(lambda: logs.dropped)
    control.tail = logs.tail
    try:
        tracing = make_tracing(settings.traces)
        audit, capture = make_audit(settings.audit), make_capture(settings.capturing)
        application = Application(settings, control, tracing, reread, program, audit, capture)
    except LoadFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    try:
        status = uvloop.run(application.serve())
    finally:
        application.close()
    tracing.close(_TRACES_SECS)
    for recorder in (audit, capture):
        if recorder is not None:
            recorder.close()
    if application.stuck:
        _exit_at_once(status)
    return status


class Application:
    """One server process."""

    def __init__(
        self,
        settings: Settings,
        logs: LogControl,
        tracing: Tracing,
        reread: Callable[[], Settings] | None = None,
        program: str = "headrace serve",
        audit: Audit | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`reread` and `program` as in `run`; without `audit` or `capture`, neither happens."""
        self._program = program
        self._settings = settings
        self._reread = reread or (lambda: self._settings)
        # Whoever starts a server by `nohup` wants it to outlive the terminal.
        kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._terminal = _has_terminal() and not kept
        self._hangup = asyncio.Event()
        self._engine = build_engine(settings, logs, tracing, audit=audit, capture=capture)
        self._doors = ServerDoors(settings, self._engine)
        self._stop = asyncio.Event()
        self.stuck = False  # true if threads still run or load models at the end

    async def serve(self) -> int:
        """Run the server from start to shutdown; returns the exit status."""
        try:
            return await self._serve()
        finally:
            await self._engine.close()

    async def _serve(self) -> int:
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        begun = monotonic()
        try:
            sources, warnings = sources_at_start(settings, self._engine)
            for warning in (*warnings, *settings.open_at_one_door):
                log.warning(warning)
            self._engine.open(watches(settings, self._engine, sources))
            print(f"headrace {__version__}")
            await self._doors.open()
            gc.freeze()  # imported modules and objects made so far
        except (RepositoryError, OSError) as error:
            print(f"{self._program}: {error}", file=sys.stderr)
            await self._doors.close(0)
            return 1
        if not await self._load(sources):
            return await self._shut_down(loaded=False)
        print_models(list(self._engine.versions()), self._engine.unavailable())
        if settings.exit_on_error and self._engine.unavailable():
            names = [name.replace("/", " version ") for name, _ in self._engine.unavailable()]
            print(
                f"{self._program}: {', '.join(names)} cannot be loaded;"
                " --exit-on-error=false serves the rest",
                file=sys.stderr,
            )
            await self._doors.close(0)
            return 1
        _collect()
        serve_promptly()
        gc.enable()  # disabled before the imports, see `headrace.cli`
        keep_memory(server=True)
        state = "ready" if self._engine.ready else "not ready"
        seconds = monotonic() - begun
        self._engine.start()
        # If both go to one terminal, one of them suffices.
        level = logging.DEBUG if self._logs_beside_output() else logging.INFO
        log.log(level, "%s after %.2f s", state, seconds)
        print(f"{state} after {seconds:.2f} s", flush=True)
        hearing = asyncio.ensure_future(self._hear_hangups())
        await self._stop.wait()
        hearing.cancel()
        return await self._shut_down()

    def close(self) -> None:
        """Remove the process's temporary files and sockets."""
        self._doors.remove_files()
        self._engine.control.close()

    async def _load(self, sources: Sequence[ModelSource]) -> bool:
        """Load every model; returns False if stopped before the end."""
        everything = self._settings.exit_on_error
        loading = asyncio.ensure_future(self._engine.load_all(sources, everything))
        stop = asyncio.ensure_future(self._stop.wait())
        while True:
            ends = (loading, stop)
            await asyncio.wait(ends, timeout=_STEP_SECS, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() or stop.done():
                break
            _collect()
        stop.cancel()
        if not loading.done():
            loading.cancel()
            return False
        await loading
        return True

    def _logs_beside_output(self) -> bool:
        return not self._settings.logs.file and sys.stdout.isatty() and sys.stderr.isatty()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("%s again: exiting at once", signal.Signals(number).name)
            self.close()
            _exit_at_once(1)
        log.info("%s: shutting down", signal.Signals(number).name)
        self._stop.set()

    def _on_hangup(self) -> None:
        if self._terminal and not _has_terminal():
            if not self._stop.is_set():
                self._on_signal(signal.SIGHUP)
            return
        self._hangup.set()

    async def _hear_hangups(self) -> None:
        """Read everything again after each SIGHUP, of which several may become one."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            try:
                await self._reload()
            except Exception:  # no error may end the server
                log.exception("bug while reading settings and repositories again")

    async def _reload(self) -> None:
        """Put into effect what can change while the server runs; the rest stays, and is named."""
        read = ["settings", "repositories"]
        try:
            self._apply(await asyncio.to_thread(self._reread))
        except SettingsError as error:
            read.remove("settings")
            log.error("SIGHUP: settings stay as they are: %s", error)
        try:
            await self._doors.renew_tls()
        except OSError as error:
            log.error("SIGHUP: TLS files stay as they are: %s", error)
        try:
            await self._engine.control.refresh()
        except RepositoryError as error:
            read.remove("repositories")
            log.error("SIGHUP: models stay as they are: %s", error)
        if read:
            log.info("SIGHUP: %s were read again", " and ".join(read))

    def _apply(self, settings: Settings) -> None:
        """Change what can be changed; only names are logged, since some values are secrets."""
        before = self._settings
        changed = {
            field.name: getattr(settings, field.name)
            for field in fields(before)
            if getattr(before, field.name) != getattr(settings, field.name)
        }
        logs = {name: value for name, value in changed.items() if name in _LOG_SETTINGS}
        rules = {name: value for name, value in changed.items() if name in _HEADER_RULES}
        if self._engine.audit is not None and (logs or rules):
            detail = {"settings": [*logs, *rules]}
            self._engine.audit.record(
                AuditEntry("SIGHUP", AuditOutcome.OK, identity=OPERATOR, detail=detail)
            )
        self._settings = now = replace(before, **logs, **rules)
        self._engine.logs.change({_LOG_SETTINGS[name]: value for name, value in logs.items()})
        if rules:
            self._doors.change_rules(now.http_rules, now.grpc_rules)
            for warning in now.open_at_one_door:
                log.warning(warning)
        if applied := [name for name in changed if name in logs or name in rules]:
            log.info("SIGHUP: changed: %s", _options(applied))
        if others := [name for name in changed if name not in applied]:
            log.warning("SIGHUP: in effect after a restart only: %s", _options(others))

    async def _shut_down(self, loaded: bool = True) -> int:
        """Shut down in order; returns the exit status. `loaded` is False if loads are abandoned."""
        settings = self._settings
        noticed = loaded or self._engine.ready
        self._engine.readiness.begin_shutdown()
        self._engine.stop()
        if settings.shutdown_delay_secs and noticed:
            await asyncio.sleep(settings.shutdown_delay_secs)
        if waiting := self._engine.admission.requests:
            log.info(
                "waiting for %d request%s under way, at most %d s; another signal ends the server"
                " at once", waiting, "s" if waiting > 1 else "", settings.exit_timeout_secs,
            )  # fmt: skip
        deadline = monotonic() + settings.exit_timeout_secs
        left = await self._doors.drain(settings.exit_timeout_secs)
        self._engine.admission.close()
        unfinished = asyncio.get_running_loop().call_later(
            _UNFINISHED_SECS, self._doors.end_unfinished
        )
        drained = asyncio.Event()
        self._engine.admission.when_empty(drained.set)
        try:
            async with asyncio.timeout(max(deadline - monotonic(), 0.1)):
                await drained.wait()
        except TimeoutError:
            left = self._engine.admission.requests
        if left:
            log.error(
                "%d requests were still under way after %d s", left, settings.exit_timeout_secs
            )
        unfinished.cancel()
        await self._engine.stopped()
        await self._doors.close(max(deadline - monotonic(), 0.1))
        if left or (loaded and not await self._unload(deadline)):
            self.stuck = True
            return 1
        self.stuck = not loaded or self._engine.loading
        when = "" if loaded else " while models were loading"
        log.info("stopped%s; every admitted request was answered", when)
        return 0

    async def _unload(self, deadline: float) -> bool:
        """Free the models; returns False if some are still running at the deadline.

        Abandoned executions do not belong to admitted requests any more; they are ended, if
        possible in this process.
        """
        left = max(deadline - monotonic(), 0.1)
        try:
            async with asyncio.timeout(left):
                await self._engine.unload_all(min(ABANDONED_SECS, left / 2))
        except TimeoutError:
            hanging = self._engine.unloading()
            names = ", ".join(f"{v.model} version {v.name}" for v in hanging)
            log.error("still running after %d s: %s", self._settings.exit_timeout_secs, names)
            return False
        return True


def _collect() -> None:
    """Collect garbage, and spare the collector what has been made so far.

    Objects made at start-up stay for good. While models are loaded this happens every few of them:
    a collection visits all objects since the last one, at once, which for a thousand models takes a
    tenth of a second.
    """
    gc.collect()
    gc.freeze()


def _has_terminal() -> bool:
    """True if the process belongs to a terminal, which has not been closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _options(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def print_models(versions: list[ModelVersion], unavailable: list[tuple[str, str]]) -> None:
    """Print the table of models; `unavailable` are models without a version, or `name/number`."""
    rows = []
    for version in versions:
        instances = backend = ""
        if version.ready:
            kinds = [str(instance.kind) for instance in version.report.instances]
            instances = ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
            backend = version.config.backend
            if gpus := {gpu for group in version.config.instance_group for gpu in group.gpus}:
                instances += f" (GPU {', '.join(map(str, sorted(gpus)))})"
        rows.append(
            (version.model, version.name, backend, instances, str(version.state),
             f"{version.report.load_seconds:.2f} s" if version.ready else "")
        )  # fmt: skip
    rows += [(name, "", "", "", "UNAVAILABLE", "") for name, _ in unavailable if "/" not in name]
    head = ("model", "version", "backend", "instances", "state", "load")
    lines = table(head, rows) if rows else ["no model is loaded"]
    print(*lines, sep="\n", flush=True)


def _exit_at_once(status: int) -> NoReturn:
    """Exit without waiting for anything.

    Unlike sys.exit: with threads still running a model, a normal exit would tear down the
    interpreter and ONNX Runtime beneath them, which aborts the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
