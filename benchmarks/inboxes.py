"""Messages through inboxes, beside the HTTP door of the same server: `make bench-inboxes`.

The server is pinned to one core; the broker, and the generator for HTTP, have the others. Messages
wait at the broker before the server starts, and have the bodies of the requests: one row of the
small MLP, as V2 JSON. Both are measured in turn, so that each has seen the same machine. A rate is
of messages delivered between two looks at the metrics, while there were more; on a machine that
others use as well, the server's CPU time says more. The broker's is of what it does for a message.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

import psutil
import uvloop

from benchmarks.http1 import HttpWire
from benchmarks.load import Load, drive
from benchmarks.messages import PROTOCOLS
from benchmarks.models import ALL_MODELS, MLP
from benchmarks.report import table
from benchmarks.server import Target, cpu_secs, split_address, split_cores, started
from tests.support.brokers import BROKERS, FROM, KilledBroker, Sent, batched, declare
from tests.support.brokers import started as started_broker
from tests.support.scrape import Scraper

_HTTP = "http-json"
_CONNECTIONS = 64
_SHARES = 0.1, 0.9  # of the messages, between which the rate is measured
_LOOK_SECS = 0.05
_LONGEST_SECS = 300.0


def main() -> None:
    """Measure the brokers that are installed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make bench-inboxes")
    parser.add_argument("brokers", nargs="*", default=[*BROKERS], metavar="BROKER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=30_000)
    parser.add_argument("--in-flight", type=int, default=1024, help="messages at once")
    parser.add_argument("--at-least-once", action="store_true", help="without transactions")
    given = parser.parse_args()
    core, others = split_cores()
    os.sched_setaffinity(0, others)  # brokers inherit it
    lines = []
    for name in given.brokers:
        rounds = [_round(name, core, given) for _ in range(given.rounds)]
        lines.append(_line(name, rounds))
        print("  ".join(lines[-1]), file=sys.stderr)
    heads = (
        "inbox",
        "messages/s",
        "CPU µs",
        "broker's",
        "HTTP requests/s",
        "CPU µs",
        "rate",
        "by CPU",
    )
    print(table(heads, lines, left=1))


def _line(name: str, rounds: Sequence[tuple[float, ...]]) -> tuple[str, ...]:
    rate, used, broker, http, http_used = (median(each) for each in zip(*rounds, strict=True))
    beside = median(each[0] / each[3] for each in rounds)
    by_cpu = median(each[4] / each[1] for each in rounds)
    return (
        name, f"{rate:.0f}", f"{used * 1e6:.1f}", f"{broker * 1e6:.1f}", f"{http:.0f}",
        f"{http_used * 1e6:.1f}", f"{beside:.2f}", f"{by_cpu:.2f}",
    )  # fmt: skip


def _round(name: str, core: int | None, given: argparse.Namespace) -> tuple[float, ...]:
    """Rate, CPU seconds and the broker's of a message, rate and CPU seconds of a request."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        ALL_MODELS[MLP].write(root / "models")
        with started_broker(name, root) as broker:
            _fill(broker, given.messages)
            more: dict[str, Any] = {"exactly_once": False} if given.at_least_once else {}
            more["in_flight"] = given.in_flight
            declared = declare(root / "inboxes.toml", broker, MLP, **more)
            options = ("--allow-metrics=true", "--metrics-port=0", "--inboxes", str(declared))
            with started(root / "models", core, options) as target:
                return *_inbox(target, given.messages), *_http(target)


def _fill(broker: KilledBroker, messages: int) -> None:
    exchanges = PROTOCOLS[_HTTP].exchanges("", ALL_MODELS[MLP])
    bodies = [exchange.message.partition(b"\r\n\r\n")[2] for exchange in exchanges]
    sent = (Sent(None, {}, bodies[at % len(bodies)]) for at in range(messages))
    for some in batched(sent, 5000):
        broker.fill(some)


def _inbox(target: Target, messages: int) -> tuple[float, ...]:
    """Rate, CPU seconds and the broker's of messages; raises `AssertionError` if one failed."""
    processes = target.processes()
    brokers = [p for p in psutil.Process().children(recursive=True) if p not in processes]
    ends = []
    with Scraper(target.metrics) as scraper:
        for share in _SHARES:
            until = monotonic() + _LONGEST_SECS
            while (done := _delivered(scraper)) < share * messages:
                assert monotonic() < until, f"{done} messages of {FROM} were delivered"
                sleep(_LOOK_SECS)
            ends.append((done, monotonic(), cpu_secs(processes), cpu_secs(brokers)))
        while _delivered(scraper) < messages:
            sleep(_LOOK_SECS)
        assert not scraper.now().samples("headrace_inbox_failures_total"), "messages failed"
    count, seconds, *used = (last - first for first, last in zip(*ends, strict=True))
    return count / seconds, *(each / count for each in used)


def _delivered(scraper: Scraper) -> float:
    return scraper.now().value("headrace_inbox_delivered_total")


def _http(target: Target) -> tuple[float, float]:
    """Rate and CPU seconds of requests; raises `AssertionError` if one failed."""
    processes: Sequence[psutil.Process] = target.processes()
    observed = uvloop.run(
        drive(
            split_address(target.http), lambda _: HttpWire(),
            PROTOCOLS[_HTTP].exchanges(target.http, ALL_MODELS[MLP]),
            Load(_CONNECTIONS, 1, 1.0, 3.0), lambda: (cpu_secs(processes),),
        )
    )  # fmt: skip
    assert not observed.errors, observed.errors
    count = len(observed.latencies)
    return count / observed.seconds, (observed.after[0] - observed.before[0]) / count


if __name__ == "__main__":
    main()
