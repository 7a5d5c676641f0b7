"""The order of instances that share resources: a state machine without clock or instances.

An instance waits, has been granted its resources, or neither. Those that wait are granted theirs in
the order of their turns, and then of their arrival. One that does not fit keeps what it needs from
all behind it, so that small ones cannot starve a large one; others may pass it. A turn grows by
the instance's priority with each run: of two that always wait, one with priority 2 runs half as
often as one with priority 1. Whoever has not waited for a while begins at the turn of the last
grant, and gets nothing for the past.

Invariant: no resource is used beyond its capacity, unless it has shrunk since.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

GLOBAL = -1  # the device of a resource that all devices share


class Resource(NamedTuple):
    """A counted resource of one device, or of all of them (`GLOBAL`)."""

    name: str
    device: int


class Contender:
    """An instance: the resources that it `needs`, and its `priority`, from 1.

    `granted` is true from the grant of its resources until they are given back.
    """

    __slots__ = ("granted", "needs", "order", "priority", "turn", "waits")

    def __init__(self, needs: Mapping[Resource, int], priority: int) -> None:
        self.needs = needs
        self.priority = max(priority, 1)
        self.turn = self.order = 0
        self.waits = self.granted = False


# Configured capacities, by a resource's name and device; None stands for any.
Limits = Mapping[tuple[str, int | None], int]


class ResourceShares:
    """The resources, and the instances that share them.

    A resource without a configured capacity has as much as the instance that needs most of it.
    """

    def __init__(self, limits: Limits) -> None:
        self.used: Counter[Resource] = Counter()
        self._limits = limits
        self._known: dict[Contender, None] = {}
        self._turn = 0  # of the last grant
        self._arrivals = 0

    def add(self, one: Contender) -> None:
        """Let an instance contend."""
        self._known[one] = None

    def remove(self, one: Contender) -> Sequence[Contender]:
        """Let an instance contend no more; returns the instances granted thereby."""
        del self._known[one]
        one.waits = False
        return self.give_back(one) if one.granted else self._grant()

    def ask(self, one: Contender) -> Sequence[Contender]:
        """Let an instance wait for its resources; returns the instances granted now."""
        if not (one.waits or one.granted):
            self._arrivals += 1
            one.waits, one.order = True, self._arrivals
            one.turn = max(one.turn, self._turn)
        return self._grant()

    def withdraw(self, one: Contender) -> Sequence[Contender]:
        """Let an instance wait no more; one that was granted has not run."""
        one.waits = False
        if not one.granted:
            return self._grant()
        one.turn -= one.priority
        return self.give_back(one)

    def give_back(self, one: Contender, again: bool = False) -> Sequence[Contender]:
        """Free the resources of an instance that has run, and may wait `again`."""
        one.granted = False
        self.used.subtract(one.needs)
        return self.ask(one) if again else self._grant()

    def capacity(self, resource: Resource) -> int:
        """The units of a resource that there are."""
        limit = limit_of(self._limits, resource)
        needs = (one.needs.get(resource, 0) for one in self._known)
        return max(needs, default=0) if limit is None else limit

    @property
    def resources(self) -> set[Resource]:
        """The resources that any instance needs."""
        return {resource for one in self._known for resource in one.needs}

    def _grant(self) -> Sequence[Contender]:
        """Grant resources to those that wait, as far as they are free."""
        granted = []
        kept: set[Resource] = set()
        waiting = (one for one in self._known if one.waits)
        for one in sorted(waiting, key=lambda each: (each.turn, each.order)):
            if kept.isdisjoint(one.needs) and self._fits(one):
                one.waits, one.granted = False, True
                self.used.update(one.needs)
                self._turn = max(self._turn, one.turn)
                one.turn += one.priority
                granted.append(one)
            else:
                kept.update(one.needs)
        return granted

    def _fits(self, one: Contender) -> bool:
        return all(
            self.used[resource] + count <= self.capacity(resource)
            for resource, count in one.needs.items()
        )


def limit_of(limits: Limits, resource: Resource) -> int | None:
    """The configured capacity of a resource; None without one."""
    found = None if resource.device == GLOBAL else limits.get((resource.name, resource.device))
    return limits.get((resource.name, None)) if found is None else found


def read_limits(texts: Iterable[str]) -> Limits:
    """Parse `NAME:COUNT[:DEVICE]`; raises `ValueError`."""
    found: dict[tuple[str, int | None], int] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        count, colon, device = rest.partition(":")
        numbers = (count, device) if colon else (count,)
        if not name or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise ValueError(f"expected NAME:COUNT[:DEVICE], got {text!r}")
        key = name, int(device) if colon else None
        if key in found:
            raise ValueError(f"resource {name!r} is given twice: {text!r}")
        found[key] = int(count)
    return found
