"""Traffic rules between a model's versions: values, and parsing from JSON.

The same document is used in a configuration, as the parameter `traffic`, and in a control call.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.core.texts import shown
from headrace.observability.statistics import LATENCY_BOUNDS

_MEMBERS = ("split", "baseline", "sticky", "shadow", "rollback")
_MOST_VERSIONS = 32
_MOST_WEIGHT = 1e9
_MOST_PENDING = 10_000
_MOST_REQUESTS = 10**9
# The numbers of a roll-back rule with their least and greatest values: limits, and settings of the
# observation.
_LIMITS: dict[str, tuple[float, float]] = {
    "max_error_rate": (0, 1),
    "max_error_rate_increase": (0, 1),
    "max_latency_ms": (0, LATENCY_BOUNDS[-1] / 1e6),
    "max_latency_ratio": (1, 1_000),
}
_LOOKS: dict[str, tuple[float, float]] = {"latency_quantile": (0, 1), "window_secs": (1, 86_400)}
_VERSION = re.compile(r"[1-9][0-9]{0,18}|0")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,256}")
WHOLE = 100.0  # weight of a version that gets all requests


@dataclass(frozen=True, slots=True)
class Sticky:
    """The source of the key for sticky routing.

    Either `header` (lower case) or `parameter` is set.
    """

    header: str = ""
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A version that gets copies of requests, whose answers are discarded.

    It gets a `share` of them (0 to 1), with at most `max_pending` in flight.
    """

    version: int
    share: float = 1.0
    max_pending: int = 64


@dataclass(frozen=True, slots=True)
class RollbackRule:
    """Limits beyond which a version is rolled back to the baseline; None is no limit.

    Rates are shares of requests (0 to 1). The latency is the `latency_quantile` of answered
    requests. Requests of the last `window_secs` are judged, if there are at least `min_requests`;
    against the baseline only if it had as many.
    """

    max_error_rate: float | None = None
    max_error_rate_increase: float | None = None  # above the baseline's rate
    max_latency_ms: float | None = None
    max_latency_ratio: float | None = None  # relative to the baseline's latency
    latency_quantile: float = 0.95
    min_requests: int = 50
    window_secs: float = 60.0


