"""Models with several backends: the search for absent upstreams."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.engine.fail_over import FailOver
from headrace.engine.loading import Backends, load
from headrace.engine.opening import open_model
from headrace.placement.backend import Backend
from headrace.placement.upstream.backend import RemoteBackend
from headrace.repository.config import parse_config
from headrace.repository.layout import ModelSource, read_model_directory
from tests.engine.worlds import LOAD_OPTIONS, Constants
from tests.scheduling.fakes import Bench


class Servers(RemoteBackend):
    """Upstreams by endpoint: some are `there`, some do not answer before an event."""

    def __init__(self) -> None:
        super().__init__()
        self.there: set[str] = set()
        self.slow: dict[str, Event] = {}

    def load(self, spec: LoadSpec) -> Any:
        endpoints = spec.parameters["endpoints"]
        if endpoints in self.slow:
            assert self.slow[endpoints].wait(30)
        if endpoints not in self.there:
            raise LoadFailed(f"{endpoints} does not answer")
        return Described()


class Described:
    """A model that is only described."""

    def close(self) -> None: ...


def config(endpoints: str, fail_over: str) -> str:
    return (
        'backend: "triton" max_batch_size: 4'
        f' parameters {{ key: "endpoints" value {{ string_value: "{endpoints}" }} }}'
        f' parameters {{ key: "fail_over" value {{ string_value: "{fail_over}" }} }}'
    )


def write(root: Path, endpoints: str, fail_over: str) -> ModelSource:
    """Write a model `m` with these backends; `constant` is a local one."""
    folder = root / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.constant").write_text("1")
    (folder / "config.pbtxt").write_text(config(endpoints, fail_over))
    return read_model_directory(folder)


def test_absent_backends_are_searched_for(tmp_path: Path) -> None:
    servers = Servers()
    backends: dict[str, Backend] = {"triton": servers, "constant": Constants()}
    source = write(tmp_path, "grpc://a", "grpc://b;constant")
    loaded = load(open_model(source, backends, LOAD_OPTIONS), 1, LOAD_OPTIONS)
    assert loaded.backends is not None
    assert list(loaded.backends.absent) == ["triton", "triton-2"]
    assert loaded.backends.look() == ""
    servers.there = {"grpc://b"}
    assert loaded.backends.look() == "triton-2"
    servers.there = {"grpc://a", "grpc://b"}
    assert loaded.backends.look() == "triton"
    for instance in loaded.instances:
        instance.model.close()


class Told(logging.Handler):
    """Calls `found` at a line of the log."""

    def __init__(self, text: str, then: Callable[[], None]) -> None:
        super().__init__()
        self._text = text
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._then()


def test_a_returning_upstream_does_not_undo_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The upstream returns while the model is loaded with a client's configuration."""
    servers = Servers()
    changed = servers.slow["grpc://b"] = Event()
    back = Told("is loaded again", changed.set)
    logger = logging.getLogger("headrace.engine.fail_over")
    caplog.set_level(logging.INFO, logger.name)

    async def scenario() -> None:
        backends: dict[str, Backend] = {"triton": servers, "constant": Constants()}
        engine = Engine("server", "0", backends, LOAD_OPTIONS, Admission(0, 0))
        source = write(tmp_path, "grpc://a", "constant")
        await engine.load_all([source])
        assert engine.find_version("m").report.detour
        override = parse_config(config("grpc://b", "constant"), "m/config.pbtxt")
        change = asyncio.ensure_future(engine.load(replace(source, override=override)))
        servers.there.add("grpc://a")
        assert await change == ""
        assert engine.find_version("m").config.parameters["endpoints"].string_value == "grpc://b"
        await engine.unload_all()

    logger.addHandler(back)
    try:
        asyncio.run(scenario())
    finally:
        logger.removeHandler(back)


async def test_shutdown_does_not_wait_for_a_check() -> None:
    """A check takes long where a server does not answer."""
    begun, released = Event(), Event()
    ended: list[bool] = []

    def look() -> str:
        begun.set()
        released.wait(20)
        ended.append(True)
        return ""

    async def load() -> str:
        raise AssertionError("nothing has come back")

    absent = {"triton": "no server answers"}
    backends = Backends(("triton", "constant"), 0, absent, look)
    found = FailOver("m", backends, Bench().batcher, asyncio.get_running_loop(), {})
    found.search(load)
    assert await asyncio.to_thread(begun.wait, 20)
    found.stop_search()
    assert not ended
    released.set()
