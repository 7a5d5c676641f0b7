"""A procedure call, as far as the handlers of operations are concerned."""

from typing import NamedTuple

from headrace.core.identity import ANYONE, Identity


class Asking(NamedTuple):
    """A call of this client."""

    identity: Identity = ANYONE


CALL = Asking()
