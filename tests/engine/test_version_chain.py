"""Chains of versions: refusals, the state that they follow, and waits for oneself."""

from pathlib import Path

import pytest

from headrace.core.errors import ModelNotReady
from headrace.engine.version import State
from tests.engine.worlds import CONFIG, FutureCall, World, ask, question, until


async def test_a_chain_follows_the_state_of_its_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.engine.load_all([world.write("m", "1", config=CONFIG.format("thread"))])
    version = world.engine.find_version("m")
    chain = version.chain
    assert (version.state, chain.ready, chain.direct is None) == (State.READY, True, False)
    assert chain.obstacle == ""
    world.backend.run_now.clear()
    call = FutureCall(question())
    chain.submit(call)
    freed = world.engine.unload("m")
    assert (version.state, chain.ready, chain.direct) == (State.UNLOADING, False, None)
    world.backend.run_now.set()
    await call.future
    await freed
    assert (version.state, version.reason) == (State.UNAVAILABLE, "unloaded")
    with pytest.raises(ModelNotReady, match="it is UNAVAILABLE"):
        await ask(chain)
    await until(lambda: world.backend.loaded[0].closed)


async def test_a_decoupled_version_stays_so(tmp_path: Path) -> None:
    """A door may have responses of one that is unloaded."""
    world = World(tmp_path)
    config = f"{CONFIG.format('thread')}\nmodel_transaction_policy {{ decoupled: true }}"
    await world.engine.load_all([world.write("m", "1", config=config)])
    chain = world.engine.find("m")
    assert (chain.decoupled, chain.direct) == (True, None)
    await world.engine.unload_all()
    assert chain.decoupled


async def test_only_a_single_instance_makes_a_version_wait_for_itself(tmp_path: Path) -> None:
    world = World(tmp_path)
    config = CONFIG.format("thread")
    sources = [
        world.write(name, "1", config=f"{config}\ninstance_group {{ count: {count} }}")
        for name, count in (("one", 1), ("two", 2))
    ]
    await world.engine.load_all(sources)
    one, two = world.engine.find("one"), world.engine.find("two")
    assert [one.waits_for(one), one.waits_for(two), two.waits_for(two)] == [True, False, False]
    await world.engine.unload_all()
