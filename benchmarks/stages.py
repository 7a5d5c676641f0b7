"""Cost of each stage of a request, in this process, without sockets: `scripts/bench --stages`.

The request is one row of the MLP. Figures are the fastest of several rounds: other work on the
machine can only add to them.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns, perf_counter
from typing import Any

from benchmarks.http1 import header
from benchmarks.messages import PROTOCOLS
from benchmarks.models import MLP, MODELS
from benchmarks.report import table
from headrace.core.call import Call, InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature, TensorSpec
from headrace.observability.statistics import VersionStatistics
from headrace.placement.choice import InstanceKind
from headrace.placement.local.instances import LocalInstance
from headrace.placement.local.onnx import OnnxBackend, OnnxModel
from headrace.protocol import v2_json, v2_protobuf
from headrace.protocol.v2_json import ResponseForm
from headrace.scheduling.batch import Batch, Outcome
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy

ROWS = (1, 16, 64)
_ROUNDS = 7
_SIGNATURE = Signature(
    MLP,
    64,
    (TensorSpec("input", Datatype.FP32, (64,)),),
    (TensorSpec("output", Datatype.FP32, (10,)),),
)

Work = Callable[[], object]


class _Tick:
    """The scheduler's clock, and an event loop of one tick, with what follows from it."""

    now = staticmethod(monotonic_ns)

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def soon(self, callback: Callable[..., object], *args: Any) -> object:
        """Remember what `end` runs."""
        self._callbacks.append(partial(callback, *args))
        return None

    def at(self, when: int, callback: Callable[[], None]) -> Any:
        """Do nothing: no call is delayed here."""
        raise AssertionError("a timer in a model without delay. This is a bug.")

    def end(self) -> None:
        """The end of the tick."""
        for callback in self._callbacks:  # those that come meanwhile, too
            callback()
        self._callbacks.clear()


class _Call(Call):
    """Takes answers and forgets them."""

    def __init__(self, asked: Call) -> None:
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.rows = 1

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take an answer."""

    def finish(self) -> None:
        """Every request here has an answer."""
        raise AssertionError("a request of the benchmark was answered with nothing")

    def fail(self, error: ServerError) -> None:
        """Do nothing: no call fails here."""
        raise error


def main(round_secs: float) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="headrace-stages-") as directory:
        MODELS[MLP].write(Path(directory))
        root = Path(directory) / MLP
        model = OnnxBackend().load(LoadSpec(MLP, root / "1" / "model.onnx", root))
        print(report(model, round_secs))


def report(model: OnnxModel, round_secs: float) -> str:
    """The tables, as Markdown."""
    singles = [
        (name, f"{_cost(work, round_secs):.2f}") for name, work in _single_stages(model).items()
    ]
    titles = ("stage", *(f"batch of {rows}" for rows in ROWS))
    stages: dict[str, list[str]] = {}
    for rows in ROWS:
        for name, work in _batch_stages(model, rows).items():
            stages.setdefault(name, []).append(f"{_cost(work, round_secs) / rows:.2f}")
    return "\n\n".join((
        "Microseconds per request, outside of batches:",
        table(("stage", "us"), singles, left=1),
        "Microseconds per request, by the size of the batch:",
        table(titles, [(name, *costs) for name, costs in stages.items()], left=1),
    ))  # fmt: skip


def _single_stages(model: OnnxModel) -> dict[str, Work]:
    """Stages that run once for each request."""
    bodies = {name: _body(name) for name in PROTOCOLS}
    request = _request()
    response = _response(model, request)
    plain, binary = ResponseForm(), ResponseForm(binary=True)
    head = _message("http-binary").partition(b"\r\n\r\n")[0].lower() + b"\r\n"
    json_size = int(header(head, b"inference-header-content-length") or 0)

    decode = partial(v2_json.decode_infer, MLP, "")

    def decode_grpc() -> None:
        data = bodies["grpc"]
        v2_protobuf.decode_infer(v2_protobuf.parse_infer(data), len(data))

    return {
        "decode HTTP JSON": partial(decode, bodies["http-json"], None),
        "decode HTTP binary": partial(decode, bodies["http-binary"], json_size),
        "decode gRPC": decode_grpc,
        "check": partial(_SIGNATURE.check, request),
        "encode HTTP JSON": partial(plain.encode, response),
        "encode HTTP binary": partial(binary.encode, response),
        "encode gRPC": lambda: b"".join(v2_protobuf.InferWriter().pieces(response)),
    }


def _batch_stages(model: OnnxModel, rows: int) -> dict[str, Work]:
    """Stages that run once for a batch of `rows` requests."""
    batcher, tick = _batcher(model)
    requests = [_request() for _ in range(rows)]
    queue, _ = _batcher(model)
    calls: list[Call] = [_Call(request) for request in requests]
    for call in calls:
        queue.submit(call)
    batch = Batch(_SIGNATURE, calls)
    inputs = batch.gather()
    arrays = model.infer(inputs, ["output"])
    outcome = Outcome(arrays, None, 0, 0, 0)

    def schedule() -> None:
        for request in requests:
            batcher.submit(_Call(request))
        tick.end()

    return {
        "gather": batch.gather,
        "run": partial(model.infer, inputs, ["output"]),
        "take outputs": partial(batch.take, "1", outcome),
        "from submit to answer, all of these included": schedule,
    }


def _batcher(model: OnnxModel) -> tuple[Batcher, _Tick]:
    tick = _Tick()
    policy = SchedulingPolicy(BatchPolicy(_SIGNATURE.max_batch_size))
    batcher = Batcher(_SIGNATURE, "1", policy, tick, VersionStatistics(), _raise)
    batcher.add_instance(LocalInstance(MLP, model, InstanceKind.INLINE, asyncio.new_event_loop()))
    tick.end()
    return batcher, tick


def _raise(calls: Sequence[Call], error: Exception) -> None:
    raise error


def _body(protocol: str) -> bytes:
    """The request as a transport hands it on: without HTTP's head, or gRPC's prefix."""
    message = _message(protocol)
    return message[5:] if protocol == "grpc" else message.partition(b"\r\n\r\n")[2]


def _message(protocol: str) -> bytes:
    return PROTOCOLS[protocol].exchanges("localhost", MODELS[MLP])[0].message


def _request() -> Call:
    data = _body("grpc")
    return v2_protobuf.decode_infer(v2_protobuf.parse_infer(data), len(data))


def _response(model: OnnxModel, request: Call) -> InferResponse:
    answers: list[InferResponse] = []

    class Keep(_Call):
        def respond(self, response: InferResponse, final: bool) -> None:
            answers.append(response)

    batcher, tick = _batcher(model)
    batcher.submit(Keep(request))
    tick.end()
    return answers[0]


def _cost(work: Work, round_secs: float) -> float:
    """Microseconds of one call."""
    count = 1
    while (elapsed := _time(work, count)) < round_secs / 4:
        count *= 4
    count = max(round(count * round_secs / elapsed), 1)
    return min(_time(work, count) for _ in range(_ROUNDS)) / count * 1e6


def _time(work: Work, count: int) -> float:
    calls: Sequence[None] = [None] * count
    begun = perf_counter()
    for _ in calls:
        work()
    return perf_counter() - begun
