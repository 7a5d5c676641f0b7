"""The traffic between the versions of all models: whose the rules are, and what is told of them.

The rules of a model come from its configuration, and from there again when what that says about
traffic changes. Until then they stay as a call, a promotion or a roll-back has left them, also
while the model is loaded again or is away for a while. What is told of them, gRPC sends as a
message and HTTP as its JSON. Owned by the event-loop thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict

from headrace.core.errors import InvalidOption, InvalidRequest, NotFound, Unavailable
from headrace.engine.admission import Admission
from headrace.engine.chain import StageModel, StagePlugin
from headrace.engine.model import Model, Traffic, parse_version
from headrace.observability.series import Sourced
from headrace.observability.statistics import LATENCY_BOUNDS
from headrace.plugins.traffic.decisions import Counts, quantile_ms
from headrace.plugins.traffic.model import FAMILIES, ModelTraffic, counts_of
from headrace.plugins.traffic.router import VersionLedger, VersionRouter
from headrace.plugins.traffic.rules import InvalidRules, TrafficRules, parse_rules, read_rules
from headrace.protocol.pb import traffic_pb2 as pb
from headrace.repository.validation import TRAFFIC

TRAFFIC_DISABLED = (
    "changing the traffic between versions is not allowed; --allow-traffic-control allows it"
)
_LONGEST_REASON = 500
_QUANTILE = 0.95  # which latency is told where no rule says which is judged
_LONGEST_MS = LATENCY_BOUNDS[-1] / 1e6  # stands for all that is longer


class TrafficControl(Traffic):
    """The traffic of all models, as their configurations and clients say.

    `changed` is called when requests for a model may go elsewhere than before.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        changed: Callable[[], None],
        allowed: bool = False,
    ) -> None:
        super().__init__(models, admission, changed, allowed)
        self.headers = {}
        self._by_model: dict[str, ModelTraffic] = {}
        self._watchers: list[Callable[[Mapping[str, str]], None]] = []

    def watch_headers(self, callback: Callable[[Mapping[str, str]], None]) -> None:
        """Call `callback` with `headers` whenever they change."""
        self._watchers.append(callback)

    def follow(self, model: Model) -> None:
        """Other versions of a model may be ready than before, and its configuration another."""
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
        return self._by_model.get(name) or ModelTraffic(model, self.admission, self._on_change)

    def to_change(self, name: str) -> ModelTraffic:
        """The traffic of a model, for changing it; raises `Unavailable` if that is not allowed."""
        if not self.allowed:
            raise Unavailable(TRAFFIC_DISABLED)
        return self._known(self.of(name).model)

    def document(self, name: str) -> pb.ModelTrafficResponse:
        """The rules of a model, and what they do; raises `NotFound`."""
        return model_document(self.of(name))

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

    def metrics(self) -> list[Sourced]:
        """Metric families of the traffic."""
        known = sorted(self._by_model.keys() & self.models.keys())
        sources = [({"model": name}, self._by_model[name]) for name in known]
        return [(family, sources) for family in FAMILIES]

    def close(self) -> None:
        """Judge no more."""
        for traffic in self._by_model.values():
            if traffic.watch is not None:
                traffic.watch.stop()

    def _known(self, model: Model) -> ModelTraffic:
        traffic = self._by_model.get(model.name)
        if traffic is None:
            self._forget_gone()
            traffic = ModelTraffic(model, self.admission, self._on_change)
            self._by_model[model.name] = traffic
        return traffic

    def _forget_gone(self) -> None:
        """Keep nothing of models that the engine does not know any more."""
        for name in [name for name in self._by_model if name not in self.models]:
            traffic = self._by_model.pop(name)
            if traffic.watch is not None:
                traffic.watch.stop()

    def _on_change(self, model: Model) -> None:
        self.changed()
        headers = {
            name: traffic.rules.sticky.header
            for name, traffic in self._by_model.items()
            if traffic.rules.sticky is not None and traffic.rules.sticky.header
        }
        if headers != self.headers:
            self.headers = headers
            for callback in self._watchers:
                callback(headers)


def _number(version: str) -> int:
    """The number of a version that a client names, 0 for none; raises `InvalidRequest`."""
    return parse_version(version) if version else 0


def _line(reason: str) -> str:
    """A client's reason, as one line of a log has it."""
    return " ".join(reason.split())[:_LONGEST_REASON]


def model_document(traffic: ModelTraffic) -> pb.ModelTrafficResponse:
    """The rules of a model, and what they do."""
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
    elif found is not None and found.ready:  # nobody keeps samples: all since it began to serve
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
    """Traffic between the versions of a model: splits, shadows and roll-back, by rules."""

    parameters = (TRAFFIC,)
    traffic = TrafficControl

    def check(self, parameters: Mapping[str, str]) -> None:
        """Raise `InvalidOption` for rules that make no sense."""
        if TRAFFIC in parameters:
            try:
                parse_rules(parameters[TRAFFIC])
            except InvalidRules as error:
                raise InvalidOption(f"parameters['{TRAFFIC}']", str(error)) from None

    def compose(self, model: StageModel) -> None:
        """No stage: rules are for calls that name no version."""
