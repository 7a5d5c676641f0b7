"""Which category of the protocol's operations each procedure belongs to.

A procedure that is not here is not served at all, so that none can be forgotten.
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.core.errors import Restricted
from headrace.observability.statistics import INFER, OTHER
from headrace.transports.grpc.call import Handlers
from headrace.wire.header_rules import Category, Key, named

_C = Category
_INFERENCE_SERVICE = {
    "ServerLive": _C.HEALTH,
    "ServerReady": _C.HEALTH,
    "ModelReady": _C.HEALTH,
    "ServerMetadata": _C.METADATA,
    "ModelMetadata": _C.METADATA,
    "ModelInfer": _C.INFERENCE,
    "ModelStreamInfer": _C.INFERENCE,
    "ModelConfig": _C.MODEL_CONFIG,
    "ModelStatistics": _C.STATISTICS,
    "RepositoryIndex": _C.MODEL_REPOSITORY,
    "RepositoryModelLoad": _C.MODEL_REPOSITORY,
    "RepositoryModelUnload": _C.MODEL_REPOSITORY,
    "SystemSharedMemoryStatus": _C.SHARED_MEMORY,
    "SystemSharedMemoryRegister": _C.SHARED_MEMORY,
    "SystemSharedMemoryUnregister": _C.SHARED_MEMORY,
    "CudaSharedMemoryStatus": _C.SHARED_MEMORY,
    "CudaSharedMemoryRegister": _C.SHARED_MEMORY,
    "CudaSharedMemoryUnregister": _C.SHARED_MEMORY,
    "TraceSetting": _C.TRACE,
    "LogSettings": _C.LOGGING,
}
_TRAFFIC_SERVICE = (
    "ModelTraffic", "SetModelTraffic", "ResetModelTraffic", "PromoteModelVersion",
    "RollBackModelVersion",
)  # fmt: skip
# None is open to all: what describes the protocol, and says nothing of models.
CATEGORIES: dict[str, Category | None] = {
    **{f"/inference.GRPCInferenceService/{n}": c for n, c in _INFERENCE_SERVICE.items()},
    **{f"/headrace.v1.TrafficService/{n}": _C.MODEL_REPOSITORY for n in _TRAFFIC_SERVICE},
    "/grpc.health.v1.Health/Check": _C.HEALTH,
    "/grpc.health.v1.Health/Watch": _C.HEALTH,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
}


_OPERATIONS = {
    "/inference.GRPCInferenceService/ModelInfer": INFER,
    "/inference.GRPCInferenceService/ModelStreamInfer": "stream_infer",
}


def operation_of(path: str) -> str:
    """What calls of a procedure are counted as."""
    return _OPERATIONS.get(path) or CATEGORIES.get(path) or OTHER


def restricted(handlers: Handlers, keys: Mapping[Category, Key]) -> Handlers:
    """Handlers that ask for the keys of their categories.

    Raises `LookupError` for a procedure without a category.
    """
    by_path: dict[str, Key] = {}
    for path in handlers.paths():
        category = named(CATEGORIES, path, "transports/grpc/categories.py")
        if category is not None and category in keys:
            by_path[path] = keys[category]
    return replace(handlers, keys=by_path)


def without_key(key: Key, metadata: Mapping[str, str]) -> Restricted | None:
    """The error of a call without the key, None for one with it."""
    given = metadata.get(key.header)
    if given is not None and key.opens([given.encode("latin-1", "replace")]):
        return None
    return Restricted(f"This protocol is restricted, expecting header '{key.header}'")
