"""Shared memory that clients have registered: which regions there are, and who uses them.

A region of system shared memory is an open file. Its bytes are read and written through the file,
never through a mapping: a client that makes its file shorter can kill a process that has it mapped
(SIGBUS), and one that changes bytes while they are looked at can have them pass a check and be
others afterwards. What is read here is a copy, and what is not there any more is an error
(docs/adr/0019-shared-memory.md).

A region that is unregistered while requests use it stays until they have ended, as in Triton: its
status is told, its name is taken, and requests may still name it.

Owned by the event-loop thread, but for `Region.read` and `Region.write`, which may be called on any
other. Invariant: a region is closed once, when it was unregistered and is not in use.
"""

import asyncio
import logging
import os
import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.backends.gpus import CudaDriver, CudaError
from headrace.core.call import Stretch
from headrace.core.errors import (
    AlreadyExists,
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    Unsupported,
)
from headrace.engine.admission import Admission
from headrace.engine.region_memory import CudaMemory, Memory, SharedFile
from headrace.wire.pb import grpc_service_pb2 as pb

log = logging.getLogger(__name__)

DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
_FOLDER = "/dev/shm/"
# What is there belongs to servers themselves: Triton's Python backend, named semaphores, OpenMP.
_RESERVED = ("triton_python_backend_shm_region_", "sem.", "__KMP_REGISTERED_LIB_")
_LONGEST = 255  # bytes of a key, which is a file's name, and of a region's name
_MOST_REGIONS = 1024  # each has a file open
_MOST = 2**63 - 1
_HANDLE_SIZE = 64  # bytes of a cudaIpcMemHandle_t
_THREADS = 4


