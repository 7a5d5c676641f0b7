"""The backend of upstream models, over the V2 protocol: Triton, or any other server.

Modules for upstreams are imported when the first model is loaded, on its loading thread.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.plugins import OptionalPart
from headrace.placement.backend import Backend, BackendContext
from headrace.placement.upstream.triton_options import (
    TRITON_PARAMETERS,
    LoadCounts,
    TritonOptions,
    is_managed,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from headrace.placement.upstream.model import RemoteModel
    from headrace.placement.upstream.reconciler import OwnServers

MakeServers = Callable[[TritonOptions], "OwnServers"]
TRITON_SERVERS: OptionalPart[MakeServers] = OptionalPart("triton_servers")
_LARGEST_MESSAGE = (1 << 31) - 1  # protobuf's maximum, in bytes


class RemoteBackend(Backend):
    """Runs models on the servers named in their configuration, or on managed Tritons."""

    platform = "triton"
    places_instances = False
    decoupled = True

    def __init__(self, tritons: TritonOptions | None = None, largest_response: int = 0) -> None:
        """`tritons` are the options of managed Tritons, None for none.

        Responses may have `largest_response` bytes unless a model sets a limit; 0 for the default.
        """
        self._options = tritons
        self._servers: OwnServers | None = None  # made by their plugin for the first model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()  # models load concurrently
        self._stopped = False
        largest = min(largest_response, _LARGEST_MESSAGE)
        self._defaults = {"max_response_bytes": str(largest)} if largest else {}
        self._uses = LoadCounts()

    @classmethod
    def of(cls, context: BackendContext) -> "RemoteBackend":
        """Make the backend of a server."""
        return cls(context.tritons, context.largest_response)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach managed Tritons to this loop."""
        self._loop = loop

    def stop(self) -> None:
        """Stop loads and unloads on managed Tritons: they end soon."""
        with self._lock:
            self._stopped = True
            if self._servers is not None:
                self._servers.stop()

    async def close(self) -> None:
        """End the managed Tritons, and remove their directory."""
        self.stop()
        if self._servers is not None:
            await self._servers.close()

    @property
    def parameters(self) -> Set[str]:
        """The documented parameters."""
        from headrace.placement.upstream.options import remote_parameters

        return remote_parameters() | TRITON_PARAMETERS

    def reads_everything(self, parameters: Mapping[str, str]) -> bool:
        """True for a managed Triton, which receives the whole configuration."""
        return is_managed(parameters)

    def version_without_files(self, parameters: Mapping[str, str]) -> int:
        """The upstream's version, or 1."""
        from headrace.placement.upstream.options import version_without_directory

        return version_without_directory(parameters)

    def execution_problems(
        self, config: ModelConfig, wanted: str, in_process: bool
    ) -> Iterator[str]:
        if wanted != "auto":
            yield "the model runs on other servers"

    def idle_parameters(self, parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        from headrace.placement.upstream.options import idle_parameters

        return idle_parameters(parameters)

    def prepare(self) -> None:
        """Import the dependencies of `load`."""
        from headrace.placement.upstream import pool  # noqa: F401

    def load(self, spec: LoadSpec) -> "RemoteModel":
        """Query a server for the model; raises `LoadFailed` or `InvalidOption`."""
        from headrace.placement.upstream.model import load_remote
        from headrace.placement.upstream.pool import UpstreamPool

        given = replace(spec, parameters={**self._defaults, **spec.parameters})
        model = load_remote(given, self._tritons, self._uses)
        model.make_pool = UpstreamPool
        return model

    def _tritons(self) -> "OwnServers":
        """The managed servers. On a loading thread; raises `LoadFailed` without any."""
        if self._options is None:
            raise LoadFailed("no Triton is started here")
        with self._lock:
            if self._servers is None:
                servers = TRITON_SERVERS.load()(self._options)
                if self._loop is not None:
                    servers.attach(self._loop)
                if self._stopped:
                    servers.stop()
                self._servers = servers
            return self._servers
