"""Copies of requests for a version whose answers nobody sees.

A copy must not cost the request that it is made of anything: it is submitted a moment later, in a
turn of the event loop of its own, and dropped where too many are under way already, or where the
server has much to do. It looks at the same tensors, which it cannot write to, and leaves clients'
shared memory alone. Owned by the event-loop thread.

Invariant: `_under_way` has every copy that is made and not done with; `_nbytes` are theirs.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic_ns

from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.version import ModelVersion
from headrace.observability.statistics import ShadowLedger
from headrace.observability.traces import TRACE_PARAMETER
from headrace.scheduling.split import SILVER, Sequence64, bound
from headrace.scheduling.traffic_rules import Shadow

# Seconds until copies are submitted: until then the answers are written that came at once, and the
# copies of what arrives meanwhile run together.
_DELAY_SECS = 0.002
_MOST_BYTES = 64 << 20  # of the copies of a model under way
_BUSY = 2  # the part of its limits that the server must have free


class _Copy(Call):
    """One copy."""

    __slots__ = ("begun", "copies")

    copies: "ShadowCopies"
    begun: int

    def respond(self, response: InferResponse, final: bool) -> None:
        """Drop a response."""
        if final:
            self.finish()

    def finish(self) -> None:
        """Count the copy."""
        ledger = self.copies.ledger
        ledger.success += 1
        ledger.durations.observe(monotonic_ns() - self.begun)
        self.copies.forget(self)

    def fail(self, error: ServerError) -> None:
        """Count the copy."""
        self.copies.ledger.failure += 1
        self.copies.forget(self)


class ShadowCopies:
    """Makes the copies for one version and counts what becomes of them."""

    def __init__(
        self, version: ModelVersion, rule: Shadow, ledger: ShadowLedger, admission: Admission
    ) -> None:
        self.version = version
        self.ledger = ledger
        self._rule = rule
        self._admission = admission
        self._points = Sequence64(SILVER)
        self._bound = bound(rule.share)
        levels: int = version.config.dynamic_batching.priority_levels
        self._priority = levels  # the lowest; 0 where there are none
        self._waiting: list[_Copy] = []
        self._under_way: dict[_Copy, int] = {}
        self._nbytes = 0
        admission.watch_close(self.close)

    def copy(self, request: Call) -> None:
        """Make a copy of a request that was submitted just now, or do not."""
        if self._points.next() >= self._bound:
            return
        tensors = list(request.inputs.values())
        nbytes = max(request.nbytes, sum([tensor.array.nbytes for tensor in tensors]))
        # A placeholder's data are in shared memory, and have still to be fetched.
        if self._no_room(nbytes) or any(tensor.array.dtype.itemsize == 0 for tensor in tensors):
            self.ledger.dropped += 1
            return
        copy = self._copied(request)
        self._under_way[copy] = nbytes
        self._nbytes += nbytes
        if not self._waiting:
            asyncio.get_running_loop().call_later(_DELAY_SECS, self._submit)
        self._waiting.append(copy)

    def forget(self, copy: _Copy) -> None:
        """A copy is done with."""
        self._nbytes -= self._under_way.pop(copy, 0)

    def close(self) -> None:
        """Make no more, and have what is under way end."""
        self._admission.unwatch_close(self.close)
        for copy in list(self._under_way):
            self.ledger.dropped += 1
            self.forget(copy)
            copy.cancel()
        self._waiting.clear()

    def _submit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for copy in waiting:
            copy.begun = monotonic_ns()
            try:
                self.version.submit(copy)
            except ServerError as error:
                copy.fail(error)

    def _no_room(self, nbytes: int) -> bool:
        admission = self._admission
        return (
            admission.exiting
            or len(self._under_way) >= self._rule.max_pending
            or self._nbytes + nbytes > _MOST_BYTES
            or _tight(admission.requests, admission.max_requests)
            or _tight(admission.bytes, admission.max_bytes)
        )

    def _copied(self, request: Call) -> _Copy:
        copy = _Copy(
            request.model_name,
            self.version.name,
            request.id,
            _read_only(request.inputs.values()),
            request.outputs,
            {n: value for n, value in request.parameters.items() if n != TRACE_PARAMETER},
            self._priority,
            sequence_id=request.sequence_id,
            sequence_start=request.sequence_start,
            sequence_end=request.sequence_end,
            nbytes=request.nbytes,
        )
        copy.copies, copy.begun = self, 0
        return copy


def _tight(now: int, most: int) -> bool:
    return bool(most) and now > most // _BUSY


def _read_only(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for tensor in tensors:
        array = tensor.array
        if not isinstance(array, BytesArray):  # which cannot be written anyway
            array = array.view()
            array.flags.writeable = False
        result[tensor.name] = Tensor(tensor.name, tensor.datatype, array)
    return result
