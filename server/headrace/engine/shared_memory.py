"""Shared memory of clients: registered regions, and the stage of calls that use them.

A region of system shared memory is an open file. Its bytes are read and written through the file,
never through a mapping: a client that truncates its file can kill a process that maps it (SIGBUS),
and one that changes bytes while they are checked can make them pass and differ afterwards. Inputs
are copies, and bytes that are gone are an error (docs/adr/0019-shared-memory.md).

A region that is unregistered while requests use it stays until they have ended, as in Triton: its
status is reported, its name is taken, and requests may still name it.

Owned by the event-loop thread, except for `Region.read` and `Region.write`, which any thread may
call. Invariant: a region is closed once, when it was unregistered and is not in use.
"""

import asyncio
import fcntl
import logging
import os
import resource
import secrets
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np

from headrace.core.call import (
    Call,
    Done,
    InferResponse,
    Owner,
    RegionSlice,
    Shared,
    SharedInput,
    Stage,
    Submit,
)
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import (
    AlreadyExists,
    ExecutionFailed,
    InvalidRequest,
    LoadFailed,
    MemoryUnavailable,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    Unsupported,
)
from headrace.core.tensors import Array, Tensor, elsewhere, raw_bytes
from headrace.engine.admission import Admission
from headrace.engine.workbench import refuse, run_in_pool
from headrace.protocol.compression import too_large
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import INTERNAL_TEXT


class Memory(Protocol):
    """The memory of a region. Methods block, and may be called on any thread."""

    def read(self, into: memoryview, offset: int) -> int:
        """Fill `into` starting at `offset`; returns the number of bytes read. Raises `OSError`."""

    def write(self, data: memoryview, offset: int) -> bool:
        """Write `data` at `offset`, unless the memory is too short. Raises `OSError`."""

    def close(self) -> None:
        """Release the memory."""


# Opens GPU memory by the region's name, a handle, the device and the number of bytes; blocks.
# Raises `InvalidRequest`.
Open = Callable[[str, bytes, int, int], Memory]
FindOpen = Callable[[], Open]  # called on a thread; raises `LoadFailed`


