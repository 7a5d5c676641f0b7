"""Asking a second server when the first one takes long: when that is, and how often it may be.

A call is hedged once it has taken a time that is given, or longer than most of the last calls. At
most a share of all calls is hedged: each call earns that share of a second one, and a little of
it is kept. Nothing here has a clock or a server; times are in seconds.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_KEPT = 10.0  # second calls that may be saved up
_WINDOW = 512  # calls of which the times are known
_REFRESH = 32  # calls after which the quantile is taken anew
LEAST_SECS = 0.001  # what is quicker than that is not worth a second call


@dataclass(frozen=True, slots=True)
class HedgeRules:
    """When to ask a second server: after `seconds`, or after the `quantile` of the calls' times.

    Exactly one of them is there. `share` is that of the calls that may be hedged.
    """

    seconds: float = 0.0
    quantile: float = 0.0
    share: float = 0.1


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def least_sample(share: float) -> int:
    """How many values there have to be for such a quantile to say something."""
    return min(max(math.ceil(1 / (1 - share)), 20), _WINDOW)


class HedgePolicy:
    """The calls of one pool, as they tell when to hedge one."""

    def __init__(self, rules: HedgeRules) -> None:
        self._rules = rules
        self._credit = 1.0
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._fresh = 0  # times since the quantile was taken
        self._delay: float | None = rules.seconds or None

    def begun(self) -> float | None:
        """A call has begun: after how many seconds to hedge it, None for never."""
        self._credit = min(self._credit + self._rules.share, _KEPT)
        return None if self._delay is None else max(self._delay, LEAST_SECS)

    def spend(self) -> bool:
        """Whether a call may be hedged now; it counts as such."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def answered(self, seconds: float) -> None:
        """A call was answered after so long, by whichever server."""
        if not self._rules.quantile:
            return
        self._times.append(seconds)
        self._fresh += 1
        enough = len(self._times) >= least_sample(self._rules.quantile)
        if enough and (self._delay is None or self._fresh >= _REFRESH):
            self._delay = quantile(self._times, self._rules.quantile)
            self._fresh = 0
