"""Instances that are lent to threads of the program, which run their calls themselves.

A thread that hands its call to the event loop waits for two switches, which take longer than a
small model. While nothing waits for the loop's scheduler, it lends its idle instances: a thread
that finds one free runs its call on it, with those that wait for it by then, as the model's policy
for batches says; then it hands the instance to the first that still waits. The scheduler takes the
instances back for a call of its own, for any change of them, and when no thread uses them.

The only part of scheduling that threads share: a lock guards it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic_ns, sleep
from typing import Any, Protocol, runtime_checkable

from headrace.core.call import Call, Submit
from headrace.core.signature import Signature
from headrace.observability.statistics import BatchCounts, VersionStatistics
from headrace.scheduling.batch import Batch, Instance, Outcome
from headrace.scheduling.policy import BatchPolicy

_MOST_OWED = 64  # batches that are counted together
_YIELDS = 3  # turns of other threads before a batch that is smaller than the last one


@runtime_checkable
class LentInstance(Instance, Protocol):
    """An instance that any thread may run, one at a time."""

    @property
    def lendable(self) -> bool:
        """True if it can be lent now."""

    def light(self, batch: Batch) -> bool:
        """True if `batch` may run on the event loop."""

    def run(self, batch: Batch) -> Outcome:
        """Run `batch` on the calling thread. Never raises: a failure is an outcome, too."""

    def run_each(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        """Run batches on the event loop, as `run`, one after the other."""


class JoinedCall(Call):
    """A call of this process that needs no queue: with its inputs, `rows` and `key`, and the
    fields of an answer, but no others before it is `complete`.
    """

    __slots__ = ()

    def complete(self) -> None:
        """Set all fields of a call, as a queue needs them."""
        raise NotImplementedError

    def queue(self, submit: Submit) -> None:
        """Submit the call, which could not run without a queue. Must not raise."""
        raise NotImplementedError


class ThreadedCall(JoinedCall):
    """A call of this process that a thread may run while it waits for it."""

    __slots__ = ("instance",)

    instance: LentInstance | None  # set while it is the call's turn to run itself

    def prepare(self) -> None:
        """Prepare for `wake`: the thread is about to wait."""

    def wake(self) -> None:
        """Let the thread go on: the call is answered, or it is its turn."""
        raise NotImplementedError

    def hand_over(self) -> None:
        """Let the event loop, which calls this, submit the call."""
        raise NotImplementedError


class Lender:
    """The instances that a scheduler has lent, and the calls that wait for one.

    `used` is true if any call has come since it was reset.
    """

    def __init__(
        self,
        signature: Signature,
        version: str,
        policy: BatchPolicy,
        statistics: VersionStatistics,
        instances: list[LentInstance],
        call_soon: Callable[..., Any],
        returned: Callable[[Instance, Batch | None, Outcome | None], None],
    ) -> None:
        """`call_soon` passes a callback to the event loop, from any thread.

        There `returned` receives an instance after `take_back`, or after a failed batch, whose
        calls are not answered.
        """
        self._signature = signature
        self._version = version
        self._policy = policy
        self._statistics = statistics
        self._call_soon = call_soon
        self._returned = returned
        self._lock = Lock()
        self._free = instances
        self._waiting: deque[ThreadedCall] = deque()
        self._open = True
        self._together = 1  # calls of the last batch, about
        self.used = True

    # --- on the event loop

    @property
    def in_use(self) -> bool:
        """True if a call waits, or a thread may be about to run one."""
        return bool(self._waiting) or not self._free

    def take_back(self) -> list[LentInstance]:
        """Lend no more: the instances that no thread has; the others are returned later.

        Calls that wait are handed over.
        """
        with self._lock:
            self._open = False
            free, self._free = self._free, []
            waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.hand_over()
        return free

    # --- on threads

    def enter(self, call: ThreadedCall) -> bool:
        """Take a call: it is its turn, or it waits for it; False if nothing is lent any more."""
        self.used = True
        call.instance = None
        call.arrived = monotonic_ns()
        with self._lock:
            if not self._open:
                return False
            if self._free:
                call.instance = self._free.pop()
            else:
                call.prepare()
                self._waiting.append(call)
        return True

    def leave(self, call: ThreadedCall) -> None:
        """Give up a call that has entered, and the instance if it has one; any number of times."""
        following = None
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            instance = call.instance
            if instance is None:
                return
            # An interrupt of the main thread may come after any call of a function, so without one
            # in between.
            if self._waiting:
                following = self._waiting[0]
                following.instance = instance
                call.instance = None
                del self._waiting[0]
            elif self._open:
                call.instance = None
                self._free.append(instance)
                return
            else:
                call.instance = None
        if following is not None:
            following.wake()
        else:
            self._pass(self._returned, instance, None, None)

    def run(self, call: ThreadedCall) -> None:
        """Run a call whose turn it is, with those that wait and fit, and leave.

        All are answered, unless the batch fails: then the event loop answers them.
        """
        instance = call.instance
        assert instance is not None, "a call that runs out of its turn. This is a bug."
        calls: list[ThreadedCall] = [call]
        try:
            if self._waiting or self._together > 1:
                # Threads that were answered with the last batch are about to call again: one batch
                # more costs more than to let them.
                for _ in range(_YIELDS):
                    if len(self._waiting) + 1 >= self._together:
                        break
                    sleep(0)
                self._gather(calls)
            self._together = len(calls)
            batch = Batch(self._signature, [*calls])
            outcome = instance.run(batch)
            if not taken(batch, self._version, outcome):
                call.instance = None
                call.prepare()
                self._pass(self._returned, instance, batch, outcome)
                return
            self.leave(call)
            for one in calls:
                one.outcome = None  # which refers to the call
                one.respond_from(batch)
            if self._statistics.owe(counts(batch, outcome)) == _MOST_OWED:
                self._pass(self._statistics.settle)
        except BaseException:  # an interrupt
            for one in calls[1:]:
                self._pass(one.hand_over)
            raise

    def _gather(self, calls: list[ThreadedCall]) -> None:
        """Add the waiting calls that share a batch with the first."""
        with self._lock:
            able = [*calls, *self._waiting]
            places, _, _ = self._policy.take(able, calls[0].arrived)
            chosen = [able[place] for place in places]
            left = deque(one for one in self._waiting if one not in set(chosen))
            calls[:], self._waiting = chosen, left

    def _pass(self, *callback: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._call_soon(*callback)


def taken(batch: Batch, version: str, outcome: Outcome) -> bool:
    """True if the batch has the outputs of all its calls now; else the outcome has an error, or
    each call its own.
    """
    if outcome.error is None and outcome.parts is None:
        try:
            batch.take(version, outcome)
        except Exception as error:  # malformed outputs
            outcome.error = error
    return outcome.error is None and outcome.parts is None


def counts(batch: Batch, outcome: Outcome) -> BatchCounts:
    """The counts of a batch whose calls are all answered."""
    arrived = [call.arrived for call in batch.calls]
    started, gathered, computed = outcome.started, outcome.gathered, outcome.computed
    return arrived, batch.rows, batch.rows, started, gathered, computed, monotonic_ns(), started