class Region:
    """A registered region. `key` and `offset` are those of system memory, `device_id` of a GPU."""

    __slots__ = ("byte_size", "device_id", "key", "leaving", "memory", "name", "offset", "users")

    def __init__(
        self,
        name: str,
        memory: Memory,
        byte_size: int,
        key: str = "",
        offset: int = 0,
        device_id: int | None = None,
    ) -> None:
        self.name = name
        self.memory = memory
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.device_id = device_id
        self.leaving = False  # unregistered while it is in use
        self.users = 0

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into`; blocks. Raises `InvalidRequest` where the region is not so long any more."""
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
        """Write `data`; blocks. Raises `ExecutionFailed` where the region does not take it."""
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
        """Let go of its memory; blocks."""
        try:
            self.memory.close()
        except OSError as error:
            log.error("cannot close shared memory region %r: %s", self.name, error)


class Regions:
    """All regions by their names, which are one name space for both kinds.

    What requests have copied out of regions counts with `admission`, and is `max_bytes` for one
    request at most.
    """

    def __init__(
        self,
        admission: Admission,
        max_bytes: int,
        allowed: bool = False,
        prefix: str = "",
        cuda: Callable[[], CudaDriver | None] = lambda: None,
    ) -> None:
        """With `prefix`, only keys that begin so are taken."""
        self.admission = admission
        self.max_bytes = max_bytes
        self._allowed = allowed
        self._prefix = prefix
        self._find_cuda = cuda
        self._cuda: CudaDriver | None = None
        self._looked = False  # for GPUs, which takes time
        self._regions: dict[str, Region] = {}
        self._opening: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def threads(self) -> ThreadPoolExecutor:
        """For what blocks."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "shared-memory")
        return self._pool

    # --- requests

    def take(self, place: Stretch) -> Region:
        """The region of a stretch, in use until it is given back with `release`.

        Raises `NotFound`, and `InvalidRequest` for a stretch that is not within it.
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
        """Give a region back."""
        region.users -= 1
        if region.leaving and not region.users:
            self._close(region)

    # --- control

    async def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open `byte_size` bytes of the POSIX shared memory object `key`, from `offset` on.

        Raises `ServerError`.
        """
        self._check_allowed()
        file_name = self._file_name(name, key)
        if not (0 <= offset <= _MOST and 0 < byte_size <= _MOST - offset):
            raise _invalid_args(name, "offset must not be negative, byte_size not less than 1")

        def opened() -> Region:
            memory = _open_file(name, key, file_name, offset, byte_size)
            return Region(name, memory, byte_size, key, offset)

        await self._register(name, opened)

    async def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Open memory of a GPU by its `cudaIpcMemHandle_t`; raises `ServerError`."""
        self._check_allowed()
        if not (0 < byte_size <= _MOST and 0 <= device_id <= _MOST):
            raise _invalid_args(name, "device_id must not be negative, byte_size not less than 1")

        def opened() -> Region:
            if not self._looked:
                self._cuda = self._find_cuda()
                self._looked = True
            cuda = self._cuda
            if cuda is None:
                raise InvalidRequest(
                    f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
                )
            if len(handle) != _HANDLE_SIZE or device_id >= cuda.devices:
                raise _invalid_args(name, "it has no handle of 64 bytes, or there is no such GPU")
            try:
                address = cuda.open(device_id, handle, byte_size)
            except CudaError as error:
                log.error("cannot open CUDA shared memory region %r: %s", name, error)
                raise _invalid_args(name, "the handle cannot be opened, or has less") from None
            memory = CudaMemory(cuda, device_id, address)
            return Region(name, memory, byte_size, device_id=device_id)

        await self._register(name, opened)

    def unregister(self, name: str, cuda: bool) -> None:
        """Forget a region, or all of the kind for "".

        One that requests use goes after them. There need not be one. Raises `Unsupported`.
        """
        self._check_allowed()
        for region in self._of_kind(cuda):
            if name in ("", region.name):
                region.leaving = True
                if not region.users:
                    self._close(region)

    def system_status(self, name: str = "") -> pb.SystemSharedMemoryStatusResponse:
        """The regions of system memory, or one; raises `NotFound`."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._listed(name, cuda=False):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def cuda_status(self, name: str = "") -> pb.CudaSharedMemoryStatusResponse:
        """The regions in memory of GPUs, or one; raises `NotFound`."""
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
        return [r for r in self._regions.values() if (r.device_id is not None) == cuda]

    def _listed(self, name: str, cuda: bool) -> list[Region]:
        found = [r for r in self._of_kind(cuda) if name in ("", r.name)]
        if name and not found:
            kind = "cuda" if cuda else "system"
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        return found

    def _file_name(self, name: str, key: str) -> str:
        """The name of a key's file; raises `InvalidRequest`."""
        file_name = key.removeprefix("/")
        if file_name.startswith(_RESERVED):
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' with key '{key}':"
                " keys that begin so are reserved"
            )
        encoded = file_name.encode(errors="replace")
        fault = (
            file_name in ("", ".", "..")
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
        if len(self._regions) + len(self._opening) >= (most := _most_regions()):
            raise Overloaded(
                f"there are {most} shared memory regions, which is the most: unregister what is"
                " not needed"
            )
        self._opening.add(name)
        future = asyncio.get_running_loop().run_in_executor(self.threads, opened)
        future.add_done_callback(lambda done: self._opened(name, done))
        # Whoever asked may go away meanwhile; what is opened is registered all the same.
        await asyncio.shield(future)

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
        log.info("unregistered shared memory region %r", region.name)
        # On a thread: the last one to close a large file frees it.
        self.threads.submit(region.close)


def _most_regions() -> int:
    """Fewer where the process may have few files open: most of them are for connections."""
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
            raise _invalid_args(name, "offset + byte_size lie beyond its end")
    except BaseException:
        os.close(descriptor)
        raise
    return SharedFile(descriptor, offset)


def _unable(key: str) -> ServerError:
    return InvalidRequest(f"Unable to open shared memory region: '{key[:300]}'")


def _invalid_args(name: str, why: str) -> ServerError:
    return InvalidRequest(f"failed to register shared memory region '{name}': invalid args: {why}")
