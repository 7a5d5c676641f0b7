"""Requests of which more is asked than what a model does: classes, and tensors in shared memory;
and those that go on as they came.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from headrace.core.errors import InvalidRequest, ModelNotReady, ServerError
from headrace.core.requests import (
    InferRequest,
    InferResponse,
    OpaqueRequest,
    Passes,
    SharedRequest,
    Sink,
    Ticket,
    name_backend,
)
from headrace.core.signature import Signature
from headrace.engine.doors import DoorSink
from headrace.engine.regions import Regions
from headrace.engine.shared_calls import Queue, SharedCall
from headrace.wire.classification import classify_outputs

Submit = Callable[[InferRequest, Sink, int], Ticket]


class _ClassifyingSink:
    """Turns outputs into their highest classes on their way to `sink`."""

    __slots__ = ("_batches", "_classes", "_labels", "_sink")

    def __init__(
        self,
        sink: Sink,
        classes: Mapping[str, int],
        labels: Mapping[str, Sequence[str]],
        batches: bool,
    ) -> None:
        self._sink = sink
        self._classes = classes
        self._labels = labels
        self._batches = batches

    def respond(self, response: InferResponse, final: bool) -> None:
        try:
            classify_outputs(response, self._classes, self._labels, self._batches)
        except ServerError as error:
            self._sink.fail(error)
            return
        self._sink.respond(response, final)

    def answered_by(self, backend: str) -> None:
        name_backend(self._sink, backend)

    def finish(self) -> None:
        self._sink.finish()

    def fail(self, error: ServerError) -> None:
        self._sink.fail(error)

    def __getattr__(self, name: str) -> Any:
        """What else the sink of a door has."""
        return getattr(self._sink, name)


class SpecialRequests:
    """Takes such requests for one version: those whose `classes` are not None."""

    def __init__(
        self,
        signature: Signature,
        labels: Mapping[str, Sequence[str]],
        regions: Regions,
        queue: Queue,
        submit: Submit,
        passes: Passes = Passes.NONE,
    ) -> None:
        """`submit` queues a request that has been checked, with its rows."""
        self._passes = passes
        self._signature = signature
        self._labels = labels
        self._regions = regions
        self._queue = queue
        self._submit = submit

    def submit(self, request: InferRequest, sink: Sink) -> Ticket:
        """Check and queue a request; raises `ServerError`."""
        if isinstance(request, OpaqueRequest):
            if not self._passes:  # it was another one when the request was taken
                raise ModelNotReady(
                    f"model '{request.model_name}' has been replaced meanwhile; send the request"
                    " again"
                )
            return self._submit(request, sink, 1)
        call: SharedCall | None = None
        if isinstance(request, SharedRequest):
            # It came by a door: models do not know of clients' shared memory.
            sink = call = SharedCall(request, cast(DoorSink, sink), self._regions)
            request.inputs |= call.placeholders()
        if request.classes:
            batches = self._signature.batches
            sink = _ClassifyingSink(sink, request.classes, self._labels, batches)
        try:
            rows = self._signature.check(request)
        except InvalidRequest as error:
            raise with_id(request, error) from None
        if call is None:
            return self._submit(request, sink, rows)
        call.begin(self._queue, lambda: self._submit(request, sink, rows))
        return call


def with_id(request: InferRequest, error: InvalidRequest) -> InvalidRequest:
    """An error of the check against a signature, with the request's id in front."""
    return InvalidRequest(f"[request id: {request.id or '<id_unknown>'}] {error}")
