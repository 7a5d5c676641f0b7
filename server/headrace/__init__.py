"""headrace: an inference server for the KServe Predict-V2 (Open Inference) protocol.

Names for writing models (`model`, `Float32`, ...), the clients and `serve` are imported on first
use: importing the package imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import ClientError
    from headrace.client.asynchronous import AsyncClient
    from headrace.client.blocking import Client
    from headrace.plugins.functions.offered import (
        BFloat16,
        Bool,
        Bytes,
        Context,
        Ensemble,
        Float16,
        Float32,
        Float64,
        Frame,
        Int8,
        Int16,
        Int32,
        Int64,
        InvalidInput,
        N,
        ResultError,
        SignatureError,
        Strings,
        Table,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
        ensemble,
        model,
        step,
    )
    from headrace.runner.embedded import AsyncEngine
    from headrace.runner.embedded import EmbeddedEngine as Engine
    from headrace.runner.runner import Runner
    from headrace.serving.server import serve
    from headrace.serving.sources import ServeError

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncEngine",
    "BFloat16",
    "Bool",
    "Bytes",
    "Client",
    "ClientError",
    "Context",
    "Engine",
    "Ensemble",
    "Float16",
    "Float32",
    "Float64",
    "Frame",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "InvalidInput",
    "N",
    "ResultError",
    "Runner",
    "ServeError",
    "SignatureError",
    "Strings",
    "Table",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "__version__",
    "ensemble",
    "model",
    "serve",
    "step",
]  # fmt: skip


_MODULES = {
    "AsyncClient": "headrace.client.asynchronous:AsyncClient",
    "AsyncEngine": "headrace.runner.embedded:AsyncEngine",
    "Client": "headrace.client.blocking:Client",
    "ClientError": "headrace.client:ClientError",
    "Engine": "headrace.runner.embedded:EmbeddedEngine",
    "Runner": "headrace.runner.runner:Runner",
    "ServeError": "headrace.serving.sources:ServeError",
    "serve": "headrace.serving.server:serve",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    module, _, target = _MODULES.get(name, f"headrace.plugins.functions.offered:{name}").partition(
        ":"
    )
    return getattr(import_module(module), target)
