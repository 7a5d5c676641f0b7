"""Supervisor of the front ends: starts, restarts and ends their processes.

Each is a fresh interpreter in a process group of its own, so that a signal from a terminal reaches
only the engine's process, which ends them in order. A front end that exits unexpectedly is
restarted at once if it had run for a while, else after a growing delay. Owned by the event loop.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from starlette.types import ASGIApp

from headrace.api.handlers import unary_handlers
from headrace.api.header_rules import HeaderRules
from headrace.core.process import is_private
from headrace.core.quotas import Quotas
from headrace.doors.clients import DoorsConfig
from headrace.engine.engine import Engine
from headrace.observability.logs import LogSettings
from headrace.placement.child_process import ChildProcess, RestartPolicy
from headrace.placement.worker.python_options import passed_environment
from headrace.plugins.frontends.clients import quotas_document
from headrace.plugins.frontends.config import FrontendConfig, LinkHeaders
from headrace.plugins.frontends.session import FrontEndSession

log = logging.getLogger(__name__)

_START_SECS = 60.0
_LOOP_SECS = 10.0  # between starts of a front end that keeps crashing
_FAREWELL_SECS = 2.0  # grace for a front end to exit after its deadline


class _FrontEnd:
    """One front end, across restarts of its process."""

    def __init__(self, owner: "Supervisor", number: int) -> None:
        self.number = number
        self.ready = False
        self.session: FrontEndSession | None = None
        self.process: ChildProcess | None = None
        self.restarts = RestartPolicy(pause=_LOOP_SECS)
        self.restart: asyncio.TimerHandle | None = None
        self._owner = owner
        self._begun = 0.0

    def start(self) -> None:
        """Start a process; raises `OSError`."""
        owner = self._owner
        self.restart = None
        ours, theirs = socket.socketpair()
        try:
            self.process = ChildProcess(
                # -P: nothing is to be imported from the working directory.
                [
                    sys.executable, "-P", "-m", "headrace.plugins.frontends", str(theirs.fileno()),
                    *(["private"] if is_private() else []),
                ],
                # The environment that a model might read before the process is private has no
                # secrets.
                passed_environment("PYTHON*", "GRPC_*"),
                descriptors=(theirs.fileno(), *owner.inherited),
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._begun = owner.loop.time()
        self.process.attach(owner.loop, self._on_exit)
        audit = owner.engine.audit
        self.session = FrontEndSession(
            ours, owner.engine, owner.app, owner.unary, self._on_ready, self._on_lost,
            moved=owner.tell_soon, record=None if audit is None else audit.record,
        )  # fmt: skip
        self.session.set_up(owner.document)
        self.session.tell_ready(owner.serves)
        if owner.headers:
            self.session.tell_headers(owner.headers)

    def kill(self) -> None:
        """Kill the process immediately."""
        if self.process is not None:
            self.process.kill()

    def _on_ready(self) -> None:
        self.ready = True
        self._owner.changed()

    def _on_lost(self, reason: str) -> None:
        if self.process is not None and not self._owner.draining:
            log.debug("link to front end %d lost: %s", self.number, reason)
        self.kill()  # the process is useless without its link

    def _on_exit(self) -> None:
        owner, process, session = self._owner, self.process, self.session
        assert process is not None
        self.process = self.session = None
        if session is not None:
            session.close()
            owner.unlogged_before += session.unlogged
        was_ready, self.ready = self.ready, False
        if owner.draining:
            owner.changed()
            return
        steady = was_ready and owner.loop.time() - self._begun >= RestartPolicy.STEADY_SECS
        if steady:
            self.restarts.steady()
        self.restarts.ended()
        delay = self.restarts.delay
        log.warning(
            "front end %d (process %d) ended with status %d; its requests are cancelled, and it is"
            " started again in %.1f s", self.number, process.pid, process.status, delay,
        )  # fmt: skip
        if self.restarts.looping:
            log.error("front end %d ends again and again; its own log lines say why", self.number)
        self.restart = owner.loop.call_later(delay, self._start_again)
        owner.changed()

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:
            self.restarts.ended()
            log.error("cannot start front end %d: %s", self.number, error)
            self.restart = self._owner.loop.call_later(self.restarts.delay, self._start_again)


class Supervisor:
    """All front ends of one engine."""

    def __init__(self, engine: Engine, app: ASGIApp, count: int, doors: DoorsConfig) -> None:
        """`count` front ends, which forward all requests over HTTP but inference to `app`."""
        self.engine = engine
        self.app = app
        self.unary = unary_handlers(engine, doors.max_request_bytes, read_only=doors.read_only)
        limits = engine.admission
        self.document = FrontendConfig(
            doors, limits.max_requests, limits.max_bytes, limits.shares, limits.max_response_bytes,
            limits.max_object_bytes, engine.logs.settings, limits.answers.bounds.buckets,
            limits.answers.bounds.native,
        ).document()  # fmt: skip
        # Listening Unix sockets, which a restarted front end inherits, too.
        kept = [door.inherited for door in (doors.http, doors.grpc) if door is not None]
        self.inherited = [descriptor for descriptor in kept if descriptor >= 0]
        self.loop = asyncio.get_running_loop()
        self.draining = False
        self.unlogged_before = 0  # lost log lines of front ends that have ended
        self.serves = False  # the readiness that front ends report
        self.headers = LinkHeaders()
        self._front_ends = [_FrontEnd(self, number) for number in range(1, count + 1)]
        self._changed = asyncio.Event()
        self._telling = False
        engine.logs.listeners.append(self.apply_logs)
        engine.logs.drops.append(lambda: self.unlogged)
        engine.wanted_headers.watch(self.want)
        engine.readiness.watch(lambda: self.tell_ready(engine.ready))
        self.tell_ready(engine.ready)

    async def start(self) -> None:
        """Start all front ends and wait until their doors are open; raises `OSError`."""
        for front_end in self._front_ends:
            front_end.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECS):
                while not all(f.ready for f in self._front_ends) and not any(
                    f.restarts.early for f in self._front_ends
                ):
                    await self._wait()
        if not all(front_end.ready for front_end in self._front_ends):
            raise OSError("a front end did not start; see the log")

    @property
    def pids(self) -> dict[str, int]:
        """Implements `FrontEnds.pids`."""
        return {
            f"front end {each.number}": 0 if each.process is None else each.process.pid
            for each in self._front_ends
        }

    def apply_logs(self, settings: LogSettings) -> None:
        """Apply log settings to all front ends, including those started later."""
        self.document["logs"] = asdict(settings)
        for session in self._sessions:
            session.apply_logs(self.document["logs"])

    def renew_tls(self) -> None:
        """Make all front ends read certificate and key again."""
        for session in self._sessions:
            session.renew_tls()

    def change_rules(self, http: HeaderRules, grpc: HeaderRules) -> None:
        """Apply header rules in all front ends, including those started later."""
        rules = {"http_rules": asdict(http), "grpc_rules": asdict(grpc)}
        self.document["doors"] |= rules
        for session in self._sessions:
            session.change_rules(rules)

    def limit_clients(self, quotas: Quotas | None) -> None:
        """Apply quotas in all front ends, including those started later."""
        self.document["quotas"] = quotas_document(quotas)
        for session in self._sessions:
            session.tell_quotas(self.document["quotas"])

    @property
    def unlogged(self) -> int:
        """Log lines that front ends could not write."""
        return self.unlogged_before + sum(session.unlogged for session in self._sessions)

    @property
    def _sessions(self) -> Iterator[FrontEndSession]:
        return (f.session for f in self._front_ends if f.session is not None)

    def tell_ready(self, ready: bool) -> None:
        """Send the server's readiness to all front ends, including those started later."""
        self.serves = ready
        for session in self._sessions:
            session.tell_ready(ready)

    def tell_soon(self) -> None:
        """Send the bytes held by others to all front ends at the end of this turn."""
        if not self._telling:
            self._telling = True
            self.loop.call_soon(self._tell_elsewhere)

    def _tell_elsewhere(self) -> None:
        self._telling = False
        for session in self._sessions:
            session.tell_elsewhere()

    def want(self, headers: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the headers that requests must carry: the fields of `LinkHeaders`."""
        self.headers = LinkHeaders(**headers)
        for session in self._sessions:
            session.tell_headers(self.headers)

    async def drain(self, seconds: float) -> int:
        """Drain and end all front ends.

        Returns the number of requests in flight after `seconds`.
        """
        admission = self.engine.admission
        self.draining = True
        left = 0

        def look() -> None:
            nonlocal left
            left = admission.requests

        timer = self.loop.call_later(seconds, look)
        for front_end in self._front_ends:
            if front_end.restart is not None:
                front_end.restart.cancel()
        for session in self._sessions:
            session.drain(seconds + 0.1)
        await self._end(seconds + _FAREWELL_SECS)
        timer.cancel()
        return left

    async def stop(self) -> None:
        """Kill all front ends."""
        self.draining = True
        for front_end in self._front_ends:
            if front_end.restart is not None:
                front_end.restart.cancel()
            front_end.kill()
        await self._end(_FAREWELL_SECS)

    def changed(self) -> None:
        """Process the start or end of a front end."""
        self._changed.set()
        self.engine.readiness.set_reachable(any(f.ready for f in self._front_ends))

    async def _end(self, seconds: float) -> None:
        """Wait until all have exited; kill the others after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while any(front_end.process for front_end in self._front_ends):
                    await self._wait()
        except TimeoutError:
            for front_end in self._front_ends:
                front_end.kill()
            while any(front_end.process for front_end in self._front_ends):
                await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
