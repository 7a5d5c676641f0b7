"""Quotas of clients as values: who has which limits for which models, and token buckets.

A quota is for each client apart: an identity has a bucket of its own, and so has an address. A
client without a proved identity is known by its address, an IPv6 one by its network of 64 bits.
Quotas that differ in their models, or of which one is for addresses, all apply to a request; of
others, only the first that is for the client does. Pure: `now` comes from the caller, in seconds.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from ipaddress import IPv6Address
from math import ceil
from typing import NamedTuple

ADDRESS = "address"  # among those whom a quota is for: all clients of an address
_NETWORK = 64  # bits of an IPv6 address that stand for one client


class Quota(NamedTuple):
    """The limits of each client that a quota is for; 0 means no limit.

    `of` has names of identities, `role:NAME`, `anonymous` (clients without a proved identity),
    `address` (all clients of an address together), or `*`; `models` has patterns of shell style.
    `requests` and `bytes` are those under way. `weight` is the share of models' queues, relative to
    other clients'; 0 means 1.
    """

    name: str
    of: tuple[str, ...]
    models: tuple[str, ...] = ("*",)
    requests_per_sec: float = 0.0
    burst: float = 0.0
    rows_per_sec: float = 0.0
    requests: int = 0
    bytes: int = 0
    connections: int = 0
    weight: float = 0.0

    @property
    def by_address(self) -> bool:
        """True if the clients of an address share the quota, whoever they are."""
        return ADDRESS in self.of

    def covers(self, model: str) -> bool:
        """True if the quota is for requests to a model."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    def is_for(self, answers_to: Callable[[str], bool]) -> bool:
        """True if the quota is for a client, by `Identity.answers_to`."""
        return any(who == ADDRESS or answers_to(who) for who in self.of)


class Quotas(NamedTuple):
    """All quotas, in the order of their declaration."""

    all: tuple[Quota, ...] = ()

    def applying(self, answers_to: Callable[[str], bool], model: str) -> Iterator[Quota]:
        """The quotas that a client's requests to a model are charged to."""
        found = set()
        for quota in self.all:
            like = quota.models, quota.by_address
            if like not in found and quota.covers(model) and quota.is_for(answers_to):
                found.add(like)
                yield quota


class Rate(NamedTuple):
    """A token bucket, which holds `burst` tokens at most and gets `per_sec` of them a second.

    Its state is one number: the time at which it will be full, or was; 0 for a new one. More may be
    taken than it holds, which is a debt.
    """

    per_sec: float
    burst: float

    def wait(self, full_at: float, now: float, tokens: float = 1.0) -> float:
        """Seconds until it holds so many tokens; 0 if it does, and for 0 tokens without a debt."""
        return max(max(full_at - now, 0.0) - (self.burst - tokens) / self.per_sec, 0.0)

    def take(self, full_at: float, now: float, tokens: float = 1.0) -> float:
        """The state without these tokens."""
        return max(full_at, now) + tokens / self.per_sec

    @property
    def window(self) -> int:
        """Whole seconds in which an empty one is full again, at least 1."""
        return max(ceil(self.burst / self.per_sec), 1)


def network_of(address: str) -> str:
    """An address without the part that one client can choose."""
    if ":" not in address or address.startswith("unix:"):
        return address
    try:
        parsed = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return parsed.packed[: _NETWORK // 8].hex(":", 2)
