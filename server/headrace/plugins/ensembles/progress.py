"""The progress of one request through an ensemble: what may start, and what is complete.

A pure state machine: events in, moves out. A step starts once, in each scope of its domain, when
its tensors are there. The request has the first scope; each response of a decoupled step opens one
below that of the step. Tensors of a scope are seen by all those below it.

A tensor that its step has not given, or an optional input that the request lacks, is absent: steps
run without it, as in Triton, and their models refuse that if they need it.

Each scope of the plan's domain gives one response, in the order in which the scopes were opened,
with the wanted outputs that are not absent. Below the request's one without any gives none.

Invariant: `_under_way` counts the calls that were started, or wait in `_waiting` for others of
their step, and have not ended.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from headrace.core.datatypes import Datatype
from headrace.core.signature import reshaped
from headrace.core.tensors import Tensor
from headrace.plugins.ensembles.graph import Domain, EnsembleStep, Graph

_UNKNOWN = Tensor("", Datatype.BOOL, np.zeros(0, bool))  # not there yet


class Scope:
    """A set of tensors: those of the request, or of one response of a decoupled step.

    `tensors` are None where absent. `begun` are the steps that were started in it; `open` counts
    those that have not ended, and the scopes below it.
    """

    __slots__ = ("above", "begun", "domain", "open", "tensors")

    def __init__(self, domain: Domain, above: "Scope | None") -> None:
        self.domain = domain
        self.above = above
        self.tensors: dict[str, Tensor | None] = {}
        self.begun: set[int] = set()
        self.open = 0

    def get(self, name: str) -> Tensor | None:
        """A tensor of this scope or one above it; None if it is absent, or `_UNKNOWN`."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope.above
        return _UNKNOWN

    def is_below(self, other: "Scope") -> bool:
        """True if it is the other one, or sees its tensors."""
        scope: Scope | None = self
        while scope is not None and scope is not other:
            scope = scope.above
        return scope is other


class Start(NamedTuple):
    """A step to be started, with the tensors by input of its model."""

    step: EnsembleStep
    scope: Scope
    tensors: dict[str, Tensor]


class Moves(NamedTuple):
    """The consequences of an event: steps to start, and responses to give."""

    starts: list[Start]
    responses: list[list[Tensor]]


# Makes a `Start` of its fields without a Python-level call, for each step of a request.
_new_start: Callable[[tuple[EnsembleStep, Scope, dict[str, Tensor]]], Start] = partial(
    tuple.__new__, Start
)


