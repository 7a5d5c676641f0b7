"""The report of a replay."""

from collections.abc import Sequence

import pytest

from headrace.plugins.capture.commands.replaying import ReplayReport


@pytest.mark.parametrize(("milliseconds", "p50", "p99"), [
    ([7], 7, 7), (range(1, 101), 50, 99), (range(1000, 0, -1), 500, 990),
])  # fmt: skip
def test_percentiles_are_measured_latencies(
    milliseconds: Sequence[int], p50: float, p99: float
) -> None:
    report = ReplayReport(latencies=[each / 1e3 for each in milliseconds])
    document = report.document()
    assert (document["p50_ms"], document["p99_ms"]) == (p50, p99)


def test_a_report_without_answers_has_no_latencies() -> None:
    assert "p50_ms" not in ReplayReport().document()
