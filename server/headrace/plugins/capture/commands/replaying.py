"""Sends captured requests again, in the intervals in which they came."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from headrace.cli.paced import paced
from headrace.client import ClientError
from headrace.client.asynchronous import AsyncModels
from headrace.core.datatypes import FLOATS, Datatype
from headrace.core.tensors import Tensor
from headrace.plugins.capture.files import read_documents
from headrace.plugins.capture.records import CapturedRequest, request_of

_TOLERANCE = 1e-4  # relative and absolute, of floats


@dataclass(slots=True)
class ReplayReport:
    """The outcome of a replay; latencies in seconds of the requests that were answered."""

    sent: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # by text; those that had not failed
    as_before: int = 0  # requests that have failed again
    equal: int = 0
    differing: Counter[str] = field(default_factory=Counter)  # by model and output
    latencies: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The report as JSON has it."""
        ranks: dict[str, float] = {}
        if self.latencies:
            p50, p99 = np.quantile(self.latencies, (0.5, 0.99), method="inverted_cdf").tolist()
            ranks = {"p50_ms": p50, "p99_ms": p99}
        return {
            "sent": self.sent,
            "skipped": dict(self.skipped),
            "failed": dict(self.failed),
            "failed_as_before": self.as_before,
            "equal": self.equal,
            "differing": dict(self.differing),
            **{name: round(seconds * 1e3, 3) for name, seconds in ranks.items()},
        }

    def text(self) -> str:
        """The report as lines."""
        lines = [f"sent {self.sent} requests"]
        for name, value in list(self.document().items())[1:]:
            if isinstance(value, dict):
                lines += [f"{name}: {count} ({why})" for why, count in value.items()]
            elif value:
                lines.append(f"{name.replace('_', ' ')}: {value}")
        return "\n".join(lines)


def read(paths: Sequence[str], model: str = "") -> Iterator[CapturedRequest]:
    """The requests of files, in order of files; raises `OSError` or `ValueError` with the path."""
    for path in paths:
        try:
            for document in read_documents(path):
                request = request_of(document)
                if not model or request.model == model:
                    yield request
        except ImportError:
            raise ValueError(f"{path}: Parquet needs pyarrow") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


async def replay(
    requests: Iterator[CapturedRequest],
    client: AsyncModels,
    report: ReplayReport,
    speed: float = 1.0,
    concurrency: int = 16,
    compare: bool = False,
) -> None:
    """Send requests `speed` times as fast as they came, 0: as fast as possible.

    The `report` has what was done so far also after an error, which ends the replay.
    """

    async def send(request: CapturedRequest) -> None:
        inputs = {name: tensor.array for name, tensor in request.inputs.items()}
        at = monotonic()
        try:
            answer = await client.infer(
                request.model, inputs, id=request.id, parameters=request.parameters
            )
        except ClientError as error:
            if request.status >= 400:
                report.as_before += 1
            else:
                report.failed[f"{request.model}: {error}"] += 1
            return
        report.latencies.append(monotonic() - at)
        if compare:
            differing = list(_differing(request, answer))
            report.differing.update(differing)
            report.equal += not differing

    await paced(_moments(requests, speed, report), send, concurrency)


def _moments(
    requests: Iterator[CapturedRequest], speed: float, report: ReplayReport
) -> Iterator[tuple[float, CapturedRequest]]:
    """The requests that can be sent, with their moments; counts them, and those that cannot."""
    first: float | None = None
    for request in requests:
        if request.missing or len(request.outputs) > 1:
            why = request.missing or "it had several responses"
            report.skipped[f"{request.model}: {why}"] += 1
            continue
        first = request.at if first is None else first
        report.sent += 1
        yield (request.at - first) / speed if speed else 0.0, request


def _differing(request: CapturedRequest, answer: Mapping[str, Any]) -> Iterator[str]:
    for outputs in request.outputs:
        for name, tensor in outputs.items():
            if name not in answer or not _alike(tensor, answer[name]):
                yield f"{request.model}/{name}"


def _alike(tensor: Tensor, given: Any) -> bool:
    array = np.asarray(given)
    is_texts = tensor.datatype is Datatype.BYTES
    if array.shape != tensor.array.shape or is_texts != (array.dtype == object):
        return False
    if is_texts:
        return [_bytes(one) for one in array.ravel()] == list(np.asarray(tensor.array).ravel())
    if tensor.datatype in FLOATS:
        wide = array.astype(np.float64), np.asarray(tensor.array, np.float64)
        return bool(np.allclose(*wide, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True))
    return bool(np.array_equal(array, np.asarray(tensor.array)))


def _bytes(element: Any) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)