class EnsembleProgress:
    """The state of one request; `over` is true once nothing is left to be done."""

    __slots__ = (
        "_calls", "_graph", "_lines", "_scopes", "_under_way", "_waiting", "over", "plan",
    )  # fmt: skip

    def __init__(self, graph: Graph, outputs: tuple[str, ...]) -> None:
        self.over = False
        self._graph = graph
        self.plan = graph.plan(outputs)
        # Of a stream there may be thousands, so that none is searched for.
        self._scopes: dict[Scope, None] = {}  # those below the request's
        self._lines: OrderedDict[Scope, None] = OrderedDict()  # of the plan's domain, unanswered
        self._under_way = 0
        self._calls: dict[int, int] = {}  # by step, if their number is limited
        self._waiting: deque[Start] = deque()

    @property
    def throttled(self) -> bool:
        """True if steps wait for earlier calls of the same step: no more tensors are wanted."""
        return bool(self._waiting)

    def begin(self, inputs: Mapping[str, Tensor]) -> Moves:
        """Start with the tensors of the request, which are no outputs: these are of steps."""
        scope = Scope((), None)
        if not self.plan.domain:
            self._lines[scope] = None
        scope.tensors.update(inputs)
        signature = self._graph.signature
        for spec in signature.inputs:
            if spec.name not in inputs:
                scope.tensors[spec.name] = None
            elif spec.reshape is not None:
                given = inputs[spec.name]
                array = reshaped(given.array, spec, signature.batches, to_model=True)
                scope.tensors[spec.name] = given._replace(array=array)
        moves = Moves([], [])
        self._try(scope, list(scope.tensors), moves.starts)
        return moves

    def answered(self, start: Start, outputs: Iterable[Tensor] | None, final: bool) -> Moves:
        """A response of a step, or with None its end alone."""
        step, scope, _ = start
        starts, responses = moves = Moves([], [])
        decoupled = step.number in self._graph.decoupled
        to = scope
        if outputs is not None:
            if decoupled:
                to = Scope((*scope.domain, step.number), scope)
                scope.open += 1
                self._scopes[to] = None
                if to.domain == self.plan.domain:
                    self._lines[to] = None
            given = {tensor.name: tensor for tensor in outputs}
            found = {tensor: given.get(name) for name, tensor in step.outputs.items()}
            to.tensors.update(found)
            self._try(to, found, starts)
        if final:
            self._under_way -= 1
            scope.open -= 1
            if self._graph.most:
                self._calls[step.number] -= 1
                self._go_on(starts)
        self._collect(responses)
        if to is not scope:
            self._close(to)
        if scope.above is not None and (final or to is not scope):
            self._close(scope)
        return moves

    def _try(self, scope: Scope, names: Iterable[str], starts: list[Start]) -> None:
        """Start the steps that may have waited for these tensors of a scope."""
        domains, consumers = self._graph.domains, self.plan.consumers
        for name in names:
            for number in consumers.get(name, ()):
                domain = domains[number]
                if domain == scope.domain:
                    self._try_step(number, scope, starts)
                    continue
                for below in self._scopes:
                    if below.domain == domain and below.is_below(scope):
                        self._try_step(number, below, starts)

    def _try_step(self, number: int, scope: Scope, starts: list[Start]) -> None:
        if number in scope.begun:
            return
        graph = self._graph
        step = graph.steps[number]
        tensors: dict[str, Tensor] = {}
        here = scope.tensors
        for name, tensor in step.inputs.items():
            found = here[tensor] if tensor in here else scope.get(tensor)
            if found is _UNKNOWN:
                return
            if found is not None:
                tensors[name] = graph.fitted(number, name, found)
        scope.begun.add(number)
        self._under_way += 1
        scope.open += 1
        start = _new_start((step, scope, tensors))
        if graph.most:
            if self._calls.get(number, 0) >= graph.most:
                self._waiting.append(start)
                return
            self._calls[number] = self._calls.get(number, 0) + 1
        starts.append(start)

    def _go_on(self, starts: list[Start]) -> None:
        """Start what has waited for a call of its step to end."""
        for start in list(self._waiting):
            number = start.step.number
            if self._calls[number] < self._graph.most:
                self._waiting.remove(start)
                self._calls[number] += 1
                starts.append(start)

    def _collect(self, responses: list[list[Tensor]]) -> None:
        """Give the responses whose outputs are all known."""
        lines, graph, outputs = self._lines, self._graph, self.plan.outputs
        while lines:
            scope = next(iter(lines))
            here, given = scope.tensors, []
            for name in outputs:
                found = here[name] if name in here else scope.get(name)
                if found is _UNKNOWN:
                    return
                if found is not None:
                    given.append(graph.fitted(-1, name, found))
            del lines[scope]
            if given or scope.above is None:
                responses.append(given)
            if scope.above is not None:
                self._close(scope)
        self.over = not (self.plan.domain and self._under_way)

    def _close(self, scope: Scope) -> None:
        """Drop scopes, from this one upwards, in which nothing is going to happen any more."""
        while (above := scope.above) is not None:
            planned = self.plan.sizes.get(scope.domain, 0)
            if scope.open or len(scope.begun) < planned or scope in self._lines:
                return
            if scope not in self._scopes:
                return
            del self._scopes[scope]
            above.open -= 1
            scope = above
