"""The series of the traffic between versions."""

from headrace.engine.metrics import TRAFFIC_FAMILIES, collected
from headrace.observability.series import TrafficSeries
from headrace.observability.statistics import ShadowLedger, VersionLedger


def test_families() -> None:
    shadow = ShadowLedger(success=2, failure=1, dropped=7)
    shadow.durations.observe(3_000_000, 2)
    series = TrafficSeries(
        "m", {"1": 0.9, "2": 0.1}, {"2": VersionLedger(routed=5, rollbacks=1)}, {"3": shadow}
    )
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in collected(TRAFFIC_FAMILIES, [({"model": "m"}, series)])
        for s in family.samples
    }
    model = ("model", "m")
    assert samples["headrace_traffic_weight", model, ("version", "1")] == 0.9
    assert samples["headrace_traffic_requests_total", model, ("version", "2")] == 5
    assert samples["headrace_traffic_rollbacks_total", model, ("version", "2")] == 1
    for outcome, count in (("success", 2), ("failure", 1), ("dropped", 7)):
        labels = model, ("outcome", outcome), ("version", "3")
        assert samples["headrace_shadow_requests_total", *labels] == count
    duration = "headrace_shadow_duration_seconds"
    version = ("version", "3")
    assert samples[f"{duration}_count", model, version] == 2
    assert samples[f"{duration}_sum", model, version] == 0.006
    assert samples[f"{duration}_bucket", ("le", "0.0025"), model, version] == 0
    assert samples[f"{duration}_bucket", ("le", "0.005"), model, version] == 2
