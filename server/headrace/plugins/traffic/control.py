"""Traffic control of all models: the source of their rules, and the watch over their versions.

A model's rules come from its configuration, and again whenever the configured rules change. In
between they stay as set by a call, a promotion or a roll-back, even while the model is reloaded or
unloaded. gRPC sends the document as a message and HTTP as its JSON.

Versions are sampled as often as the rules require. The difference between now and the oldest sample
within the window is judged: the counters are those of the versions, so that requests cost nothing
more. Owned by the event-loop thread.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from headrace.core.errors import InvalidOption, InvalidRequest, NotFound, Unavailable
from headrace.engine.admission import Admission
from headrace.engine.chain import StageModel, StagePlugin
from headrace.engine.model import Model, Traffic, parse_version
from headrace.engine.version import ModelVersion
from headrace.observability.statistics import LATENCY_BOUNDS, Family, Sourced, in_seconds
from headrace.plugins.traffic.decisions import Counts, quantile_ms, verdict
from headrace.plugins.traffic.router import Ledgers, VersionLedger, VersionRouter
from headrace.plugins.traffic.rules import (
    InvalidRules,
    RollbackRule,
    TrafficRules,
    parse_rules,
    read_rules,
)
from headrace.protocol.pb import traffic_pb2 as pb
from headrace.repository.validation import TRAFFIC

log = logging.getLogger(__name__)

NO_RULES = TrafficRules()
_BY_CALL = "rolled back by a call"
_SAMPLES = 20  # samples per window
_LEAST_SECS, _MOST_SECS = 0.1, 5.0  # between two samples
NOTHING = Counts(0, 0, (0,) * (len(LATENCY_BOUNDS) + 1))


def counts_of(version: ModelVersion, ledger: VersionLedger) -> Counts:
    """Counts of a version's requests so far, however routed.

    Only quantities that clients cannot influence: failures of executions, and latencies of
    executions, without queueing and without delays by clients that do not read.
    """
    statistics = version.report.statistics
    failures = statistics.faults + ledger.refused
    latencies = zip(
        statistics.compute_histogram.within(LATENCY_BOUNDS),
        statistics.paused_histogram.within(LATENCY_BOUNDS),
        strict=True,
    )
    return Counts(
        statistics.success_count + failures,
        failures,
        tuple([all_of_them - paused for all_of_them, paused in latencies]),
    )


class Samples:
    """Samples of one version's counts over a window."""

    def __init__(self, window_secs: float) -> None:
        self._window = window_secs
        self._samples: deque[tuple[float, Counts]] = deque()

    def add(self, now: float, counts: Counts) -> None:
        """Add a sample; lower counts mean that the version was replaced."""
        samples = self._samples
        if samples and counts.requests < samples[-1][1].requests:
            samples.clear()
        while len(samples) > 1 and samples[1][0] <= now - self._window:
            samples.popleft()
        samples.append((now, counts))

    @property
    def recent(self) -> Counts:
        """The counts within the window."""
        if not self._samples:
            return NOTHING
        return self._samples[-1][1].since(self._samples[0][1])


class TrafficWatch:
    """Judges the versions `judged` by a rule, against the `baseline`, until stopped.

    `counts` returns those of the ready versions, `act` receives versions to roll back, and why.
    """

    def __init__(
        self,
        rule: RollbackRule,
        baseline: int,
        judged: Callable[[], list[int]],
        counts: Callable[[], Mapping[int, Counts]],
        act: Callable[[int, str], None],
    ) -> None:
        self._rule = rule
        self._baseline = baseline
        self._judged = judged
        self._counts = counts
        self._act = act
        self._samples: dict[int, Samples] = {}
        self._interval = min(max(rule.window_secs / _SAMPLES, _LEAST_SECS), _MOST_SECS)
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def recent(self, number: int) -> Counts:
        """A version's counts within the window."""
        samples = self._samples.get(number)
        return NOTHING if samples is None else samples.recent

    def look(self) -> None:
        """Take samples, judge, and schedule the next look."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = loop.call_later(self._interval, self.look)
        counts = self._counts()
        for number, version in counts.items():
            samples = self._samples.get(number)
            if samples is None:
                samples = self._samples[number] = Samples(self._rule.window_secs)
            samples.add(now, version)
        for number in set(self._samples) - set(counts):
            del self._samples[number]
        if self._baseline not in counts:
            return  # there is no better version
        for number in self._judged():
            if not self._stopped and number in counts:
                why = verdict(self._rule, self.recent(number), self.recent(self._baseline))
                if why:
                    self._act(number, why)

    def stop(self) -> None:
        """Stop watching."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()


