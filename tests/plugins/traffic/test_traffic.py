"""Requests without a version, divided between changing versions of a model."""

import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.core.call import Call, CallOptions, InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, NotFound, Unavailable
from headrace.core.tensors import Array, elsewhere
from headrace.engine.admission import Admission
from headrace.engine.entrance import Target
from headrace.engine.metrics import collected
from headrace.engine.model import Model
from headrace.engine.version_chain import VersionChain
from headrace.plugins.traffic.control import ModelTraffic, TrafficControl, TrafficStage
from headrace.plugins.traffic.router import (
    ShadowCopies,
    ShadowedRequest,
    ShadowLedger,
    VersionRouter,
)
from headrace.plugins.traffic.rules import Shadow
from headrace.repository.layout import ModelSource
from tests.engine import worlds
from tests.engine.worlds import (
    CONFIG,
    LOAD_OPTIONS,
    FutureCall,
    ask,
    entries,
    number,
    question,
    until,
)

SPLIT = {"split": {"1": 90, "2": 10}}


class DoorCall(FutureCall):
    """A door's call, of a client that sent headers."""

    def __init__(self, asked: Call, headers: dict[str, str]) -> None:
        super().__init__(asked)
        self.headers = headers
        self.target: Target | None = None

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    def routed(self, target: Target) -> None:
        self.target = target


class World(worlds.World):
    """An engine with one model, `m`, whose version N answers N by default."""

    def __init__(self, root: Path, admission: Admission | None, allowed: bool) -> None:
        options = replace(LOAD_OPTIONS, stages={"traffic": TrafficStage()})
        traffic = partial(TrafficControl, allowed=allowed)
        super().__init__(root, options, admission, traffic=traffic)

    def configure(
        self, rules: object, versions: str = "123", execution: str = "inline"
    ) -> ModelSource:
        """Set the configuration's rules and the versions."""
        text = json.dumps(rules) if rules is not None else ""
        config = f"{CONFIG.format(execution)}\nversion_policy {{ all {{}} }}\n"
        if text:
            config += f"parameters {{ key: 'traffic' value {{ string_value: '{text}' }} }}"
        for name in "1234":
            folder = self.root / "m" / name
            if name in versions and not folder.exists():
                self.write("m", name, int(name))
            elif name not in versions and folder.exists():
                shutil.rmtree(folder)
        (self.root / "m" / "config.pbtxt").write_text(config)
        return self.source("m")

    async def change(self, rules: object, versions: str = "123") -> str:
        """Load the current configuration and versions; reason of a failure."""
        return await self.engine.load(self.configure(rules, versions))

    async def ask(self, parameters: dict[str, Any] | None = None, **headers: str) -> int:
        """The version that answers."""
        call = self.send(parameters, 0, False, **headers)
        response: InferResponse = await call.future
        assert call.target is None or call.target.name == response.model_version
        assert number(response) == int(response.model_version)
        return int(response.model_version)

    def send(
        self,
        parameters: dict[str, Any] | None = None,
        sequence: int = 0,
        start: bool = False,
        **headers: str,
    ) -> DoorCall:
        options = CallOptions(sequence_id=sequence, sequence_start=start)
        asked = question(parameters=parameters or {}, options=options)
        call = DoorCall(asked, headers)
        self.engine.find("m").submit(call)
        return call

    async def count(self, requests: int = 100) -> dict[int, int]:
        """Number of requests that each version answers."""
        return dict(Counter([await self.ask() for _ in range(requests)]))

    @property
    def traffic(self) -> TrafficControl:
        traffic = self.engine.traffic
        assert isinstance(traffic, TrafficControl)
        return traffic

    @property
    def series(self) -> ModelTraffic:
        return self.traffic.of("m")

    @property
    def shadow(self) -> ShadowLedger:
        return self.series.ledgers.shadows[3]


