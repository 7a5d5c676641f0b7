"""The choice among versions by weight: for each request anew, or the same for each key.

Requests without a key take the points of an additive recurrence (multiples of the golden ratio,
modulo one), which lie as evenly as points can: after any number of requests, each version has had
its share but for a few. No random numbers are drawn, and unlike with taking turns, requests that
come in a rhythm do not all meet the same version.

Keys choose by weighted rendezvous hashing: each version draws a number from the key, which grows
with the version's weight, and the highest one wins. If a weight changes, or a version comes or
goes, only those keys move that have to. The numbers depend on nothing but model, version and key:
they are the same on every server, and after a restart.
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import log

_WHOLE = 2**64
_MASK = _WHOLE - 1
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio, as a share of 2**64
SILVER = 0x6A09E667F3BCC909  # the square root of two, likewise: independent of the golden ratio


class Sequence64:
    """Evenly distributed points from 0 to 2**64, one after the other."""

    __slots__ = ("_step", "point")

    def __init__(self, step: int, point: int = 0) -> None:
        self._step = step
        self.point = point

    def next(self) -> int:
        """The next point."""
        self.point = point = (self.point + self._step) & _MASK
        return point


def bound(share: float) -> int:
    """The point below which a `share` (0 to 1) of all points lie."""
    return min(round(share * _WHOLE), _WHOLE)


class Split:
    """Versions by weight. The weights are positive, and there is at least one."""

    def __init__(self, model: str, weights: Mapping[int, float]) -> None:
        total = sum(weights.values())
        versions = sorted(weights)
        self.shares = {number: weights[number] / total for number in versions}
        self._bounds: list[tuple[int, int]] = []
        reached = 0.0
        for number in versions:
            reached += weights[number]
            self._bounds.append((bound(reached / total), number))
        self._bounds[-1] = (_WHOLE, versions[-1])
        self._salted = [
            (number, weights[number], f"{model}\0{number}\0".encode(errors="replace"))
            for number in versions
        ]

    def at(self, point: int) -> int:
        """The version at a point from 0 to 2**64."""
        for limit, number in self._bounds:
            if point < limit:
                return number
        raise ValueError(f"{point} is beyond 2**64")

    def of(self, key: str) -> int:
        """The version of a key."""
        text = key.encode(errors="replace")
        chosen, least = 0, float("inf")
        for number, weight, salt in self._salted:
            digest = blake2b(salt + text, digest_size=8).digest()
            # The time to a first event of this rate: of all, the one that comes first wins.
            wait = -log((int.from_bytes(digest, "little") + 1) / (_WHOLE + 1)) / weight
            if wait < least or not chosen:
                chosen, least = number, wait
        return chosen
