"""Whether a model is cheap enough to run on the event-loop thread: a decision over measured costs.

A run on the loop costs no hop to another thread and back (about 50 microseconds), but while it
lasts nothing else is read or answered. So a model runs inline while its runs stay within a budget
that a tick can bear.
"""

from enum import StrEnum


class InstanceKind(StrEnum):
    """Where an instance runs its model."""

    INLINE = "inline"
    THREAD = "thread"
    PROCESS = "process"
    REMOTE = "remote"


IN_PROCESS = (InstanceKind.INLINE.value, InstanceKind.THREAD.value)  # of the server


BUDGET_NS = 500_000
_CAP = 4  # one slow run, preempted or at a page fault, counts as this many budgets at most
_PATIENCE = 12  # budgets' worth of slow runs close together that make a model leave the loop
_LIGHT_RUNS = 1_000  # in a row, that bring it back
_LIGHT = 0.5  # share of the budget below which a run is light


class AutoChoice:
    """Picks the kind by what runs cost.

    On the loop, a run over the budget adds its cost in budgets to a score, any other takes one
    away: three heavy runs in a row move the model to a thread, and so does a mixture in which heavy
    ones weigh more. A busy machine slows down single runs of any model; they fade. Coming back
    takes a long row of light runs, so that a model does not go to and fro.
    """

    __slots__ = ("_budget", "_light", "_score", "calm_ns", "kind")

    def __init__(self, measured_ns: float, budget_ns: int = BUDGET_NS) -> None:
        """`measured_ns` is what warm-up found for the largest batch."""
        self._budget = budget_ns
        self._score = 0.0
        self._light = 0
        self.kind = InstanceKind.INLINE if measured_ns <= budget_ns else InstanceKind.THREAD
        # Cost up to which a run changes nothing, so that it need not be observed; -1 if any may.
        self.calm_ns = -1

    def observe(self, cost_ns: int) -> bool:
        """Take the cost of one run into account; whether the kind changed by it."""
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
