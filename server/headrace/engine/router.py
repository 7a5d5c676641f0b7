"""What serves requests for a model that name no version, where the model has rules for them.

To a door it is a version like any other; which one a request goes to is decided when it is
submitted. Requests are read by the signature of one version, the baseline if it is ready; those of
which the signature differs get nothing (`headrace.scheduling.arrangement`).

Versions come and go: the table of those that take part is made anew when one of them is not ready
any more, which is looked at for each request, and when others may be found, which the engine tells.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.core.call import HEADER_PARAMETER, Call
from headrace.core.errors import ServerError
from headrace.core.signature import Signature
from headrace.engine.admission import Admission
from headrace.engine.shadow import ShadowCopies
from headrace.engine.version import ModelVersion
from headrace.observability.statistics import ShadowLedger, VersionLedger
from headrace.scheduling.arrangement import Arrangement, arrange
from headrace.scheduling.rollback import is_fault
from headrace.scheduling.split import GOLDEN, Sequence64, Split
from headrace.scheduling.traffic_rules import TrafficRules

log = logging.getLogger(__name__)

_SEQUENCE = "sequence_id"  # which is not among the parameters


class Ledgers:
    """The counters of a model's versions, whatever its rules are; made when first asked for."""

    def __init__(self) -> None:
        self.versions: dict[int, VersionLedger] = {}
        self.shadows: dict[int, ShadowLedger] = {}

    def version(self, number: int) -> VersionLedger:
        """What was sent to a version."""
        return self.versions.setdefault(number, VersionLedger())

    def shadow(self, number: int) -> ShadowLedger:
        """What was copied for a version."""
        return self.shadows.setdefault(number, ShadowLedger())


class Router:
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
        self._ways: dict[int, tuple[ModelVersion, VersionLedger]] = {}
        self._watched: list[ModelVersion] = []
        self._shadow: ShadowCopies | None = None

    @property
    def ready(self) -> bool:
        """Whether all are ready that requests are sent to, so that nothing has to be decided."""
        for version in self._watched:  # noqa: SIM110 - for each request
            if not version.ready:
                return False
        return True

    @property
    def obstacle(self) -> str:
        """Why none that requests are sent to executes them; "" if any does."""
        found = [version.obstacle for version, _ in self._ways.values()]
        return "; ".join(dict.fromkeys(found)) or "no version is ready" if all(found) else ""

    @property
    def decoupled(self) -> bool:
        """Whether a request may be answered more than once."""
        return self._reference.decoupled

    @property
    def signature(self) -> Signature:
        """The inputs and outputs that requests have, and the parameters that any version reads."""
        return self._signature

    def waits_for(self, version: object) -> bool:
        """Whether a request may have to wait until this version has done what it does."""
        return any(way.waits_for(version) for way, _ in self._ways.values())

    def refresh(self) -> bool:
        """Take the versions as they are now; whether any is ready."""
        ready = {n: v.signature for n, v in self._versions.items() if v.ready}
        arrangement = arrange(self._rules, ready)
        self._tell(self.arrangement, arrangement)
        self.arrangement = arrangement
        if arrangement is None:
            self._ways, self._watched = {}, []
            self._copy_for(0)
            return False
        self._split = Split(self.model, arrangement.weights)
        self._reference = self._versions[arrangement.reference]
        self._ways = {
            number: (self._versions[number], self._ledgers.version(number))
            for number in arrangement.weights
        }
        self._signature = replace(
            ready[arrangement.reference],
            parameters=self._read([ready[number] for number in self._ways]),
        )
        self._copy_for(arrangement.shadow)
        self._watched = [version for version, _ in self._ways.values()]
        if self._shadow is not None:
            self._watched.append(self._shadow.version)
        return True

    @property
    def shares(self) -> Mapping[int, float]:
        """What part of the requests each version gets."""
        return self._split.shares if self._ways else {}

    def submit(self, call: Call) -> None:
        """Have one of the versions check and queue a call; raises `ServerError`."""
        key = self._key(call) if self._sticky is not None else ""
        number = self._split.of(key) if key else self._split.at(self._points.next())
        version, ledger = self._ways[number]
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
                self._versions[number], rule, self._ledgers.shadow(number), self._admission
            )

    def _key(self, request: Call) -> str:
        """What the request has in common with those that get the same version; "" for nothing."""
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
