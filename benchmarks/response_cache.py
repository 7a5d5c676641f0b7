"""The cost of hits and misses of the response cache: `scripts/bench --cache`.

One row of a light model over HTTP JSON, with a response cache and without one, from one connection
and from many. A hit is the same request again and again, a miss one that never came before. What
counts is the server's processor time, the least of the rounds, since the machine does other things
too.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from benchmarks.models import echo
from benchmarks.report import table
from benchmarks.server import Target, cpu_secs, read_answer, split_cores, started

_PLAIN = "plain"
_CACHED = "cached"
_CALLS = 4_000  # of a round
_CALLERS = (1, 16)


def main(rounds: int = 5) -> None:
    """Measure, and print a table."""
    core, _ = split_cores()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        model = echo("echo_4", 4)
        [(name, row)] = model.cases()[0].inputs.items()
        replace(model, name=_PLAIN).write(Path(folder))
        config = f"{model.config}\nresponse_cache {{ enable: true }}"
        replace(model, name=_CACHED, config=config).write(Path(folder))
        options = ["--cache-config=local,size=1000000000"]
        width = row.shape[1]
        with started(Path(folder), core, options) as target:
            times = asyncio.run(_measure(target, (name, width), rounds))
    lines = []
    for callers in _CALLERS:
        plain = times[callers, _PLAIN, True]
        for what, key in (
            ("without a cache", (callers, _PLAIN, True)),
            ("hit", (callers, _CACHED, False)),
            ("miss", (callers, _CACHED, True)),
        ):
            spent = times[key]
            many = "1 connection" if callers == 1 else f"{callers} connections"
            lines.append((f"{what}, {many}", f"{spent:.1f}", f"{spent - plain:+.1f}"))
    print(table((f"{width} numbers a request", "us a request", "beside none"), lines, left=1))


async def _measure(
    target: Target, given: tuple[str, int], rounds: int
) -> dict[tuple[int, str, bool], float]:
    """Microseconds a request, by the number of connections, the model, and whether each differs."""
    found: dict[tuple[int, str, bool], float] = {}
    numbers, processes = count(), target.processes()
    for _ in range(rounds):
        for callers in _CALLERS:
            for model, new in ((_PLAIN, True), (_CACHED, False), (_CACHED, True)):
                begun = cpu_secs(processes)
                bodies = _bodies(given, numbers if new else None)
                await asyncio.gather(
                    *(_ask(target.http, model, bodies, _CALLS // callers) for _ in range(callers))
                )
                spent = (cpu_secs(processes) - begun) / _CALLS * 1e6
                key = callers, model, new
                found[key] = min(spent, found.get(key, spent))
    return found


def _bodies(given: tuple[str, int], numbers: "count[int] | None") -> Iterator[bytes]:
    name, width = given
    rest = ",0" * (width - 1)
    while True:
        number = 0 if numbers is None else next(numbers)
        yield (
            f'{{"inputs":[{{"name":"{name}","shape":[1,{width}],"datatype":"FP32",'
            f'"data":[{number}{rest}]}}]}}'
        ).encode()


async def _ask(address: str, model: str, bodies: Iterator[bytes], calls: int) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(calls):
        body = next(bodies)
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await read_answer(reader)
    writer.close()
