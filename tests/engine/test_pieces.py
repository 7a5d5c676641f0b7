"""Pieces of long work on the event loop, and everything else between them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.api.handlers import HANDLERS
from headrace.core.identity import ANYONE
from headrace.doors.http.app import create_app
from headrace.engine.metrics import ServerCollector, process_registry, scrape
from headrace.engine.pieces import Pieces
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.doors.http.asgi import ask
from tests.engine.worlds import World

_MODELS = 30


@contextmanager
def counting() -> Iterator[list[int]]:
    """The number of turns of the loop so far."""
    loop, turns, over = asyncio.get_running_loop(), [0], False

    def turn() -> None:
        turns[0] += 1
        if not over:
            loop.call_soon(turn)

    turn()
    try:
        yield turns
    finally:
        over = True


async def test_one_piece_per_turn_for_all() -> None:
    pieces, seen = Pieces(0.0), list[int]()
    with counting() as now:

        def note(item: int) -> int:
            seen.append(now[0])
            return item

        found = await asyncio.gather(*(pieces.each([n, -n], note) for n in range(5)))
    assert found == [[n, -n] for n in range(5)]
    assert len(set(seen)) == len(seen) == 10


async def test_pieces_have_many_items() -> None:
    with counting() as now:
        assert await Pieces(60.0).each(range(100), str) == [str(n) for n in range(100)]
        assert now[0] < 5


async def test_abandoned_work_keeps_no_turn() -> None:
    pieces = Pieces(0.0)
    tasks = [asyncio.ensure_future(pieces.each(range(3), str)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert found[0] == found[2] == ["0", "1", "2"]
    assert await pieces.each([1], str) == ["1"]


async def test_documents_about_many_models_are_made_in_pieces(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine = world.engine
    engine.pieces = engine.control.pieces = Pieces(0.0)
    await engine.load_all([world.write(f"m{n}", str(n)) for n in range(_MODELS)])
    collector, registry = ServerCollector(engine, None), process_registry()
    statistics, index = HANDLERS["ModelStatistics"], HANDLERS["RepositoryIndex"]
    assert statistics.json is not None
    assert index.json is not None
    with counting() as now:
        for making, least in (
            (statistics.answer(engine, pb.ModelStatisticsRequest(), ANYONE), _MODELS),
            (statistics.json(engine, {}, {}, ANYONE), _MODELS),
            (index.answer(engine, pb.RepositoryIndexRequest(), ANYONE), _MODELS),
            (index.json(engine, {}, {}, ANYONE), _MODELS),
            (scrape(collector, registry), _MODELS // 5),
            (ask(create_app(engine, 1 << 20), "GET", "/"), _MODELS),
        ):
            before = now[0]
            await making
            assert now[0] - before >= least
    await engine.unload_all()
