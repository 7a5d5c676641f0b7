"""Loads and unloads by request: order, and cancellation without clients."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ModelLoadFailed, NotFound, Overloaded, Unavailable
from headrace.core.model_spec import LoadParameters
from headrace.engine.control import Control, ControlMode, ControlOptions, LoadOverrides
from headrace.protocol.documents import to_json
from tests.engine import worlds
from tests.engine.worlds import CONFIG, ask, until
from tests.support.stores import catalogue


class World(worlds.World):
    """An engine with a repository, with no model loaded."""

    def __init__(
        self,
        root: Path,
        mode: ControlMode = ControlMode.EXPLICIT,
        overrides: LoadOverrides = LoadOverrides.FILES,
    ) -> None:
        control = ControlOptions(mode, catalogue([root]), overrides, max_new_models=5)
        super().__init__(root, strict_readiness=True, control=control)

    @property
    def control(self) -> Control:
        return self.engine.control

    async def ask(self, name: str) -> float:
        return await ask(self.engine.find(name))

    async def index(self) -> list[tuple[str, str, str]]:
        return [(m.name, m.state, m.reason) for m in await self.control.index()]


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[World]:
    await world.engine.load_all([])
    yield world
    world.engine.stop_loading()
    await world.engine.unload_all()
    world.control.close()
    await until(lambda: all(model.closed for model in world.backend.loaded))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An engine that loads on request."""
    async with serving(World(tmp_path)) as world:
        yield world


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (
            ControlMode.NONE,
            ", nor in the model control mode 'none' of this server; --model-control",
        ),
        (ControlMode.POLL, "; --model-control-mode=explicit allows it"),
    ],
)
async def test_control_needs_explicit_mode(tmp_path: Path, mode: ControlMode, why: str) -> None:
    async with serving(World(tmp_path, mode)) as world:
        world.write("m", "1")
        for action in (world.control.load, world.control.unload):
            with pytest.raises(
                Unavailable, match=f"load / unload is not allowed if polling is enabled{why}"
            ):
                await action("m")
        assert await world.index() == []


async def test_requests_for_a_model_take_effect_in_their_order(world: World) -> None:
    world.write("m", "1")
    asked = [
        action("m") for _ in range(10) for action in (world.control.load, world.control.unload)
    ]
    asked.append(world.control.load("m"))
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert found[-1] is None
    assert await world.ask("m") == 1
    asked[:] = [world.control.load("m"), world.control.unload("m")]
    await asyncio.gather(*asked, return_exceptions=True)
    assert await world.index() == [("m", "UNAVAILABLE", "unloaded")]


async def test_a_load_that_meets_an_unload(world: World) -> None:
    world.write("m", "1")
    world.backend.load_now.clear()
    loading = asyncio.ensure_future(world.control.load("m"))
    await until(lambda: world.backend.begun == ["1"])
    await world.control.unload("m")
    world.backend.load_now.set()
    with pytest.raises(ModelLoadFailed, match="failed to load 'm', no version is available: it"):
        await loading


async def test_equal_load_requests_share_a_load(world: World) -> None:
    world.write("m", "1")
    world.backend.load_now.clear()
    asked = [asyncio.ensure_future(world.control.load("m")) for _ in range(20)]
    await until(lambda: world.backend.begun == ["1"])
    # A later request too, rather than cancel what others wait for.
    asked.append(asyncio.ensure_future(world.control.load("m")))
    assert await world.index() == [("m", "LOADING", "")]
    world.backend.load_now.set()
    await asyncio.gather(*asked)
    assert world.backend.begun == ["1"]
    await world.control.load("m")
    assert world.backend.begun == ["1"]