class SharedFile:
    """An open file of system shared memory, starting at `start`."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._start = start

    def read(self, into: memoryview, offset: int) -> int:
        """Implements `Memory.read`."""
        done = 0
        while done < len(into):  # one call reads at most 2 GiB
            count = os.preadv(self._descriptor, [into[done:]], self._start + offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, data: memoryview, offset: int) -> bool:
        """Implements `Memory.write`."""
        # Writing would enlarge a truncated file again, which is the client's to do.
        if os.fstat(self._descriptor).st_size < self._start + offset + len(data):
            return False
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self._start + offset + done)
        return True

    def close(self) -> None:
        """Implements `Memory.close`."""
        os.close(self._descriptor)


log = logging.getLogger(__name__)

DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
_FOLDER = "/dev/shm/"
# Names used by servers themselves: Triton's Python backend, named semaphores, OpenMP.
_RESERVED = ("triton_python_backend_shm_region_", "sem.", "__KMP_REGISTERED_LIB_")
_LONGEST = 255  # bytes of a key, which is a file name, and of a region's name
_MOST_REGIONS = 1024  # each keeps a file open
_MOST = 2**63 - 1
_THREADS = 4
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Region:
    """A registered region. `key` and `offset` are for system memory, `device_id` for a GPU.

    One that is `lent` belongs to a connection: it is neither listed nor unregistered by name.
    """

    __slots__ = (
        "byte_size", "device_id", "key", "leaving", "lent", "memory", "name", "offset", "users",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        memory: Memory,
        byte_size: int,
        key: str = "",
        offset: int = 0,
        device_id: int | None = None,
        lent: bool = False,
    ) -> None:
        self.lent = lent
        self.name = name
        self.memory = memory
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.device_id = device_id
        self.leaving = False  # unregistered while in use
        self.users = 0

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into`; blocks. Raises `InvalidRequest` if the region has become shorter."""
        try:
            if self.memory.read(into, offset) == len(into):
                return
        except OSError as error:
            log.error("cannot read shared memory region %r: %s", self.name, error)
        raise InvalidRequest(
            f"shared memory region '{self.name}' does not have the bytes any more that it was"
            " registered with"
        )

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data`; blocks. Raises `ExecutionFailed` if the region cannot be written."""
        try:
            if self.memory.write(data, offset):
                return
        except OSError as error:
            log.error("cannot write to shared memory region %r: %s", self.name, error)
        raise ExecutionFailed(
            f"shared memory region '{self.name}' did not take an output: it does not have the"
            " bytes any more that it was registered with, or can not be written"
        )

    def close(self) -> None:
        """Release the memory of the region; blocks."""
        try:
            self.memory.close()
        except OSError as error:
            log.error("cannot close shared memory region %r: %s", self.name, error)


def _without_cuda() -> Open:
    raise LoadFailed("not supported")


class Regions:
    """All regions by name, in one name space for both kinds.

    Copies of inputs are charged to `admission`, at most `max_bytes` for one request.
    """

    def __init__(
        self,
        admission: Admission,
        max_bytes: int,
        allowed: bool = False,
        prefix: str = "",
        find_cuda: FindOpen = _without_cuda,
    ) -> None:
        """With a `prefix`, only keys that start with it are accepted."""
        self.admission = admission
        self.max_bytes = max_bytes
        self._allowed = allowed
        self._prefix = prefix
        self._find_cuda = find_cuda
        self._regions: dict[str, Region] = {}
        self._opening: set[str] = set()
        self._lent_bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Threads for blocking work."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "shared-memory")
        return self._pool

    # --- requests

    def take(self, place: RegionSlice) -> Region:
        """The region of a slice, in use until `release`.

        Raises `NotFound`, and `InvalidRequest` for a slice beyond the region.
        """
        region = self._regions.get(place.region)
        if region is None:
            why = "" if self._allowed else f". {DISABLED}"
            raise NotFound(f"Unable to find shared memory region: '{place.region}'{why}")
        if place.offset >= region.byte_size:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{place.region}'")
        if place.offset + place.byte_size > region.byte_size:
            raise InvalidRequest(
                f"Invalid offset + byte size for shared memory region: '{place.region}'"
            )
        region.users += 1
        return region

    def release(self, region: Region) -> None:
        """End the use of a region."""
        region.users -= 1
        if region.leaving and not region.users:
            self._close(region)

    # --- control

    async def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open `byte_size` bytes of the POSIX shared memory object `key`, starting at `offset`.

        Raises `ServerError`.
        """
        self._check_allowed()
        file_name = self._file_name(name, key)
        if not (0 <= offset <= _MOST and 0 < byte_size <= _MOST - offset):
            raise invalid_args(name, "offset must not be negative, byte_size not less than 1")

        def opened() -> Region:
            memory = _open_file(name, key, file_name, offset, byte_size)
            return Region(name, memory, byte_size, key, offset)

        await self._register(name, opened)

    async def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Open GPU memory by its `cudaIpcMemHandle_t`; raises `ServerError`."""
        self._check_allowed()
        if not (0 < byte_size <= _MOST and 0 <= device_id <= _MOST):
            raise invalid_args(name, "device_id must not be negative, byte_size not less than 1")

        def opened() -> Region:
            try:
                open_memory = self._find_cuda()
            except LoadFailed as error:
                text = f"failed to register CUDA shared memory region: '{name}', {error}"
                raise InvalidRequest(text) from None
            memory = open_memory(name, handle, device_id, byte_size)
            return Region(name, memory, byte_size, device_id=device_id)

        await self._register(name, opened)

    def lend(self, descriptor: int) -> str:
        """Add a client's file, which is closed with the region; returns the region's name.

        The name cannot be guessed, so that other clients cannot use it. All files together are
        limited like the bytes of requests, since writing outputs may take their memory here. Raises
        `ServerError`.
        """
        try:
            # Raises OSError for a file that is not memory.
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED != _FIXED:
                raise InvalidRequest("the file's size is not sealed")
            size = os.fstat(descriptor).st_size
            most = self.admission.max_bytes
            if most and self._lent_bytes + size > most:
                raise Overloaded(f"clients share more than {most} bytes (--max-admitted-bytes)")
            self._check_room()
        except OSError:
            os.close(descriptor)
            raise InvalidRequest("the file is not memory of memfd_create") from None
        except ServerError:
            os.close(descriptor)
            raise
        name = f"lent-{secrets.token_hex(16)}"
        self._regions[name] = Region(name, SharedFile(descriptor, 0), size, lent=True)
        self._lent_bytes += size
        return name

    def withdraw(self, name: str) -> None:
        """Remove a region that was lent, after the requests that use it."""
        region = self._regions[name]
        region.leaving = True
        if not region.users:
            self._close(region)

    def unregister(self, name: str, cuda: bool) -> None:
        """Unregister a region, or all of the kind for "".

        One in use goes after its requests. Unknown names are ignored. Raises `Unsupported`.
        """
        self._check_allowed()
        for region in self._of_kind(cuda):
            if name in ("", region.name):
                region.leaving = True
                if not region.users:
                    self._close(region)

    def system_status(self, name: str = "") -> pb.SystemSharedMemoryStatusResponse:
        """The regions of system memory, or one of them; raises `NotFound`."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._listed(name, cuda=False):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def cuda_status(self, name: str = "") -> pb.CudaSharedMemoryStatusResponse:
        """The regions of GPU memory, or one of them; raises `NotFound`."""
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._listed(name, cuda=True):
            status = response.regions[region.name]
            status.name, status.byte_size = region.name, region.byte_size
            status.device_id = region.device_id or 0
        return response

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Unsupported(DISABLED)

    def _of_kind(self, cuda: bool) -> list[Region]:
        found = self._regions.values()
        return [r for r in found if (r.device_id is not None) == cuda and not r.lent]

    def _listed(self, name: str, cuda: bool) -> list[Region]:
        found = [r for r in self._of_kind(cuda) if name in ("", r.name)]
        if name and not found:
            kind = "cuda" if cuda else "system"
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        return found

    def _file_name(self, name: str, key: str) -> str:
        """The file name of a key; raises `InvalidRequest` and `MemoryUnavailable`."""
        file_name = key.lstrip("/")  # as the C library does
        if not file_name:
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' - invalid shm key '{key[:300]}'"
            )
        for prefix in _RESERVED:
            if file_name.startswith(prefix):
                raise InvalidRequest(
                    f"cannot register shared memory region '{name}' with key '{key[:300]}' as the"
                    f" key contains the reserved prefix '{prefix}'"
                )
        encoded = file_name.encode(errors="replace")
        fault = (
            file_name in (".", "..")
            or "/" in file_name
            or "\0" in file_name
            or len(encoded) > _LONGEST
        )
        if fault or not file_name.startswith(self._prefix):
            raise _unable(key)
        return file_name

    async def _register(self, name: str, opened: Callable[[], Region]) -> None:
        if not 0 < len(name.encode(errors="replace")) <= _LONGEST:
            raise InvalidRequest(
                f"a shared memory region's name must have 1 to {_LONGEST} bytes, got {len(name)}"
            )
        if name in self._regions or name in self._opening:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        self._check_room()
        future = run_in_pool(self.threads, opened)
        self._opening.add(name)
        future.add_done_callback(lambda done: self._opened(name, done))
        try:
            # The client may disconnect meanwhile; the region is registered all the same.
            await asyncio.shield(future)
        finally:
            del future  # its error refers to this frame

    def _check_room(self) -> None:
        if len(self._regions) + len(self._opening) >= (most := _most_regions()):
            raise Overloaded(
                f"there are {most} shared memory regions, which is the most: unregister what is"
                " not needed"
            )

    def _opened(self, name: str, done: "asyncio.Future[Region]") -> None:
        self._opening.discard(name)
        if not done.cancelled() and done.exception() is None:
            region = self._regions[name] = done.result()
            log.info(
                "registered shared memory region %r: %d bytes of %s", name, region.byte_size,
                f"GPU {region.device_id}" if region.device_id is not None else repr(region.key),
            )  # fmt: skip

    def _close(self, region: Region) -> None:
        del self._regions[region.name]
        if region.lent:
            self._lent_bytes -= region.byte_size
        else:
            log.info("unregistered shared memory region %r", region.name)
        # On a thread: closing a large file for the last time frees it.
        with suppress(RuntimeError):  # no further thread: the next free one finds it queued
            self.threads.submit(region.close)


def _most_regions() -> int:
    """The maximum of regions, lower with a low limit of open files, which connections need."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_REGIONS if files == resource.RLIM_INFINITY else min(_MOST_REGIONS, files // 4)


def _open_file(name: str, key: str, file_name: str, offset: int, byte_size: int) -> SharedFile:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(_FOLDER + file_name, flags)
    except (OSError, ValueError):
        raise _unable(key) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _unable(key)
        if offset + byte_size > found.st_size:
            raise invalid_args(name, "offset + byte_size lie beyond its end")
    except BaseException:
        os.close(descriptor)
        raise
    return SharedFile(descriptor, offset)


def _unable(key: str) -> ServerError:
    return MemoryUnavailable(f"Unable to open shared memory region: '{key[:300]}'")


def invalid_args(name: str, why: str) -> ServerError:
    """The error that refuses the registration of a region."""
    return InvalidRequest(f"failed to register shared memory region '{name}': invalid args: {why}")


AT_ONCE = 1 << 20  # bytes copied on the event loop, in less than 0.1 ms

_Copy = Callable[[], None]


# Announces so many more, or fewer, requests to the queue that they are about to join.
Expect = Callable[[int], None]


def share(regions: Regions, expect: Expect, submit: Submit) -> Submit:
    """The stage of calls with tensors in shared memory, before `submit`."""

    def stage(call: Call) -> None:
        shared = call.options.shared
        if shared is None:
            submit(call)
        else:
            memory = SharedMemory(shared, regions)
            call.enter(memory, partial(memory.begin, expect, submit))

    return stage


def placeholders(shared: Shared) -> dict[str, Tensor]:
    """The inputs in shared memory, as tensors without data."""
    return {
        name: Tensor(name, given.datatype, np.empty(given.shape, "V0"))
        for name, given in shared.inputs.items()
    }


class SharedMemory(Stage, Owner):
    """The shared memory of one call, and its owner while its inputs are copied.

    Inputs are copied before the call is queued, so that a batch never waits for a region, nor fails
    because of one; outputs are written when they arrive, and the response is passed on without
    their data. Small data is copied on the event loop; large data, and data in GPU memory, on other
    threads, while the call, or its later responses, wait.

    Invariant: regions are in use from `begin` to the end, and while a thread copies.
    """

    def __init__(self, shared: Shared, regions: Regions) -> None:
        self._shared = shared
        self._regions = regions
        self._used: list[Region] = []
        # Destinations of outputs: region, offset, byte_size.
        self._places: dict[str, tuple[Region, int, int]] = {}
        self._nbytes = 0  # charged to admission
        self._copying = False
        self._over = False

    def begin(self, expect: Expect, submit: Submit, call: Call) -> None:
        """Copy the inputs and `submit` the call, at once or later; raises `ServerError`."""
        copies = self._prepare(call)
        if self._at_once(self._nbytes):
            for copy in copies:
                copy()
            submit(call)
            return
        call.owner = self
        self._copy(copies, partial(self._fetched, expect, submit, call))
        expect(1)

    def transform(
        self, call: Call, response: InferResponse, final: bool, done: Done
    ) -> Owner | None:
        """Write outputs to their places; the response is passed on without them."""
        copies, nbytes = self._written(response)
        if not self._at_once(nbytes):
            self._copy(copies, done)
            return self
        for copy in copies:
            copy()
        return None

    def over(self, call: Call) -> None:
        """Release everything, except what a thread is copying."""
        self._over = True
        if not self._copying:
            self._release()

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`: a copying thread goes on."""

    # --- inputs

    def _prepare(self, call: Call) -> list[_Copy]:
        """Take the regions and allocate the copies; raises `ServerError`."""
        shared, regions = self._shared, self._regions
        for name, place in shared.outputs.items():
            self._places[name] = (self._use(place), place.offset, place.byte_size)
        sources = [(self._use(given.place), n, given) for n, given in shared.inputs.items()]
        nbytes = sum(given.place.byte_size for given in shared.inputs.values())
        if call.nbytes + nbytes > regions.max_bytes:
            raise PayloadTooLarge(
                too_large("request and its shared memory", regions.max_bytes, call.nbytes + nbytes)
            )
        regions.admission.grow(nbytes)
        self._nbytes = nbytes
        return [partial(self._read, call, *source) for source in sources]

    def _use(self, place: RegionSlice) -> Region:
        region = self._regions.take(place)
        self._used.append(region)
        return region

    def _read(self, call: Call, region: Region, name: str, given: SharedInput) -> None:
        """Copy an input; may run on another thread."""
        place = given.place
        if given.datatype is Datatype.BYTES:
            raw = np.empty(place.byte_size, np.uint8)
            region.read(raw.data, place.offset)
            tensor = Tensor.from_bytes(
                name, given.datatype, given.shape, raw.data, call.model_name, call.id
            )
        else:
            array: Array = np.empty(given.shape, NUMPY[given.datatype])
            region.read(array.reshape(-1).view(np.uint8).data, place.offset)
            tensor = Tensor(name, given.datatype, array)
        call.inputs[name] = tensor

    def _fetched(self, expect: Expect, submit: Submit, call: Call, error: Exception | None) -> None:
        """Continue once the inputs are copied, or have failed."""
        try:
            if self._over:
                return
            if error is None:
                submit(call)
            else:
                refuse(call, error)
        except Exception as problem:
            refuse(call, problem)
        finally:
            expect(-1)

    # --- outputs

    def _written(self, response: InferResponse) -> tuple[list[_Copy], int]:
        """Remove placed outputs from a response; returns their copies, and the number of bytes.

        Raises `ExecutionFailed` for an output larger than its place.
        """
        copies: list[_Copy] = []
        total = 0
        outputs: list[Tensor] = []
        for tensor in response.outputs:
            place = self._places.get(tensor.name)
            if place is None:
                outputs.append(tensor)
                continue
            region, offset, room = place
            raw = raw_bytes(tensor.array)
            if region.lent and len(raw) > room:  # its client has only guessed its size
                outputs.append(tensor)
                continue
            if len(raw) > room:
                raise ExecutionFailed(
                    f"shared memory size specified with the request for output '{tensor.name}'"
                    f" ({room} bytes) should be at least {len(raw)} bytes to hold the results"
                )
            total += len(raw)
            copies.append(partial(region.write, memoryview(raw), offset))
            outputs.append(elsewhere(tensor.name, tensor.datatype, tensor.array.shape))
        response.outputs = outputs
        return copies, total

    # --- both

    def _at_once(self, nbytes: int) -> bool:
        return nbytes <= AT_ONCE and all(region.device_id is None for region in self._used)

    def _copy(self, copies: Sequence[_Copy], done: Done) -> None:
        """Copy on another thread, then call `done`, with the error if it failed.

        Raises `Unavailable` if no thread can be started.
        """
        future = run_in_pool(self._regions.threads, partial(_run, copies))
        self._copying = True
        future.add_done_callback(partial(self._copied, done))

    def _copied(self, done: Done, future: "asyncio.Future[None]") -> None:
        self._copying = False
        if self._over:
            self._release()
        error = future.exception()
        if error is not None and not isinstance(error, ServerError):
            log.error("bug while copying shared memory", exc_info=error)
            error = ExecutionFailed(INTERNAL_TEXT)
        done(error)

    def _release(self) -> None:
        used, self._used = self._used, []
        for region in used:
            self._regions.release(region)
        nbytes, self._nbytes = self._nbytes, 0
        self._regions.admission.count(-nbytes)


def _run(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        copy()