class ModelTraffic:
    """The rules of one model and their effects.

    `declared` are the configured rules, as text. `source` is the origin of the rules. `promoted`
    are the rules before the last promotion, until they change in another way.
    """

    def __init__(self, model: Model, admission: Admission, changed: Callable[[], None]) -> None:
        self.model = model
        self.rules = NO_RULES
        self.declared = ""
        self.source = "none"
        self.since = ""
        self.reason = ""
        self.reasons: dict[int, str] = {}  # reasons of roll-backs
        self.ledgers = Ledgers()
        self.watch: TrafficWatch | None = None
        self.router: VersionRouter | None = None
        self._promoted: TrafficRules | None = None
        self._admission = admission
        self._changed = changed

    def declare(self, text: str) -> None:
        """Apply the rules of a configuration."""
        try:
            rules = parse_rules(text) if text else NO_RULES
        except InvalidRules as error:  # the configuration was not checked
            log.error("model %s: parameters['%s']: %s", self.model.name, TRAFFIC, error)
            return
        self.declared = text
        self.apply(rules, "config" if text else "none", "")

    def apply(self, rules: TrafficRules, source: str, reason: str) -> None:
        """Apply rules from the next request on."""
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
        """Attach the rules to a model, possibly a new one of this name."""
        if self.model is model and not again:
            return
        if self.router is not None:
            self.router.close()
            self.router = None
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        self.model = model
        rules = self.rules
        if rules != NO_RULES:
            self.router = VersionRouter(
                model.name, rules, model.versions, self.ledgers, self._admission
            )
            self.router.refresh()
        if rules.rollback is not None and rules.candidates:
            self.watch = TrafficWatch(
                rules.rollback, rules.baseline, lambda: self.rules.candidates, self.counts,
                self._roll_back_bad,
            )  # fmt: skip
            self.watch.look()
        self._changed()

    def counts(self) -> dict[int, Counts]:
        """The counts of the ready versions in the split."""
        versions = self.model.versions
        return {
            number: counts_of(versions[number], self.ledgers.versions[number])
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
        """Give a version's requests to the baseline; 0: those of all candidates.

        Without candidates, undo the last promotion. Raises `InvalidRequest`.
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
        """Roll back a version that was judged bad."""
        name = self.model.name
        self.ledgers.versions[number].rollbacks += 1
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
        """The current share of unversioned requests for each version."""
        router = self.router
        return router.shares if router is not None else {}

    def reason_of(self, number: int) -> str:
        """The reason why a version gets no requests, or no more; "" for none."""
        router = self.router
        given = router.arrangement.reasons if router and router.arrangement else {}
        return self.reasons.get(number) or given.get(number, "")

    @property
    def weights(self) -> dict[str, float]:
        """The shares of all versions named by the rules, by name."""
        shares = self.shares
        return {str(n): shares.get(n, 0.0) for n in sorted({*self.rules.split, *shares})}


FAMILIES: tuple[Family[ModelTraffic], ...] = (
    Family("headrace_traffic_weight", "gauge", lambda t: t.weights,
           "Share of the requests without a version that a version gets by the rules, 0 to 1",
           ("version",)),
    Family("headrace_traffic_requests_total", "counter",
           lambda t: {str(n): ledger.routed for n, ledger in t.ledgers.versions.items()},
           "Requests that the rules have sent to a version", ("version",)),
    Family("headrace_traffic_rollbacks_total", "counter",
           lambda t: {str(n): ledger.rollbacks for n, ledger in t.ledgers.versions.items()},
           "How often a version has lost its traffic", ("version",)),
    Family("headrace_shadow_requests_total", "counter",
           lambda t: {
               (str(n), outcome): count
               for n, shadow in t.ledgers.shadows.items() for outcome, count in (
                   ("success", shadow.success), ("failure", shadow.failure),
                   ("dropped", shadow.dropped),
               )
           },
           "Copies for a shadow version by what became of them", ("version", "outcome")),
    Family("headrace_shadow_duration_seconds", "histogram",
           lambda t: {str(n): in_seconds(one.durations) for n, one in t.ledgers.shadows.items()},
           "Seconds from submitting a copy to its answer", ("version",)),
)  # fmt: skip


TRAFFIC_DISABLED = (
    "changing the traffic between versions is not allowed; --allow-traffic-control allows it"
)
_LONGEST_REASON = 500
_QUANTILE = 0.95  # latency quantile in documents if no rule has one
_LONGEST_MS = LATENCY_BOUNDS[-1] / 1e6  # stands for anything longer


class TrafficControl(Traffic):
    """The traffic of all models, by configurations and clients.

    `changed` is called when requests for a model may be routed differently.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        changed: Callable[[], None],
        allowed: bool = False,
    ) -> None:
        super().__init__(models, admission, changed, allowed)
        self._by_model: dict[str, ModelTraffic] = {}

    @property
    def headers(self) -> Mapping[str, str]:
        """The header that the rules evaluate, by model."""
        return {
            name: traffic.rules.sticky.header
            for name, traffic in self._by_model.items()
            if traffic.rules.sticky is not None and traffic.rules.sticky.header
        }

    def follow(self, model: Model) -> None:
        """Update to a model's ready versions and configuration."""
        traffic = self._by_model.get(model.name)
        if traffic is not None and traffic.model is model and traffic.router is not None:
            traffic.router.refresh()
        newest = model.newest()
        if newest is None:
            return
        parameters = newest.config.parameters
        text = parameters[TRAFFIC].string_value if TRAFFIC in parameters else ""
        if traffic is None:
            if not text:
                return
            traffic = self._known(model)
        traffic.attach(model)
        if text != traffic.declared:
            traffic.declare(text)

    def router(self, model: Model) -> VersionRouter | None:
        """The router of a model's requests; None without rules, or without a ready version."""
        traffic = self._by_model.get(model.name)
        if traffic is None or traffic.model is not model or traffic.router is None:
            return None
        return traffic.router if traffic.router.refresh() else None

    def of(self, name: str) -> ModelTraffic:
        """The traffic of a model; raises `NotFound`."""
        model = self.models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self._by_model.get(name) or ModelTraffic(model, self.admission, self.changed)

    def to_change(self, name: str) -> ModelTraffic:
        """The traffic of a model, for changing it; raises `Unavailable` if that is not allowed."""
        if not self.allowed:
            raise Unavailable(TRAFFIC_DISABLED)
        return self._known(self.of(name).model)

    def document(self, name: str) -> pb.ModelTrafficResponse:
        """The rules of a model, and their effects; raises `NotFound`."""
        return model_document(self.of(name))

    def set(self, name: str, document: object) -> None:
        """Replace a model's rules by those in a JSON document.

        Raises `NotFound`, `Unavailable`, and `InvalidRequest` for invalid rules.
        """
        traffic = self.to_change(name)
        try:
            rules = read_rules(document)
        except InvalidRules as error:
            raise InvalidRequest(f"traffic rules of model '{name}': {error}") from None
        traffic.apply(rules, "call", "")

    def reset(self, name: str) -> None:
        """Restore the rules of a model's configuration; raises `NotFound`, `Unavailable`."""
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
        """The reason why a version has lost its requests; "" if it has not."""
        traffic = self._by_model.get(name)
        return "" if traffic is None else traffic.reasons.get(version, "")

    def metrics(self) -> list[Sourced]:
        """Metric families of the traffic."""
        known = sorted(self._by_model.keys() & self.models.keys())
        sources = [({"model": name}, self._by_model[name]) for name in known]
        return [(family, sources) for family in FAMILIES]

    def close(self) -> None:
        """Stop judging versions."""
        for traffic in self._by_model.values():
            if traffic.watch is not None:
                traffic.watch.stop()

    def _known(self, model: Model) -> ModelTraffic:
        traffic = self._by_model.get(model.name)
        if traffic is None:
            self._forget_gone()
            traffic = ModelTraffic(model, self.admission, self.changed)
            self._by_model[model.name] = traffic
        return traffic

    def _forget_gone(self) -> None:
        """Remove models that the engine no longer knows."""
        for name in [name for name in self._by_model if name not in self.models]:
            traffic = self._by_model.pop(name)
            if traffic.watch is not None:
                traffic.watch.stop()


