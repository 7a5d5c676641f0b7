"""Choice between event loop and thread for a model: measured cost, and a decision.

A run on the loop saves the switch to a thread and back (about 50 microseconds), but blocks
everything else. So a model runs inline while its runs stay within a budget that a tick can bear.

If its inputs can be of any size, so can the cost: then only sizes that were measured run inline,
and smaller ones. Others are measured on the thread, where they cost nobody anything.
"""

import logging
import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from time import perf_counter_ns

import numpy as np

from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.signature import Shape, Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.scheduling.batch import Batch

log = logging.getLogger(__name__)


class InstanceKind(StrEnum):
    """The place where an instance runs its model."""

    INLINE = "inline"
    THREAD = "thread"
    PROCESS = "process"
    REMOTE = "remote"


IN_PROCESS = (InstanceKind.INLINE.value, InstanceKind.THREAD.value)  # of the server


BUDGET_NS = 500_000
_CAP = 4  # maximum score of one slow run, possibly preempted or page-faulting
_PATIENCE = 12  # score at which a model leaves the loop
_LIGHT_RUNS = 1_000  # consecutive light runs that bring it back
_LIGHT = 0.5  # share of the budget below which a run is light


_LEARNING_RUNS = 8  # light runs on the thread after which a size counts as light
# Budgets beyond which a single run on the loop was too long: if the loop's thread was busy for more
# than one of them, or in any case. A machine with other work interrupts short runs, too.
_OVERRUN, _STALL = 2, 20
_MOST_SIZES = 64  # remembered light ones, heavy ones, and ones being learned


_WARM_RUNS = 3
_HEAVY_NS = 100 * BUDGET_NS  # after two runs as heavy as this no third is needed
_HOPELESS_NS = 2000 * BUDGET_NS  # after one run as heavy as this no second is needed
# A configuration may allow batches that are never sent, and whose measurement would take seconds or
# all of the memory.
_MOST_ROWS = 4096
_MOST_BYTES = 64 << 20
_TEXT_SIZE = 64  # bytes per text element: a pointer, an object, its copy as `str`


Size = tuple[int, ...]  # the rows of a batch, and the other axes of each input


class Sizes:
    """The sizes at which a model whose cost grows with its inputs may run on the loop.

    A size is light if it was measured to be, or no larger in any axis than one that was. A run on
    the loop that takes too long makes its size heavy for good, and all that are no smaller in any
    axis. Bounded: a model with too many heavy sizes does not run on the loop any more, and the
    oldest light size is dropped for a new one.
    """

    __slots__ = ("_budget", "_heavy", "_learning", "_light")

    def __init__(self, measured: Size | None, budget_ns: int = BUDGET_NS) -> None:
        """`measured` is a size known to be light, None for none."""
        self._budget = budget_ns
        self._light = [] if measured is None else [measured]
        self._heavy: list[Size] = []
        self._learning: dict[Size, int] = {}

    def light(self, size: Size) -> bool:
        """True if batches of this size may run on the loop."""
        return any(_within(size, known) for known in self._light)

    def ran(self, size: Size, cost_ns: int, busy_ns: int | None, failed: bool) -> None:
        """Learn from a run; one that failed may have been short.

        `busy_ns` is the CPU time of the loop's thread, None for a run on another one.
        """
        budget = self._budget
        if busy_ns is None:
            if not failed:
                self._learn(size, cost_ns)
        elif cost_ns > _OVERRUN * budget and (busy_ns > budget or cost_ns > _STALL * budget):
            self._refuse(size)

    def _refuse(self, size: Size) -> None:
        self._heavy = [known for known in self._heavy if not _within(size, known)] + [size]
        self._light = [known for known in self._light if not _within(size, known)]
        if len(self._heavy) > _MOST_SIZES:
            self._heavy, self._light = [()], []

    def _learn(self, size: Size, cost_ns: int) -> None:
        if cost_ns >= _LIGHT * self._budget:
            self._learning.pop(size, None)
            return
        if any(_within(known, size) for known in self._heavy):
            return
        runs = self._learning.pop(size, 0) + 1
        if runs < _LEARNING_RUNS:
            if len(self._learning) >= _MOST_SIZES:
                del self._learning[next(iter(self._learning))]
            self._learning[size] = runs
            return
        light = [known for known in self._light if not _within(known, size)]
        self._light = [*light[-_MOST_SIZES + 1 :], size]


def _within(size: Size, other: Size) -> bool:
    """True if `size` is no larger than `other` in any axis; `()` is within all."""
    return not size or (len(size) == len(other) and all(map(int.__le__, size, other)))


def sizes_of(signature: Signature, measured_ns: float, budget_ns: int = BUDGET_NS) -> Sizes | None:
    """The sizes of a model whose cost was measured; None if no batch is larger than that one."""
    rows = largest_batch(signature)
    if signature.uniform and rows >= signature.max_batch_size:
        return None
    if measured_ns > budget_ns:
        return Sizes(None, budget_ns)
    shapes = [[1 if axis == -1 else axis for axis in spec.dims] for spec in signature.inputs]
    return Sizes(_size(rows, shapes), budget_ns)


