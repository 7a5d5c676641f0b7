"""TLS beside plain text, and beside nginx that terminates it: `scripts/bench --tls`.

One server without TLS, one with it, and nginx in front of the former, whose connections it keeps.
nginx has one process, on the core of the servers: both together are what has to be paid for. All
of a repetition run one after the other, so that each has seen the same machine; what counts is the
median. Clients keep their connections, so that handshakes are not in the figures. CPU time is
that of servers for a request, with nginx that of both.
"""

import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measure import Plan, Results, measure_cell
from benchmarks.messages import PROTOCOLS
from benchmarks.models import MLP, write_repository
from benchmarks.report import table
from benchmarks.server import Target, split_cores, started
from benchmarks.summary import Cell, Repetition

_CERTIFICATES = Path(__file__).parents[1] / "tests" / "support" / "tls"
_PAIR = f"{_CERTIFICATES}/server.pem", f"{_CERTIFICATES}/server.key"
_CONCURRENCY = (16, 64)
_PROTOCOLS = {"http-json": "HTTP JSON", "grpc": "gRPC"}
_PLAIN, _TLS, _NGINX = "plain", "TLS", "nginx"
_START_SECS = 10.0
_CONFIGURATION = """\
daemon off;
{user}
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder};
  proxy_temp_path {folder};
  fastcgi_temp_path {folder};
  uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  keepalive_requests 100000000;
  upstream headrace {{ server {server}; keepalive 128; keepalive_requests 100000000; }}
  server {{
    listen {at} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    ssl_protocols TLSv1.2 TLSv1.3;
    location / {{
      proxy_pass http://headrace;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""


def main(seconds: float, repetitions: int) -> None:
    """Measure, and print a table."""
    core, client_cores = split_cores()
    trusting = ssl.create_default_context(cafile=f"{_CERTIFICATES}/root.pem")
    certificate, key = _PAIR
    options = [
        f"--{door}-{name}" for door in ("http", "grpc")
        for name in ("use-ssl", f"server-cert={certificate}", f"server-key={key}")
    ]  # fmt: skip
    trusting.set_alpn_protocols(["h2", "http/1.1"])
    plan = Plan([MLP], list(_PROTOCOLS), _CONCURRENCY, seconds, seconds / 4, repetitions, 1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-"))
        root = Path(folder) / "models"
        write_repository(root, [MLP])
        plain = replace(stack.enter_context(started(root, core)), name=_PLAIN)
        secure = stack.enter_context(started(root, core, options))
        targets = [plain, replace(secure, name=_TLS, tls=trusting)]
        if shutil.which("nginx"):
            behind = stack.enter_context(_nginx(Path(folder), plain, core))
            targets.append(replace(behind, tls=trusting))
        else:
            print("nginx is not installed", file=sys.stderr)
        os.sched_setaffinity(0, client_cores)
        results: Results = {}
        for _ in range(repetitions):
            for protocol, count in product(_PROTOCOLS, _CONCURRENCY):
                for target in targets:
                    if target.address(PROTOCOLS[protocol].transport):
                        cell = Cell(target.name, MLP, protocol, count)
                        found = measure_cell(plan, cell, target)
                        results.setdefault(cell, []).append(found)
                        _show(cell, found)
        print(_report(results))


@dataclass(frozen=True, slots=True)
class Terminator(Target):
    """A server in front of another, whose processes are counted with its own."""

    behind: Target | None = None

    def processes(self) -> list[psutil.Process]:
        """Its processes, and those of the server behind it."""
        others = [] if self.behind is None else self.behind.processes()
        return [*Target.processes(self), *others]


@contextmanager
def _nginx(folder: Path, behind: Target, core: int | None) -> Iterator[Target]:
    """Nginx that terminates TLS in front of a server's HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    certificate, key = _PAIR
    (folder / "nginx.conf").write_text(
        _CONFIGURATION.format(
            user="user root;" if os.geteuid() == 0 else "", folder=folder, server=behind.http,
            at=at, certificate=certificate, key=key,
        )
    )  # fmt: skip
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    command = [*pinned, "nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    process = subprocess.Popen(command)
    try:
        _wait(at)
        yield Terminator(_NGINX, at, "", process.pid, behind=behind)
    finally:
        process.terminate()
        process.wait()


def _wait(address: str) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _START_SECS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.05)


def _show(cell: Cell, repetition: Repetition) -> None:
    busy = repetition.client_cpu / repetition.seconds if repetition.seconds else 0.0
    print(
        f"{cell.server:6} {cell.protocol:9} {cell.concurrency:3} {repetition.throughput:9.0f}/s"
        f"  client {busy:4.0%}  errors {repetition.failures}", file=sys.stderr,
    )  # fmt: skip


def _report(results: Results) -> str:
    """A table of requests/s and of ratios to plain text, by protocol and concurrency."""
    rows = []
    for protocol in _PROTOCOLS:
        for concurrency in _CONCURRENCY:
            found = {
                cell.server: each_of
                for cell, each_of in results.items()
                if (cell.protocol, cell.concurrency) == (protocol, concurrency)
            }
            row = [f"{_PROTOCOLS[protocol]}, {concurrency} connections"]
            for name in (_PLAIN, _TLS, _NGINX):
                if (each_of := found.get(name)) is None:
                    row += [""] * 3
                    continue
                row.append(f"{median(each.throughput for each in each_of):,.0f}")
                row.append(f"{median((each.cost or 0) * 1e6 for each in each_of):.0f}")
                if name != _PLAIN:
                    pairs = zip(each_of, found[_PLAIN], strict=True)
                    row.append(f"{median(_ratio(*pair) for pair in pairs):.2f}")
            rows.append(row)
    titles = (
        "requests/s", "plain text", "CPU, µs", "TLS", "CPU, µs", "/ plain", "nginx in front",
        "CPU, µs", "/ plain",
    )  # fmt: skip
    return table(titles, rows, left=1)


def _ratio(one: Repetition, plain: Repetition) -> float:
    return one.throughput / plain.throughput if plain.throughput else 0.0
