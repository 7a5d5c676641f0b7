"""Shares of the server's limits for one client: a value that settings have without a server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """Percent of the server's limits, for a connection and for all those of an address.

    Either may have 64 requests and 64 MiB in any case. `connections` may be open at once; 0: no
    limit.
    """

    connection: int = 50
    address: int = 100
    connections: int = 0