def size_of(batch: Batch) -> Size:
    """The size of a batch, whose calls have equal shapes of rows."""
    signature, inputs = batch.signature, batch.calls[0].inputs
    lead = 1 if signature.batches else 0
    shapes: list[Sequence[int]] = []
    for spec in signature.inputs:
        if spec.name in inputs:
            shapes.append(inputs[spec.name].array.shape[lead:])
        else:  # optional
            shapes.append((0,) * len(spec.dims))
    return _size(batch.rows if lead else 1, shapes)


def _size(rows: int, shapes: Sequence[Sequence[int]]) -> Size:
    return (rows, *[axis for shape in shapes for axis in shape])


class AutoChoice:
    """Chooses the kind by the cost of runs.

    On the loop, a run over the budget adds its cost in budgets to a score, any other subtracts one:
    three heavy runs in a row move the model to a thread, and so does a mixture dominated by heavy
    ones. Single slow runs on a busy machine fade. Coming back takes a long series of light runs, so
    that a model does not oscillate. All of this is for models whose inputs have a largest size; of
    others `sizes` decides.
    """

    __slots__ = ("_budget", "_light", "_score", "calm_ns", "kind", "sizes")

    def __init__(
        self, measured_ns: float, budget_ns: int = BUDGET_NS, sizes: Sizes | None = None
    ) -> None:
        """`measured_ns` is the cost of the largest batch, measured at warm-up."""
        self.sizes = sizes
        self._budget = budget_ns
        self._score = 0.0
        self._light = 0
        self.kind = InstanceKind.INLINE if measured_ns <= budget_ns else InstanceKind.THREAD
        # Cost up to which a run has no effect, so that it need not be observed; -1 for none.
        self.calm_ns = -1

    def observe(self, cost_ns: int) -> bool:
        """Update with the cost of one run; True if the kind changed."""
        self.calm_ns = -1
        if self.kind is InstanceKind.INLINE:
            if cost_ns <= self._budget:
                if self._score > 1:
                    self._score -= 1
                else:
                    self._score, self.calm_ns = 0.0, self._budget
                return False
            self._score += min(cost_ns / self._budget, _CAP)
            if self._score < _PATIENCE:
                return False
            self.kind, self._light = InstanceKind.THREAD, 0
            return True
        self._light = self._light + 1 if cost_ns < _LIGHT * self._budget else 0
        if self._light < _LIGHT_RUNS:
            return False
        self.kind, self._score = InstanceKind.INLINE, 0.0
        return True


def measure(infer: Callable[..., object], signature: Signature) -> float:
    """Nanoseconds of the fastest of a few runs with the largest batch of zeros.

    A busy machine slows down single runs, and so does a model's first run: only a run that takes a
    second is conclusive alone.

    The largest batch is `max_batch_size`, as long as its tensors have a reasonable size; the cost
    of larger ones is observed later. A model that fails on zeros, or whose single row exceeds that
    size, cannot be measured; it counts as too heavy for the event loop.
    """
    cost = float("inf")
    names = [spec.name for spec in signature.outputs]
    largest = largest_batch(signature)
    for rows in sorted({1, largest} if largest else ()):
        if rows > 1 and cost > BUDGET_NS:
            break  # too heavy already; a large batch would only cost time and memory
        cost = float("inf")
        try:
            inputs = {spec.name: _zeros(spec, signature, rows) for spec in signature.inputs}
            for run in range(_WARM_RUNS):
                begun = perf_counter_ns()
                infer(inputs, names)
                cost = min(cost, perf_counter_ns() - begun)
                if cost > (_HEAVY_NS if run else _HOPELESS_NS):
                    return cost
        except Exception as error:  # any error: zeros may be invalid for the model
            log.debug("model %s cannot be measured with zeros: %s", signature.model, error)
            return float("inf")
    return cost


def largest_batch(signature: Signature) -> int:
    """The number of rows to measure; 0 if the inputs of one are too large."""
    taken = sum(map(_row_bytes, signature.inputs))
    given = sum(map(_row_bytes, signature.outputs))
    if taken > _MOST_BYTES:
        return 0
    affordable = _MOST_BYTES // max(taken + given, 1)
    return max(1, min(signature.max_batch_size, _MOST_ROWS, affordable))


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(_row_shape(spec)) * ITEM_SIZES.get(spec.datatype, _TEXT_SIZE)


def _row_shape(spec: TensorSpec) -> Shape:
    """A row's shape for the model, with 1 for every variable dimension."""
    return tuple(1 if d == -1 else d for d in spec.model_dims)


def _zeros(spec: TensorSpec, signature: Signature, rows: int) -> Array:
    shape = [*([rows] if signature.batches else []), *_row_shape(spec)]
    if spec.datatype is Datatype.BYTES:
        array = np.empty(shape, object)
        array.fill(b"0")  # valid as a number, too, for graphs that cast it
        return array
    return np.zeros(shape, NUMPY[spec.datatype])
