"""The server's services for its models: calls of other models, model control, metrics.

A model's calls are part of a request that was admitted, so they are not admitted again, and
continue while the server finishes its requests; only quotas of its client for the called model
count them. Calls that a model makes while it is started or
warmed up, on a loading thread, run on the server's event loop, and their results are delivered on
that thread's event loop (`LoadingServices`). Meanwhile that load does not count against the limit
of concurrent loads: the called model may have to be loaded, too. Models that are not ready cannot
be called.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from headrace.core.call import Call, InferResponse, InnerCall
from headrace.core.errors import ExecutionFailed, InvalidRequest, NotFound, ServerError, Unsupported
from headrace.core.identity import Identity
from headrace.core.model_spec import LoadParameters
from headrace.engine.admission import Admission
from headrace.engine.auditing import InferAudit, load_detail, result
from headrace.engine.entrance import Router
from headrace.engine.tracing import TracedCall, Tracing
from headrace.observability.audit import Audit, AuditEntry
from headrace.observability.capture import Capture
from headrace.observability.model_metrics import ModelMetrics
from headrace.placement.placement import ModelServices
from headrace.protocol.load_json import load_parameters
from headrace.protocol.status import INTERNAL_TEXT

log = logging.getLogger(__name__)


class ModelControl(Protocol):
    """Model control."""

    async def load(self, name: str, parameters: LoadParameters, waiter: str = "") -> None:
        """Load a model; the load of `waiter` waits for it; raises `ServerError`."""

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model; raises `ServerError`."""


class Models(Protocol):
    """All models of the server."""

    @property
    def control(self) -> ModelControl:
        """Model control."""

    def find(self, name: str, version: str = "") -> Router:
        """The target of requests for a model, possibly loaded on request; raises `ServerError`."""

    def model_ready(self, name: str, version: str = "") -> bool:
        """True if a model takes requests; raises `InvalidRequest`."""