async def test_a_configuration_of_a_request_stays_until_the_directory_changes(
    world: World,
) -> None:
    def size() -> int:
        return world.engine.find_version("m").config.max_batch_size

    world.write("m", "1")
    await world.control.load("m", LoadParameters('{"max_batch_size": 2}'))
    await world.control.load("m")
    assert (size(), world.backend.begun) == (2, ["1"])
    with pytest.raises(ModelLoadFailed, match="must not be negative"):
        await world.control.load("m", LoadParameters('{"max_batch_size": -1}'))
    world.write("m", "nonsense")
    with pytest.raises(ModelLoadFailed, match="'nonsense' is no"):
        await world.control.load("m", LoadParameters('{"max_batch_size": 3}'))
    with pytest.raises(ModelLoadFailed, match="'nonsense' is no"):
        await world.control.load("m")
    assert (size(), await world.ask("m")) == (2, 1)
    world.write("m", "20")
    await world.control.load("m")
    assert (size(), await world.ask("m")) == (4, 20)
    await world.control.load("m", LoadParameters('{"max_batch_size": 2}'))
    await world.control.unload("m")
    await world.control.load("m")
    assert size() == 4
    await world.control.load("m", LoadParameters('{"max_batch_size": 2}'))
    files = {"1/model.constant": b"5"}
    await world.control.load("m", LoadParameters('{"max_batch_size": 3}', files))
    assert (size(), await world.ask("m")) == (3, 5)
    await world.control.load("m")
    assert (size(), await world.ask("m")) == (4, 20)


@pytest.mark.parametrize("whole", [False, True])
async def test_a_configuration_of_a_request_changes_instances_in_place(
    world: World, whole: bool
) -> None:
    """Clients send the file's own configuration, or the completed one."""
    text = CONFIG.format("thread")
    if not whole:
        text += ' input { name: "X" data_type: TYPE_FP32 dims: 1 }'
        text += ' output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    world.write("m", "1", config=text)
    await world.control.load("m")
    version = world.engine.find("m")
    told: dict[str, Any] = {
        "name": "m", "max_batch_size": 4,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
    }  # fmt: skip
    if whole:
        told = to_json(world.engine.find_version("m").config)
    for count, loads in ((3, 3), (1, 3), (2, 4)):
        told["instance_group"] = [{"name": "m", "count": count}]
        await world.control.load("m", LoadParameters(json.dumps(told)))
        assert world.engine.find_version("m").config.instance_group[0].count == count
        assert len(world.backend.loaded) == loads
        assert world.engine.find("m") is version
    told["max_batch_size"] = 2
    told.pop("dynamic_batching", None)
    await world.control.load("m", LoadParameters(json.dumps(told)))
    assert len(world.backend.loaded) == 6
    assert world.engine.find("m") is not version


async def test_a_load_goes_on_without_its_client(world: World) -> None:
    world.write("m", "1")
    world.backend.load_now.clear()
    asked = asyncio.ensure_future(world.control.load("m"))
    await until(lambda: world.backend.begun == ["1"])
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    world.backend.load_now.set()
    await until(lambda: world.engine.model_ready("m"))
    assert await world.ask("m") == 1


async def test_loads_without_their_clients_keep_no_tasks(world: World) -> None:
    world.write("m", "1")
    world.backend.load_now.clear()
    asked = [asyncio.ensure_future(world.control.load("m")) for _ in range(200)]
    await until(lambda: world.backend.begun == ["1"])
    for request in asked:
        request.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert len(asyncio.all_tasks()) < 20
    world.backend.load_now.set()
    await until(lambda: world.engine.model_ready("m"))


async def test_loads_that_fail_together_leave_the_configuration_before(world: World) -> None:
    world.write("m", "1")
    await world.control.load("m", LoadParameters('{"max_batch_size": 2}'))
    wrong = [LoadParameters(f'{{"max_batch_size": {-n}}}') for n in (1, 2)]
    asked = [world.control.load("m", wrong[n % 2]) for n in range(20)]
    for found in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(found, ModelLoadFailed)
    await world.control.load("m")
    assert world.engine.find_version("m").config.max_batch_size == 2
    await world.control.load("m", LoadParameters('{"max_batch_size": 3}'))
    await world.control.load("m")
    assert world.engine.find_version("m").config.max_batch_size == 3


