"""Shared memory regions of one connection: creation, registration, leases, removal.

`SharedRegion` is a file in /dev/shm, as created by `shm_open`. A lock marks it as in use: the
system releases it when its process ends, in whatever way and container. A region without a lock is
a leftover, and is removed.

`RegionPool` tracks the state of each region. A region serves one call at a time, and is

1. idle: registered with the server, and unused;
2. lent: used by a call;
3. held: it contains the response of a successful call, which is still needed;
4. retired: not to be used again, but registered until it is due.

The server may still access a region after its call was cancelled, late or cut off. Such a region is
retired, and stays registered for a while: some servers crash if a region disappears during a run.
After a lost connection it is unknown whether the server still has its regions: they are retired,
and others are created.

`SharedRegions` creates and registers them in one task, beside the calls. Calls never wait for a
region: without one, their tensors are in the message. Blocking work runs on a thread.

Owned by the event-loop thread, except that held regions may be released on any. Times are seconds.
"""

import asyncio
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from headrace.core.tensors import Buffer
from headrace.protocol.grpc import End, Reason
from headrace.protocol.v2_protobuf import register_request, registered, unregister_request

log = logging.getLogger(__name__)

_NAME = re.compile(r"headrace-[0-9]+-[0-9a-f]{24}")
_FOLDER = "/dev/shm"


class SharedRegion:
    """`size` bytes of zeroed shared memory, allocated from the start."""

    __slots__ = ("_descriptor", "memory", "name", "size")

    def __init__(self, size: int) -> None:
        """Raises `OSError` without enough memory."""
        self.size = size
        self.name = f"headrace-{os.getpid()}-{secrets.token_hex(12)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(_path(self.name), flags, 0o600)
        try:
            # Another process may hold the lock for a moment, to test it.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._descriptor).st_nlink:
                raise OSError("it was taken for one that was left behind")
            # Allocated now, since a process that writes to missing memory is killed.
            os.posix_fallocate(self._descriptor, 0, size)
            populate = getattr(mmap, "MAP_POPULATE", 0)
            flags = mmap.MAP_SHARED | populate
            self.memory = memoryview(mmap.mmap(self._descriptor, size, flags))
        except BaseException:
            self.dispose()
            raise

    @property
    def key(self) -> str:
        """The name for `shm_open`."""
        return f"/{self.name}"

    def dispose(self) -> None:
        """Remove the file; the memory remains while `memory` is referenced."""
        if self._descriptor >= 0:
            with suppress(FileNotFoundError):
                os.unlink(_path(self.name))
            os.close(self._descriptor)
            self._descriptor = -1


def is_ours(name: str) -> bool:
    """True if the name is that of a region of any server of this kind."""
    return _NAME.fullmatch(name) is not None


def exists(name: str) -> bool:
    """True if a region of this name exists, whoever created it."""
    return os.path.lexists(_path(name))


def remove_left_behind() -> int:
    """Remove leftovers of ended servers of this user; returns their number."""
    removed = 0
    try:
        names = [name for name in os.listdir(_FOLDER) if is_ours(name)]
    except OSError:
        return 0
    for name in names:
        with suppress(OSError):  # already gone, or another user's
            removed += _removed(_path(name))
    return removed


def _removed(path: str) -> bool:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if in use
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def _path(name: str) -> str:
    return os.path.join(_FOLDER, name)


THRESHOLD = 256 << 10  # bytes of a tensor from which on it is shared
MOST_BYTES = 512 << 20  # of all regions per connection
SMALLEST = 256 << 10  # bytes
GRACE_SECS = 60.0


class RegionLease:
    """A region in use; `epoch` is that of its registration."""

    __slots__ = ("epoch", "region")

    def __init__(self, region: SharedRegion, epoch: int) -> None:
        self.region = region
        self.epoch = epoch


class Due(NamedTuple):
    """A retired region, and the time of its unregistration."""

    region: SharedRegion
    when: float


