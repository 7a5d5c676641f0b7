"""Models on request that operators or files change, with a backend that obeys the test."""

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import InvalidRequest, ModelLoadFailed, NotFound, Overloaded, Unavailable
from headrace.core.model_spec import LoadParameters
from headrace.engine.on_request import OnRequest
from headrace.engine.residency import ResidencyOptions
from headrace.repository.layout import ModelSource, scan
from tests.engine.test_engine_loading import CONFIG, until
from tests.engine.test_on_request import MIB, ROOM_FOR_TWO, World, serving

ROOM_FOR_ONE = ResidencyOptions(budget=MIB, minimum_secs=0)


def on_request(world: World) -> OnRequest:
    assert isinstance(world.engine.loads, OnRequest)
    return world.engine.loads


def source(world: World, name: str) -> ModelSource:
    return next(source for source in scan([world.root]) if source.name == name)


def files(content: object) -> LoadParameters:
    """A model that answers with that, as a request brings it along."""
    return LoadParameters(
        '{"backend": "constant", "max_batch_size": 4}', {"1/model.constant": str(content).encode()}
    )


async def test_what_is_no_version_is_refused(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        for version in ("x", "-1", "1" * 5_000, "²"):
            with pytest.raises(InvalidRequest, match="version string"):
                world.ask("a", version)


async def test_a_version_that_is_not_served_loads_nothing_again(tmp_path: Path) -> None:
    world = World(tmp_path, ResidencyOptions(), "a")
    world.write("a", "no number", version=3)
    config = f"{CONFIG.format('inline')}\nversion_policy {{ all {{}} }}"
    (tmp_path / "a" / "config.pbtxt").write_text(config)
    async with serving(world):
        assert await world.ask("a") == 0
        begun = len(world.backend.begun)
        with pytest.raises(Unavailable, match="version 3 is not at ready state"):
            world.ask("a", "3")
        assert len(world.backend.begun) == begun


async def test_one_that_is_unloaded_while_it_waits_for_room_does_not_come(tmp_path: Path) -> None:
    options = replace(ROOM_FOR_ONE, minimum_secs=50)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.ask("a")
        answer = world.ask("b")
        await asyncio.sleep(0.05)
        await world.engine.unload("b")
        with pytest.raises(Unavailable, match="'b' could not be loaded: it was unloaded"):
            await answer
        world.ahead = 51
        await world.engine.unload("a")
        await asyncio.sleep(0.3)
        assert world.in_memory == set()
        assert world.backend.begun == ["0"]


async def test_a_change_outlives_its_model(tmp_path: Path) -> None:
    """One that has changed in memory is loaded as it is now when it comes back."""
    async with serving(World(tmp_path, ROOM_FOR_TWO, "a", "b", "c")) as world:
        await world.ask("a")
        world.write("a", "no number", version=2)
        world.engine.follow(source(world, "a"), False)
        await until(lambda: not world.engine.loading)
        assert await world.ask("a") == 0
        world.write("a", "2", version=2)
        for name in "bc":
            world.ahead += 1
            await world.ask(name)
        assert "a" not in world.in_memory
        assert await world.ask("a") == 2


async def test_a_version_that_took_the_place_of_another_unnoticed(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a", "b")) as world:
        await world.ask("a")
        await world.ask("b")
        (tmp_path / "a" / "1").rename(tmp_path / "a" / "2")
        assert await world.ask("a") == 0
        assert await world.ask("a", "2") == 0


async def test_files_that_are_replaced_while_they_are_loaded(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        world.write("a", "half")
        world.backend.load_now.clear()
        answer = world.ask("a")
        await until(lambda: world.backend.begun == ["half"])
        world.write("a", "5")
        world.backend.load_now.set()
        assert await answer == 5
        assert world.engine.model_ready("a")


async def test_one_that_is_loaded_again_does_not_go(tmp_path: Path) -> None:
    options = ResidencyOptions(idle_secs=100)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.ask("a")
        await world.ask("b")
        world.write("a", "7")
        world.backend.load_now.clear()
        loading = world.engine.load(source(world, "a"))
        await until(lambda: len(world.backend.begun) == 3)
        world.ahead = 101
        await until(lambda: world.in_memory == {"a"})
        world.backend.load_now.set()
        assert await loading == ""
        assert await world.ask("a") == 7


async def test_there_is_room_made_for_a_new_model(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_TWO, "a", "b")) as world:
        for name in "ab":
            world.ahead += 1
            await world.ask(name)
        world.write("c", "3")
        assert await world.engine.load(source(world, "c")) == ""
        assert world.in_memory == {"b", "c"}


async def test_what_could_not_be_loaded_for_an_operator_is_not_what_comes(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        good = source(world, "a")
        problem = await world.engine.load(replace(good, problem="not like this"))
        assert "not like this" in problem
        assert await world.ask("a") == 0


async def test_what_a_request_has_brought_along_comes_back(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a", "b")) as world:
        control = world.engine.control
        await control.load("a", LoadParameters('{"max_batch_size": 3}'))
        assert await world.ask("b") == 1
        assert world.in_memory == {"b"}
        assert await world.ask("a") == 0
        assert world.engine.model_config("a").max_batch_size == 3
        for number in (5, 6):
            await control.load(f"new{number}", files(number))
        assert world.in_memory == {"new6"}
        assert await world.ask("new5") == 5
        with pytest.raises(Overloaded, match="2 models are loaded from files"):
            await control.load("new7", files(7))
        with pytest.raises(ModelLoadFailed, match="'x' is no number"):
            await control.load("new6", files("x"))
        assert await world.ask("new6") == 6
        await control.unload("new5")
        with pytest.raises(ModelLoadFailed, match="'x' is no number"):
            await control.load("new8", files("x"))
        with pytest.raises(NotFound, match="'new8' has no available versions"):
            world.ask("new8")
        await control.load("new7", files(7))
        assert await world.ask("new7") == 7


async def test_a_load_that_there_is_never_room_for(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a", "b")) as world:
        await world.ask("a")
        await world.ask("b")
        (tmp_path / "a" / "1" / "large").write_bytes(bytes(MIB + 1))
        with pytest.raises(ModelLoadFailed, match="load failed for model 'a': it needs about"):
            await world.engine.control.load("a")


async def test_a_load_tells_of_each_version_that_it_could_not_load(tmp_path: Path) -> None:
    world = World(tmp_path, ResidencyOptions(), "a")
    world.write("a", "no number", version=3)
    config = f"{CONFIG.format('inline')}\nversion_policy {{ all {{}} }}"
    (tmp_path / "a" / "config.pbtxt").write_text(config)
    async with serving(world):
        problem = await world.engine.load(source(world, "a"))
        assert problem == "'no number' is no number"
        assert await world.ask("a") == 0


async def test_a_model_that_was_too_large_and_is_not_any_more(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a")) as world:
        (large := tmp_path / "a" / "1" / "large").write_bytes(bytes(MIB + 1))
        with pytest.raises(Unavailable, match="needs about"):
            await world.ask("a")
        large.unlink()
        assert await world.ask("a") == 0


async def test_a_model_that_has_gone_is_told_of(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        await world.engine.unload("a")
        (model,) = world.engine.index().models
        assert (model.name, model.state, model.reason) == ("a", "UNAVAILABLE", "unloaded")
        world.engine.follow(source(world, "a"), False)
        (model,) = world.engine.index().models
        assert (model.name, model.state, model.reason) == ("a", "", "")
        assert await world.ask("a") == 0


async def test_names_that_nobody_knows_leave_nothing_behind(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        tracemalloc.start()
        for number in range(1_000):
            await world.engine.unload(f"{number:01000}")
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < 500_000
        with pytest.raises(NotFound):
            world.ask("0")
