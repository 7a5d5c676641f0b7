"""A scheduler for instances to which it matters what requests have besides tensors.

A batch is formed as for any model, and is divided then: those that are alike run together, at the
same time as the others where there are instances for them. So requests of two kinds that come in
turns do not keep each other from growing batches.
"""

from collections.abc import Callable
from typing import Any

from headrace.core.call import Call
from headrace.scheduling.batch import Batch
from headrace.scheduling.batcher import Batcher


class DividingBatcher(Batcher):
    """`Batcher` whose batches have only requests of which `alike` gives the same."""

    def __init__(self, *given: Any, alike: Callable[[Call], object], **named: Any) -> None:
        """`alike` gives something that can be a key; the rest is for `Batcher`."""
        super().__init__(*given, **named)
        self._alike = alike

    def _next_batch(self, now: int) -> Batch | None:
        batch = super()._next_batch(now)
        if batch is None or len(batch.calls) == 1:
            return batch
        groups: dict[object, list[Call]] = {}
        for call in batch.calls:
            groups.setdefault(self._alike(call), []).append(call)
        if len(groups) == 1:
            return batch
        first, *others = (Batch(self._signature, calls) for calls in groups.values())
        self._retries.extendleft(reversed(others))  # they have their turn at once
        return first
