"""What is to happen to requests for a model that name no version, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

WHOLE = 100.0  # the weight of a version that gets everything


@dataclass(frozen=True, slots=True)
class Sticky:
    """What requests have in common that always get the same version.

    Either `header` (lower case) or `parameter` is set.
    """

    header: str = ""
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A version that gets copies of requests, whose answers nobody sees.

    It gets a `share` of them (0 to 1), of which at most `max_pending` are under way.
    """

    version: int
    share: float = 1.0
    max_pending: int = 64


@dataclass(frozen=True, slots=True)
class RollbackRule:
    """When a version is bad enough to lose its traffic to the baseline; None is no limit.

    Rates are shares of requests (0 to 1). The latency is the `latency_quantile` of those that were
    answered. What is judged are the requests of the last `window_secs`, if they are at least
    `min_requests`; against the baseline only if it had as many.
    """

    max_error_rate: float | None = None
    max_error_rate_increase: float | None = None  # above the baseline's
    max_latency_ms: float | None = None
    max_latency_ratio: float | None = None  # to the baseline's
    latency_quantile: float = 0.95
    min_requests: int = 50
    window_secs: float = 60.0


@dataclass(frozen=True, slots=True)
class TrafficRules:
    """Where requests for a model go that name no version.

    `split` has weights by version; it is empty for "the highest that is ready, but the shadow". The
    other versions of it are held against its `baseline`.
    """

    split: Mapping[int, float] = field(default_factory=dict)
    baseline: int = 0
    sticky: Sticky | None = None
    shadow: Shadow | None = None
    rollback: RollbackRule | None = None

    @property
    def candidates(self) -> list[int]:
        """The versions beside the baseline that get requests, ascending."""
        return sorted(n for n, weight in self.split.items() if weight and n != self.baseline)

    def only(self, version: int) -> "TrafficRules":
        """The same rules with all requests for one version, which is the baseline then."""
        split = {**dict.fromkeys(self.split, 0.0), version: WHOLE}
        shadow = self.shadow
        if shadow is not None and shadow.version == version:
            shadow = None
        return replace(self, split=split, baseline=version, shadow=shadow)

    def without(self, version: int) -> "TrafficRules":
        """The same rules with the weight of one version given to the baseline."""
        split = dict(self.split)
        split[self.baseline] = split.get(self.baseline, 0.0) + split.get(version, 0.0)
        split[version] = 0.0
        return replace(self, split=split)
