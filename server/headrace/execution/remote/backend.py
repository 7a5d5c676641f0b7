"""Models that another server runs, by the V2 protocol: Triton, or whatever speaks it.

What has to do with other servers is imported when the first model is loaded, on its loading thread.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.core.model_spec import LoadSpec
from headrace.execution.triton.options import TRITON_PARAMETERS
from headrace.execution.triton.uses import Uses

if TYPE_CHECKING:
    from headrace.execution.remote.model import RemoteModel
    from headrace.execution.triton.servers import TritonServers

Tritons = Callable[[], "TritonServers"]


_LARGEST_MESSAGE = (1 << 31) - 1  # of protobuf, in bytes


class RemoteBackend:
    """Asks the servers that a model's configuration names, or those that this one starts."""

    platform = "triton"
    default_filename = ""
    filenames: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    isolated = False

    def __init__(self, tritons: Tritons | None = None, largest_response: int = 0) -> None:
        """`tritons` gives those that this server starts, None if it starts none.

        Answers may have `largest_response` bytes where a model does not say otherwise; 0 for the
        usual.
        """
        self._tritons = tritons
        largest = min(largest_response, _LARGEST_MESSAGE)
        self._defaults = {"max_response_bytes": str(largest)} if largest else {}
        self._uses = Uses()

    def reads_parameter(self, name: str) -> bool:
        """Whether it is one of those that the documentation names."""
        from headrace.execution.remote.options import REMOTE_PARAMETERS

        return name in REMOTE_PARAMETERS or name in TRITON_PARAMETERS

    @staticmethod
    def prepare() -> None:
        """Import what `load` needs."""
        from headrace.execution.remote import model  # noqa: F401

    def load(self, spec: LoadSpec) -> "RemoteModel":
        """Ask a server about the model; raises `LoadFailed` or `InvalidOption`."""
        from headrace.execution.remote.model import load_remote

        given = replace(spec, parameters={**self._defaults, **spec.parameters})
        return load_remote(given, self._tritons, self._uses)