async def test_a_load_that_fails_without_its_client_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.write("m", "nonsense")
    world.backend.load_now.clear()
    asked = asyncio.ensure_future(world.control.load("m"))
    await until(lambda: world.backend.begun == ["nonsense"])
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    world.backend.load_now.set()
    await until(lambda: not world.engine.loading)
    with pytest.raises(ModelLoadFailed):
        await world.control.load("m")  # behind the abandoned one
    del asked
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_shutdown_ends_the_wait_for_a_load(world: World) -> None:
    world.write("m", "1")
    world.backend.load_now.clear()
    asked = asyncio.ensure_future(world.control.load("m"))
    await until(lambda: world.backend.begun == ["1"])
    world.engine.stop_loading()
    for late in (asked, world.control.load("m")):  # neither waits for the running load
        with pytest.raises(Unavailable, match="the server is shutting down"):
            await asyncio.wait_for(late, 60)
    world.backend.load_now.set()
    await until(lambda: not world.engine.loading)


async def test_load_errors_are_reported_and_stay_in_the_index(world: World) -> None:
    world.write("m", "nonsense")
    with pytest.raises(
        ModelLoadFailed,
        match="load failed for model 'm': version 1 is at UNAVAILABLE state: 'nonsense' is no",
    ):
        await world.control.load("m")
    with pytest.raises(NotFound, match="failed to load 'n', failed to poll"):
        await world.control.load("n")
    assert await world.index() == [("m", "UNAVAILABLE", "'nonsense' is no number")]
    assert not world.engine.ready
    world.write("m", "1")
    await world.control.load("m")
    world.write("m", "nonsense")
    with pytest.raises(ModelLoadFailed, match="load failed for model 'm': 'nonsense' is no"):
        await world.control.load("m")
    assert await world.ask("m") == 1
    assert world.engine.ready


async def test_a_model_whose_directory_has_gone_serves_until_it_is_unloaded(world: World) -> None:
    world.write("m", "1")
    await world.control.load("m")
    (world.root / "m").rename(world.root / "other")
    with pytest.raises(NotFound):
        await world.control.load("m")
    assert await world.ask("m") == 1
    assert await world.index() == [("m", "READY", ""), ("other", "", "")]
    await world.control.unload("m")
    await world.control.load("other")
    assert await world.ask("other") == 1


async def test_models_known_only_from_requests_are_forgotten(world: World) -> None:
    """Names that are no longer used would fill the index."""
    world.write("m", "1")
    await world.control.load("m")
    contents = ["1", "nonsense", "2", "nonsense", "nonsense", "3", "4", "5", "6"]
    for number, content in enumerate(contents):
        files = {"1/model.constant": content.encode()}
        parameters = LoadParameters('{"backend": "constant"}', files)
        load = world.control.load(f"new{number}", parameters)
        if content == "nonsense":
            with pytest.raises(ModelLoadFailed):
                await load
        elif content == "6":
            with pytest.raises(Overloaded, match="5 models are loaded from files of load"):
                await load
        else:
            await load
    assert [name for name, *_ in await world.index()] == [
        "m", "new0", "new2", "new5", "new6", "new7"
    ]  # fmt: skip
    await world.control.unload("new5")
    await until(lambda: not world.engine.unloading())
    await world.control.load("new9", LoadParameters('{"backend": "constant"}', files))
    assert "new5" not in [name for name, *_ in await world.index()]


@pytest.mark.parametrize("allowed", LoadOverrides)
async def test_load_override_levels(tmp_path: Path, allowed: LoadOverrides) -> None:
    config = '{"backend": "constant", "max_batch_size": 2}'
    code = '{"parameters": {"own": {"string_value": "x"}}}'
    asked = {
        LoadOverrides.NONE: LoadParameters(),
        LoadOverrides.CONFIG: LoadParameters(config),
        LoadOverrides.FILES: LoadParameters(config, {"1/model.constant": b"2"}),
        LoadOverrides.CODE: LoadParameters(code),
    }
    async with serving(World(tmp_path, overrides=allowed)) as world:
        world.write("m", "1")
        for level, parameters in asked.items():
            if level <= allowed:
                await world.control.load("m", parameters)
                continue
            # One step after the other, where a request asks for several.
            needed = LoadOverrides.CONFIG if not parameters.files and not allowed else level
            with pytest.raises(ModelLoadFailed, match=f"--load-overrides={needed.name.lower()}"):
                await world.control.load("m", parameters)
        assert await world.ask("m") == (2 if allowed is LoadOverrides.FILES else 1)
