"""Repositories that change while served: no request is lost or mixes versions.

No answer comes from a version that had been replaced before the request was sent.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.core.errors import NotFound, ServerError
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.swapping import Callers, Held, ask, content, resident

BROKEN = {
    "code": (b"def f(:\n", "SyntaxError: invalid syntax"),
    "graph": (b"nothing", "is not a valid ONNX model"),
}
FILES = {"code": "model.py", "graph": "model.onnx"}
NAMES = tuple(FILES)
_POLL_SECS = 1
_GROWTH = 24 << 20  # bytes, over hundreds of swaps


class Repository:
    """A served repository with models of both kinds; `serving` are the numbers they answer with."""

    def __init__(self, root: Path, names: Sequence[str] = NAMES) -> None:
        self.root = root
        self.serving = dict.fromkeys(names, 1)
        for name in names:
            self.write(name, content(name, 1))

    def file(self, name: str, version: int = 1) -> Path:
        return self.root / name / str(version) / FILES[name.rstrip("0123456789")]

    def write(self, name: str, data: bytes, version: int = 1) -> None:
        """Replace a file atomically."""
        file = self.file(name, version)
        file.parent.mkdir(parents=True, exist_ok=True)
        other = file.with_name(".new")
        other.write_bytes(data)
        other.replace(file)

    def publish(self, name: str, number: int, version: int) -> None:
        staged = self.root / ".staged"
        staged.mkdir()
        (staged / FILES[name]).write_bytes(content(name, number))
        staged.rename(self.root / name / str(version))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def server(request: pytest.FixtureRequest, repository: Repository) -> Iterator[ServerProcess]:
    options = ["--model-control-mode=poll", f"--repository-poll-secs={_POLL_SECS}"]
    options += getattr(request, "param", [])
    with clean_server(repository.root, options=options) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with HttpClient(server.url, binary=True) as client:
        yield client


def index(client: Client, name: str) -> dict[str, tuple[str, str]]:
    """State and reason of each version of a model."""
    return {m.version: (m.state, m.reason) for m in client.index().models if m.name == name}


def until_answer(client: Client, name: str, number: int) -> None:
    until(lambda: ask(client, name) == number, f"{name} to be {number}", 60)


def until_reason(client: Client, name: str, version: str, told: str) -> None:
    until(lambda: told in index(client, name)[version][1], f"the reason of {name}")


@pytest.mark.slow
@pytest.mark.parametrize("server", [
    [], pytest.param(["--frontends=2"], marks=pytest.mark.whole, id="front ends"),
], indirect=True)  # fmt: skip
def test_a_repository_with_every_kind_of_change(
    server: ServerProcess, repository: Repository, client: Client
) -> None:
    """Versions, files, configurations and models are added, changed and removed under load."""
    serving = repository.serving

    def expect(number: int) -> None:
        for name in NAMES:
            until_answer(client, name, number)
            serving[name] = number

    with Callers(server, serving, 6, rate=100) as callers:
        for name in NAMES:  # a file in place of another
            repository.write(name, content(name, 2))
        expect(2)
        for name in NAMES:  # a version beside another
            repository.publish(name, 3, version=2)
        expect(3)
        until(lambda: list(index(client, "code")) == ["2"], "version 1 to be known no more")
        for name in NAMES:  # something broken
            repository.write(name, BROKEN[name][0], version=2)
        for name in NAMES:
            told = BROKEN[name][1]
            until_reason(client, name, "2", told)
            assert index(client, name)["2"][0] == "READY"
            server.await_logged(told)
        with Scraper(server.metrics) as metrics:
            for name in NAMES:
                labels = {"model": name, "outcome": "failure"}
                assert metrics.now().value("headrace_model_loads_total", **labels) >= 1
        for name in NAMES:  # the broken version is removed, and the previous one changed
            shutil.rmtree(repository.file(name, 2).parent)
            repository.write(name, content(name, 4))
        expect(4)
        for name in NAMES:  # more instances, without a load of existing ones
            config = f'instance_group {{ name: "{name}" count: 3 }}'
            (repository.root / name / "config.pbtxt").write_text(config)
        for name in NAMES:
            told = f"{name} version 1 goes on with 3 instances"
            server.await_logged(told)
            assert client.model_config(name).instance_group[0].count == 3
        shutil.copytree(repository.root / "code", repository.root / "code2")  # a new model
        until(lambda: client.model_ready("code2"), "the new model")
        away = repository.root.rename(repository.root.with_name("away"))  # it is not there
        server.await_logged("cannot be read")
        away.rename(repository.root)
        server.await_logged("is back")
        shutil.rmtree(repository.root / "code2")
        until(lambda: not client.model_ready("code2"), "the model to go")
        with pytest.raises(NotFound):
            ask(client, "code2")
        for name in NAMES:  # fewer
            (repository.root / name / "config.pbtxt").unlink()
        for name in NAMES:
            told = f"{name} version 1 goes on with 1 instance\n"
            server.await_logged(told)
    assert callers.failures == []
    assert callers.answers > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundreds_of_swaps_under_load(tmp_path: Path) -> None:
    """Swaps and failing loads of ONNX and Python models leave nothing behind."""
    repository = Repository(tmp_path / "repository", ("graph", "graph2", "code"))
    for name, kind in {"graph": "inline", "graph2": "thread"}.items():
        config = f'parameters {{ key: "execution" value {{ string_value: "{kind}" }} }}'
        (repository.root / name / "config.pbtxt").write_text(config)
    options = ["--model-control-mode=explicit", "--load-model=*"]
    with ServerProcess(repository.root, options=options) as server:
        swap(server, repository, {name: (4, 2) for name in repository.serving}, callers=32)
        before, memory = Held.of(server.pid), resident(server.pid)
        maps = mapped(server.pid, repository.root)
        times = {"graph": (100, 33), "graph2": (100, 33), "code": (24, 8)}
        swap(server, repository, times, callers=32)
        until(lambda: Held.of(server.pid) == before, f"what was held before: {before}", 60)
        assert mapped(server.pid, repository.root) == maps
        assert resident(server.pid) - memory < _GROWTH
        assert server.stop() == 0
        assert "bug " not in server.log, server.log


def mapped(pid: int, root: Path) -> int:
    """Number of mappings of files in the repository, or of unnamed ones."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:" in line or str(root) in line for line in lines)


def swap(
    server: ServerProcess, repository: Repository, times: dict[str, tuple[int, int]], callers: int
) -> None:
    """Swap each model `swaps` times, with `failures` between, under load."""
    with Callers(server, repository.serving, callers) as asking, ThreadPoolExecutor() as pool:
        swaps = [pool.submit(swap_one, server, repository, n, *t) for n, t in times.items()]
        for future in swaps:
            future.result()
    assert asking.failures == []
    assert asking.answers > callers
    with GrpcClient(server.grpc) as client:  # also from swaps after their end
        assert {name: ask(client, name) for name in times} == repository.serving


def swap_one(
    server: ServerProcess, repository: Repository, name: str, swaps: int, failures: int
) -> None:
    """Swap one model repeatedly by load requests."""
    serving = repository.serving
    with GrpcClient(server.grpc) as client:
        for turn in range(swaps):
            number = serving[name] + 1
            repository.write(name, content(name, number))
            client.load(name)
            serving[name] = number  # from here on, no answer may come from the previous one
            if turn * failures // swaps != (turn + 1) * failures // swaps:
                broken, told = BROKEN[name.rstrip("0123456789")]
                repository.write(name, broken)
                with pytest.raises(ServerError, match=told):
                    client.load(name)
                assert index(client, name)["1"][0] == "READY"