def _number(version: str) -> int:
    """Parse a version named by a client, 0 for none; raises `InvalidRequest`."""
    return parse_version(version) if version else 0


def _line(reason: str) -> str:
    """A client's reason as one line of text."""
    return " ".join(reason.split())[:_LONGEST_REASON]


def model_document(traffic: ModelTraffic) -> pb.ModelTrafficResponse:
    """The rules of a model, and their effects."""
    model, rules = traffic.model, traffic.rules
    response = pb.ModelTrafficResponse(
        name=model.name, source=traffic.source, since=traffic.since, reason=traffic.reason
    )
    if traffic.source != "none":
        response.rules.CopyFrom(_rules(rules))
    shadow = rules.shadow.version if rules.shadow is not None else 0
    named = {*rules.split, *([shadow] if shadow else [])}
    for number in sorted(named | set(model.versions)):
        response.versions.append(_version(traffic, number, shadow))
    for number, ledger in sorted(traffic.ledgers.shadows.items()):
        response.shadows.add(
            version=str(number),
            success=ledger.success,
            failure=ledger.failure,
            dropped=ledger.dropped,
            median_ms=min(quantile_ms(ledger.durations.counts, 0.5), _LONGEST_MS),
            p95_ms=min(quantile_ms(ledger.durations.counts, 0.95), _LONGEST_MS),
        )
    return response


