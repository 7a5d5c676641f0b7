"""The figures that are required of the server, and what a run says about them: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.scorecard.sample import Metric, Sample, values
from benchmarks.scorecard.workloads import (
    BARE_ASGI,
    GRPC_AIO,
    HEADRACE,
    HEADRACE_PYTHON,
    KSERVE,
    MLSERVER,
    ORT,
    PLAIN,
    TRITON,
)

Results = Mapping[tuple[str, str], Sequence[Sample]]  # by workload and peer


@dataclass(frozen=True, slots=True)
class Claim:
    """`metric` of our own server in `workload` is at least, or `at_most`, `required` times that of
    `than`: a peer in `other`, or in the same workload. Without a peer `required` is a value.
    """

    subject: str
    workload: str
    metric: Metric
    required: float
    than: str = ""
    other: str = ""
    at_most: bool = False
    ours: str = HEADRACE

    @property
    def reference(self) -> tuple[str, str]:
        """The cell that is compared with."""
        return self.other or self.workload, self.than


@dataclass(frozen=True, slots=True)
class Verdict:
    """Measured ratio of a claim: median, least and largest over pairs of repetitions."""

    claim: Claim
    measured: float | None
    least: float = 0.0
    largest: float = 0.0
    errors: int = 0

    @property
    def holds(self) -> bool | None:
        """True if the claim is met; None if it was not measured."""
        if self.measured is None:
            return None
        if self.errors:
            return False
        if self.claim.at_most:
            return self.measured <= self.claim.required
        return self.measured >= self.claim.required


def judge(claim: Claim, results: Results) -> Verdict:
    """Compare repetition with repetition: those were measured next to one another."""
    ours = results.get((claim.workload, claim.ours), ())
    errors = sum(sample.failures for sample in ours)
    numbers = values(ours, claim.metric)
    if claim.than:
        theirs = values(results.get(claim.reference, ()), claim.metric)
        found = [a / b for a, b in zip(numbers, theirs, strict=False) if a and b]
    else:
        found = [number for number in numbers if number]
    if not found:
        return Verdict(claim, None, errors=errors)
    return Verdict(claim, median(found), min(found), max(found), errors)


def _claims() -> list[Claim]:
    rate, p50 = Metric.THROUGHPUT, Metric.P50
    claims: list[Claim] = []
    for n, plain, bare in ((16, 0.85, 2.0), (64, 0.85, 2.6)):
        what = f"MLP, HTTP JSON, {n} concurrent"
        claims += [
            Claim(what, f"json-{n}", rate, plain, PLAIN),
            Claim(what, f"json-{n}", rate, bare, BARE_ASGI),
        ]
        claims += [Claim(what, f"json-{n}", rate, 12.0, peer) for peer in (MLSERVER, KSERVE)]
    for n, plain, usual in ((16, 0.85, 10.5), (64, 0.9, 12.5)):
        what = f"MLP, gRPC unary, {n} concurrent"
        claims += [
            Claim(what, f"grpc-{n}", rate, plain, PLAIN),
            Claim(what, f"grpc-{n}", rate, usual, GRPC_AIO),
        ]
        claims += [Claim(what, f"grpc-{n}", rate, 10.0, peer) for peer in (MLSERVER, KSERVE)]
        claims.append(Claim(f"{what}, perf_analyzer", f"grpc-perf-{n}", rate, 1.9, TRITON))
    one = "1 connection"
    claims += [
        Claim(f"MLP, HTTP JSON, {one}", "json-1", p50, 1.12, PLAIN, at_most=True),
        Claim(f"MLP, HTTP JSON, {one}", "json-1", p50, 1.0, BARE_ASGI, at_most=True),
        Claim(
            "MLP, HTTP JSON, 16 concurrent",
            "json-16",
            Metric.USER_PER_1000,
            0.5,
            BARE_ASGI,
            at_most=True,
        ),
        Claim(f"MLP, HTTP JSON, {one}", "json-1", p50, 0.6, TRITON, at_most=True),
        Claim(f"MLP, gRPC unary, {one}", "grpc-1", p50, 0.6, TRITON, at_most=True),
        Claim(f"MLP, gRPC unary, {one}", "grpc-1", p50, 0.6, GRPC_AIO, at_most=True),
        Claim(
            "MLP, HTTP binary, 16 concurrent, perf_analyzer", "binary-perf-16", rate, 1.5, TRITON
        ),
    ]
    for size, title in (("1m", "1 MB"), ("16m", "16 MB")):
        claims += [
            Claim(f"identity, {title}, {protocol}", f"{short}-{size}", rate, 1.3, TRITON)
            for short, protocol in (("binary", "HTTP binary"), ("grpc", "gRPC"))
        ]
    claims += [
        Claim("ResNet-50, 4 concurrent, batches of 1 alone", "cnn-4", Metric.ROWS, 0.97,
              ORT, "cnn-1"),
        Claim("ResNet-50, 4 concurrent, batches of 4 alone", "cnn-4", Metric.ROWS, 0.97, ORT),
        Claim("MLP, 64 rows a request, HTTP binary", "rows-64", Metric.ROWS, 0.5, ORT),
        Claim("idle, three small models, seconds", "start", Metric.READY, 0.6, at_most=True),
        Claim("idle, three small models, bytes", "start", Metric.RSS, 90e6, at_most=True),
    ]  # fmt: skip
    for short, protocol in (("json", "HTTP JSON"), ("grpc", "gRPC")):
        off = f"{short}-16-unbatched"
        claims += [
            Claim(f"batching by tick, 16 concurrent, {protocol}", f"{short}-16",
                  Metric.MEAN_BATCH, 8.0),
            Claim(f"batching on, 16 concurrent, {protocol}", f"{short}-16", p50, 1.0,
                  HEADRACE, off, at_most=True),
        ]  # fmt: skip
    return claims + _python_claims()


def _python_claims() -> list[Claim]:
    rate = Metric.THROUGHPUT
    required = {
        f"{short}-{n}": (least, f"MLP in Python, {protocol}, {n} concurrent")
        for short, protocol in (("json", "HTTP JSON"), ("grpc", "gRPC"))
        for n, least in ((16, 2.3), (64, 2.0))
    }
    wide = {
        "rows-64": "MLP in Python, 64 rows a request, batches of 64",
        "rows-64-batched": "MLP in Python, 64 rows a request, batches of up to 1 024",
    }
    required |= {name: (2.0, subject) for name, subject in wide.items()}
    for size, title in (("1m", "1 MB"), ("16m", "16 MB")):
        required[f"binary-{size}"] = (1.3, f"identity in Python, {title}, HTTP binary")
        required[f"grpc-{size}"] = (1.3, f"identity in Python, {title}, gRPC")
    claims = [
        Claim(subject, f"python-{name}", rate, least, TRITON, ours=HEADRACE_PYTHON)
        for name, (least, subject) in required.items()
    ]
    claims += [
        Claim(
            f"MLP in Python, {protocol}, 1 connection",
            f"python-{short}-1",
            Metric.P50,
            most,
            TRITON,
            at_most=True,
            ours=HEADRACE_PYTHON,
        )
        for short, protocol, most in (("json", "HTTP JSON", 0.8), ("grpc", "gRPC", 0.9))
    ]
    claims += [
        Claim(f"{subject}, rows/s", f"python-{name}", Metric.ROWS, 200_000.0, ours=HEADRACE_PYTHON)
        for name, subject in wide.items()
    ]
    return claims


CLAIMS: Sequence[Claim] = _claims()
