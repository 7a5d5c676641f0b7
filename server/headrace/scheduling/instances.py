"""The instances of one scheduler: idle, suspended, busy, or busy for the last time.

Owned by the event-loop thread.
"""

from collections.abc import Callable
from operator import attrgetter

from headrace.scheduling.batch import Instance

_load = attrgetter("load")


class Instances:
    """Who may run the next batch. What is in neither list has a batch under way."""

    def __init__(self) -> None:
        self.idle: list[Instance] = []
        self._suspended: list[Instance] = []
        self._all: list[Instance] = []
        self.leaving: dict[Instance, Callable[[], None]] = {}

    @property
    def busy(self) -> bool:
        """Whether any has a batch under way."""
        return len(self.idle) + len(self._suspended) < len(self._all)

    def add(self, instance: Instance) -> None:
        """Let an idle instance take part."""
        self._all.append(instance)
        self.idle.append(instance)

    def remove(self, instance: Instance, removed: Callable[[], None]) -> bool:
        """Take an instance out; if it is busy, which is False, that is when it comes back."""
        for resting in (self.idle, self._suspended):
            if instance in resting:
                resting.remove(instance)
                self._all.remove(instance)
                return True
        self.leaving[instance] = removed
        return False

    def suspend(self, instance: Instance) -> None:
        """Give an idle instance nothing until it is resumed."""
        if instance in self.idle:
            self.idle.remove(instance)
            self._suspended.append(instance)

    def resume(self, instance: Instance) -> bool:
        """Let a suspended instance take part again; whether it was one."""
        if instance not in self._suspended:
            return False
        self._suspended.remove(instance)
        self.idle.append(instance)
        return True

    def pick(self) -> Instance:
        """Make an idle one busy: the one that can begin soonest."""
        idle = self.idle
        for chosen in idle:  # a model on other servers has many, all of them free
            if not chosen.load:
                break
        else:
            chosen = min(idle, key=_load)
        idle.remove(chosen)
        return chosen

    def give_back(self, instance: Instance) -> Callable[[], None] | None:
        """A busy instance is idle again; what to call if it is to be removed instead."""
        if (removed := self.leaving.pop(instance, None)) is not None:
            self._all.remove(instance)
            return removed
        self.idle.append(instance)
        return None

    def close(self) -> None:
        """Close all of them; only while none is busy."""
        for instance in self._all:
            instance.close()
        self._all.clear()
        self.idle.clear()
        self._suspended.clear()
