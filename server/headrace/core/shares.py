"""Shares of the server's limits, for a client or a model, and what a model takes of them."""

from dataclasses import dataclass
from sys import maxsize


@dataclass(frozen=True, slots=True)
class Shares:
    """Percent of the server's limits for a connection, all those of an address, and a model.

    The first two may have 64 requests and 64 MiB in any case, a model 64 requests and 8 MiB.
    `connections` may be open at once; 0: no limit.
    """

    connection: int = 50
    address: int = 100
    connections: int = 0
    model: int = 80


class ModelLoad:
    """Requests of one model that are under way, of all its versions, and their bytes.

    Without a limit; `headrace.engine.admission` has one that holds models to their share. Nobody
    has to ask it below `free_requests` and `free_bytes`.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.free_requests = self.free_bytes = maxsize

    def check(self) -> None:
        """Raise `Overloaded` if there must be no request more."""
