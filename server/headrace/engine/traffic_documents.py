"""What is told of the traffic between a model's versions; gRPC sends the message, HTTP its JSON."""

from headrace.engine.traffic import ModelTraffic, Traffic
from headrace.engine.traffic_watch import counts_of
from headrace.observability.statistics import LATENCY_BOUNDS, VersionLedger
from headrace.scheduling.rollback import Counts, quantile_ms
from headrace.scheduling.traffic_rules import RollbackRule, TrafficRules
from headrace.wire.pb import traffic_pb2 as pb

_QUANTILE = 0.95  # which latency is told where no rule says which is judged
_LONGEST_MS = LATENCY_BOUNDS[-1] / 1e6  # stands for all that is longer


def model_traffic(all_traffic: Traffic, name: str) -> pb.ModelTrafficResponse:
    """The rules of a model, and what they do; raises `NotFound`."""
    traffic = all_traffic.of(name)
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
        message.rollback.CopyFrom(_rollback(rules.rollback))
    return message


def _rollback(rule: RollbackRule) -> pb.TrafficRules.Rollback:
    return pb.TrafficRules.Rollback(
        max_error_rate=rule.max_error_rate,
        max_error_rate_increase=rule.max_error_rate_increase,
        max_latency_ms=rule.max_latency_ms,
        max_latency_ratio=rule.max_latency_ratio,
        latency_quantile=rule.latency_quantile,
        min_requests=rule.min_requests,
        window_secs=rule.window_secs,
    )
