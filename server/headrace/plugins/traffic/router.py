"""Router of requests without a version, for a model with traffic rules.

To a door the router is a version like any other; the version is chosen at submission. Requests are
decoded by the signature of one version, the baseline if it is ready; versions with a different
signature get nothing (`headrace.plugins.traffic.decisions`). The table of participating versions is
rebuilt when one of them is no longer ready, which is checked on each request, and on the engine's
notification of changes.

A shadow gets copies of requests, whose answers are discarded. A copy must not cost the original
anything: it is submitted later, in a separate turn of the event loop, and dropped if too many are
in flight, or the server is busy. It shares the original's tensors, read-only, and leaves clients'
shared memory alone.

Owned by the event-loop thread.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import NamedTuple

from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call, CallOptions, InferResponse
from headrace.core.errors import ServerError, is_fault
from headrace.core.signature import Signature
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.version import ModelVersion
from headrace.engine.version_chain import VersionChain
from headrace.observability.statistics import Histogram
from headrace.plugins.traffic.decisions import (
    GOLDEN,
    SILVER,
    Arrangement,
    Sequence64,
    Split,
    arrange,
    bound,
    point_of,
)
from headrace.plugins.traffic.rules import Shadow, TrafficRules

log = logging.getLogger(__name__)

_SEQUENCE = "sequence_id"  # reserved, so not among the parameters
# Seconds until copies are submitted: in the meantime immediate answers are written, and copies of
# further requests gather to a batch.
_DELAY_SECS = 0.002
_MOST_BYTES = 64 << 20  # bytes of a model's copies in flight
_MOST_TORN = 32_768  # remembered sequences of which a copy was dropped
_BUSY = 2  # the server must have half of its limits free


@dataclass(slots=True)
class VersionLedger:
    """Counters of requests that traffic rules have sent to one version.

    `routed` requests were accepted, `refused` ones were not, because nothing can execute them; no
    other counter has these. `rollbacks` counts automatic roll-backs.
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
    """The counters of a model's versions, whatever its rules are; created on first use."""

    def __init__(self) -> None:
        self.versions: dict[int, VersionLedger] = defaultdict(VersionLedger)
        self.shadows: dict[int, ShadowLedger] = defaultdict(ShadowLedger)


class _Copy(Call):
    """A shadow request."""

    __slots__ = ("begun", "copies")

    copies: "ShadowCopies"
    begun: int

    def respond(self, response: InferResponse, final: bool) -> None:
        """Discard a response."""
        if final:
            self.finish()

    def finish(self) -> None:
        """Count the end of the copy."""
        ledger = self.copies.ledger
        ledger.success += 1
        ledger.durations.observe(monotonic_ns() - self.begun)
        self.copies.forget(self)

    def fail(self, error: ServerError) -> None:
        """Count the failure of the copy."""
        self.copies.ledger.failure += 1
        self.copies.forget(self)


class ShadowedRequest(NamedTuple):
    """Parts of a request as its client has sent it: the stages of a sequence add to them."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    options: CallOptions


class ShadowCopies:
    """Creates the copies for one version and counts their outcomes.

    Invariant: `_under_way` has every unfinished copy; `_nbytes` is their total size.
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
        self._priority = levels  # the lowest level; 0 without levels
        self._waiting: list[_Copy] = []
        self._under_way: dict[_Copy, int] = {}
        self._nbytes = 0
        self._torn: set[int | str] = set()  # sequences of which a copy was dropped
        admission.watch_close(self.close)

    def copy(self, request: Call, asked: ShadowedRequest) -> None:
        """Copy a request that was just submitted as `asked`, unless too busy.

        All requests of a sequence are copied, or none, or those before the first that is dropped: a
        state that lacks one would make all answers behind it wrong.
        """
        id = asked.options.sequence_id
        key = f"shadow\0{id}".encode(errors="replace")
        if (point_of(key) if id else self._points.next()) >= self._bound:
            return
        if asked.options.sequence_start:
            self._torn.discard(id)
        tensors = list(asked.inputs.values())
        nbytes = max(request.nbytes, sum([tensor.array.nbytes for tensor in tensors]))
        # The data of a placeholder is in shared memory, and was not fetched yet.
        if (
            id in self._torn
            or self._no_room(nbytes)
            or any(tensor.array.dtype.itemsize == 0 for tensor in tensors)
        ):
            self.ledger.dropped += 1
            if id:
                self._tear(id, asked.options.sequence_end)
            return
        copy = self._copied(request, asked)
        self._under_way[copy] = nbytes
        self._nbytes += nbytes
        if not self._waiting:
            asyncio.get_running_loop().call_later(_DELAY_SECS, self._submit)
        self._waiting.append(copy)

    def _tear(self, id: int | str, ends: bool) -> None:
        """Copy no further requests of a sequence, until one with its id begins."""
        self._torn.add(id)
        if ends or len(self._torn) > _MOST_TORN:
            self._torn.remove(id)

    def forget(self, copy: _Copy) -> None:
        """Remove a finished copy."""
        self._nbytes -= self._under_way.pop(copy, 0)

    def close(self) -> None:
        """Make no more copies, and cancel those in flight."""
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
                self.version.chain.submit(copy)
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

    def _copied(self, request: Call, asked: ShadowedRequest) -> _Copy:
        copy = _Copy(
            request.model_name,
            self.version.name,
            request.id,
            _read_only(asked.inputs.values()),
            asked.outputs,
            dict(request.parameters),
            asked.options._replace(
                priority=self._priority, timeout=0, classes=None, shared=None, raw=None
            ),
            request.nbytes,
        )
        copy.copies, copy.begun = self, 0
        return copy


