"""Requests of which more is asked than what a model does: classes, and tensors in shared memory."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headrace.core.errors import ExecutionFailed, InvalidRequest, ServerError
from headrace.core.requests import Call, InferResponse, SharedRequest, Sink, StageSink, Ticket
from headrace.core.signature import Signature
from headrace.engine.doors import Enqueue, Submit
from headrace.engine.regions import Regions
from headrace.engine.shared_calls import Queue, SharedCall
from headrace.engine.workbench import Job, Workbench
from headrace.wire.classification import classify_outputs
from headrace.wire.elements import uncharged
from headrace.wire.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

_AT_ONCE = 16 << 10  # bytes to look for classes in, each of which becomes a text at worst


class _Classifying(StageSink):
    """Turns outputs into their highest classes on their way to `sink`, and is the ticket.

    What takes long is done on the workbench; what comes meanwhile waits behind it.
    """

    __slots__ = (
        "_batches", "_behind", "_bench", "_classes", "_job", "_labels", "_over", "_sink", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        sink: Sink,
        classes: Mapping[str, int],
        labels: Mapping[str, Sequence[str]],
        batches: bool,
        bench: Workbench,
    ) -> None:
        self.ticket: Ticket | None = None  # of the request itself
        super().__init__(sink)
        self._classes = classes
        self._labels = labels
        self._batches = batches
        self._bench = bench
        self._job: Job[None] | None = None
        self._behind: deque[Callable[[], None]] = deque()
        self._over = False

    def respond(self, response: InferResponse, final: bool) -> None:
        if self._job is not None:
            self._behind.append(partial(self.respond, response, final))
            return
        size = sum(t.array.nbytes for t in response.outputs if t.name in self._classes)
        if size > _AT_ONCE:
            self._job = self._bench.do(
                size, lambda charge: self._classify(response),
                partial(self._classified, response, final), uncharged,
            )  # fmt: skip
            return
        try:
            self._classify(response)
        except ServerError as error:
            self._sink.fail(error)
            return
        self._sink.respond(response, final)

    def finish(self) -> None:
        if self._job is not None:
            self._behind.append(self.finish)
        else:
            self._sink.finish()

    def fail(self, error: ServerError) -> None:
        if self._job is not None:
            self._behind.append(partial(self.fail, error))
        else:
            self._sink.fail(error)

    def cancel(self) -> None:
        self._over = True
        self._behind.clear()
        if self._job is not None:
            self._job.cancel()
        if self.ticket is not None:
            self.ticket.cancel()

    def hold(self, held: bool) -> None:
        if self.ticket is not None:
            self.ticket.hold(held)

    def _classify(self, response: InferResponse) -> None:
        classify_outputs(response, self._classes, self._labels, self._batches)

    def _classified(
        self, response: InferResponse, final: bool, _: None, problem: Exception | None
    ) -> None:
        """Hand on what was classified on the workbench, and what has come since."""
        self._job = None
        if isinstance(problem, ServerError):
            self._sink.fail(problem)
        elif problem is not None:
            log.error("bug in a classification", exc_info=problem)
            self._sink.fail(ExecutionFailed(INTERNAL_TEXT))
        else:
            self._sink.respond(response, final)
        self._go_on()

    def _go_on(self) -> None:
        while self._behind and self._job is None and not self._over:
            self._behind.popleft()()


def ask_more(
    signature: Signature,
    labels: Mapping[str, Sequence[str]],
    regions: Regions,
    queue: Queue,
    enqueue: Enqueue,
) -> Submit:
    """The stage of requests with classes, or with tensors in shared memory, before `enqueue`."""
    bench = regions.admission.workbench

    def stage(request: Call, sink: Sink) -> Ticket:
        call: SharedCall | None = None
        classifying: _Classifying | None = None
        if isinstance(request, SharedRequest):
            # It came by a door: models do not know of clients' shared memory.
            sink = call = SharedCall(request, sink, regions)
            request.inputs |= call.placeholders()
        if request.classes:
            sink = classifying = _Classifying(
                sink, request.classes, labels, signature.batches, bench
            )
        try:
            rows = signature.check(request)
        except InvalidRequest as error:
            raise with_id(request, error) from None
        if call is None:
            ticket = enqueue(request, sink, rows)
            if classifying is None:
                return ticket
            classifying.ticket = ticket
            return classifying
        call.begin(queue, lambda: enqueue(request, sink, rows))
        return call

    return stage


def with_id(request: Call, error: InvalidRequest) -> InvalidRequest:
    """An error of the check against a signature, with the request's id in front."""
    return InvalidRequest(f"[request id: {request.id or '<id_unknown>'}] {error}")
