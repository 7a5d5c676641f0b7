"""Loading of models beside the serving ones, which they replace."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import active_count

import pytest

from headrace.core.errors import ModelNotReady, NotFound
from headrace.engine.chain import Compose, StageModel, StagePlugin
from headrace.engine.opening import LoadOptions
from headrace.engine.version import State
from headrace.repository.layout import ModelSource, read_model_directory
from headrace.repository.model_files import write_manifest
from tests.engine import worlds
from tests.engine.worlds import CONFIG, INLINE, LOAD_OPTIONS, ask, entries, until


class World(worlds.World):
    """An engine with one model, `m`, whose versions are in `folder`."""

    def __init__(
        self, root: Path, execution: str = "inline", options: LoadOptions = LOAD_OPTIONS
    ) -> None:
        super().__init__(root, options, strict_readiness=True)
        self.folder = root / "m"
        self.folder.mkdir()
        self.configure(CONFIG.format(execution))

    def configure(self, text: str) -> None:
        (self.folder / "config.pbtxt").write_text(text)

    def change(self, text: str, version: int = 1) -> ModelSource:
        """Change a version's file; the resulting model."""
        return self.write("m", text, version)

    async def replace(self, text: str, version: int = 1) -> str:
        """Change a file and load it; reason of a failure."""
        return await self.engine.load(self.change(text, version))

    def reload(self) -> "asyncio.Future[str]":
        """Load the current model; reason of a failure."""
        return self.engine.load(self.source("m"))

    async def begin(self, text: str, version: int = 1) -> "asyncio.Future[str]":
        """Begin a load that continues once `load_now` is set."""
        self.backend.load_now.clear()
        loading, begun = self.engine.load(self.change(text, version)), len(self.backend.begun)
        await until(lambda: len(self.backend.begun) == begun + 1)
        return loading

    async def ask(self, version: str = "") -> float:
        return await ask(self.engine.find("m", version))

    async def asked(self, count: int = 1) -> "list[asyncio.Task[float]]":
        """Requests that wait for `run_now`."""
        self.backend.run_now.clear()
        asked = [asyncio.ensure_future(self.ask()) for _ in range(count)]
        await asyncio.sleep(0)
        return asked

    def index(self) -> list[tuple[str, str, str]]:
        return [(m.version, m.state, m.reason) for m in entries(self.engine)]


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[World]:
    """The loaded model; at the end it is unloaded, with nothing left of it."""
    threads = active_count()
    await world.engine.load_all([world.source("m")])
    yield world
    await world.engine.unload_all()
    assert not world.engine.unloading()
    assert not world.engine.loading
    await until(lambda: all(model.closed for model in world.backend.loaded))
    await until(lambda: active_count() <= threads)


