"""A model's own metrics, which the server shows beside its own.

The server keeps the values: instances of a model, and models, that name the same family and labels
change the same metric. A model's metrics go when it is unloaded.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.workers.triton_arguments import real, text, wrong
from headrace.workers.triton_server import connected
from headrace.workers.triton_tensors import TritonModelException

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("nv_", "headrace_", "python_", "process_")


class Metric:
    """One metric of a family, with its own labels."""

    def __init__(
        self, family: "MetricFamily", labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._family = family
        self._key = {
            "family": family.name,
            "labels": {str(name): str(value) for name, value in labels.items()},
        }
        self._tell("create", 0.0, {"buckets": [float(bound) for bound in buckets]})

    def increment(self, value: float) -> None:
        """Add to a counter, or to a gauge, which may also be lowered."""
        self._only("increment", MetricFamily.COUNTER, MetricFamily.GAUGE)
        value = real("value", value)
        if self._family.kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException(f"a counter cannot be lowered, by {value}")
        self._tell("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._only("set", MetricFamily.GAUGE)
        self._tell("set", value)

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._only("observe", MetricFamily.HISTOGRAM)
        self._tell("observe", value)

    def value(self) -> float:
        """The value of a counter or a gauge; not while the model is being started or finalised."""
        self._only("value", MetricFamily.COUNTER, MetricFamily.GAUGE)
        return float(connected().control({"op": "metric", **self._key}))

    def _only(self, operation: str, *kinds: str) -> None:
        if self._family.kind not in kinds:
            raise TritonModelException(
                f"{operation} is not for a metric of kind {self._family.kind}"
            )

    def _tell(self, operation: str, value: float, more: Mapping[str, Any] | None = None) -> None:
        connected().tell(
            {"do": operation, **self._key, "value": real("value", value), **(more or {})}
        )


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"

    def __init__(self, name: str, description: str, kind: str) -> None:
        """Raises `TypeError`, and `TritonModelException` for a name that cannot be."""
        name, description = text("name", name), text("description", description)
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise wrong("kind", "MetricFamily.COUNTER, GAUGE or HISTOGRAM", kind)
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            raise TritonModelException(
                f"'{name}' cannot be the name of a model's metric: expected letters, digits and _,"
                f" and none of {', '.join(_RESERVED)} in front"
            )
        self.name = name
        self.kind = kind
        connected().tell(
            {"do": "family", "family": self.name, "kind": kind, "description": description}
        )

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The metric with these labels; a histogram needs `buckets`, ascending upper bounds.

        Raises `TritonModelException` for labels or buckets that cannot be.
        """
        for name in labels or {}:
            if not _LABEL.fullmatch(str(name)):
                raise TritonModelException(f"'{name}' cannot be the name of a label")
        bounds = list(buckets or [])
        if (self.kind == self.HISTOGRAM) != bool(bounds) or bounds != sorted(set(bounds)):
            raise TritonModelException(
                "a histogram needs buckets, ascending upper bounds, and nothing else has any;"
                f" got {bounds}"
            )
        return Metric(self, labels or {}, bounds)
