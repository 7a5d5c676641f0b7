"""The stages that a call passes before the queue of its version; see `ModelVersion.compose`.

Here are those that keep nothing of a call. Owned by the event-loop thread.
"""

from collections.abc import Sequence
from time import monotonic_ns

from headrace.core.errors import InvalidRequest
from headrace.core.parameter_names import DEADLINE_PARAMETER, FORWARD_PARAMETER
from headrace.core.requests import Call, Sink, Ticket
from headrace.core.signature import Signature
from headrace.engine.doors import Enqueue, Submit
from headrace.engine.special_requests import with_id


def check(signature: Signature, enqueue: Enqueue, ask_more: Submit) -> Submit:
    """The stage that checks requests, before `enqueue`.

    Those of which more is asked than what a model does go to `ask_more`, unchecked.
    """

    def stage(request: Call, sink: Sink) -> Ticket:
        if request.classes is not None:
            return ask_more(request, sink)
        try:
            rows = signature.check(request)
        except InvalidRequest as error:
            raise with_id(request, error) from None
        return enqueue(request, sink, rows)

    return stage


def tell_servers(headers: Sequence[str], enqueue: Enqueue) -> Enqueue:
    """The stage for a model that other servers run: what they are told of a request's client.

    Its headers of these names, in lower case, and until when it waits become part of the request.
    """
    names = [(name, FORWARD_PARAMETER + name) for name in headers]

    def stage(request: Call, sink: Sink, rows: int) -> Ticket:
        for name, parameter in names:
            # A front end has put them in already.
            if parameter not in request.parameters and (value := sink.header(name)):
                request.parameters[parameter] = value
        if seconds := sink.remaining():
            request.parameters[DEADLINE_PARAMETER] = monotonic_ns() + int(seconds * 1e9)
        return enqueue(request, sink, rows)

    return stage