@asynccontextmanager
async def threaded(tmp_path: Path, execution: str = "thread") -> AsyncIterator[World]:
    """A model that answers 1 on its own thread."""
    world = World(tmp_path, execution)
    world.change("1")
    async with serving(world):
        yield world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A model that answers 1."""
    async with threaded(tmp_path, "inline") as world:
        yield world


async def test_the_old_version_serves_while_the_new_one_loads(world: World) -> None:
    replaced = await world.begin("2")
    assert await world.ask() == 1
    assert world.engine.ready
    assert world.index() == [("1", "READY", "")]
    world.backend.load_now.set()
    assert await replaced == ""
    assert [await world.ask(), await world.ask("1")] == [2, 2]
    assert world.index() == [("1", "READY", "")]
    (version,) = [v for v in world.engine.versions() if v.ready]
    assert version.report.statistics.success_count == 3  # counters go on


async def test_the_old_version_finishes_accepted_requests(tmp_path: Path) -> None:
    async with threaded(tmp_path) as world:
        old = world.engine.find_version("m")
        begun = await world.asked(9)
        assert await world.replace("2") == ""
        assert world.engine.find_version("m") is not old
        assert world.engine.unloading() == [old]
        [later] = await world.asked()
        world.backend.run_now.set()
        assert await asyncio.gather(*begun) == [1] * 9
        assert await later == 2
        await until(lambda: not world.engine.unloading())
        assert old.state is State.UNAVAILABLE
        await until(lambda: world.backend.loaded[0].closed)
        assert not world.backend.loaded[1].closed


@pytest.mark.parametrize("what", ["file", "config"])
async def test_the_old_version_stays_if_the_new_one_fails_to_load(
    world: World, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    caplog.set_level("INFO")
    if what == "config":
        world.configure("max_batch_size: -1")
    problem = await world.replace("nonsense")
    told = "'nonsense' is no number" if what == "file" else "max_batch_size"
    assert told in problem
    assert world.index() == [("1", "READY", f"a change could not be loaded: {problem}")]
    assert world.engine.ready
    assert await world.ask() == 1
    world.configure(INLINE)
    assert await world.replace("3") == ""
    assert world.index() == [("1", "READY", "")]
    assert await world.ask() == 3
    (model,) = world.engine.models()
    assert (model.loads, model.failed_loads) == (2, 1)
    assert "m version 1 goes on as it was loaded before" in caplog.text
    assert "loaded m version 1 again in " in caplog.text


async def test_the_last_of_several_changes_wins(world: World) -> None:
    waiting = [await world.begin("2")]
    waiting += [world.engine.load(world.change(str(number))) for number in range(3, 50)]
    world.backend.load_now.set()
    assert await asyncio.gather(*waiting) == [""] * 48
    # The loading version is not served; in between none was loaded at all.
    assert world.backend.begun == ["1", "2", "49"]
    assert world.backend.loaded[1].closed
    assert await world.ask() == 49


async def test_a_later_broken_change_wins_too(world: World) -> None:
    first = await world.begin("2")
    second = world.engine.load(world.change("nonsense"))
    world.backend.load_now.set()
    assert "is no number" in await first
    assert "is no number" in await second
    assert await world.ask() == 1


async def test_a_cancelled_wait_does_not_cancel_the_load(world: World) -> None:
    replaced = await world.begin("2")
    replaced.cancel()
    world.backend.load_now.set()
    await until(lambda: not world.engine.loading)
    assert await world.ask() == 2


async def test_versions_are_added_and_removed(world: World) -> None:
    old = world.engine.find_version("m")
    assert await world.replace("2", version=2) == ""  # the newest alone is served
    assert await world.ask() == 2
    assert world.index() == [("2", "READY", "")]
    with pytest.raises(NotFound):
        world.engine.find_version("m", "1")
    await until(lambda: old.state is State.UNAVAILABLE)


async def test_older_versions_stay_if_an_added_one_fails_to_load(world: World) -> None:
    assert "is no number" in await world.replace("nonsense", version=2)
    assert await world.ask() == 1
    assert [entry[:2] for entry in world.index()] == [("1", "READY"), ("2", "UNAVAILABLE")]
    assert await world.replace("2", version=2) == ""
    assert await world.ask() == 2
    assert world.index() == [("2", "READY", "")]


async def test_a_failed_model_can_be_loaded_later(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.change("nonsense")
    async with serving(world):
        readiness = [world.engine.ready]
        with pytest.raises(NotFound):
            world.engine.find_version("m")
        assert await world.replace("still") == "'still' is no number"
        assert world.index() == [("1", "UNAVAILABLE", "'still' is no number")]
        assert await world.replace("2") == ""
        readiness.append(world.engine.ready)
        assert readiness == [False, True]
        assert await world.ask() == 2


async def test_no_load_begins_once_the_engine_stops(world: World) -> None:
    under_way = await world.begin("2")
    world.engine.stop_loading()
    assert world.engine.loading
    assert await world.ask() == 1  # until it is unloaded
    world.backend.load_now.set()
    assert await under_way == "the server is shutting down"
    assert await world.replace("3") == "the server is shutting down"
    assert world.backend.loaded[1].closed
    assert world.backend.begun == ["1", "2"]
    assert await world.ask() == 1


async def test_the_engine_stops_between_two_steps_of_a_load(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = world.engine.load(world.change("2", version=2))
    await until(lambda: ("2", "LOADING", "") in world.index())
    world.engine.stop_loading()
    assert await loaded == "the server is shutting down"
    assert world.backend.begun == ["1"]
    assert "failed to load" not in caplog.text


async def test_requests_in_every_turn_of_many_swaps(tmp_path: Path) -> None:
    """No request is refused or lost, and no client sees an older version after a newer one."""
    async with threaded(tmp_path) as world:
        seen: list[list[float]] = [[] for _ in range(8)]
        done = False

        async def call(answers: list[float]) -> None:
            while not done:
                answers.append(await world.ask())

        callers = [asyncio.ensure_future(call(answers)) for answers in seen]
        for number in range(2, 30):
            assert await world.replace(str(number)) == ""
        done = True
        await asyncio.gather(*callers)
        for answers in seen:
            assert answers == sorted(answers)
            assert set(answers) <= set(range(1, 30))


async def test_an_unloaded_model_stays_in_the_index_and_can_be_loaded_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert await world.ask() == 1
    await world.engine.unload("m")
    assert caplog.messages[-1] == "unloaded m version 1"
    assert world.backend.loaded[0].closed
    assert world.index() == [("1", "UNAVAILABLE", "unloaded")]
    assert world.engine.ready
    assert not world.engine.model_ready("m")
    assert not world.engine.unavailable()
    with pytest.raises(NotFound, match="'m' has no available versions"):
        world.engine.find_version("m")
    with pytest.raises(ModelNotReady, match="'m' version 1 is not at ready state"):
        world.engine.find_version("m", "1")
    assert await world.replace("2") == ""
    assert world.index() == [("1", "READY", "")]
    assert await world.ask() == 2
    (version,) = world.engine.counted("m")
    assert version.report.statistics.inference_count == 2


async def test_an_unloaded_model_finishes_accepted_requests(tmp_path: Path) -> None:
    async with threaded(tmp_path) as world:
        begun = await world.asked(9)
        unloaded = world.engine.unload("m")
        assert world.index() == [("1", "UNLOADING", "")]
        assert [v.name for v in world.engine.unloading()] == ["1"]
        assert world.engine.ready
        with pytest.raises(NotFound):
            world.engine.find_version("m")
        again = world.engine.unload("m")
        assert await world.replace("2") == ""  # beside running requests
        [later] = await world.asked()
        assert len(world.engine.unloading()) == 1
        world.backend.run_now.set()
        assert await asyncio.gather(*begun) == [1] * 9
        assert await later == 2
        await unloaded
        await again
        assert world.backend.loaded[0].closed
        assert world.index() == [("1", "READY", "")]


async def test_unloading_cancels_a_running_load(world: World) -> None:
    loaded = await world.begin("2", version=2)
    assert world.index()[-1] == ("2", "LOADING", "")
    await world.engine.unload("m")
    gone = [(number, "UNAVAILABLE", "unloaded") for number in ("1", "2")]
    assert world.index() == gone
    world.backend.load_now.set()
    assert await loaded == "it was unloaded before it was loaded"
    assert world.index() == gone
    assert world.backend.loaded[-1].closed


async def test_the_last_of_loads_and_unloads_wins(world: World) -> None:
    first = await world.begin("2")
    unloads, loads = [], []
    for number in range(3, 9):
        unloads.append(world.engine.unload("m"))
        loads.append(world.engine.load(world.change(str(number))))
    world.backend.load_now.set()
    assert await asyncio.gather(first, *loads) == [""] * 7
    await asyncio.gather(*unloads)
    assert world.backend.begun == ["1", "2", "8"]
    assert await world.ask() == 8


async def test_unloading_a_failed_or_unknown_model_is_no_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.configure("max_batch_size: -1")
    world.change("1")
    async with serving(world):
        readiness = [world.engine.ready]
        await world.engine.unload("nobody")
        await world.engine.unload("m")
        readiness.append(world.engine.ready)
        assert readiness == [False, True]
        assert world.index() == [("", "", "")]  # no version of it is known
        assert "max_batch_size" in await world.reload()
        assert not world.engine.ready


async def test_a_load_that_fails_after_an_unload_says_why(tmp_path: Path) -> None:
    async with threaded(tmp_path) as world:
        [begun] = await world.asked()
        unloaded = world.engine.unload("m")
        source = world.source("m")
        world.configure("max_batch_size: -1")
        problem = await world.engine.load(source)
        assert world.index() == [("1", "UNAVAILABLE", problem)]
        world.backend.run_now.set()
        assert await begun == 1
        await unloaded
        assert world.index() == [("1", "UNAVAILABLE", problem)]


async def test_a_load_that_fails_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, options=LoadOptions(cores=1, retries=2))
    world.change("nonsense")
    async with serving(world):
        assert world.backend.begun == ["nonsense"] * 3
        assert world.index() == [("1", "UNAVAILABLE", "'nonsense' is no number")]
        assert await world.replace("2") == ""
        assert world.backend.begun[3:] == ["2"]


async def test_concurrent_loads_are_limited(tmp_path: Path) -> None:
    world = World(tmp_path, options=LoadOptions(cores=1, threads=2))
    world.change("1")
    others = []
    for number in ("2", "3", "4"):
        folder = tmp_path / f"m{number}"
        shutil.copytree(world.folder, folder)
        (folder / "1" / "model.constant").write_text(number)
        others.append(read_model_directory(folder))
    async with serving(world):
        world.backend.load_now.clear()
        loads = [asyncio.ensure_future(world.engine.load(source)) for source in others]
        await until(lambda: len(world.backend.begun) == 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(world.backend.begun) == 3  # the third of them waits
        world.backend.load_now.set()
        assert await asyncio.gather(*loads) == [""] * 3
        assert sorted(world.backend.begun) == ["1", "2", "3", "4"]


async def test_a_load_that_takes_too_long_is_abandoned(tmp_path: Path) -> None:
    options = LoadOptions(cores=1, limit_secs=2, retries=3, threads=1)
    world = World(tmp_path, options=options)
    world.change("1")
    async with serving(world):
        world.backend.load_now.clear()
        problem = await world.replace("2")
        assert problem == "loading has taken longer than 2 s (--model-load-timeout-secs)"
        assert world.backend.begun == ["1", "2"]  # not again: it would take as long
        assert world.index() == [("1", "READY", f"a change could not be loaded: {problem}")]
        assert world.engine.loading
        assert await world.ask() == 1
        again = await world.replace("3")  # the only thread is not held by the hanging load
        assert again == problem
        assert world.backend.begun == ["1", "2", "3"]
        world.backend.load_now.set()
        await until(lambda: not world.engine.loading)
        await until(lambda: len(world.backend.loaded) == 3)
        assert await world.ask() == 1
        assert await world.replace("4") == ""
        assert await world.ask() == 4


GROUPS = '\ninstance_group {{ name: "m" count: {} }}'


async def test_unchanged_versions_are_not_loaded_again(world: World) -> None:
    old = world.engine.find("m")
    assert await world.reload() == ""
    assert world.engine.find("m") is old
    assert world.backend.begun == ["1"]
    (model,) = world.engine.models()
    assert (model.loads, model.failed_loads) == (1, 0)
    assert await world.replace("nonsense") != ""
    (world.folder / "1").rename(world.folder / ".away")
    assert "no version directory" in await world.reload()
    (world.folder / ".away").rename(world.folder / "1")
    assert await world.replace("1") == ""  # rewritten, it is another file


async def test_a_version_policy_without_matching_versions(world: World) -> None:
    world.configure(INLINE + "\nversion_policy { specific { versions: 7 } }")
    problem = await world.reload()
    assert "at least one version must be available under the version policy of" in problem
    assert await world.ask() == 1


async def test_only_the_versions_that_have_changed_are_loaded(world: World) -> None:
    both = INLINE + "\nversion_policy { all {} }"
    world.configure(both)
    first = world.engine.find("m", "1")
    assert await world.replace("2", version=2) == ""
    assert world.engine.find("m", "1") is first
    assert world.engine.find_version("m", "1").config.version_policy.HasField("all")
    assert await world.replace("3", version=2) == ""
    assert world.backend.begun == ["1", "2", "3"]
    world.configure(INLINE)
    second = world.engine.find("m", "2")
    assert await world.reload() == ""
    assert world.engine.find("m") is second
    assert world.index() == [("2", "READY", "")]
    world.configure(both)
    assert await world.reload() == ""
    assert world.backend.begun == ["1", "2", "3", "1"]
    assert world.engine.find("m", "2") is second


async def test_a_broken_version_keeps_all_others_as_they_were(world: World) -> None:
    world.configure(INLINE + "\nversion_policy { all {} }")
    assert await world.replace("2", version=2) == ""
    world.change("10")
    world.change("3", version=3)
    problem = await world.replace("nonsense", version=2)
    assert "is no number" in problem
    assert [await world.ask("1"), await world.ask("2")] == [1, 2]
    assert world.index() == [
        ("1", "READY", ""),
        ("2", "READY", f"a change could not be loaded: {problem}"),
        ("3", "UNAVAILABLE", "not served, since version 2 cannot be loaded"),
    ]
    assert [model.closed for model in world.backend.loaded] == [False, False, True, True]
    assert await world.replace("20", version=2) == ""
    assert [await world.ask(number) for number in "123"] == [10, 20, 3]


async def test_instances_are_added_and_removed_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with threaded(tmp_path) as world:
        version = world.engine.find_version("m")
        begun = await world.asked(20)
        world.configure(CONFIG.format("thread") + GROUPS.format(3))
        assert await world.reload() == ""
        assert world.engine.find_version("m") is version
        assert world.engine.find_version("m").config.instance_group[0].count == 3
        assert [len(world.backend.loaded), len(version.report.instances)] == [3, 3]
        begun += await world.asked(20)
        world.configure(CONFIG.format("thread") + GROUPS.format(1))
        assert await world.reload() == ""
        assert len(version.report.instances) == 1
        assert not any(model.closed for model in world.backend.loaded)  # they are busy
        world.backend.run_now.set()
        assert await asyncio.gather(*begun) == [1] * 40
        await until(lambda: sum(model.closed for model in world.backend.loaded) == 2)
        assert await world.ask() == 1
        assert world.engine.find_version("m") is version
    assert "m version 1 goes on with 3 instances" in caplog.text
    assert "m version 1 goes on with 1 instance\n" in caplog.text


async def test_an_instance_that_cannot_be_added_changes_nothing(tmp_path: Path) -> None:
    async with threaded(tmp_path) as world:
        version = world.engine.find_version("m")
        world.configure(CONFIG.format("thread") + GROUPS.format(2))
        world.backend.load_now.clear()
        loading = world.reload()
        await until(lambda: len(world.backend.begun) == 2)
        (world.folder / "1" / "model.constant").write_text("nonsense")
        again = world.reload()
        world.backend.load_now.set()
        assert "is no number" in await loading
        assert "is no number" in await again
        assert world.engine.find_version("m") is version
        assert len(version.report.instances) == 1
        assert world.backend.loaded[1].closed


async def test_added_versions_do_not_affect_readiness_until_they_serve(world: World) -> None:
    """A broken version on a shared volume must not take all replicas out of service."""
    world.backend.load_now.clear()
    loading = world.engine.load(world.change("nonsense", version=2))
    await until(lambda: ("2", "LOADING", "") in world.index())
    readiness = [world.engine.ready]
    world.backend.load_now.set()
    await loading
    readiness.append(world.engine.ready)
    other = world.folder.with_name("other")
    (other / "1").mkdir(parents=True)
    (other / "1" / "model.constant").write_text("nonsense")
    await world.engine.load(read_model_directory(other), added=True)
    readiness.append(world.engine.ready)
    assert readiness == [True] * 3
    assert [name for name, _ in world.engine.unavailable()] == ["m/2", "other/1"]
    await world.engine.unload("other")


async def test_a_model_with_a_manifest_is_loaded_once_complete(world: World) -> None:
    old = world.engine.find("m")
    write_manifest(world.folder)
    assert await world.reload() == ""
    # Its content is known from now on, whichever files hold it.
    known = world.engine.find("m")
    assert known is not old
    assert await world.replace("1") == ""
    assert world.engine.find("m") is known
    problem = await world.replace("2")
    assert problem.endswith("1/model.constant does not hold what it is to hold")
    assert world.index() == [("1", "READY", f"a change could not be loaded: {problem}")]
    write_manifest(world.folder)
    assert await world.reload() == ""
    assert await world.ask() == 2
    assert world.backend.begun == ["1", "1", "2"]


async def test_files_with_odd_names_or_none_at_all(world: World) -> None:
    source = world.change("1")
    (world.folder / "1" / "model.constant").unlink()
    os.close(os.open(os.fsencode(world.folder) + b"/1/\xff", os.O_CREAT))
    assert await world.engine.load(source)
    [(_, state, reason)] = world.index()
    assert state == "READY"
    assert r"found \udcff;" in reason
    source = world.change("1")
    shutil.rmtree(world.folder / "1")
    problem = "its version 1 cannot be read: No such file or directory"
    assert await world.engine.load(source) == problem


class Broken(StagePlugin):
    """A stage with a bug in the method of this name."""

    def __init__(self, where: str) -> None:
        self.where = where

    def check(self, parameters: Mapping[str, str]) -> None:
        assert self.where != "check"

    def compose(self, model: StageModel) -> Compose | None:
        assert self.where != "compose"
        return None


@pytest.mark.parametrize("where", ["check", "compose"])
async def test_a_bug_in_a_stage_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    world = World(tmp_path, options=replace(LOAD_OPTIONS, stages={"mine": Broken(where)}))
    assert await world.replace("1") == "its stage 'mine' failed: AssertionError"
    (record,) = (one for one in caplog.records if one.exc_info)
    assert record.getMessage() == "plugin 'mine' failed for model m"
