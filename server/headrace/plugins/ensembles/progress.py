"""The progress of one request through an ensemble: what may start, and what is complete.

A pure state machine: events in, moves out. A step starts once, in each scope of its domain, when
the tensors that it needs are there; those of optional inputs that the request lacks are not waited
for. The request has the first scope; each response of a decoupled step opens one below that of the
step. Tensors of a scope are seen by all those below it.

Each scope of the plan's domain gives one response, in the order in which the scopes were opened,
with all wanted outputs, or, if nothing is left that could produce the others, with those that there
are. Without any it gives none; the request itself is stuck then.

Invariant: `_under_way` counts the calls that were started, or wait in `_waiting` for others of
their step, and have not ended.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace.core.signature import reshaped
from headrace.core.tensors import Tensor
from headrace.plugins.ensembles.graph import Domain, EnsembleStep, Graph


class Scope:
    """A set of tensors: those of the request, or of one response of a decoupled step.

    `begun` are the steps that were started in it, `running` counts those not decoupled that have
    not ended, `open` what keeps it: decoupled steps in it, and scopes below it.
    """

    __slots__ = ("above", "begun", "domain", "open", "running", "tensors")

    def __init__(self, domain: Domain, above: "Scope | None") -> None:
        self.domain = domain
        self.above = above
        self.tensors: dict[str, Tensor] = {}
        self.begun: set[int] = set()
        self.running = 0
        self.open = 0

    def get(self, name: str) -> Tensor | None:
        """A tensor of this scope or one above it."""
        scope: Scope | None = self
        while scope is not None:
            if (found := scope.tensors.get(name)) is not None:
                return found
            scope = scope.above
        return None

    @property
    def settled(self) -> bool:
        """True if no further tensor is going to appear in it."""
        scope: Scope | None = self
        while scope is not None:
            if scope.running:
                return False
            scope = scope.above
        return True

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


class EnsembleProgress:
    """The state of one request.

    `over` is true once nothing is left to be done, `stuck` if an output will never be there.
    """

    __slots__ = (
        "_absent", "_calls", "_graph", "_lines", "_plan", "_scopes", "_under_way", "_waiting",
        "over", "stuck",
    )  # fmt: skip

    def __init__(self, graph: Graph, outputs: tuple[str, ...]) -> None:
        self.over = self.stuck = False
        self._graph = graph
        self._plan = graph.plan(outputs)
        self._absent: set[str] = set()
        self._scopes: list[Scope] = []  # those below the request's
        self._lines: deque[Scope] = deque()  # of the plan's domain, without their response
        self._under_way = 0
        self._calls: Counter[int] = Counter()  # by step, if their number is limited
        self._waiting: deque[Start] = deque()

    @property
    def throttled(self) -> bool:
        """True if steps wait for earlier calls of the same step: no more tensors are wanted."""
        return bool(self._waiting)

    def wanted(self, number: int) -> tuple[str, ...]:
        """The outputs that a step's model is asked for; () for all."""
        return self._plan.wanted[number]

    def begin(self, inputs: Mapping[str, Tensor]) -> Moves:
        """Start with the tensors of the request."""
        scope = Scope((), None)
        if not self._plan.domain:
            self._lines.append(scope)
        scope.tensors.update(inputs)
        signature = self._graph.signature
        for spec in signature.inputs:
            if spec.name not in inputs:
                self._absent.add(spec.name)
            elif spec.reshape is not None:
                given = inputs[spec.name]
                array = reshaped(given.array, spec, signature.batches, to_model=True)
                scope.tensors[spec.name] = given._replace(array=array)
        moves = Moves([], [])
        self._try(scope, [*inputs, *self._absent], moves.starts)
        self._collect(moves.responses)
        return moves

    def answered(self, start: Start, outputs: Iterable[Tensor] | None, final: bool) -> Moves:
        """A response of a step, or with None its end alone."""
        step, scope, _ = start
        moves = Moves([], [])
        decoupled = step.number in self._graph.decoupled
        to = scope
        if outputs is not None:
            if decoupled:
                to = Scope((*scope.domain, step.number), scope)
                scope.open += 1
                self._scopes.append(to)
                if to.domain == self._plan.domain:
                    self._lines.append(to)
            names = step.outputs
            found = {names[tensor.name]: tensor for tensor in outputs if tensor.name in names}
            to.tensors.update(found)
            self._try(to, found, moves.starts)
        if final:
            self._under_way -= 1
            if decoupled:
                scope.open -= 1
            else:
                scope.running -= 1
            if self._graph.most:
                self._calls[step.number] -= 1
                self._go_on(moves.starts)
        self._collect(moves.responses)
        if final or to is not scope:
            self._close(to)
            self._close(scope)
        return moves

    def _try(self, scope: Scope, names: Iterable[str], starts: list[Start]) -> None:
        """Start the steps that may have waited for these tensors of a scope."""
        domains, consumers = self._graph.domains, self._plan.consumers
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
        for name, tensor in step.inputs.items():
            found = scope.get(tensor)
            if found is not None:
                tensors[name] = graph.fitted(number, name, found)
            elif tensor not in self._absent:
                return
        scope.begun.add(number)
        self._under_way += 1
        if number in graph.decoupled:
            scope.open += 1
        else:
            scope.running += 1
        start = Start(step, scope, tensors)
        if graph.most:
            if self._calls[number] >= graph.most:
                self._waiting.append(start)
                return
            self._calls[number] += 1
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
        """Give the responses that are complete, or never will be."""
        lines, graph = self._lines, self._graph
        while lines:
            scope = lines[0]
            found = [
                graph.fitted(-1, name, tensor)
                for name in self._plan.outputs
                if (tensor := scope.get(name)) is not None
            ]
            if len(found) < len(self._plan.outputs):
                if not scope.settled:
                    return
                if scope.above is None:
                    self.stuck = self.over = True
                    return
                if not self._has_own(scope):
                    found = []
            lines.popleft()
            if found:
                responses.append(found)
            self._close(scope)
        self.over = not (self._plan.domain and self._under_way)

    def _has_own(self, scope: Scope) -> bool:
        """True if a wanted output is not the request's alone."""
        inner: Scope | None = scope
        while inner is not None and inner.above is not None:
            if any(name in inner.tensors for name in self._plan.outputs):
                return True
            inner = inner.above
        return False

    def _close(self, scope: Scope) -> None:
        """Drop scopes, from this one upwards, in which nothing is going to happen any more."""
        while (above := scope.above) is not None:
            planned = self._plan.sizes.get(scope.domain, 0)
            if scope.running or scope.open or len(scope.begun) < planned or scope in self._lines:
                return
            if scope not in self._scopes:
                return
            self._scopes.remove(scope)
            above.open -= 1
            scope = above
