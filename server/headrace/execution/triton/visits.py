"""Connections to servers for threads that may wait, also while their models are served."""

from contextlib import AbstractContextManager

from headrace.execution.remote.connection import Visit
from headrace.execution.remote.dialects import Dialects
from headrace.execution.remote.options import Endpoint, RemoteOptions


class Visits:
    """Those for one model, called `model` here; for several threads at a time."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        self.options = options
        self.model = model

    def to(self, endpoint: Endpoint) -> AbstractContextManager[Visit]:
        """A connection for as long as `with` lasts."""
        # A dialect is for one thread at a time, and that of the pool is the event loop's.
        return Dialects(self.options, self.model).of(endpoint).visit(endpoint)
