"""Which regions of shared memory a connection has, and what each of them is doing.

A region is for one call at a time. It is in one of these states:

1. idle: registered with the server, and in nobody's use;
2. lent: a call has it;
3. held: the answer of a call that has ended well lies in it, and is still needed;
4. retired: not to be used again, and still registered, until it is due.

The server may still read and write what a call had that was cancelled, late or cut off. So such a
region is retired, and its registration stays for a while: there are servers that do not survive
it if a region goes that a run has. After a connection was lost, nobody knows whether the server
still has its regions: they are retired, and others are made.

Plain values of the event-loop thread, but that what is held may be let go on any. Times are in
seconds of any clock.
"""

import weakref
from collections import deque
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

MOST_BYTES = 512 << 20  # of all regions of a connection
SMALLEST = 256 << 10  # bytes
GRACE_SECS = 60.0


class Sized(Protocol):
    """A region, as far as it matters here."""

    @property
    def size(self) -> int:
        """In bytes."""


R = TypeVar("R", bound=Sized)


class Lease(Generic[R]):
    """A region in use; `epoch` is that of its registration."""

    __slots__ = ("epoch", "region")

    def __init__(self, region: R, epoch: int) -> None:
        self.region = region
        self.epoch = epoch


class Due(NamedTuple, Generic[R]):
    """A region that is retired, and when it is to be unregistered."""

    region: R
    when: float


class RegionPool(Generic[R]):
    """The regions of one connection. Somebody else makes, registers and removes them.

    `wanted` are sizes of regions that are to be made, while it `grows`; `epoch` counts the
    connections that were lost.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.epoch = 0
        self.grows = True
        self.wanted: deque[int] = deque()
        self.retired: list[Due[R]] = []
        self._most_bytes = most_bytes
        self._bytes = 0  # of all regions there are, and of those that are being made
        self._making: set[int] = set()
        self._idle: dict[int, list[R]] = {}  # by size
        self._held: dict[Lease[R], weakref.ref[Any]] = {}
        self._let_go: deque[Lease[R]] = deque()

    def take(self, nbytes: int, now: float) -> Lease[R] | None:
        """A region for so many bytes; if there is none, one may be wanted then."""
        while self._let_go:
            lease = self._let_go.popleft()
            if self._held.pop(lease, None) is not None:
                self.give_back(lease, now)
        size = size_class(nbytes)
        idle = self._idle.get(size)
        if idle:
            return Lease(idle.pop(), self.epoch)
        self._want(size, now)
        return None

    def give_back(self, lease: Lease[R], now: float) -> None:
        """Nobody reads or writes it any more."""
        if lease.epoch == self.epoch:
            self._idle.setdefault(lease.region.size, []).append(lease.region)
        else:
            self.retired.append(Due(lease.region, now))

    def hold(self, lease: Lease[R], user: object) -> None:
        """Nobody writes it any more; it is given back once `user` is gone."""
        self._held[lease] = weakref.ref(user, lambda _: self._let_go.append(lease))

    def retire(self, lease: Lease[R], now: float) -> None:
        """The server may still read or write it."""
        self.retired.append(Due(lease.region, now + GRACE_SECS))

    def renew(self, now: float) -> None:
        """The connection was lost."""
        self.epoch += 1
        self.grows = True
        for size in list(self._idle):
            self._retire_idle(size, now)

    def made(self, size: int, region: R | None, epoch: int, now: float) -> None:
        """What was wanted is registered since `epoch`, or could not be made."""
        self._making.discard(size)
        if region is None:
            self._bytes -= size
        else:
            self.give_back(Lease(region, epoch), now)

    def due(self, now: float) -> R | None:
        """The next region that is to be unregistered; it counts until it is `gone`."""
        for index, (region, when) in enumerate(self.retired):
            if when <= now:
                del self.retired[index]
                return region
        return None

    def postpone(self, when: float) -> None:
        """Let nothing be due before."""
        self.retired = [Due(region, max(due, when)) for region, due in self.retired]

    def gone(self, region: R) -> None:
        """One that was due has been removed."""
        self._bytes -= region.size

    def empty(self) -> list[R]:
        """Those that the server needs no more, which are idle or held; they are not had again."""
        found = [region for idle in self._idle.values() for region in idle]
        found += [lease.region for lease in self._held if lease.epoch == self.epoch]
        self._idle.clear()
        self._held.clear()
        return found

    def _want(self, size: int, now: float) -> None:
        if not self.grows or size > self._most_bytes or size in self._making:
            return
        if self._bytes + size > self._most_bytes:
            # Room for later: what is retired counts until it is gone.
            other = next((s for s, idle in self._idle.items() if idle and s != size), None)
            if other is not None:
                self._retire_idle(other, now)
            return
        self._bytes += size
        self._making.add(size)
        self.wanted.append(size)

    def _retire_idle(self, size: int, now: float) -> None:
        self.retired += [Due(region, now) for region in self._idle.pop(size, ())]


def size_class(nbytes: int) -> int:
    """The size of a region for so many bytes: a power of two."""
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())
