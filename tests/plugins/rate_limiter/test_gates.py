"""Gates before the instances of real schedulers, on one manual clock."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import LoadFailed, Unavailable
from headrace.observability.statistics import VersionStatistics
from headrace.plugins.rate_limiter import rate_limiter
from headrace.plugins.rate_limiter.gates import ResourceLimiter
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.completion import normalise
from headrace.repository.config import parse_config
from headrace.scheduling.batch import Batch, Instance, NotStarted, Outcome
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.fail_over import Tiers
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import FakeCall, FakeClock, FakeInstance, request, signature, submitted

MS = 1_000_000
Done = Callable[[Instance, Batch, Outcome], None]


def config(*groups: str) -> ModelConfig:
    """Instance groups, each as `COUNT NEEDS`, where needs are fields of `rate_limiter`."""
    texts = []
    for number, group in enumerate(groups):
        count, _, needs = group.partition(" ")
        name = f'name: "g{number}"'
        texts.append(f"instance_group {{ {name} count: {count} rate_limiter {{ {needs} }} }}")
    return normalise(parse_config(f'name: "m" {" ".join(texts)}', "f").config)


def needs(count: int, name: str = "R", everywhere: bool = True) -> str:
    kind = "global: true" if everywhere else ""
    return f'resources {{ name: "{name}" count: {count} {kind} }}'


class Limited:
    """Versions whose instances a limiter limits."""

    def __init__(self, *resources: str) -> None:
        self.clock = FakeClock()
        self.limiter = rate_limiter(resources)
        assert isinstance(self.limiter, ResourceLimiter)
        self.runs: list[list[str]] = []

    def version(
        self, settings: ModelConfig, names: Sequence[str], policy: BatchPolicy | None = None
    ) -> "Version":
        return Version(self, settings, names, policy or BatchPolicy(4))

    def used(self, name: str = "R") -> int:
        return sum(n for key, n in self.limiter.shares.used.items() if key.name == name)


class Version:
    """A scheduler with instances of these names."""

    def __init__(
        self, limited: Limited, settings: ModelConfig, names: Sequence[str], policy: BatchPolicy
    ) -> None:
        self.clock = limited.clock
        self.batcher = Batcher(
            signature(), "1", SchedulingPolicy(policy), self.clock, VersionStatistics(),
            lambda calls, error: None,
        )  # fmt: skip
        gate = limited.limiter.gate(settings, self.batcher.wake)
        assert gate is not None
        self.gate = gate
        self.batcher.limit(gate)
        self.instances = [FakeInstance(self.clock, all_runs=limited.runs, name=n) for n in names]
        for instance in self.instances:
            self.batcher.add_instance(instance)

    def ask(self, name: str, value: int = 1, target: Instance | None = None) -> FakeCall:
        submit = partial(self.batcher.submit, target=target)
        return submitted(submit, request(name, value), FakeCall(name), 1)

    def finish(self) -> None:
        next(instance for instance in self.instances if instance.busy).finish()
        self.clock.settle()


def test_instances_of_two_models_share_a_resource() -> None:
    limited = Limited()
    one = limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    other = limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    calls = [one.ask("a"), other.ask("b")]
    limited.clock.settle()
    assert limited.runs == [["a"]]
    calls.append(other.ask("c"))
    limited.clock.settle()
    one.finish()
    assert limited.runs == [["a"], ["b", "c"]]  # the batch has grown while it waited
    other.finish()
    assert [len(call.responses) for call in calls] == [1, 1, 1]
    assert limited.used() == 0


def test_more_units_run_more_instances() -> None:
    limited = Limited("R:2")
    version = limited.version(config(f"3 {needs(1)}"), ["g0_0", "g0_1", "g0_2"], BatchPolicy(1))
    for name in "abc":
        version.ask(name)
    limited.clock.settle()
    assert limited.runs == [["a"], ["b"]]
    assert limited.used() == 2
    version.finish()
    assert limited.runs == [["a"], ["b"], ["c"]]
    version.finish()
    version.finish()
    assert limited.used() == 0


def test_an_instance_group_without_needs_runs_beside() -> None:
    limited = Limited()
    holder = limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    holder.ask("held")
    limited.clock.settle()
    version = limited.version(config(f"1 {needs(1)}", "1"), ["g0_0", "g1_0"], BatchPolicy(1))
    for name in "ab":
        version.ask(name)
    limited.clock.settle()
    assert limited.runs == [["held"], ["a"]]
    version.finish()
    assert limited.runs == [["held"], ["a"], ["b"]]


def test_a_cancelled_request_lets_others_pass() -> None:
    limited = Limited()
    one, other, third = [limited.version(config(f"1 {needs(1)}"), ["g0_0"]) for _ in range(3)]
    one.ask("a")
    limited.clock.settle()
    waiting = other.ask("b")
    limited.clock.settle()
    third.ask("c")
    limited.clock.settle()
    waiting.cancel()
    one.finish()
    assert limited.runs == [["a"], ["c"]]
    third.finish()
    assert limited.used() == 0


def test_a_delayed_batch_holds_nothing() -> None:
    limited = Limited()
    slow = limited.version(config(f"1 {needs(1)}"), ["g0_0"], BatchPolicy(4, 5 * MS))
    other = limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    slow.ask("a")
    limited.clock.settle()
    other.ask("b")
    limited.clock.settle()
    assert limited.runs == [["b"]]
    limited.clock.advance(6 * MS)
    assert limited.runs == [["b"]]
    other.finish()
    assert limited.runs == [["b"], ["a"]]


def test_priorities_are_turns_across_models() -> None:
    limited = Limited()
    often = limited.version(config(f"1 {needs(1)} priority: 1"), ["g0_0"], BatchPolicy(1))
    seldom = limited.version(config(f"1 {needs(1)} priority: 3"), ["g0_0"], BatchPolicy(1))
    for _ in range(40):
        often.ask("often")
        seldom.ask("seldom")
    limited.clock.settle()
    for _ in range(40):
        for version in (often, seldom):
            if any(instance.busy for instance in version.instances):
                version.finish()
                break
    names = [name for run in limited.runs[:40] for name in run]
    assert abs(names.count("often") - 30) <= 1


def test_an_instance_is_added_and_removed_while_it_serves() -> None:
    limited = Limited("R:9")
    version = limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    version.ask("a")
    limited.clock.settle()
    version.gate.follow(config(f"1 {needs(2)}"))
    assert limited.used() == 1  # what runs keeps what it has
    version.finish()
    version.ask("b")
    limited.clock.settle()
    assert limited.used() == 2
    version.finish()
    version.gate.close()
    assert limited.limiter.shares.resources == set()


def test_a_version_without_needs_has_no_gate() -> None:
    limited = Limited()
    assert limited.limiter.gate(config("1", "2 priority: 3"), lambda: None) is None


def problems(limiter: ResourceLimiter, settings: ModelConfig) -> list[tuple[str, str]]:
    return [(problem.path, problem.text) for problem in limiter.problems(settings)]


def test_instances_that_could_never_run_are_refused() -> None:
    limiter = rate_limiter(["R:2"])
    assert problems(limiter, config(f"1 {needs(2)}")) == []
    [(path, text)] = problems(limiter, config("1", f"1 {needs(3)}"))
    assert path == "instance_group[1].rate_limiter.resources"
    assert text == "instance g1_0 needs 3 of 'R', and --rate-limit-resource has 2"


# --- several backends


def failing_over(group: str, order: str, instances: str = "") -> ModelConfig:
    settings = config(group)
    settings.parameters["fail_over"].string_value = order
    if instances:
        settings.parameters["fail_over_instances"].string_value = instances
    return settings


def test_further_backends_need_what_the_first_group_needs() -> None:
    settings = failing_over(f"1 {needs(3)}", "python", "2")
    assert problems(rate_limiter(["R:3"]), settings) == []
    found = problems(rate_limiter(["R:2"]), settings)
    assert found == [
        ("instance_group[0].rate_limiter.resources",
         f"instance {name} needs 3 of 'R', and --rate-limit-resource has 2")
        for name in ("g0_0", "m_python_0", "m_python_1")
    ]  # fmt: skip


class UpstreamInstance:
    """An instance without a name, which holds its batch until `inner` finishes it."""

    load = 0

    def __init__(self, inner: FakeInstance) -> None:
        self.inner = inner

    def serves(self, target: object) -> bool:
        return True

    def execute(self, batch: Batch, done: Done) -> None:
        self.inner.execute(batch, lambda _, batch, outcome: done(self, batch, outcome))

    def close(self) -> None:
        self.inner.close()


class TieredVersion:
    """A version whose first backend runs here, the second on an upstream, the third here."""

    def __init__(self, limited: Limited, settings: ModelConfig) -> None:
        self.clock = limited.clock
        batcher = Batcher(
            signature(), "1", SchedulingPolicy(BatchPolicy(1)), self.clock, VersionStatistics(),
            lambda calls, error: None,
        )  # fmt: skip
        gate = limited.limiter.gate(settings, batcher.wake)
        assert gate is not None
        batcher.limit(gate)
        self.tiers = Tiers("m", ["onnxruntime", "triton", "python"], batcher, self.clock, {})
        names = ("g0_0", "", "m_python_0")
        self.fakes = [FakeInstance(self.clock, all_runs=limited.runs, name=n) for n in names]
        first, upstream, last = self.fakes
        self.instances: list[Instance] = [first, UpstreamInstance(upstream), last]
        for tier, instance in zip(self.tiers, self.instances, strict=True):
            tier.add_instance(instance)

    def ask(self, name: str) -> FakeCall:
        return submitted(self.tiers.submit, request(name, 1), FakeCall(name), 1)

    def lose(self, *ranks: int) -> None:
        for rank in ranks:
            self.tiers[rank].suspend(self.instances[rank])


@pytest.mark.parametrize(("lost", "waits", "used"), [
    ((), True, 1),  # the first backend needs the resource
    ((0,), False, 0),  # an upstream needs nothing
    ((0, 1), True, 1),  # the last one runs here, too
])  # fmt: skip
def test_backends_that_run_here_take_their_resources(
    lost: Sequence[int], waits: bool, used: int
) -> None:
    limited = Limited("R:1")
    holder = limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    settings = failing_over(f"1 {needs(1)}", "grpc://standby:8001; python")
    version = TieredVersion(limited, settings)
    limited.clock.settle()
    version.lose(*lost)
    limited.clock.settle()
    holder.ask("held")
    limited.clock.settle()
    call = version.ask("a")
    limited.clock.settle()
    assert limited.runs == ([["held"]] if waits else [["held"], ["a"]])
    holder.finish()
    assert limited.runs == [["held"], ["a"]]
    assert limited.used() == used
    [running] = [fake for fake in version.fakes if fake.busy]
    assert running is version.fakes[len(lost)]
    running.finish()
    limited.clock.settle()
    assert (len(call.responses), limited.used()) == (1, 0)
    assert not version.tiers.busy


def test_a_batch_keeps_its_units_when_its_backend_refuses_it() -> None:
    limited = Limited("R:1")
    version = TieredVersion(limited, failing_over(f"1 {needs(1)}", "grpc://a:1; python"))
    limited.clock.settle()
    call = version.ask("a")
    limited.clock.settle()
    version.fakes[0].report(NotStarted(Unavailable("not here")))
    limited.clock.settle()
    assert version.fakes[1].busy
    assert limited.used() == 1
    version.fakes[1].finish()
    limited.clock.settle()
    assert (len(call.responses), limited.used()) == (1, 0)


# --- calls for certain instances, as those of sequences are


def test_calls_wait_for_the_resources_of_their_instance() -> None:
    limited = Limited("R:1")
    version = limited.version(config(f"2 {needs(1)}"), ["g0_0", "g0_1"])
    for name, place in (("a", 0), ("b", 1), ("c", 0)):
        version.ask(name, target=version.instances[place])
    limited.clock.settle()
    assert limited.runs == [["a", "c"]]
    version.finish()
    assert limited.runs == [["a", "c"], ["b"]]
    version.finish()
    assert limited.used() == 0


def test_an_instance_that_leaves_keeps_its_resources_until_it_is_gone() -> None:
    """Sequences on it go on, after the configuration does not have it any more."""
    limited = Limited()
    settings = config(f"1 {needs(1)}", f"1 {needs(5)}")
    version = limited.version(settings, ["g0_0", "g1_0"])
    leaving = version.instances[1]
    version.gate.follow(config(f"1 {needs(1)}"))
    version.ask("a", target=leaving)
    limited.clock.settle()
    assert (limited.runs, limited.used()) == ([["a"]], 5)
    gone = list[bool]()
    version.batcher.remove_instance(leaving, lambda: gone.append(True))
    limited.clock.settle()
    assert not gone
    version.finish()
    assert gone
    [resource] = limited.limiter.shares.resources
    assert limited.limiter.shares.capacity(resource) == 1  # what the largest other needs
    version.gate.close()
    assert limited.limiter.shares.resources == set()


def test_an_instance_comes_back_before_it_is_gone() -> None:
    limited = Limited()
    version = limited.version(config(f"2 {needs(1)}"), ["g0_0", "g0_1"])
    for units in (1, 2):  # the same needs as before, and others
        version.gate.follow(config(f"1 {needs(1)}"))
        version.gate.follow(config(f"2 {needs(units)}"))
        version.ask("a", target=version.instances[1])
        limited.clock.settle()
        assert limited.used() == units
        version.finish()
    assert limited.runs == [["a"], ["a"]]
    version.gate.close()
    assert limited.limiter.shares.resources == set()


UNITS, MODELS, INSTANCES = 3, 2, 2


@given(st.lists(st.tuples(
    st.sampled_from(["ask", "ask", "any", "finish", "cancel"]),
    st.integers(0, MODELS - 1), st.integers(0, INSTANCES - 1),
), max_size=60), st.lists(st.integers(1, UNITS), min_size=MODELS, max_size=MODELS))  # fmt: skip
def test_random_schedules(events: list[tuple[str, int, int]], units: list[int]) -> None:
    """Never more than there is, nothing waits in vain, and every call is answered or cancelled.

    The reference is the rule itself: a call may wait while its instance runs, or while what is free
    is less than any waiting instance needs that could have come before it.
    """
    limited = Limited(f"R:{UNITS}")
    names = [f"g0_{n}" for n in range(INSTANCES)]
    versions = [
        limited.version(config(f"{INSTANCES} {needs(each)}"), names, BatchPolicy(1))
        for each in units
    ]
    calls: list[tuple[int, int | None, FakeCall]] = []

    def check() -> None:
        running = [
            (place, number)
            for place, version in enumerate(versions)
            for number, instance in enumerate(version.instances)
            if instance.busy
        ]
        used = sum(units[place] for place, _ in running)
        assert limited.used() == used <= UNITS
        needed = [
            units[place]
            for place, number, call in calls
            if not call.ended and not call.started
            and any((place, n) not in running for n in ([0, 1] if number is None else [number]))
        ]  # fmt: skip
        assert not needed or max(needed) > UNITS - used

    for number, (kind, place, instance) in enumerate(events):
        version = versions[place]
        if kind in ("ask", "any"):
            target = instance if kind == "ask" else None
            on = None if target is None else version.instances[instance]
            calls.append((place, target, version.ask(str(number), target=on)))
        elif kind == "finish" and version.instances[instance].busy:
            version.instances[instance].finish()
        elif kind == "cancel" and calls:
            calls[(place + 2 * instance) % len(calls)][2].cancel()
        limited.clock.settle()
        check()
    while busy := [i for version in versions for i in version.instances if i.busy]:
        busy[0].finish()
        limited.clock.settle()
        check()
    assert limited.used() == 0
    assert all(call.ended for _, _, call in calls)


def test_a_resource_is_global_or_of_each_device() -> None:
    limited = Limited()
    limited.version(config(f"1 {needs(1)}"), ["g0_0"])
    [(path, text)] = problems(limited.limiter, config(f"1 {needs(1, everywhere=False)}"))
    assert path == "instance_group[0].rate_limiter.resources[0].global"
    assert text == "resource 'R' is global in other instance groups"
    both = config(f"1 {needs(1, 'S', False)}", f"1 {needs(1, 'S')}")
    [(_, text)] = problems(limited.limiter, both)
    assert text == "resource 'S' is of each device in other instance groups"


def test_malformed_options_are_named() -> None:
    with pytest.raises(LoadFailed, match="--rate-limit-resource: expected NAME:COUNT"):
        rate_limiter(["R"])
