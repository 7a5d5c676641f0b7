"""Versions: their states before and after a load."""

import asyncio
from pathlib import Path

import pytest

from headrace.core.errors import ModelNotReady
from headrace.engine.version import ModelVersion, State
from tests.engine.worlds import CONFIG, FutureCall, World, ask, number, question, until


def test_a_version_that_is_being_loaded_refuses_calls_for_now() -> None:
    version = ModelVersion("m", 3)
    with pytest.raises(ModelNotReady, match="version 3 is not at ready") as it:
        version.chain.submit(question())
    assert it.value.retry_after == 1
    version.fail("it is broken")
    with pytest.raises(ModelNotReady, match="it is UNAVAILABLE") as it:
        version.chain.submit(question())
    assert it.value.retry_after == 0
    for refused in (lambda: version.config, lambda: version.chain.signature):
        with pytest.raises(ModelNotReady):
            refused()
    assert (version.reason, version.ready, version.chain.ready) == ("it is broken", False, False)
    assert (version.lease, version.serving) == (None, None)


async def test_a_version_is_freed_when_its_requests_are_finished(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.engine.load_all([world.write("m", "1", config=CONFIG.format("thread"))])
    version = world.engine.find_version("m")
    assert (version.ready, version.serving is None, version.reason) == (True, False, "")
    world.backend.run_now.clear()
    call = FutureCall(question())
    version.chain.submit(call)
    version.leave()
    freed = [asyncio.create_task(version.unload()) for _ in range(2)]
    await asyncio.sleep(0)
    assert (version.state, version.serving, version.report.busy) == (State.UNLOADING, None, True)
    world.backend.run_now.set()
    await call.future
    await asyncio.gather(*freed)
    assert (version.state, version.reason) == (State.UNAVAILABLE, "unloaded")
    assert world.backend.loaded[0].closed


async def test_a_version_that_is_being_freed_refuses_calls(tmp_path: Path) -> None:
    """Its instances are gone: the door has found it earlier."""
    world = World(tmp_path)
    await world.engine.load_all([world.write("m", "1", config=CONFIG.format("thread"))])
    chain, [model] = world.engine.find_version("m").chain, world.backend.loaded
    assert await ask(chain) == 1
    model.close_now.clear()
    freed = world.engine.unload("m")
    await until(lambda: model.closing)
    with pytest.raises(ModelNotReady, match="it is UNLOADING"):
        chain.submit(question())
    model.close_now.set()
    await freed
    assert model.closed


async def test_a_request_that_comes_behind_the_last_one_is_finished_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.engine.load_all([world.write("m", "1", config=CONFIG.format("thread"))])
    chain = world.engine.find_version("m").chain
    world.backend.run_now.clear()
    calls = [FutureCall(question()) for _ in range(2)]
    chain.submit(calls[0])
    freed = world.engine.unload("m")
    await asyncio.sleep(0)
    world.backend.run_now.set()
    async with asyncio.timeout(30):
        await calls[0].future
        chain.submit(calls[1])
        assert number(await calls[1].future) == 1
    await freed
