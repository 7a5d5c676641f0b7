"""Gates before the instances of a scheduler, which decide when an instance may run a batch.

A batcher asks its gate while it flushes, on the event-loop thread: `InstanceGate` is what it needs
of one, `DelayGate` the one of Triton's variables for tests. The gate of the rate limiter is a part
of its own (`headrace.engine.limiting`).
"""

import os
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from headrace.scheduling.batch import Instance

# Triton's variables by which tests determine batches: how many requests have to be there before the
# first of them runs, and how many of sequences without a seat.
DELAY, BACKLOG_DELAY = "TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"


class InstanceGate(Protocol):
    """A limit of the instances that may run, by what other versions' instances need as well.

    Asked by a batcher while it flushes. Everything that is taken for an instance is given back by
    `leave`, or by `decline`.
    """

    def enter(self, idle: Sequence[Instance]) -> Instance | None:
        """Take what one of the idle instances needs; None if all have to wait.

        Then `Batcher.wake` is called once one need not.
        """

    def leave(self, instance: Instance, again: bool) -> None:
        """Give back what an instance has had for its batch; `again` if more calls wait."""

    def decline(self, instance: Instance) -> None:
        """Give back what was taken for an instance that gets no batch now."""

    def rest(self, waits: bool) -> None:
        """Give back what was not taken by the end of a flush; `waits` if calls still wait."""

    def forget(self, instance: Instance) -> None:
        """Expect no more batches for an instance, which was removed."""


class DelayGate:
    """A gate by which an instance first runs once `enough` is true of it, as tests of Triton want.

    `inner` is a gate behind this one, if there is any.
    """

    def __init__(self, enough: Callable[[Instance], bool], inner: InstanceGate | None) -> None:
        self._enough = enough
        self._inner = inner
        self._begun: set[Instance] = set()

    def enter(self, idle: Sequence[Instance]) -> Instance | None:
        """Implements `InstanceGate.enter`."""
        able = [one for one in idle if one in self._begun or self._enough(one)]
        self._begun.update(able)
        if self._inner is not None:
            return self._inner.enter(able)
        return min(able, key=attrgetter("load"), default=None)

    def leave(self, instance: Instance, again: bool) -> None:
        """Implements `InstanceGate.leave`."""
        if self._inner is not None:
            self._inner.leave(instance, again)

    def decline(self, instance: Instance) -> None:
        """Implements `InstanceGate.decline`."""
        if self._inner is not None:
            self._inner.decline(instance)

    def rest(self, waits: bool) -> None:
        """Implements `InstanceGate.rest`."""
        if self._inner is not None:
            self._inner.rest(waits)

    def forget(self, instance: Instance) -> None:
        """Implements `InstanceGate.forget`."""
        self._begun.discard(instance)
        if self._inner is not None:
            self._inner.forget(instance)


def delay_in(variable: str) -> int:
    """The number of calls in a variable of the environment such as `DELAY`; 0 if it has none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0