def _version(traffic: ModelTraffic, number: int, shadow: int) -> pb.ModelTrafficResponse.Version:
    rules, found = traffic.rules, traffic.model.versions.get(number)
    ledger = traffic.ledgers.versions.get(number, VersionLedger())
    version = pb.ModelTrafficResponse.Version(
        version=str(number),
        state=found.state.value if found is not None else "",
        role=_role(rules, number, shadow),
        weight=rules.split.get(number, 0.0),
        share=traffic.shares.get(number, 0.0),
        reason=traffic.reason_of(number),
        routed=ledger.routed,
        rollbacks=ledger.rollbacks,
    )
    quantile = _QUANTILE if rules.rollback is None else rules.rollback.latency_quantile
    recent: Counts | None = None
    if traffic.watch is not None and number in rules.split:
        recent = traffic.watch.recent(number)
    elif found is not None and found.ready:  # without samples: everything since it began to serve
        recent = counts_of(found, ledger)
    if recent is not None:
        version.recent.requests = recent.requests
        version.recent.failures = recent.failures
        version.recent.error_rate = recent.error_rate
        latency = recent.latency_ms(quantile)
        version.recent.latency_ms = min(latency, _LONGEST_MS)
    return version


def _role(rules: TrafficRules, number: int, shadow: int) -> str:
    if number == shadow:
        return "shadow"
    if number not in rules.split:
        return ""
    return "baseline" if number == rules.baseline else "candidate"


def _rules(rules: TrafficRules) -> pb.TrafficRules:
    message = pb.TrafficRules(split={str(n): weight for n, weight in rules.split.items()})
    if rules.baseline:
        message.baseline = str(rules.baseline)
    if rules.sticky is not None:
        if rules.sticky.header:
            message.sticky.header = rules.sticky.header
        else:
            message.sticky.parameter = rules.sticky.parameter
    if (shadow := rules.shadow) is not None:
        message.shadow.version = str(shadow.version)
        message.shadow.share = shadow.share
        message.shadow.max_pending = shadow.max_pending
    if rules.rollback is not None:
        message.rollback.CopyFrom(pb.TrafficRules.Rollback(**asdict(rules.rollback)))
    return message


class TrafficStage(StagePlugin):
    """The check of a model's traffic rules, by which `TrafficControl` routes its calls."""

    parameters = (TRAFFIC,)

    def check(self, parameters: Mapping[str, str]) -> None:
        """Raise `InvalidOption` for invalid rules."""
        if TRAFFIC in parameters:
            try:
                parse_rules(parameters[TRAFFIC])
            except InvalidRules as error:
                raise InvalidOption(f"parameters['{TRAFFIC}']", str(error)) from None

    def compose(self, model: StageModel) -> None:
        """Return None: rules only concern calls without a version."""
