"""One server for the whole suite, and a client for each transport."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from inspect import signature
from itertools import count, filterfalse
from pathlib import Path
from secrets import token_hex, token_urlsafe
from typing import Protocol

import numpy as np
import pytest

from headrace.core.tensors import Array
from tests.contract.proxied import PROXIES, TRITONS, impossible, write_proxies
from tests.contract.repository import (
    write_busy_repository,
    write_repository,
    write_small_repository,
)
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.held import Gates, write_held_model
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server
from tests.support.tls_files import ROOT, tls_options
from tests.support.transports import grpc_transport


class Addressed(Protocol):
    """Addresses of a running server."""

    grpc: str
    secure: set[str]

    @property
    def url(self) -> str:
        """The address with its scheme."""


# Servers with TLS know their clients by a key; who has none may only look at metrics.
KEY = f"hrk_{token_hex(4)}_{token_urlsafe(32)}"
IDENTITIES = f"""\
roles.client.may = "*"
roles.watcher.may = ["observe"]
anonymous.roles = ["watcher"]
keys.suite = {{ hash = "sha256:{sha256(KEY.encode()).hexdigest()}", roles = ["client"] }}
"""


def _over_http(server: Addressed, binary: bool) -> HttpClient:
    return HttpClient(server.url, binary, KEY if "http" in server.secure else "")


def _over_grpc(server: Addressed) -> GrpcClient:
    if "grpc" in server.secure:
        return GrpcClient(server.grpc, root=ROOT.read_bytes(), key=KEY)
    return GrpcClient(server.grpc)


CLIENTS: dict[str, Callable[[Addressed], Client]] = {
    "http": lambda server: _over_http(server, binary=False),
    "http-binary": lambda server: _over_http(server, binary=True),
    "grpc": _over_grpc,
}
# Fast paths must give the answers of the reference implementations.
CARRIERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "reference": ("--http-fast-path=false", "--grpc-transport=grpcio"),
    "frontends": ("--frontends=2",),
    "tls": (*tls_options("http"), *tls_options("grpc")),
    "tls frontends": ("--frontends=2", *tls_options("http"), *tls_options("grpc")),
    "tls reference": ("--http-fast-path=false", "--grpc-transport=grpcio",
                      *tls_options("http"), *tls_options("grpc")),
}  # fmt: skip
# Reference implementations run in the slow tests alone. Front ends carry everything in
# them, and in the quick ones the tests of `WITH_FRONT_ENDS`.
EACH_CARRIER = [
    pytest.param(name, marks=pytest.mark.slow) if name == "reference" or "tls" in name else name
    for name in CARRIERS
]
WITH_FRONT_ENDS = {"test_infer"}
OTHERS = {*CARRIERS, *PROXIES, *TRITONS, "inline", "remote", "remote frontends"} - {"default"}
TLS = {name for name in CARRIERS if "tls" in name}
# Whose tests open connections of their own, and the fixtures of others that do.
RAW = {"test_connections", "test_openapi", "test_shared_memory"}
RAW_FIXTURES = {"server", "servers"}
Rounds = Callable[[float], Array]
_TRIAL_ROUNDS = 20_000
_NUMBERS = count(500_000)  # of gates


# For extensions, which front ends have the engine answer, or forward unchanged.
FIRST_CARRIER = [
    pytest.param(name, marks=pytest.mark.slow) if name != "default" else name
    for name in CARRIERS
    if "tls" not in name
]
# For what happens behind the doors, whichever they are.
BEHIND_DOORS = [
    "default", pytest.param("frontends", marks=pytest.mark.slow),
    pytest.param("reference", marks=[pytest.mark.slow, pytest.mark.whole]),
]  # fmt: skip
# For models of a module's own: front ends carry them like any other model.
FRONT_ENDS = pytest.param("front ends", marks=pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that a proxy cannot pass, with the reason, and leave others to the slow suite.

    The default server runs every case. Other carriers run the first case of a test; those with
    doors of their own run its first case by each client. A test that opens connections of its own
    has no case with TLS.
    """
    asked: set[tuple[str, str, object]] = set()
    impassable = [item for item in items if _plain_with_tls(item)]
    config.hook.pytest_deselected(items=impassable)
    items[:] = filterfalse(set(impassable).__contains__, items)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        params = item.callspec.params
        values = [value for value in params.values() if isinstance(value, str)]
        if "frontends" in values and item.path.stem not in WITH_FRONT_ENDS:
            item.add_marker(pytest.mark.slow)
        if reason := impossible(item.path.stem, item.originalname, values):
            item.add_marker(pytest.mark.skip(reason=reason))
        for carrier in OTHERS.intersection(values):
            client = params.get("client") if carrier in CARRIERS else None
            if (case := (item.nodeid.partition("[")[0], carrier, client)) in asked:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.whole)
            asked.add(case)


