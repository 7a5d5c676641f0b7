"""Fair shares of a queue: `scripts/bench --fair-share`.

A model that takes 10 ms for a batch of up to 8 rows, on one instance, has two clients of equal
weight: one waits for each answer, the other has fifty requests under way. What counts is the
latency of the first, alone, beside the other by arrival, and beside the other by fair shares.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from benchmarks.report import table
from benchmarks.server import read_answer, split_cores, started

_MANY = 50
_WARM_UP_SECS = 1.0
_CLIENTS = ("few", "many")
_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
dynamic_batching {}
instance_group { count: 1 kind: KIND_CPU }
"""
_MODEL = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]
            )
            for request in requests
        ]
"""
_BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'


def main(secs: float) -> None:
    """Measure, and print a table."""
    rows = []
    for named, options, others in (
        ("alone", [], 0), ("beside 50, by arrival", [], _MANY),
        ("beside 50, fair", ["--fair-share"], _MANY),
    ):  # fmt: skip
        found = sorted(_measured(options, others, secs))
        median, late = found[len(found) // 2], found[len(found) * 99 // 100]
        rows.append((named, f"{len(found)}", f"{median * 1e3:.1f}", f"{late * 1e3:.1f}"))
    print(table(("", "answers", "p50, ms", "p99, ms"), rows, left=1))


def _measured(options: Sequence[str], others: int, secs: float) -> list[float]:
    """Latencies of the client that waits for its answers, in seconds."""
    core, _ = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        root, rules = Path(folder, "models"), Path(folder, "access.toml")
        version = root / "slow" / "1"
        version.mkdir(parents=True)
        (root / "slow" / "config.pbtxt").write_text(_CONFIG)
        (version / "model.py").write_text(_MODEL)
        rules.write_text(_rules())
        with started(root, core, [f"--access={rules}", *options]) as target:
            return asyncio.run(_load(target.http, others, secs))


def _rules() -> str:
    keys = [
        f'[keys.{name}]\nhash = "sha256:{hashlib.sha256(name.encode()).hexdigest()}"\n'
        'roles = ["all"]\n'
        for name in _CLIENTS
    ]
    return '[roles.all]\nmay = "*"\n' + "".join(keys)


async def _load(address: str, others: int, secs: float) -> list[float]:
    begin = perf_counter() + _WARM_UP_SECS
    end = begin + secs
    few: list[float] = []
    many: list[float] = []
    tasks = [_ask(address, "few", few, begin, end)]
    tasks += [_ask(address, "many", many, begin, end) for _ in range(others)]
    await asyncio.gather(*tasks)
    return few


async def _ask(address: str, name: str, latencies: list[float], begin: float, end: float) -> None:
    """Send requests, each when the last one is answered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        "POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {name}\r\nContent-Length: {len(_BODY)}\r\n\r\n"
    )
    request = head.encode() + _BODY
    while (begun := perf_counter()) < end:
        writer.write(request)
        await read_answer(reader)
        if begun > begin:
            latencies.append(perf_counter() - begun)
    writer.close()
