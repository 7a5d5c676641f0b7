"""The regions of shared memory of one connection: made, registered with its server, and removed.

Calls never wait for a region: while there is none for them, their tensors are in the message.
Regions are made and registered by one task, beside the calls. Whatever blocks is on a thread.

Owned by the event-loop thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from headrace.core.tensors import Buffer
from headrace.execution.remote.grpc_procedures import REGISTER, REGISTERED, UNREGISTER, Procedures
from headrace.execution.remote.region_pool import Due, Lease, RegionPool
from headrace.execution.remote.shared_layout import THRESHOLD
from headrace.execution.remote.shared_region import SharedRegion, exists, is_ours
from headrace.wire.grpc_call import End, Reason
from headrace.wire.http2.request_blocks import RequestHead
from headrace.wire.remote_shared import register_request, registered, unregister_request

log = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[RequestHead, bytes, float], Awaitable[tuple[Buffer | None, End | None]]]
SharedLease: TypeAlias = Lease[SharedRegion]

_ASK_SECS = 5.0
_CLOSE_SECS = 1.0
_AGAIN_SECS = 5.0  # after a server could not be told
_IN_USE = "currently in use"


class SharedRegions:
    """Gives regions to calls."""

    def __init__(self, ask: Ask, procedures: Procedures, model: str, endpoint: str) -> None:
        """`ask` makes a call of the connection; `model` and `endpoint` are for the log."""
        self._ask = ask
        self._register = procedures.head(REGISTER)
        self._unregister = procedures.head(UNREGISTER)
        self._registered = procedures.head(REGISTERED)
        self._model = model
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._pool: RegionPool[SharedRegion] = RegionPool()
        self._all: set[SharedRegion] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looked = -1  # the epoch in which it was looked for what others have left
        self._told = False
        self._closed = False

    def take(self, nbytes: int) -> SharedLease | None:
        """A region for so many bytes, if there is one; to be given to one of the next three."""
        lease = self._pool.take(nbytes, self._loop.time())
        self._go_on()
        return lease

    def give_back(self, lease: SharedLease) -> None:
        """The server is done with it, and nobody here needs what is in it."""
        self._pool.give_back(lease, self._loop.time())

    def hold(self, lease: SharedLease, user: object) -> None:
        """The server is done with it; it is needed for as long as there is `user`."""
        self._pool.hold(lease, user)

    def retire(self, lease: SharedLease) -> None:
        """The server may still read and write it."""
        self._pool.retire(lease, self._loop.time())
        self._go_on()

    def renew(self) -> None:
        """A connection was lost: the server may not know the regions any more."""
        self._pool.renew(self._loop.time())
        self._go_on()

    def forgotten(self, epoch: int) -> None:
        """The server does not know a region of this epoch."""
        if epoch == self._pool.epoch:
            self.renew()

    async def withdraw(self) -> None:
        """Have the server close what it needs no more; the connection is still there."""
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
            pass  # the files go all the same

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
        """Do what there is to do."""
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
        _, end = await self._ask(self._register, asked, _ASK_SECS)
        now = self._loop.time()
        if end is None:
            pool.made(size, region, epoch, now)
            self._tell()
            if self._looked != pool.epoch:
                self._looked = pool.epoch
                await self._clean()
        elif end.reason is Reason.LOST or end.reason is Reason.LATE:
            pool.made(size, region, -1, now)  # the server may have it
        else:
            pool.made(size, None, epoch, now)
            await self._remove([region])
            if end.reason is Reason.STATUS:
                self._refuse(f"the server does not take part: {end.text}")

    async def _close_one(self, region: SharedRegion) -> None:
        _, end = await self._tell_closed(region)
        now = self._loop.time()
        if end is not None and _IN_USE in end.text:  # as some Tritons say; others close it later
            self._pool.retired.append(Due(region, now + _AGAIN_SECS))
            return
        if end is not None and end.reason is not Reason.STATUS:
            self._pool.retired.append(Due(region, now))
            self._pool.postpone(now + _AGAIN_SECS)
            return
        await self._remove([region])
        self._pool.gone(region)

    async def _clean(self) -> None:
        """Have the server close what servers have registered that have ended since."""
        data, end = await self._ask(self._registered, b"", _ASK_SECS)
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
            await self._ask(self._unregister, asked, _ASK_SECS)

    async def _tell_closed(self, region: SharedRegion) -> tuple[Buffer | None, End | None]:
        asked = unregister_request(region.name)
        return await self._ask(self._unregister, asked, _ASK_SECS)

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
