"""The server that a worker belongs to, as the functions of Triton's Python API reach it.

That API is a module, so there has to be one such thing for a process: this is the only place that
keeps it.
"""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from headrace.workers.triton_tensors import TritonModelException


class Server(Protocol):
    """What a model may ask of its server, from any thread."""

    def exec(self, request: Any, decoupled: bool) -> Any:
        """Have another model run; see `InferenceRequest.exec`."""

    def async_exec(self, request: Any, decoupled: bool) -> Awaitable[Any]:
        """See `InferenceRequest.async_exec`."""

    def control(self, document: Mapping[str, Any]) -> Any:
        """Have something else done, and wait for what comes of it."""

    def register(self, document: Mapping[str, Any]) -> None:
        """Make a family of metrics; raises `TritonModelException` if it contradicts another."""

    def tell(self, document: Mapping[str, Any]) -> None:
        """Tell of a change of a metric, without waiting."""


class _Connection:
    server: Server | None = None


def connect(server: Server | None) -> None:
    """Be connected to `server` from now on; not for models."""
    _Connection.server = server


def connected() -> Server:
    """The server; raises `TritonModelException` where there is none."""
    if _Connection.server is None:
        raise TritonModelException("this is only possible inside a server's worker")
    return _Connection.server
