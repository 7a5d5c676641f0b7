"""Shared-memory regions: registration, use and release, on real shared memory."""

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.call import RegionSlice
from headrace.core.errors import (
    AlreadyExists,
    ExecutionFailed,
    InvalidRequest,
    MemoryUnavailable,
    NotFound,
    Overloaded,
    ServerError,
    Unavailable,
    Unsupported,
)
from headrace.engine.admission import Admission
from headrace.engine.shared_memory import Regions
from tests.placement.threads import no_threads
from tests.support.shared_memory import SharedFile

SIZE = 4096


def regions_of(prefix: str = "", allowed: bool = True) -> Regions:
    return Regions(Admission(0, 0), 1 << 20, allowed, prefix)


def register(regions: Regions, name: str, key: str, offset: int = 0, byte_size: int = SIZE) -> None:
    asyncio.run(regions.register_system(name, key, offset, byte_size))


@pytest.fixture
def shared() -> Iterator[SharedFile]:
    with SharedFile(SIZE) as file:
        yield file


def open_files(path: Path) -> int:
    """Number of this process's descriptors of a file."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(link).removesuffix(" (deleted)") == str(path)
    return count


def closed(regions: Regions) -> None:
    """Wait for pending closes."""
    regions.threads.shutdown()


def test_a_region(shared: SharedFile) -> None:
    regions = regions_of()
    shared.put(b"0123456789")
    register(regions, "r", shared.key, 2, 6)
    status = regions.system_status("r").regions["r"]
    assert (status.name, status.key, status.offset, status.byte_size) == ("r", shared.key, 2, 6)
    assert regions.system_status() == regions.system_status("r")
    region = regions.take(RegionSlice("r", 1, 5))
    data = bytearray(5)
    region.read(memoryview(data), 1)
    assert data == b"34567"
    region.write(memoryview(b"ab"), 4)
    assert shared.get(10) == b"012345ab89"
    # A key with and without its slash.
    regions = regions_of()
    register(regions, "a", shared.key)
    register(regions, "b", shared.key[1:])
    assert {r.key for r in regions.system_status().regions.values()} == {
        shared.key, shared.key[1:]
    }  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        ".", "..", "/.", "/..", "//etc/passwd", "../../etc/passwd", "/../etc/passwd",
        "a/b", "a\0b", "/" + "k" * 256, "/" + "\u00fc" * 128, "/headrace-test-nothing", "\ud800",
    ],
)  # fmt: skip
def test_invalid_keys(key: str) -> None:
    regions = regions_of()
    with pytest.raises(MemoryUnavailable) as raised:
        register(regions, "r", key)
    assert str(raised.value).startswith(f"Unable to open shared memory region: '{key[:300]}'")
    assert not regions.system_status().regions


@pytest.mark.parametrize("key", ["", "/", "///"])
def test_keys_without_a_name(key: str) -> None:
    text = f"cannot register shared memory region 'r' - invalid shm key '{key}'"
    with pytest.raises(InvalidRequest, match=f"^{text}$"):
        register(regions_of(), "r", key)


@pytest.mark.parametrize(("key", "prefix"), [
    ("triton_python_backend_shm_region_", "triton_python_backend_shm_region_"),
    ("/triton_python_backend_shm_region_1", "triton_python_backend_shm_region_"),
    ("///triton_python_backend_shm_region_1", "triton_python_backend_shm_region_"),
    ("/sem.mutex", "sem."),
])  # fmt: skip
def test_reserved_keys(key: str, prefix: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        register(regions_of(), "r", key)
    assert str(raised.value) == (
        f"cannot register shared memory region 'r' with key '{key}' as the key contains the"
        f" reserved prefix '{prefix}'"
    )


def test_only_keys_with_the_prefix() -> None:
    regions = regions_of(prefix="ours-")
    with SharedFile(SIZE, "ours-") as ours, SharedFile(SIZE, "theirs-") as theirs:
        register(regions, "a", ours.key)
        with pytest.raises(MemoryUnavailable, match="Unable to open"):
            register(regions, "b", theirs.key)


@pytest.mark.parametrize(
    "make",
    [
        lambda path, _: path.mkdir(),
        lambda path, _: os.mkfifo(path),
        lambda path, target: path.symlink_to(target),
        lambda path, _: path.symlink_to("/etc/passwd"),
        lambda path, _: path.touch(0o400),  # root may write it, and finds it too short
    ],
    ids=["directory", "fifo", "link", "link out", "read-only"],
)
def test_files_that_are_not_shared_memory(
    shared: SharedFile, make: Callable[[Path, Path], None]
) -> None:
    path = shared.path.with_suffix(".other")
    make(path, shared.path)
    try:
        with pytest.raises((InvalidRequest, MemoryUnavailable)):
            register(regions_of(), "r", path.name)
        assert open_files(path) == 0
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        (0, 0), (0, -1), (-1, 8), (0, SIZE + 1), (1, SIZE), (SIZE, 1), (2**63, 1), (0, 2**63),
        (2**63 - 1, 2**63 - 1), (2**64 - 1, 2), (1, 2**64 - 1), (-(2**63), 8),
    ],
)  # fmt: skip
def test_sizes_beyond_the_file(shared: SharedFile, offset: int, byte_size: int) -> None:
    with pytest.raises(InvalidRequest, match="failed to register shared memory region 'r': inval"):
        register(regions_of(), "r", shared.key, offset, byte_size)
    assert open_files(shared.path) == 1  # our own


def test_names(shared: SharedFile) -> None:
    regions = regions_of()
    register(regions, "r", shared.key)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        register(regions, "r", shared.key)
    for name in ("", "n" * 256):
        with pytest.raises(InvalidRequest, match="name must have 1 to 255 bytes"):
            register(regions, name, shared.key)
    regions = regions_of()

    async def both() -> list[BaseException | None]:
        coroutines = [regions.register_system("r", shared.key, 0, SIZE) for _ in range(2)]
        return await asyncio.gather(*coroutines, return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, AlreadyExists)


def test_regions_leave_descriptors_for_connections(shared: SharedFile) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    regions = regions_of()
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        for number in range(100):
            register(regions, f"r{number}", shared.key)
        with pytest.raises(Overloaded, match="there are 100 shared memory regions"):
            register(regions, "one more", shared.key)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    register(regions, "one more", shared.key)
    regions.unregister("", cuda=False)


def test_the_number_of_regions_is_bounded(shared: SharedFile) -> None:
    regions = regions_of()

    async def many() -> None:
        for number in range(1024):
            await regions.register_system(str(number), shared.key, 0, SIZE)

    asyncio.run(many())
    with pytest.raises(Overloaded, match="1024 shared memory regions"):
        register(regions, "more", shared.key)
    regions.unregister("", cuda=False)
    closed(regions)
    assert open_files(shared.path) == 1


@pytest.mark.parametrize(
    ("place", "error", "part"),
    [
        (RegionSlice("x", 0, 1), NotFound, "Unable to find shared memory region: 'x'"),
        (RegionSlice("r", 100, 0), InvalidRequest, "Invalid offset for shared memory region"),
        (RegionSlice("r", 2**63, 1), InvalidRequest, "Invalid offset for shared memory region"),
        (RegionSlice("r", 99, 2), InvalidRequest, "Invalid offset \\+ byte size for shared memory"),
        (
            RegionSlice("r", 1, 2**63),
            InvalidRequest,
            "Invalid offset \\+ byte size for shared memory",
        ),
    ],
)
def test_slices_outside_of_a_region(
    shared: SharedFile, place: RegionSlice, error: type[ServerError], part: str
) -> None:
    regions = regions_of()
    register(regions, "r", shared.key, 0, 100)
    with pytest.raises(error, match=part):
        regions.take(place)
    regions.take(RegionSlice("r", 99, 1))
    regions.take(RegionSlice("r", 0, 100))


def test_unregister(shared: SharedFile) -> None:
    regions = regions_of()
    for name in "abc":
        register(regions, name, shared.key)
    regions.unregister("a", cuda=False)
    regions.unregister("a", cuda=False)  # unregistered
    regions.unregister("b", cuda=True)  # of another kind
    assert set(regions.system_status().regions) == {"b", "c"}
    regions.unregister("", cuda=True)
    assert set(regions.system_status().regions) == {"b", "c"}
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'a'"):
        regions.system_status("a")
    regions.unregister("", cuda=False)
    assert not regions.system_status().regions
    closed(regions)
    assert open_files(shared.path) == 1


def test_regions_for_which_there_is_no_thread(shared: SharedFile) -> None:
    """A refused name is free again, and a file is closed by the next free thread."""
    regions = regions_of()
    with no_threads(), pytest.raises(Unavailable, match="the server cannot do this now"):
        register(regions, "r", shared.key)
    assert not regions.system_status().regions
    register(regions, "r", shared.key)
    go = Event()
    regions.threads.submit(go.wait, 30)
    with no_threads():
        regions.unregister("r", cuda=False)
    assert not regions.system_status().regions
    go.set()
    closed(regions)
    assert open_files(shared.path) == 1


def test_a_region_in_use_stays_registered_until_released(shared: SharedFile) -> None:
    """Like Triton: its status is listed, its name is taken, and requests may use it."""
    regions = regions_of()
    register(regions, "r", shared.key)
    shared.put(b"still here")
    region = regions.take(RegionSlice("r", 0, SIZE))
    regions.unregister("r", cuda=False)
    regions.unregister("", cuda=False)
    assert set(regions.system_status().regions) == {"r"}
    with pytest.raises(AlreadyExists):
        register(regions, "r", shared.key)
    assert regions.take(RegionSlice("r", 0, 1)) is region
    data = bytearray(10)
    region.read(memoryview(data), 0)
    assert data == b"still here"
    regions.release(region)
    assert set(regions.system_status().regions) == {"r"}
    regions.release(region)
    assert not regions.system_status().regions
    register(regions, "r", shared.key)  # the name is free
    closed(regions)
    assert open_files(shared.path) == 2  # our own, and that of the second


def test_a_truncated_file(shared: SharedFile) -> None:
    regions = regions_of()
    register(regions, "r", shared.key)
    region = regions.take(RegionSlice("r", 0, SIZE))
    shared.resize(100)
    with pytest.raises(InvalidRequest, match="'r' does not have the bytes any more"):
        region.read(memoryview(bytearray(200)), 0)
    with pytest.raises(ExecutionFailed, match="'r' did not take an output"):
        region.write(memoryview(bytes(200)), 0)
    assert shared.path.stat().st_size == 100
    region.write(memoryview(b"fits"), 96)
    assert shared.get(4, 96) == b"fits"


def test_shared_memory_is_off_by_default(shared: SharedFile) -> None:
    regions = regions_of(allowed=False)
    assert not regions.system_status().regions
    assert not regions.cuda_status().regions
    with pytest.raises(NotFound):
        regions.system_status("r")
    attempts: list[Callable[[], object]] = [
        lambda: register(regions, "r", shared.key),
        lambda: asyncio.run(regions.register_cuda("r", bytes(64), 0, 8)),
        lambda: regions.unregister("", cuda=False),
    ]
    for attempt in attempts:
        with pytest.raises(Unsupported, match="Start the server with '--allow-client-shm=true'"):
            attempt()
    with pytest.raises(NotFound, match=r"Unable to find shared memory region: 'r'\. .*=true'"):
        regions.take(RegionSlice("r", 0, 1))


# --- any registration

names = st.text(max_size=8) | st.sampled_from(["r", "", "n" * 300])
numbers = st.one_of(
    st.integers(-2, SIZE + 2),
    st.integers(),
    st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**40]),
)
keys = st.one_of(
    st.text(st.characters(categories=None), max_size=300),
    st.lists(st.sampled_from(["/", ".", "..", "a", "\0", "dev", "shm", "etc", "passwd"])).map(
        "".join
    ),
    st.just("<the file>"),
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(names, keys, numbers, numbers)
def test_any_registration(
    shared: SharedFile, name: str, key: str, offset: int, byte_size: int
) -> None:
    regions = regions_of()
    if key == "<the file>":
        key = shared.key
    try:
        register(regions, name, key, offset, byte_size)
    except ServerError:
        assert not regions.system_status().regions
        return
    assert key.lstrip("/") == shared.path.name
    assert 0 <= offset < offset + byte_size <= SIZE
    regions.unregister(name, cuda=False)
    closed(regions)


def test_gpu_memory_without_a_plugin_for_it() -> None:
    with pytest.raises(InvalidRequest, match="shared memory region: 'c', not supported"):
        asyncio.run(regions_of().register_cuda("c", bytes(64), 0, 8))
