"""The procedures of system and CUDA shared memory."""

from headrace.engine.shared_memory import Regions
from headrace.transports.grpc.call import Unary
from headrace.transports.grpc.unary import answers, awaits
from headrace.wire.pb import grpc_service_pb2 as pb


def shared_memory_handlers(regions: Regions) -> dict[str, Unary]:
    """The procedures by name."""

    async def register_system(
        asked: pb.SystemSharedMemoryRegisterRequest,
    ) -> pb.SystemSharedMemoryRegisterResponse:
        await regions.register_system(asked.name, asked.key, asked.offset, asked.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def register_cuda(
        asked: pb.CudaSharedMemoryRegisterRequest,
    ) -> pb.CudaSharedMemoryRegisterResponse:
        await regions.register_cuda(asked.name, asked.raw_handle, asked.device_id, asked.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def unregister_system(
        asked: pb.SystemSharedMemoryUnregisterRequest,
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        regions.unregister(asked.name, cuda=False)
        return pb.SystemSharedMemoryUnregisterResponse()

    def unregister_cuda(
        asked: pb.CudaSharedMemoryUnregisterRequest,
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        regions.unregister(asked.name, cuda=True)
        return pb.CudaSharedMemoryUnregisterResponse()

    return {
        "SystemSharedMemoryStatus": answers(
            pb.SystemSharedMemoryStatusRequest, lambda m: regions.system_status(m.name)
        ),
        "SystemSharedMemoryRegister": awaits(pb.SystemSharedMemoryRegisterRequest, register_system),
        "SystemSharedMemoryUnregister": answers(
            pb.SystemSharedMemoryUnregisterRequest, unregister_system
        ),
        "CudaSharedMemoryStatus": answers(
            pb.CudaSharedMemoryStatusRequest, lambda m: regions.cuda_status(m.name)
        ),
        "CudaSharedMemoryRegister": awaits(pb.CudaSharedMemoryRegisterRequest, register_cuda),
        "CudaSharedMemoryUnregister": answers(
            pb.CudaSharedMemoryUnregisterRequest, unregister_cuda
        ),
    }
