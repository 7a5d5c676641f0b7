"""Which models are in memory when not all of them fit: pure decisions.

A model that is asked for needs room. Room is made by unloading the models that have not been asked
for the longest, but never one that is pinned, that has requests to finish, or that was loaded only
just now: two models that do not fit side by side would otherwise push each other out with every
request. If that is not enough, nobody is unloaded in vain; the request waits for the first model
that may go, or is told that there will never be room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """The operator's choices about models in memory.

    `budget` bytes may be taken by them all, 0: as many as there are. A request waits for
    `wait_secs` at most. A model stays `minimum_secs` after it was loaded, and goes after
    `idle_secs` without a request, 0: never. `pinned` models always stay; they and the `first` ones
    are loaded at start. `clock` gives seconds since the epoch.
    """

    budget: int = 0
    wait_secs: float = 30.0
    minimum_secs: float = 60.0
    idle_secs: float = 0.0
    pinned: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    clock: Callable[[], float] = time


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory, or on its way in or out.

    `nbytes` is its memory. `last_used` and `loaded` are in seconds on one clock. `leaving` is set
    when it is being unloaded: its memory is not free yet, but will be.
    """

    name: str
    nbytes: int
    last_used: float
    loaded: float
    pinned: bool = False
    busy: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The models to unload before another one may be loaded.

    `unload` are to be unloaded. If `wait` is set, there is no room yet: to be asked again after
    so many seconds, or when something has changed. `problem` says why there never will be.
    """

    unload: tuple[str, ...] = ()
    wait: float | None = None
    problem: str = ""


_SOON = 0.1  # seconds after which to look again at what has requests to finish


def make_room(
    residents: Sequence[Resident], needed: int, budget: int, now: float, minimum: float
) -> EvictionPlan:
    """How to have `needed` bytes besides the residents within `budget` bytes.

    A resident stays for `minimum` seconds after it was loaded.
    """
    pinned = sum(one.nbytes for one in residents if one.pinned)
    if needed > budget - pinned:
        taken = f", {pinned} of them taken by models that are pinned" if pinned else ""
        return EvictionPlan(
            problem=f"it needs about {needed} bytes, more than the {budget} bytes that models may"
            f" take{taken} (--model-memory-budget)"
        )
    missing = sum(one.nbytes for one in residents) + needed - budget
    if missing <= 0:
        return EvictionPlan()
    # What leaves already comes first: its memory need not be asked for again.
    missing -= sum(one.nbytes for one in residents if one.leaving)
    staying = [one for one in residents if not (one.leaving or one.pinned)]
    unload: list[str] = []
    for one in sorted(staying, key=_last_used):
        if missing <= 0:
            break
        if not one.busy and now - one.loaded >= minimum:
            unload.append(one.name)
            missing -= one.nbytes
    if missing <= 0:
        return EvictionPlan(unload=tuple(unload), wait=_SOON)
    ends = [one.loaded + minimum - now for one in staying if now - one.loaded < minimum]
    return EvictionPlan(wait=max(min(ends, default=_SOON), _SOON))


def surplus(residents: Sequence[Resident], budget: int, now: float, minimum: float) -> list[str]:
    """The models to unload because those in memory have grown beyond `budget` bytes."""
    excess = sum(one.nbytes for one in residents if not one.leaving) - budget
    unload = []
    for one in sorted(residents, key=_last_used):
        if excess <= 0:
            break
        if not (one.pinned or one.busy or one.leaving) and now - one.loaded >= minimum:
            unload.append(one.name)
            excess -= one.nbytes
    return unload


def idle(residents: Sequence[Resident], now: float, seconds: float) -> list[str]:
    """The models that nobody has asked for in so many seconds."""
    return [
        one.name
        for one in residents
        if not (one.pinned or one.busy or one.leaving)
        and now - max(one.last_used, one.loaded) >= seconds
    ]


def _last_used(one: Resident) -> float:
    return max(one.last_used, one.loaded)
