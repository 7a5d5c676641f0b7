"""A model in memory, and where that is, told without importing what loads models there.

A server imports what runs models in workers, in itself or on other servers when the first of them
is loaded. Each of these classes has one that is derived from it.
"""

from typing import TYPE_CHECKING, TypeGuard

from headrace.backends.backend import LoadedModel

if TYPE_CHECKING:
    from headrace.execution.in_process import LoadedInProcess
    from headrace.execution.loaded_worker import LoadedWorker
    from headrace.execution.remote.model import RemoteModel


class InWorker(LoadedModel):
    """A model in a worker process: `LoadedWorker`."""


class InServer(LoadedModel):
    """A Python model in the server's own process: `LoadedInProcess`."""


class Elsewhere(LoadedModel):
    """A model that other servers run: `RemoteModel`."""


def in_worker(model: LoadedModel) -> "TypeGuard[LoadedWorker]":
    """Whether it is in a worker process."""
    return isinstance(model, InWorker)


def in_server(model: LoadedModel) -> "TypeGuard[LoadedInProcess]":
    """Whether it is a Python model in the server's own process."""
    return isinstance(model, InServer)


def is_elsewhere(model: LoadedModel) -> "TypeGuard[RemoteModel]":
    """Whether other servers run it."""
    return isinstance(model, Elsewhere)