@dataclass(frozen=True, slots=True)
class TrafficRules:
    """Rules for requests without a version.

    `split` has weights by version; empty means the highest ready version except the shadow. The
    other versions are compared with its `baseline`.
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
        """A copy that sends all requests to one version, as the baseline."""
        split = {**dict.fromkeys(self.split, 0.0), version: WHOLE}
        shadow = self.shadow
        if shadow is not None and shadow.version == version:
            shadow = None
        return replace(self, split=split, baseline=version, shadow=shadow)

    def without(self, version: int) -> "TrafficRules":
        """A copy that gives the weight of one version to the baseline."""
        split = dict(self.split)
        split[self.baseline] = split.get(self.baseline, 0.0) + split.get(version, 0.0)
        split[version] = 0.0
        return replace(self, split=split)


class InvalidRules(Exception):
    """Invalid rules; the text names the member and what was expected."""


def parse_rules(text: str) -> TrafficRules:
    """Parse rules from JSON text; raises `InvalidRules`."""
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRules(f"is not valid JSON: {error}") from None
    return read_rules(document)


def read_rules(document: Any) -> TrafficRules:
    """Read rules from a JSON document; raises `InvalidRules`."""
    members = _object(document, "", _MEMBERS)
    split = _split(members.get("split", {}))
    baseline = _baseline(members, split)
    shadow = _shadow(members["shadow"], split) if "shadow" in members else None
    sticky = _sticky(members["sticky"]) if "sticky" in members else None
    rollback = _rollback(members["rollback"]) if "rollback" in members else None
    if not split:
        for name in ("sticky", "rollback"):
            if name in members:
                raise InvalidRules(f"{name}: is about a split, and there is none")
    return TrafficRules(split, baseline, sticky, shadow, rollback)


def _split(document: Any) -> dict[int, float]:
    if type(document) is not dict:
        raise InvalidRules(
            f"split: must be an object of weights by version, got {_shown(document)}"
        )
    if len(document) > _MOST_VERSIONS:
        raise InvalidRules(f"split: at most {_MOST_VERSIONS} versions, got {len(document)}")
    split = {
        _version(name, "split"): _number(weight, f"split['{name}']", 0, _MOST_WEIGHT)
        for name, weight in document.items()
    }
    if split and not any(split.values()):
        raise InvalidRules("split: at least one weight must be more than 0")
    return dict(sorted(split.items()))


def _baseline(members: Mapping[str, Any], split: Mapping[int, float]) -> int:
    """The named baseline, else the lowest version of the split."""
    if "baseline" not in members:
        return min((n for n, weight in split.items() if weight), default=0)
    baseline = _version(members["baseline"], "baseline")
    if baseline not in split:
        names = ", ".join(map(str, split)) or "none"
        raise InvalidRules(f"baseline: must be a version of the split ({names}), got {baseline}")
    return baseline


def _sticky(document: Any) -> Sticky:
    members = _object(document, "sticky", ("header", "parameter"))
    if len(members) != 1:
        raise InvalidRules("sticky: must have either 'header' or 'parameter'")
    [(kind, name)] = members.items()
    if type(name) is not str or not name:
        raise InvalidRules(f"sticky.{kind}: must be a name, got {_shown(name)}")
    if kind == "parameter":
        return Sticky(parameter=name)
    header = name.lower()
    if not _HEADER.fullmatch(header) or header.endswith("-bin"):
        raise InvalidRules(f"sticky.header: must be the name of a text header, got {_shown(name)}")
    return Sticky(header=header)


def _shadow(document: Any, split: Mapping[int, float]) -> Shadow:
    if type(document) in (str, int):
        document = {"version": document}
    members = _object(document, "shadow", ("version", "share", "max_pending"))
    if "version" not in members:
        raise InvalidRules("shadow.version: is missing")
    version = _version(members["version"], "shadow.version")
    if split.get(version):
        raise InvalidRules(
            f"shadow.version: {version} gets requests by the split; a shadow gets only copies"
        )
    share = _number(members.get("share", 1), "shadow.share", 0, 1)
    if not share:
        raise InvalidRules("shadow.share: must be more than 0")
    pending = _whole(members.get("max_pending", 64), "shadow.max_pending", 1, _MOST_PENDING)
    return Shadow(version, share, pending)


def _rollback(document: Any) -> RollbackRule:
    members = _object(document, "rollback", (*_LIMITS, *_LOOKS, "min_requests"))
    if not members.keys() & _LIMITS.keys():
        raise InvalidRules(f"rollback: must have at least one of {', '.join(_LIMITS)}")
    given: dict[str, Any] = {
        name: _number(members[name], f"rollback.{name}", *bounds)
        for name, bounds in (_LIMITS | _LOOKS).items()
        if name in members
    }
    if "min_requests" in members:
        least = _whole(members["min_requests"], "rollback.min_requests", 1, _MOST_REQUESTS)
        given["min_requests"] = least
    rule = RollbackRule(**given)
    if not 0 < rule.latency_quantile < 1:
        raise InvalidRules("rollback.latency_quantile: must be between 0 and 1")
    return rule


def _object(document: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    lead = f"{where}: " if where else ""
    if type(document) is not dict:
        raise InvalidRules(f"{lead}must be a JSON object, got {_shown(document)}")
    for name in document:
        if name not in known:
            raise InvalidRules(
                f"{lead}unknown member {_shown(name)}, it may have {', '.join(known)}"
            )
    return document


def _version(value: Any, where: str) -> int:
    text = str(value) if type(value) is int else value
    if type(text) is not str or not _VERSION.fullmatch(text) or int(text) >= 2**63:
        raise InvalidRules(f"{where}: must be the number of a version, got {_shown(value)}")
    return int(text)


def _number(value: Any, where: str, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:  # also excludes NaN
        raise InvalidRules(
            f"{where}: must be a number from {least} to {most:g}, got {_shown(value)}"
        )
    return float(value)


def _whole(value: Any, where: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidRules(
            f"{where}: must be a whole number from {least} to {most}, got {_shown(value)}"
        )
    return value


def _shown(value: Any) -> str:
    return shown(value)[:60]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{_shown(name)} is given twice")
        result[name] = value
    return result


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")