class RegionPool:
    """The states of one connection's regions. The caller creates, registers and removes them.

    `wanted` are sizes of regions to be created, while it `grows`; `epoch` counts lost
    connections.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.epoch = 0
        self.grows = True
        self.wanted: deque[int] = deque()
        self.retired: list[Due] = []
        self._most_bytes = most_bytes
        self._bytes = 0  # bytes of all regions, existing or being created
        self._making: set[int] = set()
        self._idle: dict[int, list[SharedRegion]] = {}  # by size
        self._held: dict[RegionLease, weakref.ref[Any]] = {}
        self._let_go: deque[RegionLease] = deque()

    def take(self, nbytes: int, now: float) -> RegionLease | None:
        """A region for `nbytes`; if there is none, one may become wanted."""
        while self._let_go:
            lease = self._let_go.popleft()
            if self._held.pop(lease, None) is not None:
                self.give_back(lease, now)
        size = size_class(nbytes)
        idle = self._idle.get(size)
        if idle:
            return RegionLease(idle.pop(), self.epoch)
        self._want(size, now)
        return None

    def give_back(self, lease: RegionLease, now: float) -> None:
        """Return a region that is no longer accessed."""
        if lease.epoch == self.epoch:
            self._idle.setdefault(lease.region.size, []).append(lease.region)
        else:
            self.retired.append(Due(lease.region, now))

    def hold(self, lease: RegionLease, user: object) -> None:
        """Return a region once `user` is collected; it is no longer written to."""
        self._held[lease] = weakref.ref(user, lambda _: self._let_go.append(lease))

    def retire(self, lease: RegionLease, now: float) -> None:
        """Retire a region that the server may still access."""
        self.retired.append(Due(lease.region, now + GRACE_SECS))

    def renew(self, now: float) -> None:
        """Handle a lost connection."""
        self.epoch += 1
        self.grows = True
        for size in list(self._idle):
            self._retire_idle(size, now)

    def made(self, size: int, region: SharedRegion | None, epoch: int, now: float) -> None:
        """Add a wanted region, registered since `epoch`; None if it cannot be created."""
        self._making.discard(size)
        if region is None:
            self._bytes -= size
        else:
            self.give_back(RegionLease(region, epoch), now)

    def due(self, now: float) -> SharedRegion | None:
        """The next region to be unregistered; it counts until it is `gone`."""
        for index, (region, when) in enumerate(self.retired):
            if when <= now:
                del self.retired[index]
                return region
        return None

    def postpone(self, when: float) -> None:
        """Postpone the unregistration of all retired regions until `when`."""
        self.retired = [Due(region, max(due, when)) for region, due in self.retired]

    def gone(self, region: SharedRegion) -> None:
        """Remove a region that was due and is unregistered."""
        self._bytes -= region.size

    def empty(self) -> list[SharedRegion]:
        """Remove the regions that the server no longer needs: idle and held ones."""
        found = [region for idle in self._idle.values() for region in idle]
        found += [lease.region for lease in self._held if lease.epoch == self.epoch]
        self._idle.clear()
        self._held.clear()
        return found

    def _want(self, size: int, now: float) -> None:
        if not self.grows or size > self._most_bytes or size in self._making:
            return
        if self._bytes + size > self._most_bytes:
            # For later: retired regions count until they are gone.
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
    """The size of a region for `nbytes`: a power of two."""
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())


Ask: TypeAlias = Callable[[bytes, bytes, float], Awaitable[tuple[Buffer | None, End | None]]]

_SERVICE = b"/inference.GRPCInferenceService/SystemSharedMemory"
REGISTER = _SERVICE + b"Register"
UNREGISTER = _SERVICE + b"Unregister"
REGISTERED = _SERVICE + b"Status"
_ASK_SECS = 5.0
_CLOSE_SECS = 1.0
_AGAIN_SECS = 5.0  # after a failed unregistration
_IN_USE = "currently in use"


class SharedRegions:
    """Provides regions to calls."""

    def __init__(self, ask: Ask, model: str, endpoint: str) -> None:
        """`ask` calls a procedure by path; `model` and `endpoint` are for the log."""
        self._ask = ask
        self._model = model
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._pool = RegionPool()
        self._all: set[SharedRegion] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looked = -1  # the epoch of the last search for leftovers
        self._told = False
        self._closed = False

    def take(self, nbytes: int) -> RegionLease | None:
        """A region for `nbytes`, if any; pass it to one of the next three methods."""
        lease = self._pool.take(nbytes, self._loop.time())
        self._go_on()
        return lease

    def give_back(self, lease: RegionLease) -> None:
        """Return a region: neither the server nor this process needs it."""
        self._pool.give_back(lease, self._loop.time())

    def hold(self, lease: RegionLease, user: object) -> None:
        """Return a region once `user` is collected: the server is done with it."""
        self._pool.hold(lease, user)

    def retire(self, lease: RegionLease) -> None:
        """Retire a region that the server may still access."""
        self._pool.retire(lease, self._loop.time())
        self._go_on()

    def renew(self) -> None:
        """Handle a lost connection: the server may have lost the regions."""
        self._pool.renew(self._loop.time())
        self._go_on()

    def forgotten(self, epoch: int) -> None:
        """Handle a region of this epoch that the server does not know."""
        if epoch == self._pool.epoch:
            self.renew()

    async def withdraw(self) -> None:
        """Unregister unneeded regions; the connection is still open."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with asyncio.timeout(_CLOSE_SECS):
                for region in self._pool.empty():
                    _, end = await self._tell_closed(region)
                    if end is not None and end.reason is not Reason.STATUS:
                        return
        except TimeoutError:
            pass  # the files are removed all the same

    async def close(self) -> None:
        """Remove all regions; the connection is closed."""
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._loop.run_in_executor(None, _dispose, list(self._all))
        self._all.clear()

    # --- the task

    def _go_on(self) -> None:
        pool = self._pool
        if self._task is None and not self._closed and (pool.wanted or pool.retired):
            if not pool.wanted:
                now = self._loop.time()
                first = min(due.when for due in pool.retired)
                if first > now:
                    if self._timer is None:
                        self._timer = self._loop.call_at(first, self._wake)
                    return
            self._task = self._loop.create_task(self._work())

    def _wake(self) -> None:
        self._timer = None
        self._go_on()

    async def _work(self) -> None:
        """Unregister due regions and create wanted ones, until none are left."""
        pool = self._pool
        try:
            while not self._closed:
                region = pool.due(self._loop.time())
                if region is not None:
                    await self._close_one(region)
                elif pool.wanted:
                    await self._make(pool.wanted.popleft())
                else:
                    break
        except Exception:
            log.exception("bug with shared memory")
            pool.grows = False
        self._task = None
        self._go_on()

    async def _make(self, size: int) -> None:
        pool, epoch = self._pool, self._pool.epoch
        if not pool.grows:
            pool.made(size, None, epoch, 0.0)
            return
        try:
            region = await self._loop.run_in_executor(None, SharedRegion, size)
        except OSError as error:
            pool.made(size, None, epoch, 0.0)
            self._refuse(f"{size} bytes of /dev/shm cannot be had: {error.strerror or error}")
            return
        self._all.add(region)
        asked = register_request(region.name, region.key, size)
        _, end = await self._ask(REGISTER, asked, _ASK_SECS)
        now = self._loop.time()
        if end is None:
            pool.made(size, region, epoch, now)
            self._tell()
            if self._looked != pool.epoch:
                self._looked = pool.epoch
                await self._clean()
        elif end.reason is Reason.LOST or end.reason is Reason.LATE:
            pool.made(size, region, -1, now)  # the server may have registered it
        else:
            pool.made(size, None, epoch, now)
            await self._remove([region])
            if end.reason is Reason.STATUS:
                self._refuse(f"the server does not take part: {end.text}")

    async def _close_one(self, region: SharedRegion) -> None:
        _, end = await self._tell_closed(region)
        now = self._loop.time()
        # Reported by some Tritons; others close it later.
        if end is not None and _IN_USE in end.text:
            self._pool.retired.append(Due(region, now + _AGAIN_SECS))
            return
        if end is not None and end.reason is not Reason.STATUS:
            self._pool.retired.append(Due(region, now))
            self._pool.postpone(now + _AGAIN_SECS)
            return
        await self._remove([region])
        self._pool.gone(region)

    async def _clean(self) -> None:
        """Unregister regions of ended servers."""
        data, end = await self._ask(REGISTERED, b"", _ASK_SECS)
        if data is None or end is not None:
            return
        try:
            found = registered(data)
        except DecodeError:
            return
        ours = [name for name, key in found.items() if is_ours(name) and key == f"/{name}"]
        left = await self._loop.run_in_executor(None, _without_file, ours)
        for name in left:
            asked = unregister_request(name)
            await self._ask(UNREGISTER, asked, _ASK_SECS)

    async def _tell_closed(self, region: SharedRegion) -> tuple[Buffer | None, End | None]:
        asked = unregister_request(region.name)
        return await self._ask(UNREGISTER, asked, _ASK_SECS)

    async def _remove(self, regions: Sequence[SharedRegion]) -> None:
        await self._loop.run_in_executor(None, _dispose, regions)
        self._all.difference_update(regions)

    # --- the log

    def _refuse(self, why: str) -> None:
        self._pool.grows = False
        log.warning(
            "model %s: server %s: tensors go over the wire: %s", self._model, self._endpoint, why,
            extra={"model": self._model},
        )  # fmt: skip

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.info(
                "model %s: server %s: tensors from %d KiB on go through shared memory",
                self._model, self._endpoint, THRESHOLD >> 10, extra={"model": self._model},
            )  # fmt: skip


def _dispose(regions: Sequence[SharedRegion]) -> None:
    for region in regions:
        region.dispose()


def _without_file(names: Sequence[str]) -> list[str]:
    return [name for name in names if not exists(name)]
