"""Large tensors of a client in memory that it shares with a server on this machine.

A server on the Unix socket PATH takes files of memory at PATH.memory, one for each connection, and
answers with the name by which requests refer to it (`headrace.doors.memory`). A file has no name in
the file system, and ends with the client. Inputs of a request are in one region, outputs in another
one; tensors without a region, and all of a server that takes none, are in the message.

The outputs' sizes are those of the last response to such inputs; a larger output comes in the
message, and so does one that the model has only had since it was loaded anew. Outputs are views of
their region, which is reused when nothing refers to them any more. After a failed request the
server may still use its regions: they are given up.

Owned by the event loop, except that regions may be released on any thread.
"""

import asyncio
import logging
import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.client import StatusError
from headrace.client.transport import InferRequest
from headrace.connections.placing import laid_out, needed
from headrace.core.call import InferResponse, RegionSlice
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor
from headrace.ipc.memory import new_file
from headrace.protocol.parameters import ALL_OUTPUTS

log = logging.getLogger(__name__)

THRESHOLD = 256 << 10  # bytes of a tensor from which on it is shared
_SUFFIX = ".memory"
_SMALLEST = 1 << 20  # bytes of a region
_MOST_BYTES = 512 << 20  # of all regions
_KEPT_BYTES = 128 << 20  # of regions that are not in use
_ANSWER_SECS = 5.0
_AGAIN_SECS = 30.0  # until a server that took no memory is asked again
_KNOWN = 256  # requests whose outputs are remembered
# Of refusals before anything is run: of a region, and of an output that the model has no more.
_REFUSED = (400, 404)
_OF_MEMORY, _OF_OUTPUTS = "shared memory region", "unexpected inference output"


class LentRegion:
    """A file of memory that the server has, as long as `sock` is open."""

    def __init__(self, size: int, file: int, sock: socket.socket, name: str) -> None:
        self.size = size
        self.name = name
        self.file = mmap.mmap(file, size)
        self.sock = sock
        self.forks = _ForkCount.count

    def close(self) -> None:
        """Take it back from the server; the memory remains while it is referenced."""
        self.sock.close()


class _ForkCount:
    """Counts forks: a child may refer to a response, so its memory must not be written again."""

    count = 0

    @classmethod
    def forked(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_parent=_ForkCount.forked)


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """The tensors of one request in memory: inputs at `places`, outputs at `rooms`.

    `views` are the rooms' bytes.
    """

    places: Mapping[str, RegionSlice] = field(default_factory=dict)
    rooms: Mapping[str, RegionSlice] = field(default_factory=dict)
    views: Mapping[str, memoryview] = field(default_factory=dict)


NOTHING = SharedTensors()
Send = Callable[[InferRequest, SharedTensors], Awaitable[InferResponse]]


