"""Audit: who asked for which change of the server, from where, with which outcome.

An entry has no secret and no content: what a request carried is described by names, sizes and
digests (`headrace.api.audited`). Entries go to an `Audit`, which a plugin implements.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from headrace.core.identity import ANYONE, Identity, Role

# The operator, by a signal, and by a file that the server follows.
OPERATOR, FOLLOWED = (Identity("operator", kind, ()) for kind in ("signal", "file"))


class AuditOutcome(StrEnum):
    """The outcome of an operation."""

    OK = "ok"
    REFUSED = "refused"  # not permitted, or beyond a quota
    FAILED = "failed"


class AuditEntry(NamedTuple):
    """One operation: its name in the table of operations, or that of an event in the server.

    `status` is HTTP's number or gRPC's name, as in `headrace_requests_total`, "" for an event.
    `detail` tells what was asked for, as JSON.
    """

    operation: str
    outcome: AuditOutcome
    status: str = ""
    identity: Identity = ANYONE
    door: str = ""
    address: str = ""
    model: str = ""
    version: str = ""
    request_id: str = ""
    detail: Mapping[str, object] = {}

    def document(self) -> dict[str, Any]:
        """The entry as a JSON document, for another process."""
        who = self.identity
        roles = [role.name for role in who.roles]
        return self._asdict() | {"identity": [who.name, who.kind, roles]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "AuditEntry":
        """The entry with a document of `document`; raises any exception for other ones."""
        name, kind, roles = document["identity"]
        who = Identity(name, kind, [Role(role, frozenset()) for role in roles])
        outcome = AuditOutcome(document["outcome"])
        return cls(**{**document, "identity": who, "outcome": outcome})


Record = Callable[[AuditEntry], object]  # takes an entry, and does not block


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of the audit log: its file, `-` for standard output.

    One in `infer` inference requests is recorded, 0 for none. A file that would exceed `max_bytes`
    is replaced, 0 for never; `files` earlier ones are kept.
    """

    file: str
    infer: int = 0
    max_bytes: int = 0
    files: int = 0


class Audit(Protocol):
    """The destination of entries; one in `infer` inference requests is to be recorded, 0: none."""

    infer: int

    @property
    def lost(self) -> Mapping[str, int]:
        """Entries that were not written since the start, by reason."""

    def record(self, entry: AuditEntry) -> None:
        """Take an entry; does not block."""

    def close(self) -> None:
        """Write everything taken, for a bounded time; blocks."""
