"""Answers on their way to the sinks of their requests: at once, or in the order of the requests.

Owned by the event-loop thread. Whatever is wrong with one answer, the others go out.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.requests import InferResponse
from headrace.core.shares import ModelLoad
from headrace.scheduling.batch import NoResponse, Pending

log = logging.getLogger(__name__)


class Delivery:
    """Calls the sinks of requests that have ended; `ordered` ones wait for all before them.

    `load` counts the requests from `expect` to their `release`.
    """

    def __init__(self, ordered: bool, load: ModelLoad) -> None:
        self._load = load
        self._ordered = ordered
        self._order: deque[Pending] = deque()  # what has not been answered

    def expect(self, pending: Pending) -> None:
        """A request has been accepted."""
        load = self._load
        load.requests += 1
        load.bytes += pending.request.nbytes
        if self._ordered:
            self._order.append(pending)

    def release(self, ended: Sequence[Pending]) -> None:
        """Answer ended requests, or let them wait for all that came earlier."""
        load = self._load
        load.requests -= len(ended)
        for pending in ended:
            load.bytes -= pending.request.nbytes
            if not self._ordered:
                _deliver(pending)
        order = self._order
        while order and order[0].ended:
            _deliver(order.popleft())


def give(pending: Pending, response: InferResponse) -> None:
    """Give a request a response that is not its last one."""
    try:
        pending.sink.respond(response, False)
    except Exception:
        log.exception("bug while answering a request")


def _deliver(pending: Pending) -> None:
    outcome, pending.outcome = pending.outcome, None  # which is None if it was cancelled
    sink = pending.sink
    del pending.sink  # it mostly holds its ticket: tensors must not wait for the cycle collector
    try:
        if isinstance(outcome, InferResponse):
            sink.respond(outcome, True)
        elif isinstance(outcome, NoResponse):
            sink.finish()
        elif isinstance(outcome, ServerError):
            sink.fail(outcome)
    except Exception:  # whatever is wrong with one answer, the others of its batch must go out
        log.exception("bug while answering a request")
        with suppress(Exception):
            sink.fail(ExecutionFailed("internal error"))
