"""A model's own metrics, which the server shows beside its own.

The server keeps the values: instances of a model, and models, that name the same family and labels
change the same metric. A family's metrics last as long as its object, as in Triton, and at most
until the model is unloaded; what is done to a metric of a family that is gone is an error.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from typing import Any

from headrace.workers.triton_arguments import real, text, wrong
from headrace.workers.triton_server import connected
from headrace.workers.triton_tensors import TritonModelException

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("nv_", "headrace_", "python_", "process_")


class _Record:
    """What a family and its metrics have in common; these do not keep the family."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.deleted = False
        self.process = os.getpid()  # a process that the model forks has a copy


class Metric:
    """One metric of a family, with its own labels."""

    def __init__(
        self, family: _Record, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._family = family
        self._key = {
            "family": family.name,
            "labels": {str(name): str(value) for name, value in labels.items()},
        }
        self._tell("create", 0.0, {"buckets": buckets})

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
        self._tell("set", real("value", value))

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._only("observe", MetricFamily.HISTOGRAM)
        self._tell("observe", real("value", value))

    def value(self) -> float:
        """The value of a counter or a gauge; not while the model is being started or finalised."""
        self._only("value", MetricFamily.COUNTER, MetricFamily.GAUGE)
        return float(connected().control({"op": "metric", **self._key}))

    def _only(self, operation: str, *kinds: str) -> None:
        if self._family.deleted:
            raise TritonModelException(
                f"Failed to {operation} metric '{self._family.name}': Invalid metric operation as"
                " the corresponding 'MetricFamily' has been deleted. The model must keep it as"
                " long as its metrics."
            )
        if self._family.kind not in kinds:
            raise TritonModelException(
                f"{operation} is not for a metric of kind {self._family.kind}"
            )

    def _tell(self, operation: str, value: float, more: Mapping[str, Any] | None = None) -> None:
        connected().tell({"do": operation, **self._key, "value": value, **(more or {})})


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
    _record: _Record | None = None

    def __init__(self, name: str, description: str, kind: str) -> None:
        """Raises `TypeError`, and `TritonModelException` for a name that cannot be.

        That is also raised, while the model executes, for a name that is another kind's already;
        before, the server logs that and shows no such metrics.
        """
        name, description = text("name", name), text("description", description)
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise wrong("kind", "MetricFamily.COUNTER, GAUGE or HISTOGRAM", kind)
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            raise TritonModelException(
                f"'{name}' cannot be the name of a model's metric: expected letters, digits and _,"
                f" and none of {', '.join(_RESERVED)} in front"
            )
        connected().register({"family": name, "kind": kind, "description": description})
        self._record = _Record(name, kind)

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The metric with these labels; a histogram needs `buckets`, ascending upper bounds.

        Raises `TypeError`, and `TritonModelException` for labels or buckets that cannot be.
        """
        assert self._record is not None
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException(f"labels must be a dict, got {type(labels).__name__}")
        for name in labels or {}:
            if not _LABEL.fullmatch(str(name)):
                raise TritonModelException(f"'{name}' cannot be the name of a label")
        if (self._record.kind == self.HISTOGRAM) != (buckets is not None):
            raise TritonModelException(
                f"a histogram needs buckets, and nothing else has any; got {buckets} for a"
                f" {self._record.kind}"
            )
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException(f"buckets must be a list, got {type(buckets).__name__}")
        bounds = [real("buckets", bound) for bound in buckets or ()]
        if bounds and bounds[-1] == inf:
            bounds.pop()  # there is always a bucket for the rest
        if any(not low < high for low, high in pairwise([-inf, *bounds, inf])):
            raise TritonModelException(f"buckets are finite, ascending bounds, got {buckets}")
        return Metric(self._record, labels or {}, bounds)

    def __del__(self) -> None:
        record = self._record
        if record is None or record.process != os.getpid():
            return
        record.deleted = True
        with suppress(OSError, TritonModelException):  # the server has gone, or the worker ends
            connected().tell({"do": "delete", "family": record.name})
