"""Regions of GPU memory, on a fake of the driver."""

import asyncio

import pytest

from headrace.core.call import RegionSlice
from headrace.core.errors import InvalidRequest
from headrace.engine.admission import Admission
from headrace.engine.shared_memory import Regions
from headrace.placement.local.gpus import CudaDriver, CudaError
from headrace.plugins.cuda_memory import opener


def regions_of(cuda: CudaDriver | None) -> Regions:
    return Regions(Admission(0, 0), 1 << 20, True, "", lambda: opener(lambda: cuda))


class FakeCuda(CudaDriver):
    """One GPU whose memory is a list of buffers, with their numbers as handles."""

    devices = 1
    uuids = ("one",)

    def __init__(self, *sizes: int) -> None:
        self.buffers = [bytearray(size) for size in sizes]
        self.closed: list[int] = []

    def open(self, device: int, handle: bytes, byte_size: int) -> int:
        number = int.from_bytes(handle, "little")
        if number >= len(self.buffers) or byte_size > len(self.buffers[number]):
            raise CudaError("no such memory")
        return number << 32

    def close(self, device: int, address: int) -> None:
        self.closed.append(address >> 32)

    def to_host(self, device: int, address: int, into: memoryview) -> None:
        start = address & 0xFFFFFFFF
        into[:] = self.buffers[address >> 32][start : start + len(into)]

    def to_device(self, device: int, address: int, data: memoryview) -> None:
        start = address & 0xFFFFFFFF
        self.buffers[address >> 32][start : start + len(data)] = data

    def pin(self, byte_size: int) -> int:
        raise CudaError("no such memory")


def handle(number: int) -> bytes:
    return number.to_bytes(64, "little")


def test_cuda_without_a_gpu() -> None:
    regions = regions_of(None)
    with pytest.raises(InvalidRequest) as raised:
        asyncio.run(regions.register_cuda("c", handle(0), 0, 8))
    assert str(raised.value) == (
        "failed to register CUDA shared memory region: 'c', GPUs not supported"
    )
    assert not regions.cuda_status().regions


def test_cuda_with_a_gpu() -> None:
    cuda = FakeCuda(16, 16)
    regions = regions_of(cuda)
    asyncio.run(regions.register_cuda("c", handle(1), 0, 16))
    status = regions.cuda_status("c").regions["c"]
    assert (status.name, status.device_id, status.byte_size) == ("c", 0, 16)
    assert not regions.system_status().regions
    region = regions.take(RegionSlice("c", 4, 8))
    region.write(memoryview(b"abcd"), 4)
    assert cuda.buffers[1][4:8] == b"abcd"
    data = bytearray(2)
    region.read(memoryview(data), 5)
    assert data == b"bc"
    regions.unregister("c", cuda=True)
    regions.release(region)
    regions.threads.shutdown()  # after pending closes
    assert cuda.closed == [1]


@pytest.mark.parametrize(
    ("given", "device", "size"),
    [
        (handle(7), 0, 8), (handle(0), 1, 8), (handle(0), -1, 8), (handle(0), 0, 17),
        (handle(0), 0, 0), (b"short", 0, 8), (handle(0), 2**63, 8), (handle(0), 0, 2**64),
    ],
)  # fmt: skip
def test_invalid_cuda_registrations(given: bytes, device: int, size: int) -> None:
    with pytest.raises(InvalidRequest, match="failed to register shared memory region 'c': inval"):
        asyncio.run(regions_of(FakeCuda(16)).register_cuda("c", given, device, size))
