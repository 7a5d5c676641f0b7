"""Memory that clients lend: which files are taken, for how long, and who sees them."""

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.core.call import RegionSlice
from headrace.core.errors import NotFound
from headrace.doors.listeners import UnixSocket
from headrace.doors.memory import MemoryDoor
from headrace.engine.admission import Admission
from headrace.engine.shared_memory import Regions
from headrace.ipc.memory import new_file
from tests.doors.fakes import until

SIZE = 1 << 20


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[MemoryDoor, Regions]]:
    """A door that takes 4 MiB."""
    regions = Regions(Admission(100, 4 * SIZE), SIZE, allowed=True)
    door = MemoryDoor(UnixSocket(f"{folder}/a", 0o600), regions)
    yield door, regions
    door.close()


async def lend(door: MemoryDoor, *files: int) -> tuple[socket.socket, str]:
    """A connection that has sent these files, and its answer."""
    loop = asyncio.get_running_loop()
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    await loop.sock_connect(client, door.unix.path)
    socket.send_fds(client, [b"m"], files)
    answer = await asyncio.wait_for(loop.sock_recv(client, 1000), 60)
    for file in files:
        os.close(file)
    return client, answer.decode()


async def test_a_region_lasts_as_long_as_its_connection(tmp_path: Path) -> None:
    async with opened(tmp_path) as (door, regions):
        file = new_file(SIZE)
        os.pwrite(file, b"abcd", 100)
        client, answer = await lend(door, file)
        said, _, name = answer.partition(" ")
        assert said == "ok"
        region = regions.take(RegionSlice(name, 100, 4))
        into = bytearray(4)
        region.read(memoryview(into), 100)
        assert into == b"abcd"
        client.close()
        await until(lambda: region.leaving)
        region.read(memoryview(into), 100)  # in use, as by a request
        regions.release(region)
        with pytest.raises(NotFound):
            regions.take(RegionSlice(name, 100, 4))


async def test_other_clients_neither_see_nor_remove_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (door, regions):
        client, answer = await lend(door, new_file(SIZE))
        assert not regions.system_status().regions
        regions.unregister("", cuda=False)
        regions.unregister(answer.split()[1], cuda=False)
        regions.release(regions.take(RegionSlice(answer.split()[1], 0, 4)))
        client.close()


async def test_files_that_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as (door, _):
        unsealed = os.memfd_create("a", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, SIZE)
        ordinary = os.open(tempfile.mkstemp(dir=tmp_path)[1], os.O_RDWR)
        for files, problem in (
            ([unsealed], "no the file's size is not sealed"),
            ([ordinary], "no the file is not memory of memfd_create"),
            ([], "no expected one file for a connection, got 0"),
            ([new_file(SIZE), new_file(SIZE)], "no expected one file for a connection, got 2"),
            ([new_file(8 * SIZE)], f"no clients share more than {4 * SIZE} bytes"),
        ):
            client, answer = await lend(door, *files)
            assert answer.startswith(problem)
            client.close()


async def test_the_bytes_of_all_files_are_limited(tmp_path: Path) -> None:
    async with opened(tmp_path) as (door, _):
        lent = [await lend(door, new_file(SIZE)) for _ in range(5)]
        assert [answer[:2] for _, answer in lent] == ["ok"] * 4 + ["no"]
        for client, _ in lent:
            client.close()
        client, answer = await lend(door, new_file(SIZE))
        assert answer.startswith("ok")
        client.close()


async def test_a_closed_door(tmp_path: Path) -> None:
    async with opened(tmp_path) as (door, regions):
        client, answer = await lend(door, new_file(SIZE))
        door.close()
        assert os.listdir(tmp_path) == []
        with pytest.raises(NotFound):
            regions.take(RegionSlice(answer.split()[1], 0, 4))
        assert client.recv(1) == b""
        client.close()
