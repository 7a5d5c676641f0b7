"""Shares of the server's limits for a client or a model: values of settings, without a server."""

from dataclasses import dataclass


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
