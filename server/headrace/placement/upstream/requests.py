"""Conversion of batches to requests for upstreams, and of responses to outcomes: pure functions."""

from collections.abc import Mapping, Sequence

from headrace.core.call import Call, Parameter
from headrace.core.errors import Cancelled, ExecutionFailed, ServerError
from headrace.core.signature import reshaped
from headrace.core.tensors import TensorArray
from headrace.placement.upstream.attempt import Lost
from headrace.placement.upstream.connection import CallTrace, CallTraces, RemoteRequest
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.status import Fate
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput
from headrace.scheduling.batch import Answer, Batch, NotStarted, Outcome, Part

_LONGEST = (1 << 63) - 1  # transmitted as a signed number


class Forwarding:
    """Forwarded parameters, headers and deadline of a call.

    A call has only one set of them, so requests share a call only if these are equal. Deadlines
    need not be: a call lasts as long as any of its requests waits.
    """

    def __init__(self, options: RemoteOptions) -> None:
        self.traces: CallTraces | None = None
        self._priority = options.forward_priority

    def alike(self, request: Call) -> object:
        """The key that requests of one call share, besides the batch key."""
        priority = request.options.priority if self._priority else 0
        timed = bool(request.options.timeout)
        forwarded = request.context.forwarded
        if not (request.parameters or forwarded):
            return (priority, timed) if priority or timed else None
        items = sorted(
            (name, type(value).__name__, value) for name, value in request.parameters.items()
        )
        return (priority, timed, tuple(items), *forwarded.items())

    def request(
        self, batch: Batch, inputs: Sequence[RemoteInput], more: Mapping[str, Parameter], now: int
    ) -> RemoteRequest:
        """The request for a batch of calls that are alike, with `more` parameters.

        `now` is in ns of the monotonic clock.
        """
        calls, names = batch.calls, batch.names
        first = calls[0]
        id = first.id if len(calls) == 1 else ""
        if not (
            first.options.timeout
            or self._priority
            or any(call.parameters or call.context.told for call in calls)
        ):
            return RemoteRequest(inputs, names, more, id)
        parameters: dict[str, Parameter] = {**first.parameters}
        headers = list(first.context.forwarded.items())
        if self._priority and first.options.priority:
            parameters["priority"] = first.options.priority
        if first.options.timeout:
            # The time in queues is common to all of them.
            left = max(call.options.timeout - (now - call.arrived) // 1000 for call in calls)
            parameters["timeout"] = min(max(left, 1), _LONGEST)
        trace = self._trace(calls)
        if trace is not None:
            headers = [item for item in headers if item[0] not in ("traceparent", "tracestate")]
            headers.append(("traceparent", trace.context.traceparent))
            if trace.context.state:
                headers.append(("tracestate", trace.context.state))
        parameters.update(more)
        deadline, target = _deadline(calls), batch.target
        return RemoteRequest(inputs, names, parameters, id, headers, deadline, trace, target)

    def _trace(self, calls: Sequence[Call]) -> CallTrace | None:
        """The span of the call, part of the first traced request's trace."""
        if self.traces is None:
            return None
        passed: CallTrace | None = None
        for call in calls:
            link = call.context.trace
            found = self.traces.begin_call(link) if link else None
            if found is not None:
                if found.context.sampled:
                    return found
                passed = passed or found
        return passed


def _deadline(calls: Sequence[Call]) -> int:
    """The latest deadline; 0 if any call has none."""
    latest = 0
    for call in calls:
        if not call.context.deadline:
            return 0
        latest = max(latest, call.context.deadline)
    return latest


def inputs_of(batch: Batch) -> list[RemoteInput]:
    """The inputs of a batch's calls, with the rows of each in order."""
    signature, calls = batch.signature, batch.calls
    inputs = []
    for spec in signature.inputs:
        if spec.name not in calls[0].inputs:
            continue  # optional and absent, for all calls due to the batch key
        parts = [call.inputs[spec.name].array for call in calls]
        shape = reshaped(parts[0], spec, signature.batches, to_model=True).shape
        if signature.batches:
            shape = (batch.rows, *shape[1:])
        inputs.append(RemoteInput(spec.name, spec.datatype, shape, parts))
    return inputs


def take_answer(batch: Batch, answer: RemoteAnswer, outcome: Outcome) -> None:
    """Store a response in the outcome of its batch; raises `ExecutionFailed`."""
    model, calls = batch.signature.model, batch.calls
    for spec in batch.outputs:
        if spec.name not in answer.outputs:
            raise ExecutionFailed(
                f"the server of model '{model}' has not given the output '{spec.name}'"
            )
    arrays: list[TensorArray] = [answer.outputs[spec.name] for spec in batch.outputs]
    if not answer.parameters:
        outcome.arrays = arrays
        return
    alone = len(calls) == 1
    if not alone and any(array.shape[:1] != (batch.rows,) for array in arrays):
        raise ExecutionFailed(f"the server of model '{model}' has not given {batch.rows} rows")
    parts: list[Answer] = []
    start = 0
    for call in calls:
        wanted = call.outputs
        own = {
            spec.name: array if alone else array[start : start + call.rows]
            for spec, array in zip(batch.outputs, arrays, strict=True)
            if not wanted or spec.name in wanted
        }
        parts.append(Part(own, dict(answer.parameters)))
        start += call.rows
    outcome.parts = parts


def take_error(batch: Batch, error: Exception, outcome: Outcome) -> None:
    """Store an error in the outcome of its batch, with the consequence for the requests.

    1. Not begun: the batch is given back, with the refusal if there is one. A request may be to
       blame: the batch is run again in halves.
    2. Retrying, even with fewer rows, is pointless: the requests get the error.
    """
    final: ServerError | None = error if isinstance(error, Cancelled) else None
    if isinstance(error, Lost):
        failure = error.failure
        if failure.fate is Fate.REFUSED:
            outcome.error = NotStarted(failure.error)
            return
        error = failure.error
        final = failure.error if failure.fate is not Fate.ANSWERED else None
    elif isinstance(error, ServerError) and batch.signature.decoupled:
        final = error
    if final is None:
        outcome.error = error
    else:
        outcome.parts = [final] * len(batch.calls)
