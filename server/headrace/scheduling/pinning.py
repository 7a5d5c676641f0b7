"""Which server runs a request of a sequence, and what is known of the sequence afterwards.

A sequence's requests go to the server that has taken the first of them, since its state is there. A
request that may or may not have been run, or a server that is gone, leaves a sequence lost: what
went on from there would be computed from another state than its client believes. It can only be
begun again.

Decisions over values: nothing here has a clock, a connection or a state.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Pin:
    """Where the state of a sequence is: on `server`, or nowhere any more if it is `lost`."""

    server: object = None
    lost: bool = False


class Way(Enum):
    """Where a request of a sequence is to go."""

    PINNED = "to the server that has the state"
    ANY = "to whichever server is best"
    NOWHERE = "the sequence is lost"


class Ending(Enum):
    """What is known of a request that has ended."""

    RUN = "a server has run it, or has said what is wrong with it"
    REFUSED = "no server has begun it"
    UNSURE = "the server is gone, or nobody knows whether it has run it"


def way(pin: Pin | None, start: bool, usable: bool) -> Way:
    """Where a request goes; `usable` is whether the server of its pin can be asked.

    One that begins a sequence anew which is under way goes to the server of that as well, which so
    learns that the old one is over; but any other will do.
    """
    if pin is not None and not pin.lost and usable:
        return Way.PINNED
    return Way.ANY if start else Way.NOWHERE


def after(pin: Pin | None, server: object, end: bool, ending: Ending) -> Pin | None:
    """What is known of a sequence after a request of it that `server` was sent.

    `pin` is what was known before, None as the result is that there is no such sequence. A request
    that was refused has changed nothing.
    """
    if ending is Ending.UNSURE:
        return Pin(lost=True)
    if ending is Ending.REFUSED:
        return pin
    return None if end else Pin(server)
