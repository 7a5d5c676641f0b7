"""Reports of versions: of none that is loaded, of busy ones, and memory."""

import asyncio
from pathlib import Path

from headrace.engine.report import VersionReport
from headrace.observability.statistics import VersionStatistics
from tests.engine.worlds import CONFIG, FutureCall, World, question, until

MUCH = 1 << 40  # bytes


def test_a_version_that_is_not_loaded_has_nothing_to_report() -> None:
    report = VersionReport(VersionStatistics())
    report.note_memory({"m": 7})
    assert (report.instances, report.stalled, report.endpoints, report.backends) == ([], [], [], ())
    assert (report.workers, report.gpu_memory, report.worker_pids()) == (None, [], {})
    assert (report.busy, report.pending, report.memory_bytes, report.load_seconds) == (
        False, 0, 0, 0.0,
    )  # fmt: skip
    assert report.detour == ""


async def test_pending_requests_are_those_that_no_instance_has_begun(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.engine.load_all([world.write("m", "1", config=CONFIG.format("thread"))])
    report = world.engine.find_version("m").report
    assert (report.busy, report.pending) == (False, 0)
    world.backend.run_now.clear()
    calls = [FutureCall(question()) for _ in range(3)]
    for call in calls:
        world.engine.find("m").submit(call)
    assert (report.busy, report.pending) == (True, 3)
    await until(lambda: not report.pending)
    assert (report.busy, report.pending) == (True, 0)
    world.backend.run_now.set()
    await asyncio.gather(*(call.future for call in calls))
    assert (report.busy, report.pending) == (False, 0)
    await world.engine.unload_all()
    assert (report.instances, report.load_seconds) == ([], 0.0)


async def test_measured_memory_replaces_that_of_the_load(tmp_path: Path) -> None:
    world = World(tmp_path)
    groups = '\ninstance_group {{ name: "m" count: {} }}'
    config = CONFIG.format("thread") + groups.format(2)
    await world.engine.load_all([world.write("m", "1", config=config)])
    report = world.engine.find_version("m").report
    first, second = (instance.name for instance in report.instances)
    report.note_memory({first: 5, second: MUCH})
    report.note_memory({first: 7})
    assert report.memory_bytes == MUCH + 7
    for count in (1, 2):  # an instance of the same name is another one
        config = CONFIG.format("thread") + groups.format(count)
        (tmp_path / "m" / "config.pbtxt").write_text(config)
        assert await world.engine.load(world.source("m")) == ""
    assert [instance.name for instance in report.instances] == [first, second]
    assert report.memory_bytes < MUCH
    await world.engine.unload_all()