def _tight(now: int, most: int) -> bool:
    return bool(most) and now > most // _BUSY


def _read_only(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for tensor in tensors:
        array = tensor.array
        if not isinstance(array, BytesArray):  # a BytesArray is immutable anyway
            array = array.view()
            array.flags.writeable = False
        result[tensor.name] = Tensor(tensor.name, tensor.datatype, array)
    return result


class VersionRouter:
    """Chooses among the versions of one model. Call `refresh` first."""

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
        """`versions` are all versions of the model, updated by the caller."""
        self.model = model
        self.arrangement: Arrangement | None = None
        self._rules = rules
        self._versions = versions
        self._ledgers = ledgers
        self._admission = admission
        self._points = Sequence64(GOLDEN)
        self._sticky = rules.sticky
        self._routes: dict[int, tuple[VersionChain, VersionLedger]] = {}
        self._watched: list[VersionChain] = []
        self._shadow: ShadowCopies | None = None

    @property
    def ready(self) -> bool:
        """True if all versions that get requests are ready, so that the table is valid."""
        for chain in self._watched:  # noqa: SIM110 - for each request
            if not chain.ready:
                return False
        return True

    @property
    def obstacle(self) -> str:
        """The reason why no version that gets requests executes them; "" if any does."""
        found = [chain.obstacle for chain, _ in self._routes.values()]
        return "; ".join(dict.fromkeys(found)) or "no version is ready" if all(found) else ""

    @property
    def decoupled(self) -> bool:
        """True if a request may get more than one response."""
        return self._reference.decoupled

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of requests, and the parameters read by any version."""
        return self._signature

    def waits_for(self, target: object) -> bool:
        """True if a request may have to wait for those of `target`, a version, to finish."""
        return any(chain.waits_for(target) for chain, _ in self._routes.values())

    def refresh(self) -> bool:
        """Rebuild the table from the current versions; False if none is ready."""
        ready = {n: v.chain.signature for n, v in self._versions.items() if v.ready}
        arrangement = arrange(self._rules, ready)
        self._tell(self.arrangement, arrangement)
        self.arrangement = arrangement
        if arrangement is None:
            self._routes, self._watched = {}, []
            self._copy_for(0)
            return False
        self._split = Split(self.model, arrangement.weights)
        self._reference = self._versions[arrangement.reference].chain
        self._routes = {
            number: (self._versions[number].chain, self._ledgers.versions[number])
            for number in arrangement.weights
        }
        self._signature = replace(
            ready[arrangement.reference],
            parameters=self._read([ready[number] for number in self._routes]),
        )
        self._copy_for(arrangement.shadow)
        self._watched = [chain for chain, _ in self._routes.values()]
        if self._shadow is not None:
            self._watched.append(self._shadow.version.chain)
        return True

    @property
    def shares(self) -> Mapping[int, float]:
        """The share of requests for each version."""
        return self._split.shares if self._routes else {}

    def submit(self, call: Call) -> None:
        """Submit a call to one of the versions; raises `ServerError`."""
        key = self._key(call) if self._sticky is not None else ""
        if not key and (id := call.options.sequence_id):  # its state is with one version
            key = str(id)
        number = self._split.of(key) if key else self._split.at(self._points.next())
        chain, ledger = self._routes[number]
        call.pass_routed(chain)
        asked = None
        if self._shadow is not None:
            asked = ShadowedRequest(call.inputs, call.outputs, call.options)
        try:
            chain.submit(call)
        except ServerError as error:
            ledger.refused += is_fault(error, begun=False)
            raise
        ledger.routed += 1
        if asked is not None and self._shadow is not None:
            self._shadow.copy(call, asked)

    def close(self) -> None:
        """Make no more copies."""
        self._copy_for(0)

    def _read(self, signatures: Sequence[Signature]) -> frozenset[str] | None:
        """The names of parameters that versions or rules read; None if any may be read."""
        names = {self._sticky.parameter} if self._sticky is not None else set()
        for signature in signatures:
            if signature.parameters is None:
                return None
            names |= signature.parameters
        return frozenset(names - {""})

    def _tell(self, before: Arrangement | None, now: Arrangement | None) -> None:
        """Log new deviations from the rules."""
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
        """Copy requests for a version from now on; 0 for none."""
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
        """The key of a request: equal keys get the same version; "" for none."""
        assert self._sticky is not None
        name = self._sticky.parameter
        if name:
            if name == _SEQUENCE:
                return str(request.options.sequence_id or "")
            found = request.parameters.get(name)
            return "" if found is None else str(found)
        return request.header(self._sticky.header)