def _plain_with_tls(item: pytest.Item) -> bool:
    """True if the carrier has TLS, and the test connects without by itself."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    if TLS.isdisjoint(v for v in item.callspec.params.values() if isinstance(v, str)):
        return False
    raw = item.path.stem in RAW or RAW_FIXTURES.intersection(signature(item.obj).parameters)
    return bool(raw)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    return root


@pytest.fixture(scope="session")
def servers(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ServerProcess]]:
    """The suite's servers by carrier, each started at its first use.

    They live until the end of the session: pytest would otherwise restart them for each file. At
    the end none of them may have logged a bug.
    """
    with ExitStack() as stack:
        started: dict[str, ServerProcess] = {}

        def find(carrier: str) -> ServerProcess:
            if carrier not in started:
                models = repository
                if carrier in PROXIES:
                    models = tmp_path_factory.mktemp(carrier)
                    write_proxies(repository, models, find("default"), PROXIES[carrier])
                options = ["--allow-client-shm", *CARRIERS.get(carrier, ())]
                if carrier in TLS:
                    access = tmp_path_factory.mktemp("access") / "access.toml"
                    access.write_text(IDENTITIES)
                    options.append(f"--access={access}")
                process = ServerProcess(models, options=options)
                started[carrier] = stack.enter_context(process)
            return started[carrier]

        yield find
        for process in reversed(started.values()):
            assert process.stop() == 0
            assert "bug " not in process.log


# A proxy must answer like the server behind it.
EACH_PROXY = [pytest.param(name, marks=pytest.mark.slow) for name in PROXIES if name not in TRITONS]
EACH_TRITON = [pytest.param(name, marks=pytest.mark.slow) for name in TRITONS]


@pytest.fixture(scope="session", params=[*EACH_CARRIER, *EACH_PROXY])
def server(
    request: pytest.FixtureRequest, servers: Callable[[str], ServerProcess]
) -> ServerProcess:
    """The suite's server, for each carrier."""
    return servers(request.param)


# Of the module's own server where it has one.
@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Clients of the suite's server for each transport and form of tensors."""
    with CLIENTS[request.param](server) as client:
        yield client


@pytest.fixture(scope="module", params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Clients of the suite's server for each transport, for tests without tensors."""
    with CLIENTS[request.param](server) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(server: ServerProcess) -> Iterator[GrpcClient]:
    with _over_grpc(server) as client:
        yield client


@pytest.fixture(scope="module")
def metrics(server: ServerProcess) -> Iterator[Scraper]:
    with Scraper(server.metrics) as scraper:
        yield scraper


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for concurrent requests."""
    with ThreadPoolExecutor(64) as executor:
        yield executor


@pytest.fixture(scope="session")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    """Gates of the server with slow models."""
    return Gates(tmp_path_factory.mktemp("gates"))


@pytest.fixture
def number(gates: Gates) -> Iterator[int]:
    """A gate number for a `held` model; its gate opens with the test's end at the latest."""
    number = next(_NUMBERS)
    gates.close(number)
    yield number
    gates.open()


@pytest.fixture(scope="session")
def busy_repository(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Path:
    """Models that take as long as a request or a test wants."""
    root = tmp_path_factory.mktemp("busy")
    write_busy_repository(root, gates.folder)
    return root


@pytest.fixture(scope="session")
def busy_server(request: pytest.FixtureRequest, busy_repository: Path) -> Iterator[ServerProcess]:
    """A server with models that take as long as a request wants."""
    options = ("--allow-in-process-python", *grpc_transport(request))
    with clean_server(busy_repository, options=options) as process:
        yield process


@pytest.fixture(scope="session")
def busy_metrics(busy_server: ServerProcess) -> Iterator[Scraper]:
    """Metrics of the server with slow models."""
    with Scraper(busy_server.metrics) as scraper:
        yield scraper


@pytest.fixture(scope="session")
def rounds(busy_server: ServerProcess) -> Rounds:
    """The input that keeps a `spin` model busy for `seconds` on this machine."""
    with GrpcClient(busy_server.grpc) as client:
        trial = {"ROUNDS": np.array([[_TRIAL_ROUNDS]])}
        answers = [
            client.infer("spin", trial, parameters={"headrace_timing": True}) for _ in range(3)
        ]
    fastest = min(answer.parameters["compute_us"] for answer in answers)
    return lambda seconds: np.array([[int(_TRIAL_ROUNDS * seconds * 1e6 / fastest)]])


@pytest.fixture(scope="session")
def small_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    write_small_repository(root)
    return root


@pytest.fixture(scope="session")
def narrow(
    small_repository: Path, gates: Gates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with low limits that logs every request as JSON."""
    options = (
        "--max-request-bytes=4096", "--max-admitted-requests=1",
        "--access-log", "--log-format=json", "--allow-in-process-python",
    )  # fmt: skip
    root = tmp_path_factory.mktemp("narrow")
    write_held_model(root, "held", gates.folder)
    with ServerProcess(small_repository, root, options=options) as process:
        yield process
        assert "bug " not in process.log
