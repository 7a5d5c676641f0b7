"""Requests for a model that other servers run, on their way to the scheduler.

What of a request's client goes on to the servers, and the client's door alone knows, becomes part
of the request here: headers, and until when the client waits. Owned by the event-loop thread.
"""

from collections.abc import Sequence
from time import monotonic_ns

from headrace.core.parameter_names import DEADLINE_PARAMETER, FORWARD_PARAMETER
from headrace.core.requests import Call, Sink, Ticket
from headrace.scheduling.sequences import Submit


class RemoteSubmission:
    """Submits them."""

    def __init__(self, submit: Submit, headers: Sequence[str]) -> None:
        """`submit` is the scheduler's, or that of what stands before it.

        `headers` are the names of those that are forwarded, in lower case.
        """
        self._submit = submit
        self._headers = [(name, FORWARD_PARAMETER + name) for name in headers]

    def submit(self, request: Call, sink: Sink, rows: int) -> Ticket:
        """See `Batcher.submit`."""
        for name, parameter in self._headers:
            # A front end has put them in already.
            if parameter not in request.parameters and (value := sink.header(name)):
                request.parameters[parameter] = value
        if seconds := sink.remaining():
            request.parameters[DEADLINE_PARAMETER] = monotonic_ns() + int(seconds * 1e9)
        return self._submit(request, sink, rows)
