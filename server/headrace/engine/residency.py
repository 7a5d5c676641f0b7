"""Choice of the models that stay in memory when not all fit: pure decisions.

A requested model needs room. Room is made by evicting the least recently used models, but never one
that is pinned, that has unfinished requests, or that was loaded only just now: two models that do
not fit side by side would otherwise evict each other with every request. If that is not enough,
nothing is evicted in vain; the request waits for the first model that can be evicted, or fails if
there will never be room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """Settings for models in memory.

    All models together may take `budget` bytes, 0: unlimited. A request waits for `wait_secs` at
    most. A model stays for `minimum_secs` after its load, and is evicted after `idle_secs` without
    requests, 0: never. `pinned` models always stay; they and the `first` ones are loaded at start.
    `clock` returns seconds since the epoch.
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
    """A model in memory, or being loaded or unloaded.

    `nbytes` is its memory. `last_used` and `loaded` are in seconds of one clock. `leaving` means
    that it is being unloaded: its memory will soon be free.
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
    """The models to evict before another one may be loaded.

    `unload` are to be evicted. If `wait` is set, there is no room yet: ask again after so many
    seconds, or after any change. `problem` is the reason why there will never be room.
    """

    unload: tuple[str, ...] = ()
    wait: float | None = None
    problem: str = ""


_SOON = 0.1  # seconds until models with unfinished requests are checked again


def make_room(
    residents: Sequence[Resident], needed: int, budget: int, now: float, minimum: float
) -> EvictionPlan:
    """Plan the eviction that leaves `needed` bytes free within `budget` bytes.

    A resident stays for `minimum` seconds after its load.
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
    # Residents being unloaded come first: their memory need not be requested again.
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
    """The models to evict because those in memory have grown beyond `budget` bytes."""
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
    """The models without a request for so many seconds."""
    return [
        one.name
        for one in residents
        if not (one.pinned or one.busy or one.leaving)
        and now - max(one.last_used, one.loaded) >= seconds
    ]


def _last_used(one: Resident) -> float:
    return max(one.last_used, one.loaded)
