"""The stage of calls that want the highest classes of outputs instead of their values."""

from collections.abc import Mapping, Sequence

from headrace.core.call import Call, Done, InferResponse, Stage, Submit
from headrace.engine.workbench import Job, Workbench
from headrace.wire.classification import classify_outputs
from headrace.wire.elements import uncharged

_AT_ONCE = 16 << 10  # bytes to look for classes in, each of which becomes a text at worst


def classify(
    labels: Mapping[str, Sequence[str]], batches: bool, bench: Workbench, submit: Submit
) -> Submit:
    """The stage of calls that may have `classes`, before `submit`."""

    def stage(call: Call) -> None:
        if call.classes:
            call.enter(_Classifying(call.classes, labels, batches, bench), submit)
        else:
            submit(call)

    return stage


class _Classifying(Stage):
    """Turns outputs into their highest classes, on the workbench where that takes long."""

    __slots__ = ("_batches", "_bench", "_classes", "_labels")

    def __init__(
        self,
        classes: Mapping[str, int],
        labels: Mapping[str, Sequence[str]],
        batches: bool,
        bench: Workbench,
    ) -> None:
        self._classes = classes
        self._labels = labels
        self._batches = batches
        self._bench = bench

    def transform(
        self, call: Call, response: InferResponse, final: bool, done: Done
    ) -> Job[None] | None:
        size = sum(t.array.nbytes for t in response.outputs if t.name in self._classes)
        if size > _AT_ONCE:
            return self._bench.do(
                size, lambda charge: self._classify(response),
                lambda _, problem: done(problem), uncharged,
            )  # fmt: skip
        self._classify(response)
        return None

    def _classify(self, response: InferResponse) -> None:
        classify_outputs(response, self._classes, self._labels, self._batches)