class ClientMemory:
    """The memory that a client shares with the server at a Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path + _SUFFIX
        self._idle: dict[int, list[LentRegion]] = {}  # by size
        self._all: set[LentRegion] = set()
        self._held: dict[LentRegion, weakref.ref[Any]] = {}  # with the array that views it
        self._let_go: deque[LentRegion] = deque()
        self._sizes: dict[object, Mapping[str, int]] = {}  # of outputs, by `_key`
        self._again = 0.0  # when to ask a server that took nothing

    async def infer(self, request: InferRequest, send: Send) -> InferResponse:
        """The response to a request, sent by `send` with large tensors in memory if possible.

        A request that is refused because of them is sent again without; raises what `send` raises.
        """
        given = {t.name: t.array.nbytes for t in request.inputs if _worth_it(t)}
        key = _key(request)
        sizes = self._sizes.get(key, {})
        wanted = {name: size for name, size in sizes.items() if size >= THRESHOLD}
        if request.classes or not (given or wanted):
            return self._learned(key, await send(request, NOTHING))
        inputs = await self._take(needed(given)) if given else None
        try:
            outputs = await self._take(needed(wanted)) if wanted else None
        except BaseException:  # cancelled; the server has nothing to do with the inputs yet
            if inputs is not None:
                self._give_back(inputs)
            raise
        if inputs is None and outputs is None:
            return self._learned(key, await send(request, NOTHING))
        asked, shared, whole = request, NOTHING, None
        if inputs is not None:
            shared = replace(shared, places=laid_out(given, inputs.name))
            _write(request.inputs, shared.places, inputs.file)
        if outputs is not None:
            # The response's arrays refer to this one, which so lives as long as any of them.
            whole = np.ndarray((outputs.size,), np.uint8, outputs.file)
            whole.flags.writeable = False
            rooms = laid_out(wanted, outputs.name)
            views = {n: whole.data[p.offset : p.offset + p.byte_size] for n, p in rooms.items()}
            shared = replace(shared, rooms=rooms, views=views)
            if not request.outputs:
                every = {**request.parameters, ALL_OUTPUTS: True}
                asked = replace(request, outputs=list(sizes), parameters=every)
        try:
            response = await send(asked, shared)
        except StatusError as error:
            self._give_up(inputs, outputs)
            text = str(error) if error.status in _REFUSED else ""
            of_memory = _OF_MEMORY in text
            if not (of_memory or (_OF_OUTPUTS in text and asked.outputs != request.outputs)):
                raise
            if of_memory:  # of a server that was restarted
                self._give_up(*self._all)
        except BaseException:
            self._give_up(inputs, outputs)
            raise
        else:
            if inputs is not None:
                self._give_back(inputs)
            if outputs is not None:
                self._hold(outputs, whole)
            return self._learned(key, response)
        self._sizes.pop(key, None)
        return self._learned(key, await send(request, NOTHING))

    def close(self) -> None:
        """Take all regions back; arrays that refer to them stay."""
        self._give_up(*self._all)

    def _learned(self, key: object, response: InferResponse) -> InferResponse:
        """Remember the sizes of a response's outputs if any is large."""
        sizes = {t.name: t.array.nbytes if _worth_it(t) else 0 for t in response.outputs}
        if any(sizes.values()):
            if len(self._sizes) >= _KNOWN:
                self._sizes.clear()
            self._sizes[key] = sizes
        return response

    # --- regions

    async def _take(self, nbytes: int) -> LentRegion | None:
        """A region for `nbytes`, or None if the server takes no more memory."""
        while self._let_go:
            region = self._let_go.popleft()
            del self._held[region]
            self._give_back(region)
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        if idle := self._idle.get(size):
            return idle.pop()
        loop = asyncio.get_running_loop()
        if loop.time() < self._again or sum(r.size for r in self._all) + size > _MOST_BYTES:
            return None
        try:
            region = await self._lend(size)
        except (OSError, TimeoutError) as error:
            self._again = loop.time() + _AGAIN_SECS
            why = str(error) or "no answer"
            log.info("%s: large tensors go through the socket: %s", self._path, why)
            return None
        self._all.add(region)
        return region

    async def _lend(self, size: int) -> LentRegion:
        """Hand a new file to the server; raises `OSError` and `TimeoutError`."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            file = new_file(size)
            try:
                async with asyncio.timeout(_ANSWER_SECS):
                    await loop.sock_connect(sock, self._path)
                    socket.send_fds(sock, [b"m"], [file])
                    answer = (await loop.sock_recv(sock, 1024)).decode(errors="replace")
                said, _, text = answer.partition(" ")
                if said != "ok":
                    raise OSError(text or "the server has hung up")
                return LentRegion(size, file, sock, text)
            finally:
                os.close(file)
        except BaseException:
            sock.close()
            raise

    def _hold(self, region: LentRegion, user: object) -> None:
        """Give a region back once `user` is collected."""
        self._held[region] = weakref.ref(user, lambda _: self._let_go.append(region))

    def _give_back(self, region: LentRegion) -> None:
        if region not in self._all:  # given up meanwhile
            return
        kept = sum(size * len(idle) for size, idle in self._idle.items())
        if region.forks != _ForkCount.count or kept + region.size > _KEPT_BYTES:
            self._give_up(region)
        else:
            self._idle.setdefault(region.size, []).append(region)

    def _give_up(self, *regions: LentRegion | None) -> None:
        for region in regions:
            if region is not None:
                region.close()
                self._all.discard(region)
                if region in (idle := self._idle.get(region.size, [])):
                    idle.remove(region)


def _worth_it(tensor: Tensor) -> bool:
    return tensor.datatype is not Datatype.BYTES and tensor.array.nbytes >= THRESHOLD


def _key(request: InferRequest) -> object:
    """The key of `_sizes`: all but values that the sizes of outputs may depend on."""
    shapes = tuple((t.name, t.array.shape) for t in request.inputs)
    return request.model, request.version, tuple(request.outputs), shapes


def _write(inputs: Sequence[Tensor], places: Mapping[str, RegionSlice], memory: mmap.mmap) -> None:
    for tensor in inputs:
        if (place := places.get(tensor.name)) is not None:
            array = tensor.array
            np.ndarray(array.shape, array.dtype, memory, place.offset)[...] = array
