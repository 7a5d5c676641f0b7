"""The report of a replay."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor
from headrace.plugins.capture.commands.replaying import ReplayReport, replay
from headrace.plugins.capture.records import CapturedRequest


@pytest.mark.parametrize(("milliseconds", "p50", "p99"), [
    ([7], 7, 7), (range(1, 101), 50, 99), (range(1000, 0, -1), 500, 990),
])  # fmt: skip
def test_percentiles_are_measured_latencies(
    milliseconds: Sequence[int], p50: float, p99: float
) -> None:
    report = ReplayReport(latencies=[each / 1e3 for each in milliseconds])
    document = report.document()
    assert (document["p50_ms"], document["p99_ms"]) == (p50, p99)


class Answers:
    """A client that gets these answers, in turn; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    async def infer(self, model: str, inputs: Any, **options: Any) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_outputs_are_compared_until_an_error_ends_the_replay() -> None:
    half = {"Y": Tensor("Y", Datatype.FP32, np.array([0.5], np.float32))}
    requests = [CapturedRequest(0.0, "m", "", "", {}, {}, [half], 200)] * 4
    client: Any = Answers(
        {"Y": np.array([0.5])}, {"Y": np.array([b"0.5"], object)}, RuntimeError("unforeseen")
    )
    report = ReplayReport()
    with pytest.raises(RuntimeError, match="unforeseen"):
        await replay(iter(requests), client, report, speed=0, concurrency=1, compare=True)
    document = report.document()
    assert (document["sent"], document["equal"], document["differing"]) == (3, 1, {"m/Y": 1})


def test_a_report_without_answers_has_no_latencies() -> None:
    assert "p50_ms" not in ReplayReport().document()
