"""The router of requests that name no version, for a model with rules for them.

To a door the router is a version like any other; which one a request goes to is decided when it is
submitted. Requests are read by the signature of one version, the baseline if it is ready; those of
which the signature differs get nothing (`headrace.plugins.traffic.decisions`). Versions come and
go: the table of those that take part is made anew when one of them is not ready any more, which is
looked at for each request, and when others may be found, which the engine tells.

Copies of requests go to a shadow, whose answers nobody sees. A copy must not cost the request that
it is made of anything: it is submitted a moment later, in a turn of the event loop of its own, and
dropped where too many are under way already, or where the server has much to do. It looks at the
same tensors, which it cannot write to, and leaves clients' shared memory alone.

Owned by the event-loop thread.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns

from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError, is_fault
from headrace.core.signature import Signature
from headrace.core.tensors import Tensor
from headrace.core.texts import HEADER_PARAMETER
from headrace.engine.admission import Admission
from headrace.engine.model import ModelVersion
from headrace.observability.statistics import Histogram
from headrace.observability.trace_settings import TRACE_PARAMETER
from headrace.plugins.traffic.decisions import (
    GOLDEN,
    SILVER,
    Arrangement,
    Sequence64,
    Split,
    arrange,
    bound,
)
from headrace.plugins.traffic.rules import Shadow, TrafficRules

log = logging.getLogger(__name__)

_SEQUENCE = "sequence_id"  # which is not among the parameters
# Seconds until copies are submitted: until then the answers are written that came at once, and the
# copies of what arrives meanwhile run together.
_DELAY_SECS = 0.002
_MOST_BYTES = 64 << 20  # of the copies of a model under way
_BUSY = 2  # the part of its limits that the server must have free


@dataclass(slots=True)
class VersionLedger:
    """Counters of the requests that traffic rules have sent to one version.

    `routed` requests that it took, `refused` those that it did not because nothing can execute
    them, which no other counter has. `rollbacks` is how often it has lost its traffic for being
    bad.
    """

    routed: int = 0
    refused: int = 0
    rollbacks: int = 0


@dataclass(slots=True)
class ShadowLedger:
    """Counters of the shadow requests for one version; `durations` of those that succeeded."""

    success: int = 0
    failure: int = 0
    dropped: int = 0
    durations: Histogram = field(default_factory=Histogram)


class Ledgers:
    """The counters of a model's versions, whatever its rules are; made when first asked for."""

    def __init__(self) -> None:
        self.versions: dict[int, VersionLedger] = defaultdict(VersionLedger)
        self.shadows: dict[int, ShadowLedger] = defaultdict(ShadowLedger)


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
    """Makes the copies for one version and counts what becomes of them.

    Invariant: `_under_way` has every copy that is made and not done with; `_nbytes` are theirs.
    """

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


