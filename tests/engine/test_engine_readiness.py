"""Every change of readiness is announced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from headrace.core.limits import ResidencyOptions
from headrace.plugins.on_request import OnRequest
from tests.engine import worlds
from tests.engine.worlds import until

_LATE = 3  # turns of the loop until a change must be announced


class World(worlds.World):
    """An engine and its announced readiness; `changes` has every value in order."""

    def __init__(self, root: Path, on_request: bool, strict: bool) -> None:
        loads = partial(OnRequest, ResidencyOptions(budget=0)) if on_request else None
        super().__init__(root, strict_readiness=strict, on_request=loads)
        self.changes = [self.engine.ready]
        self.engine.readiness.watch(lambda: self.changes.append(self.engine.ready))

    async def check(self) -> None:
        """Fail if the readiness differs from the announced one for too long."""
        wrong, told = 0, len(self.changes)
        while True:
            late = self.engine.ready is not self.changes[-1] and told == len(self.changes)
            wrong, told = wrong + 1 if late else 0, len(self.changes)
            assert wrong < _LATE, f"nobody was told of {self.engine.ready}"
            await asyncio.sleep(0)


@asynccontextmanager
async def checked(
    root: Path, on_request: bool = False, strict: bool = False
) -> AsyncIterator[World]:
    world = World(root, on_request, strict)
    checking = asyncio.ensure_future(world.check())
    yield world
    for _ in range(2 * _LATE):
        await asyncio.sleep(0)
    assert not checking.done(), checking.exception()
    checking.cancel()
    await world.engine.unload_all()


async def test_loads_failures_changes_and_unloads(tmp_path: Path) -> None:
    async with checked(tmp_path, strict=True) as world:
        engine, backend = world.engine, world.backend
        backend.load_now.clear()
        loading = asyncio.ensure_future(engine.load_all([world.write("a", "1")]))
        await until(lambda: bool(backend.begun))
        assert engine.readiness.reason == "models are being loaded: a"
        backend.load_now.set()
        await loading
        await until(lambda: world.changes == [False, True])
        assert await engine.load(world.write("a", "no number"))  # the old one continues
        assert await engine.load(world.write("a", "2")) == ""
        await engine.load(world.write("b", "bad"), added=True)  # not part of the server's readiness
        assert world.changes == [False, True]
        await engine.load(world.write("c", "bad"))
        await until(lambda: world.changes == [False, True, False])
        assert engine.readiness.reason == "models are not loaded (--strict-readiness): c"
        await engine.unload("c")
        await until(lambda: world.changes[-1])
        await engine.load(world.write("c", "3"))
        await engine.load(world.write("c", "4", version=2))
        await engine.unload("a")
        await engine.load(world.write("a", "5"))
        await engine.unload("a")


async def test_not_ready_before_every_model_was_tried(
    tmp_path: Path,
) -> None:
    async with checked(tmp_path) as world:
        engine, backend = world.engine, world.backend
        names = ["a", "b", "c", "d", "e", "f", "g"]
        sources = [world.write(n, "1" if n == "a" else "no number") for n in names]
        assert engine.readiness.reason == "it is starting"
        backend.load_now.clear()
        loading = asyncio.ensure_future(engine.load_all(sources))
        await until(lambda: bool(backend.begun))
        said = "models are being loaded: a, b, c, d, e and 2 more"
        assert engine.readiness.reason == said
        backend.load_now.set()
        await loading
        await until(lambda: world.changes == [False, True])
        assert engine.readiness.reason == ""
        assert engine.model_obstacle("a") == ""
        assert engine.model_obstacle("b").endswith(
            "'b' has no available versions (version 1 is UNAVAILABLE): 'no number' is no number"
        )
        await engine.load(world.write("h", "no number"))  # a client asks for it
        assert world.changes == [False, True]


async def test_a_server_that_exits_on_error_is_never_ready(tmp_path: Path) -> None:
    async with checked(tmp_path) as world:
        await world.engine.load_all([world.write("a", "no number")], all_or_none=True)
        assert not world.engine.ready
        assert world.changes == [False]


@pytest.mark.parametrize("drains", [True, False])
async def test_doors_and_shutdown(tmp_path: Path, drains: bool) -> None:
    async with checked(tmp_path) as world:
        await world.engine.load_all([world.write("a", "1")])
        await until(lambda: world.changes == [False, True])
        world.engine.readiness.set_reachable(False)
        await until(lambda: world.changes == [False, True, False])
        world.engine.readiness.set_reachable(True)
        await until(lambda: world.changes[-1])
        (world.engine.readiness.begin_shutdown if drains else world.admission.close)()
        await until(lambda: not world.changes[-1])
        world.admission.close()


@pytest.mark.parametrize("name", ["good", "bad"])
async def test_models_that_are_loaded_on_request(tmp_path: Path, name: str) -> None:
    async with checked(tmp_path, on_request=True) as world:
        sources = [world.write("good", "1"), world.write("bad", "no number")]
        await world.engine.load_all(sources)
        await until(lambda: world.changes == [False, True])
        await world.engine.load(sources[name == "bad"])
        await world.engine.unload(name)
        assert world.changes == [False, True]
