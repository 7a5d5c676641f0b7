"""The gate of a door: what a request has to show before anything else of it is looked at.

Every operation passes it, by its entry in the table of operations: first the header that its
category may require (`HeaderRules`), then the client's permission. Both are decided from the
request's head. A request that names a model passes `check`, too, as soon as the name is known.

A client that may do nothing with a model does not learn that there is one: it gets the answer for
an unknown model, and lists are without it.
"""

from collections.abc import Callable, Sequence

from headrace.api.header_rules import HeaderRules, Key
from headrace.api.operations import Category, Operation
from headrace.core.errors import Forbidden, NotFound, Restricted, ServerError, Unauthenticated
from headrace.core.identity import (
    ANYONE,
    CHANGING,
    NO_PEER,
    NOBODY,
    Access,
    Identity,
    PeerFacts,
    Permission,
)
from headrace.core.texts import shown

AUTHORIZATION = "authorization"  # the header with the client's proof
# The values of a request's header, by its lower-case name.
Values = Callable[[str], Sequence[bytes]]
Refused = Callable[[Operation, ServerError, Values, PeerFacts, str], object]


class Gate:
    """The rules in effect at one door, which `change` replaces while it is open.

    Doors read `pattern`, `origins` and `keys` for each request; whoever keeps something that
    follows from them or from who asks, such as the heads of earlier requests, watches for changes.
    Owned by the event loop; requests that were accepted before a change are finished.
    """

    def __init__(
        self,
        rules: HeaderRules | None = None,
        access: Access | None = None,
        noun: str = "API",
        read_only: bool = False,
    ) -> None:
        """Without `rules`, nothing is restricted or forwarded; without `access`, everyone may do
        everything. `noun` is what the door's clients call an operation. A `read_only` door has no
        operations that change something. Raises `ValueError`.
        """
        self._watchers: list[Callable[[], object]] = []
        self._noun = noun
        self._read_only = read_only
        self.refused: Refused | None = None  # called by `refuse`
        self.changes = 0  # so far
        self.access: Access | None = None
        self.change(rules or HeaderRules())
        if access is not None:
            self.follow(access)

    def follow(self, access: Access) -> None:
        """Let `access` identify clients from now on."""
        self.access = access
        access.watch(self._tell)
        self._tell()

    def change(self, rules: HeaderRules) -> None:
        """Replace the rules; raises `ValueError` and leaves them as they were."""
        found = rules.pattern(), rules.allowed_origins(), rules.keys()
        self.pattern, self.origins, self.keys = found
        self._tell()

    def watch(self, changed: Callable[[], object]) -> None:
        """Call `changed` after every change."""
        self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], object]) -> None:
        """Remove a callback of `watch`."""
        self._watchers.remove(changed)

    def key(self, category: Category | None) -> Key | None:
        """The header that a category requires, None for none."""
        return None if category is None else self.keys.get(category)

    def _tell(self) -> None:
        self.changes += 1
        for changed in list(self._watchers):
            changed()

    # --- requests

    def enter(
        self,
        operation: Operation,
        values: Values,
        peer: PeerFacts = NO_PEER,
        changes: bool = False,
    ) -> Identity:
        """The client of a request, if it may request the operation at all; raises as `examine`."""
        try:
            return self.examine(operation, values, peer, changes)
        except ServerError as error:
            self.refuse(operation, error, values, peer)
            raise

    def refuse(
        self,
        operation: Operation,
        error: ServerError,
        values: Values,
        peer: PeerFacts,
        model: str = "",
    ) -> None:
        """Record a request that is refused with this error, for a model if its door knows it."""
        if self.refused is not None:
            self.refused(operation, error, values, peer, model)

    def examine(
        self,
        operation: Operation,
        values: Values,
        peer: PeerFacts = NO_PEER,
        changes: bool = False,
    ) -> Identity:
        """Find the client like `enter`, without a record of a refusal, which follows elsewhere.

        Raises `Restricted` without the header that the operation's category requires,
        `Unauthenticated`, `Forbidden` for a client without any role for it, and `NotFound` for an
        operation that the door does not have.
        """
        if self._read_only and operation.needs(changes) in CHANGING:
            raise elsewhere()
        if (key := self._lacked(operation.category, values)) is not None:
            raise Restricted(f"This {self._noun} is restricted, expecting header '{key.header}'")
        return self.require(operation.needs(changes), values, peer)

    def require(
        self, permission: Permission, values: Values, peer: PeerFacts = NO_PEER
    ) -> Identity:
        """The client of a request, if a role permits this; raises as `enter`."""
        if self.access is None:
            return ANYONE
        try:
            identity = self.access.identify(values(AUTHORIZATION), peer)
            if identity.may_some(permission):
                return identity
            missing = _missing(identity, permission, "")
            if identity.anonymous:
                raise Unauthenticated(f"{missing}; it has to send '{AUTHORIZATION}'")
            raise missing
        except Unauthenticated as error:
            if permission is Permission.OPEN:
                return NOBODY
            error.challenge = self.access.challenge
            raise

    def check(
        self,
        operation: Operation,
        identity: Identity,
        values: Values,
        peer: PeerFacts,
        model: str,
        version: str = "",
    ) -> None:
        """Raise as the function `check`, and record it, unless a client may do this to a model."""
        try:
            check(identity, operation.permission, model, version)
        except ServerError as error:
            self.refuse(operation, error, values, peer, model)
            raise

    def known(self, category: Category, values: Values, peer: PeerFacts = NO_PEER) -> Identity:
        """The client of a request for a page that shows what such operations do, or `NOBODY`."""
        if self._lacked(category, values) is not None:
            return NOBODY
        return self.require(Permission.OPEN, values, peer)

    def _lacked(self, category: Category | None, values: Values) -> Key | None:
        """The header that a category requires and a request has not, None for none."""
        key = self.key(category)
        return None if key is None or key.opens(values(key.header)) else key


def elsewhere() -> NotFound:
    """The error for an operation that changes something, at a door that has none."""
    return NotFound("what changes models or settings has an address of its own (--control-address)")


def check(identity: Identity, permission: Permission, model: str = "", version: str = "") -> None:
    """Raise `Forbidden` unless a role permits this for the model; without one, for all of them.

    Raises `NotFound`, as for an unknown model, if the client may not know of it.
    """
    if identity is ANYONE or identity.may(permission, model, version):
        return
    if model and not identity.sees(model):
        raise NotFound(f"Request for unknown model: '{model}' is not found")
    raise _missing(
        identity, permission, f" for model {shown(model)}" if model else " for all models"
    )


def _missing(identity: Identity, permission: Permission, of: str) -> Forbidden:
    who = shown(identity.name) if identity.name else "an unknown client"
    return Forbidden(f"{who} has no role that permits '{permission}'{of}")
