"""Models that are loaded when somebody asks for them, with a backend that obeys the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import time

import numpy as np
import pytest

from headrace.core.call import Call, InferResponse
from headrace.core.errors import NotFound, ServerError, ServerExiting, Unavailable
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.control import ControlMode, ControlOptions, LoadOverrides
from headrace.engine.engine import Engine
from headrace.engine.on_request import OnRequest
from headrace.engine.opening import LoadOptions
from headrace.engine.residency import ResidencyOptions
from headrace.observability.machine import GrowthMeter
from headrace.repository.layout import Catalogue, scan
from tests.engine.test_engine_loading import CONFIG, FP32, Constants, until

MIB = 1 << 20
# A model whose files are small counts for as much before it is measured, and these never are.
ROOM_FOR_TWO = ResidencyOptions(budget=2 * MIB, minimum_secs=0)


class Answer(Call):
    """One request."""

    def __init__(self, name: str, version: str, inputs: dict[str, Tensor]) -> None:
        super().__init__(name, version, "", inputs)
        self.future: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def respond(self, response: InferResponse, final: bool) -> None:
        self.future.set_result(float(np.asarray(response.outputs[0].array)[0, 0]))

    def finish(self) -> None:
        raise AssertionError("a request without a response")

    def fail(self, error: ServerError) -> None:
        self.future.set_exception(error)


class World:
    """An engine with models that answer with the number in their file."""

    def __init__(self, root: Path, options: ResidencyOptions, *names: str) -> None:
        self.root = root
        self.backend = Constants()
        for number, name in enumerate(names):
            self.write(name, str(number))
        self.ahead = 0.0
        control = ControlOptions(
            ControlMode.EXPLICIT, Catalogue((root,)), LoadOverrides.FILES, max_new_models=2
        )
        options_of_loads = LoadOptions(cores=1, meter=GrowthMeter(lambda: 0))
        self.engine = Engine(
            "server", "0", {"constant": self.backend}, options_of_loads, Admission(0, 0),
            residency=replace(options, clock=lambda: time() + self.ahead),
            control=control,
        )  # fmt: skip

    def write(self, name: str, text: str, version: int = 1) -> None:
        folder = self.root / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.constant").write_text(text)
        (folder.parent / "config.pbtxt").write_text(CONFIG.format("inline"))

    def ask(self, name: str, version: str = "") -> "asyncio.Future[float]":
        answer = Answer(name, version, {"X": Tensor("X", FP32, np.zeros((1, 1), np.float32))})
        self.engine.find(name, version).submit(answer)
        return answer.future

    @property
    def in_memory(self) -> set[str]:
        return {version.model for version in self.engine.versions() if version.ready}


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[World]:
    await world.engine.load_all(scan([world.root]))
    yield world
    await world.engine.unload_all()
    world.engine.control.close()


async def test_a_model_is_loaded_when_it_is_asked_for(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a", "b")) as world:
        assert world.in_memory == set()
        assert world.engine.ready
        assert world.engine.model_ready("b")
        assert await world.ask("b") == 1
        assert world.in_memory == {"b"}
        assert await world.ask("b", "1") == 1
        with pytest.raises(NotFound, match="version 2 is not found"):
            world.ask("a", "2")
        with pytest.raises(NotFound, match="unknown model"):
            world.ask("c")


async def test_all_who_ask_meanwhile_wait_for_the_same_load(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        answers = [world.ask("a") for _ in range(5)]
        assert await asyncio.gather(*answers) == [0] * 5
        assert len(world.backend.loaded) == 1


async def test_the_one_that_was_not_asked_for_the_longest_goes(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ROOM_FOR_TWO, "a", "b", "c")) as world:
        for name in "abc":
            world.ahead += 1
            await world.ask(name)
        assert world.in_memory == {"b", "c"}
        assert isinstance(world.engine.loads, OnRequest)
        assert world.engine.loads.evictions == 1


async def test_pinned_models_are_loaded_at_start_and_stay(tmp_path: Path) -> None:
    options = ResidencyOptions(2 * MIB, minimum_secs=0, pinned=frozenset("a"))
    async with serving(World(tmp_path, options, "a", "b", "c")) as world:
        assert world.in_memory == {"a"}
        for name, number in (("b", 1), ("c", 2), ("b", 1)):
            assert await world.ask(name) == number
            assert world.in_memory == {"a", name}


async def test_a_model_stays_for_a_while(tmp_path: Path) -> None:
    options = ResidencyOptions(MIB, wait_secs=0.2, minimum_secs=50)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.ask("a")
        with pytest.raises(Unavailable, match=r"'b' was not loaded within 0\.2 s"):
            await world.ask("b")
        assert world.in_memory == {"a"}
        world.ahead = 51
        assert isinstance(world.engine.loads, OnRequest)
        await world.engine.loads.bring("b", patient=True)
        assert world.in_memory == {"b"}


async def test_a_model_that_never_fits(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(MIB - 1), "a")) as world:
        with pytest.raises(Unavailable, match=r"more than the 1048575 bytes .*budget"):
            await world.ask("a")


async def test_a_model_that_cannot_be_loaded_is_not_tried_with_every_request(
    tmp_path: Path,
) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        world.write("a", "what")
        with pytest.raises(Unavailable, match="could not be loaded: 'what' is no number"):
            await world.ask("a")
        with pytest.raises(Unavailable, match="could not be loaded: 'what' is no number"):
            await world.ask("a")
        assert len(world.backend.begun) == 1
        assert not world.engine.model_ready("a")
        assert world.engine.ready
        world.write("a", "7")
        world.ahead = 2
        assert await world.ask("a") == 7
        assert world.engine.model_ready("a")


async def test_idle_models_go(tmp_path: Path) -> None:
    options = ResidencyOptions(idle_secs=100)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await asyncio.gather(world.ask("a"), world.ask("b"))
        world.ahead = 101
        await until(lambda: not world.in_memory)
        assert await world.ask("a") == 0


async def test_cancelling_the_last_who_waits_loads_nothing(tmp_path: Path) -> None:
    options = ResidencyOptions(MIB, minimum_secs=50)
    async with serving(World(tmp_path, options, "a", "b")) as world:
        await world.ask("a")
        answer = Answer("b", "", {})
        world.engine.find("b").submit(answer)
        answer.cancel()
        world.ahead = 51
        await asyncio.sleep(0)
        assert not answer.future.done()
        assert await world.ask("a") == 0
        assert world.in_memory == {"a"}


async def test_unloaded_by_the_operator_it_stays_unloaded(tmp_path: Path) -> None:
    async with serving(World(tmp_path, ResidencyOptions(), "a")) as world:
        await world.ask("a")
        await world.engine.unload("a")
        with pytest.raises(NotFound, match="no available versions"):
            world.ask("a")
        assert not world.engine.model_ready("a")
        assert await world.engine.load(scan([tmp_path])[0]) == ""
        assert await world.ask("a") == 0


async def test_who_waits_when_the_server_ends_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, ResidencyOptions(), "a")
    async with serving(world):
        world.backend.load_now.clear()
        answer = world.ask("a")
        await until(lambda: bool(world.backend.begun))
        world.engine.stop_loading()
        with pytest.raises(ServerExiting):
            await answer
        world.backend.load_now.set()