class EngineServices:
    """The services for one version of a model; a `ModelServices`."""

    def __init__(
        self,
        models: Models,
        metrics: ModelMetrics,
        owner: Router | None = None,
        tracing: Tracing | None = None,
        audit: Audit | None = None,
        capture: Capture | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`owner` is the target of that version's calls, `admission` has the clients' quotas."""
        self.loading = ""  # the model whose load waits for these calls
        self.tracing = tracing
        self._audit = audit
        self.infer_audit = InferAudit(audit, audit.infer) if audit and audit.infer else None
        self.capture = capture
        self._admission = admission
        self._owner = owner
        self._models = models
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, call: Call, inside: bool) -> None:
        """Run a model; raises `ServerError`."""
        found = self._models.find(call.model_name, call.model_version)
        if inside and found.waits_for(self._owner):
            raise Unsupported(
                f"model '{call.model_name}' asks itself while it executes, and would wait for"
                " itself: it needs a second instance (instance_group), or to be a coroutine"
            )
        if found.decoupled and call.refusal:
            raise Unsupported(call.refusal)
        submit = found.submit
        if self.tracing is not None and call.context.trace:
            submit = partial(self.tracing.submit_child, submit)
        clients = None if self._admission is None else self._admission.clients
        if clients is not None and isinstance(call, InnerCall):
            clients.submit(call, submit)
        else:
            submit(call)

    def begin_call(self, link: str) -> TracedCall | None:
        """Implements `headrace.placement.upstream.connection.CallTraces`."""
        return None if self.tracing is None else self.tracing.begin_call(link)

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Run a control operation of a model; invalid documents raise any exception."""
        if document["op"] in ("load", "unload"):
            task = asyncio.get_running_loop().create_task(self._change(document, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        try:
            answer(self._do(document), None)
        except ServerError as error:
            answer(None, error)

    async def _change(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        name = str(document["model"])
        error: ServerError | None = None
        detail: Mapping[str, object] = {}
        try:
            if document["op"] == "load":
                given = {"config": document["config"]} if document["config"] else {}
                parameters = await asyncio.to_thread(
                    load_parameters, {**given, **document["files"]}
                )
                if self._audit is not None:
                    detail = await asyncio.to_thread(load_detail, parameters)
                await self._models.control.load(name, parameters, self.loading)
            else:
                await self._models.control.unload(name, bool(document["dependents"]))
        except ServerError as raised:
            error = raised
        except Exception as bug:
            log.error("bug while a model has %s loaded or unloaded", name, exc_info=bug)
            error = ExecutionFailed(INTERNAL_TEXT)
        if self._audit is not None:
            operation = f"RepositoryModel{document['op'].capitalize()}"
            by = Identity("" if self._owner is None else self._owner.model, "model", ())
            self._audit.record(
                AuditEntry(operation, *result("", error), by, model=name, detail=detail)
            )
        answer(None, error)

    def _do(self, document: Mapping[str, Any]) -> object:
        operation = document["op"]
        if operation == "ready":
            return self._models.model_ready(str(document["model"]), str(document["version"]))
        if operation == "family":
            self._metrics.add_family(self, document)
            return True
        if operation == "metric":
            value = self._metrics.value(document)
            if value is None:
                raise NotFound(f"there is no metric {document['family']!r} with these labels")
            return value
        raise InvalidRequest(f"there is no operation {operation!r}")

    def metric(self, document: Mapping[str, Any]) -> None:
        """Update one of the model's metrics; invalid documents raise any exception."""
        self._metrics.change(self, document)

    def close(self) -> None:
        """Release the services: the version is gone."""
        self._metrics.forget(self)


Answer = Callable[[object, ServerError | None], None]


class LoadingServices:
    """Forwards a loading model's calls to `host`, which belongs to `loop`, from other loops."""

    def __init__(
        self, host: ModelServices, loop: asyncio.AbstractEventLoop, wait: Callable[[bool], None]
    ) -> None:
        """`wait` is called when the load starts or stops waiting for answers."""
        self._host = host
        self._loop = loop
        self._wait = wait
        self._asked = 0
        self._over = False

    def close(self) -> None:
        """End the load's pending calls; on the server's event loop."""
        self.count(-self._asked)
        self._over = True

    def count(self, more: int) -> None:
        """Change the number of awaited answers; on the server's event loop."""
        if self._over:
            return
        before, self._asked = self._asked, self._asked + more
        if bool(before) != bool(self._asked):
            self._wait(bool(self._asked))

    def submit(self, call: Call, inside: bool) -> None:
        """Run a model; errors are delivered to the call."""
        asked = _Asked(self, asyncio.get_running_loop(), call)
        call.owner = _There(self._loop, asked)
        _on(self._loop, asked.go, self._host, inside)

    def control(self, document: Mapping[str, Any], answer: Answer) -> None:
        """Run a control operation, and answer once."""
        here = asyncio.get_running_loop()

        waits = answered = False

        def back(value: object, error: ServerError | None) -> None:
            nonlocal answered
            answered = True
            self.count(-waits)
            _on(here, answer, value, error)

        def ask() -> None:
            nonlocal waits
            try:
                self._host.control(document, back)
            except Exception as error:  # from an invalid document
                back(None, InvalidRequest(f"{type(error).__name__}: {error}"))
            waits = not answered
            self.count(waits)

        _on(self._loop, ask)

    def metric(self, document: Mapping[str, Any]) -> None:
        """Do nothing: metrics are kept until the model serves."""


class _Asked(Call):
    """The copy of a loading thread's call on the server's event loop."""

    def __init__(self, owner: LoadingServices, here: asyncio.AbstractEventLoop, call: Call) -> None:
        """`call` belongs to the event loop `here`."""
        super().__init__("", "", "", {})
        self.take(call)
        self.refusal = call.refusal
        self._loads = owner
        self._here = here
        self._call = call
        self._over = False

    def go(self, host: ModelServices, inside: bool) -> None:
        """Submit the call."""
        self._loads.count(1)
        try:
            host.submit(self, inside)
        except ServerError as error:
            self.fail(error)

    def respond(self, response: InferResponse, final: bool) -> None:
        if final:
            self._end()
        _on(self._here, self._call.pass_response, response, final)

    def finish(self) -> None:
        self._end()
        _on(self._here, self._call.pass_end)

    def fail(self, error: ServerError) -> None:
        self._end()
        _on(self._here, self._call.pass_end, error)

    def cancel(self) -> None:
        self._end()
        super().cancel()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._loads.count(-1)


class _There:
    """The owner of a loading thread's call: forwards to the server's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, asked: _Asked) -> None:
        self._loop = loop
        self._asked = asked

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        _on(self._loop, self._asked.cancel)

    def hold(self, call: Call, held: bool) -> None:
        """Implements `Owner.hold`."""
        _on(self._loop, self._asked.hold, held)


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *given: object) -> None:
    """Call on another event loop; does nothing if it is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *given)
