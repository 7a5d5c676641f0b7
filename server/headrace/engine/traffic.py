"""The traffic between the versions of each model: its rules, who has changed them, and when.

The rules of a model come from its configuration, and from there again when what that says about
traffic changes. Until then they stay as a call, a promotion or a roll-back has left them, also
while the model is loaded again or is away for a while. Owned by the event-loop thread.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from headrace.core.errors import InvalidRequest, NotFound, Unavailable
from headrace.engine.admission import Admission
from headrace.engine.model import Model, parse_version
from headrace.engine.router import Ledgers, Router
from headrace.engine.traffic_watch import TrafficWatch, counts_of
from headrace.observability.series import TrafficSeries
from headrace.repository.traffic import PARAMETER, InvalidRules, parse_rules, read_rules
from headrace.scheduling.rollback import Counts
from headrace.scheduling.traffic_rules import TrafficRules

log = logging.getLogger(__name__)

TRAFFIC_DISABLED = (
    "changing the traffic between versions is not allowed; --allow-traffic-control allows it"
)
NO_RULES = TrafficRules()
_BY_CALL = "rolled back by a call"
_LONGEST_REASON = 500


class ModelTraffic:
    """The rules of one model and what has come of them.

    `declared` is what its configuration says, as text. `source` is whose the rules are. `promoted`
    are the rules as they were before the last promotion, until they change in another way.
    """

    def __init__(
        self, model: Model, admission: Admission, changed: Callable[[Model], None]
    ) -> None:
        self.model = model
        self.rules = NO_RULES
        self.declared = ""
        self.source = "none"
        self.since = ""
        self.reason = ""
        self.reasons: dict[int, str] = {}  # why versions were rolled back
        self.ledgers = Ledgers()
        self.watch: TrafficWatch | None = None
        self._promoted: TrafficRules | None = None
        self._admission = admission
        self._changed = changed

    def declare(self, text: str) -> None:
        """Take the rules that a configuration has."""
        try:
            rules = parse_rules(text) if text else NO_RULES
        except InvalidRules as error:  # of a model that came past the check of configurations
            log.error("model %s: parameters['%s']: %s", self.model.name, PARAMETER, error)
            return
        self.declared = text
        self.apply(rules, "config" if text else "none", "")

    def apply(self, rules: TrafficRules, source: str, reason: str) -> None:
        """Have rules take effect with the next request."""
        self.rules, self.source, self.reason = rules, source, reason
        now = datetime.now(UTC).replace(tzinfo=None)
        self.since = f"{now.isoformat(timespec='milliseconds')}Z"
        self._promoted = None
        self.reasons = {n: why for n, why in self.reasons.items() if not rules.split.get(n)}
        self.attach(self.model, again=True)
        what = ", ".join(f"version {n}: {weight:g}" for n, weight in rules.split.items())
        log.info(
            "traffic of model %s by %s: %s", self.model.name, source,
            what or "the highest version", extra={"model": self.model.name},
        )  # fmt: skip

    def attach(self, model: Model, again: bool = False) -> None:
        """Have the rules stand for a model, which may be another one of its name."""
        if self.model is model and not again:
            return
        if self.model.router is not None:
            self.model.router.close()
            self.model.router = None
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        self.model = model
        rules = self.rules
        if rules != NO_RULES:
            model.router = Router(model.name, rules, model.versions, self.ledgers, self._admission)
            model.router.refresh()
        if rules.rollback is not None and rules.candidates:
            self.watch = TrafficWatch(
                rules.rollback, rules.baseline, lambda: self.rules.candidates, self.counts,
                self._roll_back_bad,
            )  # fmt: skip
            self.watch.look()
        self._changed(self.model)

    def counts(self) -> dict[int, Counts]:
        """What has become of the requests of the versions in the split that are ready."""
        versions = self.model.versions
        return {
            number: counts_of(versions[number], self.ledgers.version(number))
            for number in self.rules.split
            if number in versions and versions[number].ready
        }

    def promote(self, version: int, reason: str) -> None:
        """Give a version all requests, 0 for the only candidate; raises `InvalidRequest`."""
        rules = self.rules
        number = version or self._only_candidate("promote")
        self._check_ready(number, "promoted")
        self.apply(rules.only(number), "promotion", reason)
        self._promoted = rules

    def roll_back(self, version: int, reason: str) -> None:
        """Give the requests of a version to the baseline, 0 for those of all candidates.

        If there is none, undo the last promotion. Raises `InvalidRequest`.
        """
        rules, candidates = self.rules, self.rules.candidates
        if version and version not in candidates:
            raise InvalidRequest(
                f"model '{self.model.name}' version {version} gets no requests that could be rolled"
                f" back; {self._candidates()}"
            )
        if not candidates:
            if self._promoted is None:
                raise InvalidRequest(
                    f"model '{self.model.name}' has nothing to roll back: {self._candidates()}, and"
                    " none was promoted"
                )
            self._check_ready(self._promoted.baseline, "given all requests again")
            self.reasons[rules.baseline] = reason or _BY_CALL
            rules = self._promoted.only(self._promoted.baseline)
        self._check_ready(rules.baseline, "given more requests")
        for number in [version] if version else candidates:
            rules = rules.without(number)
            self.reasons[number] = reason or _BY_CALL
        self.apply(rules, "rollback", reason)

    def _roll_back_bad(self, number: int, why: str) -> None:
        """A version does not do well enough."""
        name = self.model.name
        self.ledgers.version(number).rollbacks += 1
        self.reasons[number] = f"rolled back: {why}"
        reason = f"version {number}: {why}"
        log.warning(
            "traffic of model %s: version %d is rolled back: %s", name, number, why,
            extra={"model": name, "version": str(number)},
        )  # fmt: skip
        self.apply(self.rules.without(number), "rollback", reason)

    def _check_ready(self, number: int, what: str) -> None:
        found = self.model.versions.get(number)
        if found is None or not found.ready:
            name = self.model.name
            raise InvalidRequest(f"model '{name}' version {number} is not ready: it is not {what}")

    def _only_candidate(self, what: str) -> int:
        candidates = self.rules.candidates
        if len(candidates) != 1:
            raise InvalidRequest(
                f"name the version of model '{self.model.name}' to {what}: {self._candidates()}"
            )
        return candidates[0]

    def _candidates(self) -> str:
        names = ", ".join(map(str, self.rules.candidates)) or "none"
        return f"beside the baseline, these get requests: {names}"

    @property
    def shares(self) -> Mapping[int, float]:
        """What part of the requests without a version each version gets now."""
        router = self.model.router
        return router.shares if router is not None else {}

    def reason_of(self, number: int) -> str:
        """Why a version gets nothing, or no more; "" if there is no reason."""
        router = self.model.router
        given = router.arrangement.reasons if router and router.arrangement else {}
        return self.reasons.get(number) or given.get(number, "")

    def series(self) -> TrafficSeries:
        """The traffic as a scrape sees it."""
        shares = self.shares
        return TrafficSeries(
            self.model.name,
            {str(n): shares.get(n, 0.0) for n in sorted({*self.rules.split, *shares})},
            {str(n): ledger for n, ledger in sorted(self.ledgers.versions.items())},
            {str(n): ledger for n, ledger in sorted(self.ledgers.shadows.items())},
        )


class Traffic:
    """The traffic of all models.

    `changed` is called when requests for a model may go elsewhere than before.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        allowed: bool,
        changed: Callable[[], None],
    ) -> None:
        """`allowed` is whether clients may change anything."""
        self._models = models
        self._admission = admission
        self._allowed = allowed
        self._changed = changed
        self._by_model: dict[str, ModelTraffic] = {}
        self._headers: dict[str, str] = {}
        self._watchers: set[Callable[[Mapping[str, str]], None]] = set()

    @property
    def headers(self) -> Mapping[str, str]:
        """By model, the header that its rules need the value of."""
        return self._headers

    def watch_headers(self, callback: Callable[[Mapping[str, str]], None]) -> None:
        """Call `callback` with `headers` whenever they change, until `unwatch_headers`."""
        self._watchers.add(callback)

    def unwatch_headers(self, callback: Callable[[Mapping[str, str]], None]) -> None:
        """Do not call `callback`."""
        self._watchers.discard(callback)

    def follow(self, model: Model) -> None:
        """Other versions of a model may be ready than before, and its configuration another."""
        if model.router is not None:
            model.router.refresh()
        newest = model.newest()
        if newest is None:
            return
        parameters = newest.config.parameters
        text = parameters[PARAMETER].string_value if PARAMETER in parameters else ""
        traffic = self._by_model.get(model.name)
        if traffic is None:
            if not text:
                return
            traffic = self._known(model)
        traffic.attach(model)
        if text != traffic.declared:
            traffic.declare(text)

    def of(self, name: str) -> ModelTraffic:
        """The traffic of a model; raises `NotFound`."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self._by_model.get(name) or ModelTraffic(model, self._admission, self._on_change)

    def to_change(self, name: str) -> ModelTraffic:
        """The same, for changing it; raises `Unavailable` where that is not allowed."""
        if not self._allowed:
            raise Unavailable(TRAFFIC_DISABLED)
        return self._known(self.of(name).model)

    def set(self, name: str, document: object) -> None:
        """Replace a model's rules by those in a JSON document.

        Raises `NotFound`, `Unavailable`, and `InvalidRequest` for rules that make no sense.
        """
        traffic = self.to_change(name)
        try:
            rules = read_rules(document)
        except InvalidRules as error:
            raise InvalidRequest(f"traffic rules of model '{name}': {error}") from None
        traffic.apply(rules, "call", "")

    def reset(self, name: str) -> None:
        """Go back to the rules of a model's configuration; raises `NotFound`, `Unavailable`."""
        traffic = self.to_change(name)
        traffic.reasons.clear()
        traffic.declare(traffic.declared)

    def promote(self, name: str, version: str, reason: str = "") -> None:
        """Give a version all requests, "" for the only candidate.

        Raises `NotFound`, `Unavailable`, `InvalidRequest`.
        """
        self.to_change(name).promote(_number(version), _line(reason))

    def roll_back(self, name: str, version: str, reason: str = "") -> None:
        """Give a version's requests to the baseline, "" for all candidates; or undo a promotion.

        Raises `NotFound`, `Unavailable`, `InvalidRequest`.
        """
        self.to_change(name).roll_back(_number(version), _line(reason))

    def reason(self, name: str, version: int) -> str:
        """Why a version has lost its requests, "" if it has not."""
        traffic = self._by_model.get(name)
        return "" if traffic is None else traffic.reasons.get(version, "")

    def series(self) -> list[TrafficSeries]:
        """Everything as a scrape sees it."""
        known = sorted(self._by_model.keys() & self._models.keys())
        return [self._by_model[name].series() for name in known]

    def close(self) -> None:
        """Judge no more."""
        for traffic in self._by_model.values():
            if traffic.watch is not None:
                traffic.watch.stop()

    def _known(self, model: Model) -> ModelTraffic:
        traffic = self._by_model.get(model.name)
        if traffic is None:
            self._forget_gone()
            traffic = ModelTraffic(model, self._admission, self._on_change)
            self._by_model[model.name] = traffic
        return traffic

    def _forget_gone(self) -> None:
        """Keep nothing of models that the engine does not know any more."""
        for name in [name for name in self._by_model if name not in self._models]:
            traffic = self._by_model.pop(name)
            if traffic.watch is not None:
                traffic.watch.stop()

    def _on_change(self, model: Model) -> None:
        self._changed()
        headers = {
            name: traffic.rules.sticky.header
            for name, traffic in self._by_model.items()
            if traffic.rules.sticky is not None and traffic.rules.sticky.header
        }
        if headers != self._headers:
            self._headers = headers
            for callback in list(self._watchers):
                callback(headers)


def _number(version: str) -> int:
    """The number of a version that a client names, 0 for none; raises `InvalidRequest`."""
    return parse_version(version) if version else 0


def _line(reason: str) -> str:
    """A client's reason, as one line of a log has it."""
    return " ".join(reason.split())[:_LONGEST_REASON]
