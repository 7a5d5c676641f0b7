"""The services of the gRPC door by name, and the procedures that tell about the engine.

A front end hands these on by their paths, and has nothing else of them.
"""

INFERENCE = "inference.GRPCInferenceService"
TRAFFIC = "headrace.v1.TrafficService"
HEALTH = "grpc.health.v1.Health"
_DOCUMENTS = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig",
    "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
    "LogSettings", "TraceSetting", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
)  # fmt: skip
_TRAFFIC = (
    "ModelTraffic", "SetModelTraffic", "ResetModelTraffic", "PromoteModelVersion",
    "RollBackModelVersion",
)  # fmt: skip
# Their paths.
DOCUMENT_PROCEDURES = tuple(f"/{INFERENCE}/{name}" for name in _DOCUMENTS)
TRAFFIC_PROCEDURES = tuple(f"/{TRAFFIC}/{name}" for name in _TRAFFIC)
CHECK = f"/{HEALTH}/Check"
