"""Large tensors to a server on this machine: `scripts/bench --local`.

A model that returns its input, over TCP, over a Unix socket, and over one with tensors in memory,
which is that of another server that takes memory. All ways of a round run one after the other, so
that each has seen the same machine; what counts is the median of the rounds.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import headrace
from benchmarks.models import Array, echo
from benchmarks.report import table
from headrace.client.blocking import Client

_SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
_BYTES = 256 << 20  # of a round, in each direction
_FEW = 20  # requests at least
_MOST = 500
_CALLERS = (1, 4)


def main(rounds: int = 5) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, ExitStack() as stack:
        root = Path(folder)
        for name, size in _SIZES.items():
            echo(_model(name), size // 4).write(root / "models")
        servers = [
            stack.enter_context(headrace.serve(
                root / "models", unix_socket_memory=memory, max_request_bytes=64 << 20,
                http_unix_socket=root / f"http-{memory}", grpc_unix_socket=root / f"grpc-{memory}",
            ))
            for memory in (False, True)
        ]  # fmt: skip
        ways = {
            "HTTP, TCP": servers[0].url,
            "HTTP, Unix socket": f"unix:{root}/http-False",
            "HTTP, and memory": f"unix:{root}/http-True",
            "gRPC, TCP": servers[0].grpc_url,
            "gRPC, Unix socket": f"grpc+unix:{root}/grpc-False",
            "gRPC, and memory": f"grpc+unix:{root}/grpc-True",
        }
        clients = {way: stack.enter_context(Client(url)) for way, url in ways.items()}
        for callers in _CALLERS:
            print(_report(callers, _measured(clients, callers, rounds)), end="\n\n")


def _model(size: str) -> str:
    return f"echo_{size.replace(' ', '_').lower()}"


def _measured(clients: dict[str, Client], callers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Requests a second, by way and size."""
    found: dict[str, dict[str, float]] = {way: {} for way in clients}
    with ThreadPoolExecutor(callers) as pool:
        for size, nbytes in _SIZES.items():
            count = min(max(_BYTES // nbytes, _FEW), _MOST)
            given = np.random.default_rng(1).random((1, nbytes // 4), np.float32)
            rates: dict[str, list[float]] = {way: [] for way in clients}
            for _ in range(rounds):
                for way, client in clients.items():
                    ask = _asking(client, _model(size), given)
                    list(pool.map(ask, [2] * callers))
                    begun = perf_counter()
                    list(pool.map(ask, [count // callers] * callers))
                    rates[way].append(count // callers * callers / (perf_counter() - begun))
            for way, each in rates.items():
                found[way][size] = median(each)
    return found


def _asking(client: Client, model: str, given: Array) -> Callable[[int], None]:
    def ask(count: int) -> None:
        for _ in range(count):
            client.infer(model, {"input": given})

    return ask


def _report(callers: int, rates: dict[str, dict[str, float]]) -> str:
    lines = [
        (way, *(f"{rate:,.0f} ({2 * rate * _SIZES[size] / 1e6:,.0f})" for size, rate in of.items()))
        for way, of in rates.items()
    ]
    title = f"{callers} caller{'s' if callers > 1 else ''}: requests/s (MB/s)"
    return table((title, *_SIZES), lines, left=1)
