"""Metrics defined by models, exported with the server's own.

A family has a name and a kind; its metrics differ in their labels. Several models, and instances of
one, may update the same metric. Names of a family, and of its samples, are no other family's in any
format of a scrape. A family is removed when none of its models is loaded any more, or each has
deleted it as often as it has created it. Owned by the event-loop thread.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.core.errors import AlreadyExists, InvalidRequest, ServerError
from headrace.core.texts import encodable
from headrace.observability.statistics import Buckets, Family, Reading, Sourced

log = logging.getLogger(__name__)

_KINDS = {"COUNTER": "counter", "GAUGE": "gauge", "HISTOGRAM": "histogram"}
_MOST_FAMILIES, _MOST_METRICS = 1000, 10_000  # in total, and per family
Labels = tuple[tuple[str, str], ...]


class _Values:
    """One metric: a number, or counts of numbers by `bounds`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.owners: set[object] = set()
        self.value = 0.0
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)

    def change(self, operation: str, value: float) -> None:
        if operation == "set":
            self.value = value
        elif operation in ("increment", "observe"):
            self.value += value
        if operation == "observe":
            self.counts[bisect_left(self.bounds, value)] += 1

    def reading(self, histogram: bool) -> Reading:
        """The value, or bucket counts, in the format of Prometheus' own libraries: 1, not 1.0."""
        bounds = [repr(bound).removesuffix(".0") for bound in self.bounds]
        return Buckets(bounds, self.counts, self.value) if histogram else self.value


class _Family:
    def __init__(self, name: str, kind: str, description: str) -> None:
        self.kind = kind
        # Of itself and its samples. In OpenMetrics, a counter's family lacks the suffix.
        base = name.removesuffix("_total") if kind == "counter" else name
        suffixes = ("_bucket", "_count", "_sum") if kind == "histogram" else ()
        self.names = {name, base, *(name + suffix for suffix in suffixes)}
        self.description = description
        self.owners: Counter[object] = Counter()  # creations by owner
        self.metrics: dict[Labels, _Values] = {}


class ModelMetrics:
    """All metrics of all models."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def change(self, owner: object, document: Mapping[str, Any]) -> None:
        """Apply a model's update of a family, a metric, or a value.

        Contradictory updates are logged and ignored. Malformed documents raise any exception.
        """
        name, what = str(document["family"]), str(document["do"])
        family = self._families.get(name)
        if what == "family":
            try:
                self.add_family(owner, document)
            except ServerError as error:
                log.error("%s", error)
            return
        if family is None or owner not in family.owners:
            return  # refused before, or the model's version is gone
        if what == "delete":
            family.owners[owner] -= 1
            if not family.owners[owner]:
                self._leave(owner, name, family)
            return
        labels = _labels(document)
        metric = family.metrics.get(labels)
        if metric is None:
            if len(family.metrics) >= _MOST_METRICS:
                log.error("metric %s has %d sets of labels: no more are kept", name, _MOST_METRICS)
                return
            bounds = [float(bound) for bound in document.get("buckets", ())]
            metric = family.metrics[labels] = _Values(bounds)
        metric.owners.add(owner)
        if what != "create":
            metric.change(what, float(document["value"]))

    def add_family(self, owner: object, document: Mapping[str, Any]) -> None:
        """Create a family, or add an owner.

        Raises `ServerError` if it is of another kind, or another has a name of it in a scrape.
        """
        name, kind = str(document["family"]), str(document["kind"])
        family = self._families.get(name)
        if family is None:
            if len(self._families) >= _MOST_FAMILIES or kind not in _KINDS:
                raise InvalidRequest(f"metric {name} of kind {kind} is not kept")
            family = _Family(name, _KINDS[kind], encodable(document["description"]))
            for other, known in self._families.items():
                if shared := family.names & known.names:
                    beside = f"the {known.kind} {other}: both would be {min(shared)} in a scrape"
                    raise AlreadyExists(f"metric {name} cannot be a {kind} beside {beside}")
            self._families[name] = family
        if family.kind != _KINDS.get(kind):
            raise AlreadyExists(f"metric {name} is a {family.kind} already, and cannot be a {kind}")
        family.owners[owner] += 1

    def value(self, document: Mapping[str, Any]) -> float | None:
        """The value of a metric, None if unknown; malformed documents raise any exception."""
        family = self._families.get(str(document["family"]))
        metric = family.metrics.get(_labels(document)) if family is not None else None
        return None if metric is None else metric.value

    def forget(self, owner: object) -> None:
        """Remove an owner, and the families that only it had created."""
        for name, family in list(self._families.items()):
            self._leave(owner, name, family)

    def _leave(self, owner: object, name: str, family: _Family) -> None:
        for labels, metric in list(family.metrics.items()):
            metric.owners.discard(owner)
            if not metric.owners:
                del family.metrics[labels]
        del family.owners[owner]
        if not family.owners:
            del self._families[name]

    @property
    def plain_counters(self) -> frozenset[str]:
        """Counters whose names lack the suffix of Prometheus' client libraries."""
        counters = [name for name, each in self._families.items() if each.kind == "counter"]
        return frozenset(name for name in counters if not name.endswith("_total"))

    def collect(self) -> Iterator[Sourced]:
        """The families, each read when consumed: models may add and remove some meanwhile."""
        for name, family in list(self._families.items()):
            metrics, buckets = family.metrics.items(), family.kind == "histogram"
            readings = [(dict(labels), metric.reading(buckets)) for labels, metric in metrics]
            yield Family(name, family.kind, lambda reading: reading, family.description), readings


def _labels(document: Mapping[str, Any]) -> Labels:
    # A text that cannot be encoded would fail the whole scrape.
    return tuple(sorted((str(key), encodable(each)) for key, each in document["labels"].items()))
