"""Identities, their roles, and the facts that a connection knows of its peer.

An identity is known by its name, and may do what any of its roles permits. Who identifies clients
is an `Access`; without one, every client is `ANYONE`, who may do everything.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from typing import Any, NamedTuple, Protocol

from headrace.core.quotas import Quotas, network_of

ROLE = "role:"  # before the name of a role, where names of identities stand, too
_KNOWN = 4096  # cached decisions of a role


class Permission(StrEnum):
    """The permissions that a role may give; each operation of the protocol requires one."""

    OPEN = "open"  # of everyone: liveness and readiness of the server, description of the protocol
    INFER = "infer"
    READ = "read"  # metadata, configurations, the index
    OBSERVE = "observe"  # status, statistics, metrics, settings of traces and of the log
    CONTROL = "control"  # models, traffic, shared memory
    ADMIN = "admin"  # settings of traces and of the log, its last records


EVERYTHING = frozenset(Permission)
CHANGING = frozenset({Permission.CONTROL, Permission.ADMIN})


class PeerFacts(NamedTuple):
    """The facts known about the other end of a connection.

    `address` is an IP address, or `unix:` and the user's number. `certificate` is a verified one as
    `ssl.SSLSocket.getpeercert` gives it. The last three are those of the process at the other end
    of a Unix socket, -1 for others.
    """

    address: str = ""
    certificate: Mapping[str, Any] | None = None
    pid: int = -1
    uid: int = -1
    gid: int = -1


class Role:
    """A set of permissions for models whose names match."""

    def __init__(
        self, name: str, may: frozenset[Permission], models: Sequence[str] = ("*",)
    ) -> None:
        """Each of `models` is a pattern of shell style, or `PATTERN/VERSION`."""
        self.name = name
        self.permissions = may | {Permission.OPEN}
        parts = [model.partition("/") for model in models]
        self._patterns = [(pattern, version) for pattern, _, version in parts]
        self.everywhere = ("*", "") in self._patterns
        self._known: dict[tuple[str, str], bool] = {}

    def covers(self, model: str, version: str = "") -> bool:
        """True if the role is for this version of a model; without a version, for all of them.

        A request without a version goes to one that the client does not choose.
        """
        if self.everywhere:
            return True
        key = model, version
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[key] = any(
                fnmatchcase(model, pattern) and only in ("", version)
                for pattern, only in self._patterns
            )
        return found

    def knows(self, model: str) -> bool:
        """True if the role is for any version of a model."""
        return any(fnmatchcase(model, pattern) for pattern, _ in self._patterns)


class Identity:
    """A client that is known by its name, or one of many that are not."""

    __slots__ = ("expires", "kind", "name", "roles")

    def __init__(self, name: str, kind: str, roles: Sequence[Role], expires: float = inf) -> None:
        """`kind` is how it was proved: `anonymous`, `key`, `token`, `certificate` or `peer`.

        It is not valid from `expires` on, in seconds since the epoch.
        """
        self.name = name
        self.kind = kind
        self.roles = tuple(roles)
        self.expires = expires

    @property
    def anonymous(self) -> bool:
        """True if the client has proved nothing: it is known by its address at most."""
        return self.kind == "anonymous"

    def client(self, address: str) -> str:
        """The client that requests from an address count for: the identity, else the network.

        "" for one that is not known at all.
        """
        return network_of(address) if self.anonymous else f"={self.name}"

    def answers_to(self, who: str) -> bool:
        """True if `who` is the client: its name, `role:NAME`, `anonymous`, or `*` for everyone."""
        if who == "*":
            return True
        if who.startswith(ROLE):
            return any(who == ROLE + role.name for role in self.roles)
        return who == "anonymous" if self.anonymous else who == self.name

    def may_some(self, permission: Permission) -> bool:
        """True if a role permits this for some model."""
        return permission is Permission.OPEN or any(
            permission in role.permissions for role in self.roles
        )

    def may(self, permission: Permission, model: str = "", version: str = "") -> bool:
        """True if a role permits this for a version of a model, or without one for all models."""
        return permission is Permission.OPEN or any(
            permission in role.permissions
            and (role.covers(model, version) if model else role.everywhere)
            for role in self.roles
        )

    def sees(self, model: str) -> bool:
        """True if the identity may know of a model: some role covers it."""
        return any(role.knows(model) for role in self.roles)

    @property
    def sees_all(self) -> bool:
        """True if there is no model that it may not know of."""
        return any(role.everywhere for role in self.roles)


NO_PEER = PeerFacts()
# Of a client without proof, for what is open to everyone.
NOBODY = Identity("", "anonymous", [])
ANYONE = Identity("anonymous", "anonymous", [Role("anyone", EVERYTHING)])


class Access(Protocol):
    """Identifies clients. Owned by the event loop; nothing here blocks."""

    @property
    def challenge(self) -> str:
        """The value of `WWW-Authenticate` for clients that have to prove who they are."""

    def identify(self, authorization: Sequence[bytes], peer: PeerFacts) -> Identity:
        """The client that sent these values of `authorization`; raises `Unauthenticated`.

        Quick: it is called once for each head or connection, whose result the doors keep.
        """

    @property
    def quotas(self) -> Quotas | None:
        """The quotas of clients; None for none. They change with the results of `identify`."""

    def watch(self, changed: Callable[[], object]) -> None:
        """Call `changed` whenever results of `identify` may have become invalid."""

    async def close(self) -> None:
        """Stop following its sources."""
