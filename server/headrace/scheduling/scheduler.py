"""The two sides of a scheduler: the calls that it takes, and the instances that run them.

A version has one scheduler for its calls: its `Batcher`, or the `Tiers` in front of the batcher if
it has several backends. Instances are added to the batcher, or to the tier of their backend. Owned
by the event-loop thread.
"""

from collections.abc import Callable
from typing import Protocol

from headrace.core.call import Call
from headrace.core.errors import ServerError
from headrace.scheduling.batch import Answer, Instance
from headrace.scheduling.quarantine import Quarantine


class Scheduler(Protocol):
    """Takes the checked calls of a version, and gives them to its instances in batches."""

    @property
    def pending(self) -> int:
        """Accepted calls that no instance has begun."""

    @property
    def busy(self) -> bool:
        """True if any call is queued, in progress, or expected."""

    def submit(self, call: Call, target: object = None) -> None:
        """Queue a call; for a `target`, such as the holder of a state, on no other instances.

        Such a call shares batches with calls for the same target alone. Raises `QueueFull`,
        `Overloaded`, or `ModelNotReady` if no instance serves the target, by which a queued call is
        ended, not begun, when the last one is removed.
        """

    def expect(self, count: int) -> None:
        """Announce `count` more, or fewer, calls, which count as not drained."""

    def cancel(self, call: Call) -> None:
        """End `call` without an answer."""

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing is queued, in progress or expected."""

    def close(self) -> None:
        """Close all instances; only when not `busy`."""


class InstanceScheduler(Protocol):
    """Gives batches to the instances of a placement."""

    @property
    def quarantine(self) -> Quarantine:
        """Inputs that workers have died of."""

    def add_instance(self, instance: Instance) -> None:
        """Add an instance, which receives batches from now on."""

    def remove_instance(self, instance: Instance, removed: Callable[[], None]) -> None:
        """Give `instance` no more batches; `removed` is called once it has none in progress."""

    def suspend(self, instance: Instance) -> None:
        """Give an idle instance no batches until it is resumed."""

    def resume(self, instance: Instance) -> None:
        """Give a suspended instance batches again."""

    def fail_waiting(self, error: ServerError) -> bool:
        """End all requests not begun, unless others may run them; True if they have ended."""

    def answer(self, call: Call, answer: Answer | None, final: bool) -> None:
        """Receive an execution's individual answer to one request; see `Batcher.answer`."""