@asynccontextmanager
async def serving(
    tmp_path: Path,
    rules: object = None,
    *,
    versions: str = "123",
    execution: str = "inline",
    admission: Admission | None = None,
    allowed: bool = True,
) -> AsyncIterator[World]:
    world = World(tmp_path, admission, allowed)
    await world.engine.load_all([world.configure(rules, versions, execution)])
    yield world
    await world.engine.unload_all()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Nine of ten requests go to version 1, the others to 2."""
    async with serving(tmp_path, SPLIT) as world:
        yield world


async def test_a_split_by_the_configuration(world: World) -> None:
    counts = await world.count()
    assert 89 <= counts[1] <= 91
    assert counts[2] == 100 - counts[1]
    series = world.series
    assert series.weights == {"1": 0.9, "2": 0.1}
    assert {v: ledger.routed for v, ledger in series.ledgers.versions.items()} == {
        1: counts[1], 2: counts[2],
    }  # fmt: skip


async def test_metrics(world: World) -> None:
    ledgers = world.series.ledgers
    ledgers.versions[2].routed, ledgers.versions[2].rollbacks = 5, 1
    shadow = ledgers.shadows[3]
    shadow.success, shadow.failure, shadow.dropped = 2, 1, 7
    shadow.durations.observe(3_000_000, 2)
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family, sources in world.traffic.metrics()
        for metric in collected([family], sources)
        for s in metric.samples
    }
    model = ("model", "m")
    assert samples["headrace_traffic_weight", model, ("version", "1")] == 0.9
    assert samples["headrace_traffic_requests_total", model, ("version", "2")] == 5
    assert samples["headrace_traffic_rollbacks_total", model, ("version", "2")] == 1
    for outcome, count in (("success", 2), ("failure", 1), ("dropped", 7)):
        labels = model, ("outcome", outcome), ("version", "3")
        assert samples["headrace_shadow_requests_total", *labels] == count
    duration = "headrace_shadow_duration_seconds"
    version = ("version", "3")
    assert samples[f"{duration}_count", model, version] == 2
    assert samples[f"{duration}_sum", model, version] == 0.006
    assert samples[f"{duration}_bucket", ("le", "0.0025"), model, version] == 0
    assert samples[f"{duration}_bucket", ("le", "0.005"), model, version] == 2


async def test_a_named_version_is_never_another(world: World) -> None:
    for name in "123":
        found = world.engine.find("m", name)
        assert isinstance(found, VersionChain)
        assert await ask(found) == float(name)
    assert not any(ledger.routed for ledger in world.series.ledgers.versions.values())
    # Documents are of the highest.
    assert list(world.engine.model_metadata("m").versions) == ["1", "2", "3"]
    assert world.engine.find_version("m").name == "3"
    assert world.engine.model_ready("m")


async def test_without_rules_it_is_the_highest_version_itself(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        assert world.engine.find("m") is world.engine.find_version("m", "3").chain
        assert world.engine.traffic.document("m").source == "none"
        assert not any(sources for _, sources in world.traffic.metrics())


async def test_versions_are_added_and_removed(tmp_path: Path) -> None:
    async with serving(tmp_path, SPLIT, versions="1") as world:
        assert await world.count(10) == {1: 10}
        assert await world.change(SPLIT, "12") == ""
        assert set(await world.count()) == {1, 2}
        assert await world.change(SPLIT, "23") == ""
        assert await world.count(10) == {2: 10}
        assert await world.change(SPLIT, "34") == ""
        assert await world.count(10) == {4: 10}  # as for a model without rules
        document = world.engine.traffic.document("m")
        assert {v.version: (v.share, v.reason) for v in document.versions} == {
            "1": (0, "is not ready"), "2": (0, "is not ready"), "3": (0, ""), "4": (1, ""),
        }  # fmt: skip


async def test_rules_of_a_configuration_are_checked_before_it_is_loaded(world: World) -> None:
    loaded = len(world.backend.loaded)
    problem = await world.change({"split": {"1": 0}})
    assert "parameters['traffic']: split: at least one weight" in problem
    assert len(world.backend.loaded) == loaded
    assert set(await world.count()) == {1, 2}


async def test_an_unloaded_model_keeps_its_rules(world: World) -> None:
    world.engine.traffic.set("m", {"split": {"2": 1}})
    await world.engine.unload("m")
    with pytest.raises(NotFound):
        world.engine.find("m")
    assert await world.engine.load(world.source("m")) == ""
    assert await world.count(10) == {2: 10}


async def test_rules_of_a_call_stay_until_the_configuration_has_others(world: World) -> None:
    loaded = len(world.backend.loaded)
    world.engine.traffic.set("m", {"split": {"2": 1}})
    assert await world.change(SPLIT, "1234") == ""
    assert await world.count(10) == {2: 10}
    assert await world.change({"split": {"3": 1}}, "1234") == ""
    assert await world.count(10) == {3: 10}
    assert len(world.backend.loaded) == loaded + 1  # rules alone do not load a version again
    world.engine.traffic.set("m", {"split": {"4": 1}})
    world.engine.traffic.reset("m")
    assert await world.count(10) == {3: 10}
    assert await world.change(None, "1234") == ""
    assert await world.count(10) == {4: 10}
    assert world.engine.find("m") is world.engine.find_version("m", "4").chain


async def test_promotion_and_its_rollback(world: World) -> None:
    traffic = world.engine.traffic
    traffic.promote("m", "")
    assert await world.count(10) == {2: 10}
    assert world.engine.traffic.document("m").source == "promotion"
    assert world.engine.find_version("m", "1").ready
    traffic.roll_back("m", "", "it  was\nworse")
    assert await world.count(10) == {1: 10}
    document = world.engine.traffic.document("m")
    assert (document.source, document.reason) == ("rollback", "it was worse")
    assert {m.version: m.reason for m in entries(world.engine)}["2"] == "it was worse"
    traffic.promote("m", "3")
    assert await world.count(10) == {3: 10}
    assert {v.version: v.role for v in world.engine.traffic.document("m").versions} == {
        "1": "candidate", "2": "candidate", "3": "baseline",
    }  # fmt: skip


async def test_no_rollback_to_a_version_that_is_not_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, SPLIT, versions="23") as world:
        with pytest.raises(InvalidRequest, match="version 1 is not ready: it is not given more"):
            world.engine.traffic.roll_back("m", "")
        assert await world.count(10) == {2: 10}
        assert await world.change(SPLIT, "12") == ""
        world.engine.traffic.promote("m", "2")
        assert await world.change(SPLIT, "23") == ""
        with pytest.raises(InvalidRequest, match="version 1 is not ready: it is not given all"):
            world.engine.traffic.roll_back("m", "")
        assert await world.count(10) == {2: 10}


async def test_a_rollback_by_a_call(world: World) -> None:
    traffic = world.engine.traffic
    traffic.set("m", {"split": {"1": 50, "2": 25, "3": 25}})
    traffic.roll_back("m", "3")
    assert world.series.weights == {"1": 0.75, "2": 0.25, "3": 0}
    traffic.roll_back("m", "")
    assert await world.count(10) == {1: 10}
    traffic.set("m", SPLIT)
    assert world.engine.traffic.reason("m", 2) == ""
    assert world.engine.traffic.reason("m", 3) == "rolled back by a call"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda t: t.promote("m", "4"), "version 4 is not ready: it is not promoted"),
        (lambda t: t.promote("m", "x"), "should be an integral value"),
        (lambda t: t.roll_back("m", "3"), "version 3 gets no requests that could be rolled back"),
        (lambda t: t.set("m", {"split": {"1": -1}}), r"rules of model 'm': split\['1'\]"),
        (lambda t: t.set("m", []), "rules of model 'm': must be a JSON object"),
        (
            lambda t: (t.set("m", {"split": {"1": 1, "2": 1, "3": 1}}), t.promote("m", "")),
            "name the version of model 'm' to promote: .* these get requests: 2, 3",
        ),
        (
            lambda t: (t.set("m", {"split": {"1": 1}}), t.roll_back("m", "")),
            "nothing to roll back: .* none, and none was promoted",
        ),
    ],
)
async def test_invalid_calls(world: World, act: Callable[[Any], object], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        act(world.engine.traffic)


async def test_calls_for_unknown_or_forbidden_models(tmp_path: Path) -> None:
    async with serving(tmp_path, SPLIT, allowed=False) as world:
        traffic = world.engine.traffic
        for act, *given in ((traffic.set, SPLIT), (traffic.reset,), (traffic.promote, "2"),
                            (traffic.roll_back, "")):  # fmt: skip
            with pytest.raises(Unavailable, match="--allow-traffic-control allows it"):
                act("m", *given)
        assert world.engine.traffic.document("m").source == "config"
        with pytest.raises(NotFound, match="'nope' is not found"):
            world.engine.traffic.document("nope")


async def test_the_same_key_gets_the_same_version(tmp_path: Path) -> None:
    rules = {"split": {"1": 50, "2": 50}, "sticky": {"header": "User"}}
    async with serving(tmp_path, rules) as world:
        users = [f"user-{n}" for n in range(60)]
        chosen = {user: await world.ask(user=user) for user in users}
        assert set(chosen.values()) == {1, 2}
        assert {user: await world.ask(user=user) for user in users} == chosen
        assert set(await world.count(20)) == {1, 2}  # without a key, by turns
        assert world.engine.traffic.headers == {"m": "user"}


@pytest.mark.parametrize("key", ["user", "sequence_id"])
async def test_keys_from_parameters_and_sequences(tmp_path: Path, key: str) -> None:
    rules = {"split": {"1": 50, "2": 50}, "sticky": {"parameter": key}}

    async def answers(world: World, numbers: Iterable[int], kind: type) -> list[int]:
        if key == "user":
            return [await world.ask({"user": kind(n)}) for n in numbers]
        sent = [world.send(sequence=n) for n in numbers]
        return [int((await call.future).model_version) for call in sent]

    async with serving(tmp_path, rules) as world:
        chosen = await answers(world, range(1, 30), int)
        assert set(chosen) == {1, 2}
        assert await answers(world, range(1, 30), str) == chosen
        if key == "sequence_id":
            assert set(await answers(world, [0] * 20, int)) == {1, 2}  # an invalid one
        assert world.engine.traffic.headers == {}


@pytest.mark.parametrize("sticky", [{}, {"sticky": {"header": "User"}}], ids=["even", "keyed"])
async def test_the_requests_of_a_sequence_get_the_same_version(
    tmp_path: Path, sticky: dict[str, Any]
) -> None:
    async with serving(tmp_path, {"split": {"1": 50, "2": 50}, **sticky}) as world:
        for id in range(1, 20):
            sent = [world.send(sequence=id) for _ in range(4)]
            assert len({(await call.future).model_version for call in sent}) == 1
        assert set(await world.count(20)) == {1, 2}


async def test_sticky_headers_are_announced(world: World) -> None:
    told: list[Any] = []
    traffic = world.engine.traffic
    world.engine.wanted_headers.watch(told.append)
    traffic.set("m", SPLIT | {"sticky": {"header": "a"}})
    traffic.set("m", SPLIT | {"sticky": {"header": "a"}})
    traffic.set("m", {})
    assert told == [{}, {"routed": {"m": "a"}}, {"routed": {}}]


async def test_invalid_requests_count_for_no_version(world: World) -> None:
    found = world.engine.find("m")
    with pytest.raises(InvalidRequest):
        found.submit(DoorCall(Call("m", "", "", {}), {}))
    assert not any(v.routed or v.refused for v in world.series.ledgers.versions.values())


async def test_a_model_that_would_wait_for_itself_is_detected(tmp_path: Path) -> None:
    async with serving(tmp_path, SPLIT, execution="thread") as world:
        found = world.engine.find("m")
        assert isinstance(found, VersionRouter)
        assert found.waits_for(world.engine.find("m", "2"))
        assert not found.waits_for(world.engine.find("m", "3"))
        assert not found.obstacle


SHADOW = {"split": {"1": 1}, "shadow": {"version": "3", "max_pending": 2}}


async def test_a_shadow_gets_copies_and_answers_no_client(tmp_path: Path) -> None:
    async with serving(tmp_path, SHADOW) as world:
        assert await world.count(1) == {1: 1}
        await until(lambda: world.shadow.success == 1)
        assert world.shadow.durations.total_ns > 0
        counted = world.engine.find_version("m", "3").report.statistics
        await until(lambda: counted.success_count == 1)


async def test_a_slow_shadow_does_not_delay_others(tmp_path: Path) -> None:
    async with serving(tmp_path, SHADOW, execution="thread") as world:
        world.backend.run_now.clear()
        waiting = [world.send() for _ in range(5)]
        assert world.shadow.dropped == 3
        world.backend.run_now.set()
        for call in waiting:
            assert (await call.future).model_version == "1"
        await until(lambda: world.shadow.success == 2)


async def test_a_share_of_requests_is_copied(tmp_path: Path) -> None:
    rules = {"split": {"1": 1}, "shadow": {"version": "3", "share": 0.25}}
    async with serving(tmp_path, rules) as world:
        for _ in range(40):
            await world.ask()
        await until(lambda: world.shadow.success == 10)
        assert world.shadow.dropped == 0


async def test_all_requests_of_a_sequence_are_copied_or_none(tmp_path: Path) -> None:
    """Only the first copy has room, so that the others are counted at once."""
    shadow = {"version": "3", "share": 0.5, "max_pending": 1}
    async with serving(tmp_path, {"split": {"1": 1}, "shadow": shadow}) as world:
        found = []
        for id in range(1, 65):
            before = world.shadow.dropped
            for _ in range(5):
                world.send(sequence=id)
            found.append(world.shadow.dropped - before)
        assert {0, 5} <= set(found) <= {0, 4, 5}
        assert 10 < found.count(0) < 54


async def test_a_sequence_without_a_copy_is_copied_no_further(tmp_path: Path) -> None:
    """Up to the next start of one with its id."""
    async with serving(tmp_path, SHADOW, admission=Admission(10, 100)) as world:

        async def copied(id: int, start: bool = False) -> bool:
            dropped = world.shadow.dropped
            await world.send(sequence=id, start=start).future
            return world.shadow.dropped == dropped

        assert await copied(1, start=True)
        world.admission.count(0, 6)
        assert not await copied(1)
        world.admission.count(0, -6)
        await until(lambda: world.shadow.success == 1)
        assert not await copied(1)
        assert await copied(2, start=True)
        await until(lambda: world.shadow.success == 2)
        assert await copied(1, start=True)
        await until(lambda: world.shadow.success == 3)
        assert await copied(1)
        await until(lambda: world.shadow.success == 4)


async def test_an_overloaded_server_makes_no_copies(tmp_path: Path) -> None:
    async with serving(tmp_path, SHADOW, admission=Admission(10, 100)) as world:
        world.admission.count(0, 6)
        assert await world.count(1) == {1: 1}
        assert world.shadow.dropped == 1
        world.admission.count(60, -6)
        assert await world.count(1) == {1: 1}
        assert world.shadow.dropped == 2
        world.admission.count(-60, 0)


async def test_copies_end_when_the_rules_do(tmp_path: Path) -> None:
    async with serving(tmp_path, SHADOW, execution="thread") as world:
        world.backend.run_now.clear()
        world.send(), world.send()
        world.engine.traffic.set("m", {"split": {"1": 1}})
        assert world.shadow.dropped == 2
        world.backend.run_now.set()


async def test_a_shadow_alone_leaves_the_highest_other_version(tmp_path: Path) -> None:
    async with serving(tmp_path, {"shadow": "3"}) as world:
        assert await world.count(4) == {2: 4}
        world.engine.traffic.promote("m", "3")
        assert await world.count(4) == {3: 4}


async def test_inputs_of_a_shadow_are_read_only(tmp_path: Path) -> None:
    async with serving(tmp_path, SHADOW) as world:
        [third] = [model for model in world.backend.loaded if model.number == 3]
        asked = question()
        array = cast(Array, asked.inputs["X"].array)
        call = DoorCall(asked, {})
        world.engine.find("m").submit(call)
        await call.future
        await until(lambda: world.shadow.success == 1)
        assert not third.seen[-1].flags.writeable
        assert array.flags.writeable


async def test_requests_in_shared_memory_are_not_copied(tmp_path: Path) -> None:
    async with serving(tmp_path, SHADOW) as world:
        found = world.engine.find("m")
        assert isinstance(found, VersionRouter)
        copies = ShadowCopies(
            world.engine.find_version("m", "3"), Shadow(3), world.shadow, world.admission
        )
        call = Call("m", "", "", {"X": elsewhere("X", Datatype.FP32, (1, 1))})
        copies.copy(call, ShadowedRequest(call.inputs, (), call.options))
        assert world.shadow.dropped == 1


async def test_a_removed_model_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        models = {name: Model(world.source("m")) for name in ("a", "b")}
        for name, model in models.items():
            model.name = name
        traffic = TrafficControl(models, world.admission, lambda: None, True)
        traffic.set("a", {"split": {"1": 1}, "sticky": {"header": "x"}})
        model = models.pop("a")
        assert not any(sources for _, sources in traffic.metrics())
        traffic.set("b", {})
        models["a"] = model
        assert traffic.of("a").source == "none"
        assert traffic.headers == {}
