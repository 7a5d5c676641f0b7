"""Answers on their way to the sinks of their requests: at once, or in the order of the requests.

Owned by the event-loop thread. Whatever is wrong with one answer, the others go out.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.requests import Call, InferResponse
from headrace.core.shares import ModelLoad
from headrace.scheduling.batch import NoResponse

log = logging.getLogger(__name__)


class Delivery:
    """Calls the sinks of requests that have ended; `ordered` ones wait for all before them.

    `load` counts the calls until their `release`.
    """

    def __init__(self, ordered: bool, load: ModelLoad) -> None:
        self._load = load
        self._ordered = ordered
        self._order: deque[Call] = deque()  # what has not been answered

    def expect(self, call: Call) -> None:
        """A call has been accepted whose answer keeps the order."""
        self._order.append(call)

    def release(self, ended: Sequence[Call]) -> None:
        """Answer ended calls, or let them wait for all that came earlier."""
        load = self._load
        load.requests -= len(ended)
        for call in ended:
            load.bytes -= call.nbytes
        if self._ordered:
            order, ended = self._order, []
            while order and order[0].ended:
                ended.append(order.popleft())
        for call in ended:
            outcome, call.outcome = call.outcome, None  # which is None if it was cancelled
            sink = call.sink
            del call.sink  # it mostly holds the call: tensors must not wait for the collector
            try:
                if isinstance(outcome, InferResponse):
                    sink.respond(outcome, True)
                elif isinstance(outcome, NoResponse):
                    sink.finish()
                elif isinstance(outcome, ServerError):
                    sink.fail(outcome)
            except Exception:  # whatever is wrong with one answer, others of its batch must go out
                log.exception("bug while answering a request")
                with suppress(Exception):
                    sink.fail(ExecutionFailed("internal error"))


def give(call: Call, response: InferResponse) -> None:
    """Give a call a response that is not its last one."""
    try:
        call.sink.respond(response, False)
    except Exception:
        log.exception("bug while answering a request")