class VersionRouter:
    """Chooses among the versions of one model. `refresh` comes before anything else."""

    direct = None

    name = ""  # the version, which differs from one request to the next

    def __init__(
        self,
        model: str,
        rules: TrafficRules,
        versions: Mapping[int, ModelVersion],
        ledgers: Ledgers,
        admission: Admission,
    ) -> None:
        """`versions` are all that the model has, as they come and go."""
        self.model = model
        self.arrangement: Arrangement | None = None
        self._rules = rules
        self._versions = versions
        self._ledgers = ledgers
        self._admission = admission
        self._points = Sequence64(GOLDEN)
        self._sticky = rules.sticky
        self._routes: dict[int, tuple[ModelVersion, VersionLedger]] = {}
        self._watched: list[ModelVersion] = []
        self._shadow: ShadowCopies | None = None

    @property
    def ready(self) -> bool:
        """True if all are ready that requests are sent to, so that nothing has to be decided."""
        for version in self._watched:  # noqa: SIM110 - for each request
            if not version.ready:
                return False
        return True

    @property
    def obstacle(self) -> str:
        """Why none that requests are sent to executes them; "" if any does."""
        found = [version.obstacle for version, _ in self._routes.values()]
        return "; ".join(dict.fromkeys(found)) or "no version is ready" if all(found) else ""

    @property
    def decoupled(self) -> bool:
        """True if a request may be answered more than once."""
        return self._reference.decoupled

    @property
    def signature(self) -> Signature:
        """The inputs and outputs that requests have, and the parameters that any version reads."""
        return self._signature

    def waits_for(self, version: object) -> bool:
        """True if a request may have to wait until this version has done what it does."""
        return any(route.waits_for(version) for route, _ in self._routes.values())

    def refresh(self) -> bool:
        """Take the versions as they are now; whether any is ready."""
        ready = {n: v.signature for n, v in self._versions.items() if v.ready}
        arrangement = arrange(self._rules, ready)
        self._tell(self.arrangement, arrangement)
        self.arrangement = arrangement
        if arrangement is None:
            self._routes, self._watched = {}, []
            self._copy_for(0)
            return False
        self._split = Split(self.model, arrangement.weights)
        self._reference = self._versions[arrangement.reference]
        self._routes = {
            number: (self._versions[number], self._ledgers.versions[number])
            for number in arrangement.weights
        }
        self._signature = replace(
            ready[arrangement.reference],
            parameters=self._read([ready[number] for number in self._routes]),
        )
        self._copy_for(arrangement.shadow)
        self._watched = [version for version, _ in self._routes.values()]
        if self._shadow is not None:
            self._watched.append(self._shadow.version)
        return True

    @property
    def shares(self) -> Mapping[int, float]:
        """The share of the requests that each version gets."""
        return self._split.shares if self._routes else {}

    def submit(self, call: Call) -> None:
        """Submit a call to one of the versions; raises `ServerError`."""
        key = self._key(call) if self._sticky is not None else ""
        number = self._split.of(key) if key else self._split.at(self._points.next())
        version, ledger = self._routes[number]
        call.pass_routed(version)
        try:
            version.submit(call)
        except ServerError as error:
            ledger.refused += is_fault(error)
            raise
        ledger.routed += 1
        if self._shadow is not None:
            self._shadow.copy(call)

    def close(self) -> None:
        """Copy nothing any more."""
        self._copy_for(0)

    def _read(self, signatures: Sequence[Signature]) -> frozenset[str] | None:
        """The names of parameters that a version reads or that decide on one; None if any may."""
        names = {self._sticky.parameter} if self._sticky is not None else set()
        for signature in signatures:
            if signature.parameters is None:
                return None
            names |= signature.parameters
        return frozenset(names - {""})

    def _tell(self, before: Arrangement | None, now: Arrangement | None) -> None:
        """Log what does not go as the rules say, when it begins."""
        if now is None:
            return
        for number, why in now.reasons.items():
            if before is None or before.reasons.get(number) != why:
                log.warning(
                    "traffic of model %s: version %d gets nothing: it %s", self.model, number, why,
                    extra={"model": self.model, "version": str(number)},
                )  # fmt: skip
        if now.fallback and not (before and before.weights == now.weights):
            log.warning(
                "traffic of model %s: no version of its split is ready; all requests go to version"
                " %d", self.model, now.reference, extra={"model": self.model},
            )  # fmt: skip

    def _copy_for(self, number: int) -> None:
        """Copy requests for a version from now on, 0 for none."""
        old, rule = self._shadow, self._rules.shadow
        if old is not None:
            if number and self._versions[number] is old.version:
                return
            old.close()
            self._shadow = None
        if number and rule is not None:
            self._shadow = ShadowCopies(
                self._versions[number], rule, self._ledgers.shadows[number], self._admission
            )

    def _key(self, request: Call) -> str:
        """The key of a request: those with the same one get the same version; "" for none."""
        assert self._sticky is not None
        name = self._sticky.parameter
        if name:
            if name == _SEQUENCE:
                return str(request.sequence_id or "")
            found = request.parameters.get(name)
            return "" if found is None else str(found)
        name = self._sticky.header
        sent = request.parameters.pop(HEADER_PARAMETER + name, None)
        if sent is not None:
            return str(sent)
        return request.header(name)
