"""Models loaded on request, and changed by operators or files."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep, time

import pytest

from headrace.core.call import Raw
from headrace.core.errors import (
    InvalidRequest,
    ModelLoadFailed,
    NotFound,
    Overloaded,
    ServerExiting,
    Unavailable,
)
from headrace.core.limits import ResidencyOptions
from headrace.core.model_spec import LoadParameters
from headrace.engine.control import ControlMode, ControlOptions, LoadOverrides
from headrace.engine.entrance import Target
from headrace.engine.opening import LoadOptions
from headrace.observability.machine import GrowthMeter
from headrace.plugins.on_request import OnRequest
from headrace.protocol.json_text import WHOLE
from headrace.protocol.v2_json import pass_raw
from tests.engine import worlds
from tests.engine.worlds import INLINE, FutureCall, entries, number, question, until
from tests.support.stores import catalogue, scan

MIB = 1 << 20
# A model whose files are small counts for as much before it is measured, and these never are.
ROOM_FOR_TWO = ResidencyOptions(budget=2 * MIB, minimum_secs=0)
ROOM_FOR_ONE = ResidencyOptions(budget=MIB, minimum_secs=0)


class World(worlds.World):
    """An engine with models that answer with the number in their file: 0, 1, and so on."""

    def __init__(self, root: Path, options: ResidencyOptions, *names: str) -> None:
        self.ahead = 0.0
        self.looks = 0  # at the clock
        super().__init__(
            root,
            LoadOptions(cores=1, meter=GrowthMeter(lambda: 0)),
            on_request=partial(OnRequest, replace(options, clock=self.clock)),
            control=ControlOptions(
                ControlMode.EXPLICIT, catalogue([root]), LoadOverrides.FILES, max_new_models=2
            ),
        )
        for text, name in enumerate(names):
            self.write(name, str(text))

    def clock(self) -> float:
        self.looks += 1
        return time() + self.ahead

    def send(self, name: str, version: str = "") -> FutureCall:
        call = FutureCall(question(name))
        self.engine.find(name, version).submit(call)
        return call

    def ask(self, name: str, version: str = "") -> "asyncio.Task[float]":
        """The answer to a request, which is queued or refused at once."""

        async def answer() -> float:
            return number(await call.future)

        call = self.send(name, version)
        return asyncio.ensure_future(answer())

    async def ask_each(self, names: str) -> None:
        """Send requests to these models, one second apart."""
        for name in names:
            self.ahead += 1
            await self.ask(name)

    @property
    def in_memory(self) -> set[str]:
        return {version.model for version in self.engine.versions() if version.ready}

    @property
    def on_request(self) -> OnRequest:
        assert isinstance(self.engine.loads, OnRequest)
        return self.engine.loads


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[World]:
    await world.engine.load_all(scan([world.root]))
    yield world
    await world.engine.unload_all()
    world.engine.control.close()


def files(content: object) -> LoadParameters:
    """Files of a load request for a model that answers with a number."""
    return LoadParameters(
        '{"backend": "constant", "max_batch_size": 4}', {"1/model.constant": str(content).encode()}
    )


async def test_a_model_is_loaded_on_request(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a", "b")) as world:
        assert world.in_memory == set()
        assert world.engine.ready
        assert world.engine.model_ready("b")
        answers = [world.ask("b") for _ in range(5)]  # all wait for the same load
        assert await asyncio.gather(*answers) == [1] * 5
        assert len(world.backend.loaded) == 1
        assert world.in_memory == {"b"}
        assert await world.ask("b", "1") == 1
        with pytest.raises(NotFound, match="version 2 is not found"):
            world.ask("a", "2")
        with pytest.raises(NotFound, match="unknown model"):
            world.ask("c")
        for version in ("x", "-1", "1" * 5_000, "²"):
            with pytest.raises(InvalidRequest, match="version string"):
                world.ask("a", version)


class ChargedCall(FutureCall):
    """A call that counts the bytes charged for its decoded request, and has room for `most`."""

    charged, most = 0, 100 * MIB

    def charge(self, nbytes: int) -> None:
        if self.charged + nbytes > self.most:
            raise Overloaded("full")
        self.charged += nbytes


async def test_raw_requests_that_waited_for_their_model_are_charged_when_decoded(
    tmp_path: Path,
) -> None:
    body = b'{"X": [0.5], "note": "%b"}' % (b"x" * WHOLE)
    async with serving(World(tmp_path, ResidencyOptions(), "a", "b")) as world:
        calls = [ChargedCall(pass_raw(name, "", body, Raw.GENERATE)) for name in "ab"]
        calls[1].most = WHOLE
        for call in calls:
            world.engine.find(call.model_name).submit(call)
        with pytest.raises(InvalidRequest, match="note"):  # too long for a parameter
            await calls[0].future
        assert calls[0].charged > WHOLE
        with pytest.raises(Overloaded, match="full"):
            await calls[1].future


async def test_requests_that_waited_for_a_model_go_on_in_turns(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        known, turn = Counter[int](), 0

        class Told(FutureCall):
            def pass_routed(self, target: Target) -> None:
                known[turn] += 1
                sleep(1e-4)  # as long as a request may take
                super().pass_routed(target)

        calls = [Told(question("a")) for _ in range(500)]
        for call in calls:
            world.engine.find("a", "").submit(call)
        calls[300].cancel()
        while known.total() < 499:
            turn += 1
            await asyncio.sleep(0)
        assert max(known.values()) < 100
        answers = [await call.future for call in calls if call is not calls[300]]
        assert {number(answer) for answer in answers} == {0.0}


async def test_the_least_recently_requested_model_is_unloaded(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_TWO, "a", "b", "c")) as world:
        await world.ask_each("abc")
        assert world.in_memory == {"b", "c"}
        assert world.on_request.evictions == 1
        world.write("d", "4")
        assert await world.engine.load(world.source("d")) == ""  # room is made for it
        assert world.in_memory == {"c", "d"}


async def test_pinned_models_are_loaded_at_start_and_stay(tmp_path: Path) -> None:
    options = ResidencyOptions(2 * MIB, minimum_secs=0, pinned=frozenset("a"))
    async with serving(World(tmp_path, options, "a", "b", "c")) as world:
        assert world.in_memory == {"a"}
        for name, answer in (("b", 1), ("c", 2), ("b", 1)):
            assert await world.ask(name) == answer
            assert world.in_memory == {"a", name}


async def test_a_model_stays_for_its_minimum_time(tmp_path: Path) -> None:
    options = ResidencyOptions(MIB, wait_secs=0.2, minimum_secs=50)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.on_request.bring("a", patient=True)
        with pytest.raises(Unavailable, match=r"'b' was not loaded within 0\.2 s"):
            await world.ask("b")
        assert world.in_memory == {"a"}
        world.ahead = 51
        await world.on_request.bring("b", patient=True)
        assert world.in_memory == {"b"}


async def test_a_model_that_does_not_fit_until_it_is_smaller(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a", "b")) as world:
        (large := tmp_path / "a" / "1" / "large").write_bytes(bytes(MIB + 1))
        with pytest.raises(Unavailable, match=r"needs about .* more than the 1048576 bytes .*budg"):
            await world.ask("a")
        large.unlink()
        assert await world.ask("a") == 0
        await world.ask("b")
        large.write_bytes(bytes(MIB + 1))
        with pytest.raises(ModelLoadFailed, match="load failed for model 'a': it needs about"):
            await world.engine.control.load("a")


async def test_a_model_that_cannot_be_loaded_is_not_tried_with_every_request(
    tmp_path: Path,
) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        world.write("a", "what")
        for _ in range(2):
            with pytest.raises(Unavailable, match="could not be loaded: 'what' is no number"):
                await world.ask("a")
        assert len(world.backend.begun) == 1
        assert not world.engine.model_ready("a")
        assert world.engine.ready
        world.write("a", "7")
        world.ahead = 2
        assert await world.ask("a") == 7
        assert world.engine.model_ready("a")


async def test_idle_models_are_unloaded(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(idle_secs=100), "a", "b")) as world:
        await asyncio.gather(world.ask("a"), world.ask("b"))
        world.ahead = 101
        await until(lambda: not world.in_memory)
        await asyncio.gather(world.ask("a"), world.ask("b"))
        world.write("a", "7")
        world.backend.load_now.clear()
        loading = world.engine.load(world.source("a"))
        await until(lambda: len(world.backend.begun) == 5)
        world.ahead = 202
        await until(lambda: world.in_memory == {"a"})
        world.backend.load_now.set()
        assert await loading == ""
        assert await world.ask("a") == 7


async def test_cancelling_the_last_waiting_request_cancels_the_load(tmp_path: Path) -> None:
    options = ResidencyOptions(MIB, minimum_secs=50)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.ask("a")
        call = world.send("b")
        call.cancel()
        world.ahead = 51
        await asyncio.sleep(0)
        assert not call.future.done()
        assert await world.ask("a") == 0
        assert world.in_memory == {"a"}


async def test_a_model_unloaded_by_the_operator_stays_unloaded(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        await world.engine.unload("a")
        (model,) = entries(world.engine)
        assert (model.name, model.state, model.reason) == ("a", "UNAVAILABLE", "unloaded")
        world.engine.follow(world.source("a"), False)
        (model,) = entries(world.engine)
        assert (model.name, model.state, model.reason) == ("a", "", "")
        assert await world.ask("a") == 0
        await world.engine.unload("a")
        with pytest.raises(NotFound, match="no available versions"):
            world.ask("a")
        assert not world.engine.model_ready("a")
        world.engine.follow(world.source("a"), False)
        (model,) = entries(world.engine)
        assert (model.version, model.state, model.reason) == ("1", "UNAVAILABLE", "unloaded")
        assert world.engine.model_ready("a")
        await world.engine.unload("a")
        assert not world.engine.model_ready("a")
        assert await world.engine.load(world.source("a")) == ""
        assert await world.ask("a") == 0


async def test_waiting_requests_fail_at_shutdown(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        world.backend.load_now.clear()
        answer = world.ask("a")
        await until(lambda: world.backend.begun)
        world.engine.stop_loading()
        with pytest.raises(ServerExiting):
            await answer
        world.backend.load_now.set()


async def test_a_version_that_is_not_served_loads_nothing_again(tmp_path: Path) -> None:
    world = World(tmp_path, ResidencyOptions(), "a")
    world.write("a", "no number", 3, f"{INLINE}\nversion_policy {{ all {{}} }}")
    async with serving(world):
        assert await world.ask("a") == 0
        begun = len(world.backend.begun)
        with pytest.raises(Unavailable, match="version 3 is not at ready state"):
            world.ask("a", "3")
        assert len(world.backend.begun) == begun
        await world.engine.unload("a")
        assert await world.engine.load(world.source("a")) == "'no number' is no number"
        assert await world.ask("a") == 0


async def test_a_model_unloaded_while_it_waits_for_room_is_not_loaded(tmp_path: Path) -> None:
    options = replace(ROOM_FOR_ONE, minimum_secs=50)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.ask("a")
        tasks = len(asyncio.all_tasks())
        answer = world.ask("b")
        looks = world.looks
        await until(lambda: world.looks > looks)  # for how long there is no room
        await world.engine.unload("b")
        with pytest.raises(Unavailable, match="'b' could not be loaded: it was unloaded"):
            await answer
        world.ahead = 51
        await world.engine.unload("a")
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert world.in_memory == set()
        assert world.backend.begun == ["0"]


async def test_a_change_survives_an_unload(tmp_path: Path) -> None:
    """A model changed in memory is loaded with its changes when it comes back."""
    async with serving(World(tmp_path, ROOM_FOR_TWO, "a", "b", "c")) as world:
        await world.ask("a")
        world.engine.follow(world.write("a", "no number", version=2), False)
        await until(lambda: not world.engine.loading)
        assert await world.ask("a") == 0
        world.write("a", "2", version=2)
        await world.ask_each("bc")
        assert "a" not in world.in_memory
        assert await world.ask("a") == 2


async def test_a_version_replaced_unnoticed(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a", "b")) as world:
        await world.ask_each("ab")
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


async def test_an_operators_failed_load_is_not_used_later(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        good = world.source("a")
        problem = await world.engine.load(replace(good, problem="not like this"))
        assert "not like this" in problem
        assert await world.ask("a") == 0


async def test_files_of_a_load_request_are_kept(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_ONE, "a", "b")) as world:
        control = world.engine.control
        await control.load("a", LoadParameters('{"max_batch_size": 3}'))
        assert await world.ask("b") == 1
        assert world.in_memory == {"b"}
        assert await world.ask("a") == 0
        assert world.engine.find_version("a").config.max_batch_size == 3
        for answer in (5, 6):
            await control.load(f"new{answer}", files(answer))
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


async def test_unknown_names_leave_nothing_behind(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        tracemalloc.start()
        for name in range(1_000):
            await world.engine.unload(f"{name:01000}")
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < 500_000
        with pytest.raises(NotFound):
            world.ask("0")
