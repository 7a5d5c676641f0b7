"""Requests that go on to a server as they came, and what comes back, for the scheduler."""

from headrace.core.errors import Relayed, ServerError
from headrace.core.requests import OpaqueRequest, OpaqueResponse, Timing
from headrace.execution.remote.connection import PassedAnswer, PassedRequest
from headrace.execution.remote.errand import Lost
from headrace.execution.remote.forwarded import Forwarding
from headrace.scheduling.batch import Batch, Pending, Whole

_UNTIMED = Timing(0, 0, 1)  # until the scheduler says
_DENIED = frozenset({7, 16, 401, 403})  # as gRPC or HTTP says it
_AUTHORIZATION = "authorization"


def passed_request(
    request: OpaqueRequest, forwarding: Forwarding, batch: Batch, now: int
) -> PassedRequest:
    """The call for the one request of a batch; `now` is of the monotonic clock, in ns."""
    forwarded = forwarding.of(batch.pendings, now)
    return PassedRequest(request, forwarded.headers, forwarded.deadline, forwarded.trace)


def whole_answer(pending: Pending, answer: PassedAnswer) -> Whole:
    """What a request gets that has gone on as it came."""
    return Whole({}, {}, _response(pending, answer))


def relayed(pending: Pending, lost: Lost) -> ServerError | None:
    """The error of a server, as it came; None if the request is to be told something else.

    That is so where it has not answered, and where it is this server's credentials that it does not
    accept.
    """
    told, failure = lost.told, lost.failure
    if told is None:
        return None
    own = not any(name.endswith(_AUTHORIZATION) for name in pending.request.parameters)
    if told.status in _DENIED and own:
        return None
    return Relayed(str(failure.error), _response(pending, told), failure.error)


def _response(pending: Pending, answer: PassedAnswer) -> OpaqueResponse:
    request = pending.request
    return OpaqueResponse(
        request.model_name, "", request.id, [], _UNTIMED,
        body=answer.body, status=answer.status, headers=answer.headers,
    )  # fmt: skip
