"""Tracing: which requests are traced, and the settings that say so.

The versions of a model that is traced have a stage for it (`headrace.engine.trace_stage`); others
have none, so that they cost nothing. When settings change, or a count is reached, the stages are
composed anew. Owned by the event-loop thread; what becomes of finished
traces is another thread's affair (`headrace.engine.trace_thread`).

Invariant: `_live` has the traces under way, which what models ask for may become part of.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns, time_ns

from headrace.core.call import Call, Submit
from headrace.core.errors import InvalidRequest
from headrace.core.trace_context import TRACE_PARAMETER, TraceContext, read_link
from headrace.engine.span_ids import child_span, new_context
from headrace.engine.trace_stage import Traced, trace_stage
from headrace.engine.trace_thread import TraceThread
from headrace.engine.traced_calls import PassedCall, TracedCall
from headrace.observability.trace_settings import (
    Mode,
    Sampler,
    SettingsTable,
    TraceConfig,
    read_changes,
)
from headrace.observability.traces import SpanIds, Trace


class Tracing:
    """The settings in force, and the traces under way."""

    def __init__(self, config: TraceConfig, thread: TraceThread | None = None) -> None:
        """`thread` takes the traces; without one there are none."""
        self._config = config
        self._table = SettingsTable(config)
        self._thread = thread
        self._numbers = itertools.count(1)
        self._live: dict[int, Trace] = {}
        self._watching: list[Callable[[Mapping[str, bool]], object]] = []
        self.changed: Callable[[], object] | None = None  # other models may be traced
        self.known: Callable[[str], bool] | None = None  # whether there is such a model

    # --- settings

    def document(self, model: str = "") -> dict[str, list[str]]:
        """The settings of a model, or of the server, by the names that clients know.

        Raises `InvalidRequest` for a model that there is not.
        """
        self._check(model)
        settings = self._table.sampler(model).now()
        document = {
            "trace_level": settings.levels,
            "trace_rate": [str(settings.rate)],
            "trace_count": [str(settings.count)],
        }
        if self._config.mode is Mode.TRITON:
            document["log_frequency"] = [str(settings.log_frequency)]
        document["trace_mode"] = [self._config.mode.value]
        return document | self._config.options

    def change(self, model: str, document: Mapping[str, Sequence[object] | None]) -> None:
        """Change settings of a model, or of the server for ""; an empty list, or None, unsets.

        Raises `InvalidRequest`, and `Unsupported` for what is fixed.
        """
        self._check(model)
        changes = read_changes(document)
        if not changes:
            return
        for sampler in self._table.change(model, changes):
            if not sampler.open:
                self._ended(sampler)
        self._tell()
        for callback in self._watching:
            callback(self._contexts())

    def watch_contexts(self, callback: Callable[[Mapping[str, bool]], object]) -> None:
        """Call `callback` now, and with each change: which models' requests have contexts that
        are wanted; "" stands for all others.
        """
        self._watching.append(callback)
        callback(self._contexts())

    def _contexts(self) -> dict[str, bool]:
        if not self.takes_contexts:
            return {}
        return {model: self._traces(self._table.sampler(model)) for model in self._table.models}

    def _check(self, model: str) -> None:
        if model and self.known is not None and not self.known(model):
            raise InvalidRequest(f"Request for unknown model : {model}")

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()

    # --- requests

    def traced(self, model: str, version: str, submit: Submit) -> Submit:
        """What comes before `submit` of a version: nothing, unless the model is traced."""
        sampler = self._table.sampler(model)
        return trace_stage(self, sampler, version, submit) if self._traces(sampler) else submit

    def _traces(self, sampler: Sampler) -> bool:
        settings = sampler.settings
        if self._thread is None or settings.off or self._config.problem(settings):
            return False
        return self._config.mode is Mode.OPENTELEMETRY or not sampler.spent

    @property
    def takes_contexts(self) -> bool:
        """Whether clients' traces are gone on with."""
        return self._config.mode is Mode.OPENTELEMETRY

    def begin(
        self, sampler: Sampler, request: Call, door: str, context: TraceContext | None
    ) -> Trace:
        """The trace of a request that was picked; `context` is its client's."""
        trace = self._trace(sampler, request, door, 0)
        if self.takes_contexts:
            root = new_context(context)
            trace.spans = SpanIds(root.trace_id, root.span_id, child_span(root), context)
        elif sampler.spent:
            self._tell()
        return trace

    def submit_child(self, submit: Submit, call: Call) -> None:
        """Submit what a model asks for as part of a trace; raises `ServerError`.

        If there is no such trace under way, it is submitted as it is.
        """
        parent = self._live.get(read_link(call.parameters[TRACE_PARAMETER]).number)
        if parent is None:
            submit(call)
            return
        trace = self._trace(parent.sampler, call, "", parent.number)
        if parent.spans is not None:
            above = parent.spans.model
            trace.spans = SpanIds(above.trace_id, 0, child_span(above), above)
        Traced(self, trace).submit(call, submit)

    def begin_call(self, link: str) -> TracedCall | PassedCall | None:
        """What the call of a request to another server is part of; None for nothing.

        `link` is what the request has under `TRACE_PARAMETER`.
        """
        number, context = read_link(link)
        trace = self._live.get(number)
        if trace is not None and trace.spans is not None:
            return TracedCall(trace, trace.spans, self._is_live)
        return None if context is None else PassedCall(context)

    def _is_live(self, trace: Trace) -> bool:
        return self._live.get(trace.number) is trace

    def _trace(self, sampler: Sampler, request: Call, door: str, parent: int) -> Trace:
        sampler.open += 1
        number = next(self._numbers)
        offset = time_ns() - monotonic_ns()
        trace = Trace(number, parent, sampler, door, request.model_name, request.id, offset)
        self._live[number] = trace
        return trace

    def end(self, trace: Trace) -> None:
        """A trace has all that it will have."""
        self._live.pop(trace.number, None)
        sampler = trace.sampler
        sampler.open -= 1
        trace.last = sampler.spent and not sampler.open
        if self._thread is not None:
            self._thread.put(trace)
        if sampler.retired and not sampler.open:
            self._ended(sampler)

    def _ended(self, sampler: Sampler) -> None:
        if self._thread is not None:
            self._thread.put(sampler)

    def close(self, seconds: float) -> None:
        """Have everything written, within so much time. Blocks; no request is under way."""
        if self._thread is not None:
            self._thread.close(seconds)
