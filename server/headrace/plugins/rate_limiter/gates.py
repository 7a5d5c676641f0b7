"""Gates before the instances of versions: each batch takes the resources of its instance.

A gate asks for the resources when its scheduler is about to form a batch, so that requests wait in
the queue, where the batch grows. Owned by the event-loop thread, but for `problems`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from headrace.observability.statistics import Family, Sourced
from headrace.plugins.rate_limiter.decisions import (
    GLOBAL,
    Contender,
    Limits,
    Resource,
    ResourceShares,
    limit_of,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import Problem
from headrace.repository.fail_over import groups_here
from headrace.repository.reading import placements
from headrace.scheduling.batch import Instance, NamedInstance

_CPU = 0  # the device of instances without a GPU, as in Triton


class ResourceLimiter:
    """The limiter of an engine; a `headrace.engine.limiting.RateLimiter`."""

    def __init__(self, limits: Limits) -> None:
        self.shares = ResourceShares(limits)
        self._limits = limits
        self._gates: dict[Contender, ResourceGate] = {}

    def problems(self, config: ModelConfig) -> Iterator[Problem]:
        """Implements `RateLimiter.problems`."""
        kinds = {resource.name: resource.device == GLOBAL for resource in self.shares.resources}
        for index, group in enumerate(config.instance_group):
            for at, resource in enumerate(group.rate_limiter.resources):
                path = f"instance_group[{index}].rate_limiter.resources[{at}]"
                everywhere: bool = getattr(resource, "global")
                if kinds.setdefault(resource.name, everywhere) != everywhere:
                    kind = "of each device" if everywhere else "global"
                    text = f"resource '{resource.name}' is {kind} in other instance groups"
                    yield Problem(f"{path}.global", text)
        for name, needs, index, _ in _needs(config):
            for needed, count in needs.items():
                limit = limit_of(self._limits, needed)
                if limit is not None and count > limit:
                    yield Problem(
                        f"instance_group[{index}].rate_limiter.resources",
                        f"instance {name} needs {count} of '{needed.name}', and"
                        f" --rate-limit-resource has {limit}",
                    )

    def gate(self, config: ModelConfig, wake: Callable[[], object]) -> "ResourceGate | None":
        """Implements `RateLimiter.gate`."""
        if not any(group.rate_limiter.resources for group in config.instance_group):
            return None
        return ResourceGate(self, config, wake)

    def join(self, one: Contender, gate: "ResourceGate") -> None:
        """Let an instance behind a gate contend."""
        self._gates[one] = gate
        self.shares.add(one)

    def part(self, one: Contender) -> None:
        """Let an instance contend no more."""
        self.wake(self.shares.remove(one))
        del self._gates[one]

    def wake(self, granted: Iterable[Contender]) -> None:
        """Let the schedulers of instances run them."""
        for gate in dict.fromkeys(self._gates[one] for one in granted):
            gate.wake()

    def families(self) -> Iterable[Sourced]:
        """Implements `RateLimiter.families`."""
        for family in _FAMILIES:
            yield family, [({}, self.shares)]


def _by_resource(read: Callable[[Resource], int], shares: ResourceShares) -> Mapping[
    tuple[str, str], int
]:  # fmt: skip
    return {
        (name, "global" if device == GLOBAL else str(device)): read(Resource(name, device))
        for name, device in sorted(shares.resources)
    }


_FAMILIES: tuple[Family[ResourceShares], ...] = (
    Family("headrace_rate_limiter_used", "gauge", lambda s: _by_resource(s.used.__getitem__, s),
           "Units of a resource that running instances have", ("resource", "device")),
    Family("headrace_rate_limiter_limit", "gauge", lambda s: _by_resource(s.capacity, s),
           "Units of a resource that there are", ("resource", "device")),
)  # fmt: skip


class ResourceGate:
    """The gate of one version; a `headrace.engine.limiting.VersionGate`."""

    def __init__(
        self, limiter: ResourceLimiter, config: ModelConfig, wake: Callable[[], object]
    ) -> None:
        self.wake = wake
        self._limiter = limiter
        self._shares = limiter.shares
        self._contenders: dict[str, Contender] = {}
        # Those of instances that the configuration has no more, but that go on, for a batch or the
        # sequences that they have.
        self._leaving: dict[str, Contender] = {}
        self._running: dict[Instance, Contender] = {}
        self.follow(config)

    def follow(self, config: ModelConfig) -> None:
        """Implements `VersionGate.follow`; instances that run keep what they have."""
        before, wanted = self._leaving | self._contenders, {}
        for name, needs, _, priority in _needs(config):
            known = before.get(name)
            if known is None or (known.needs, known.priority) != (needs, max(priority, 1)):
                known = Contender(needs, priority)
                self._limiter.join(known, self)
            wanted[name] = known
        self._contenders = wanted
        self._leaving = {name: one for name, one in before.items() if name not in wanted}
        for one in before.values():
            if one not in self._all and one not in self._running.values():
                self._limiter.part(one)

    def close(self) -> None:
        """Implements `VersionGate.close`."""
        for one in self._all:
            self._limiter.part(one)
        self._contenders, self._leaving = {}, {}

    def enter(self, idle: Sequence[Instance]) -> Instance | None:
        """Implements `InstanceGate.enter`, for the one whose turn is first."""
        able: list[tuple[bool, int, Contender, Instance]] = []
        unlimited: list[Instance] = []
        for instance in idle:
            one = self._contender(instance)
            if one is None:
                unlimited.append(instance)
            elif not instance.load and one not in self._running.values():
                able.append((not one.granted, one.turn, one, instance))
        for _, _, one, instance in sorted(able, key=lambda each: each[:2]):
            if not one.granted:
                granted = self._shares.ask(one)
                self._limiter.wake(other for other in granted if other is not one)
            if one.granted:
                self._running[instance] = one
                return instance
        return min(unlimited, key=attrgetter("load"), default=None)

    def leave(self, instance: Instance, again: bool) -> None:
        """Implements `InstanceGate.leave`."""
        if (one := self._running.pop(instance, None)) is None:
            return
        stays = one in self._all
        self._limiter.wake(self._shares.give_back(one, again and stays))
        if not stays:
            self._limiter.part(one)

    def decline(self, instance: Instance) -> None:
        """Implements `InstanceGate.decline`."""
        if (one := self._running.pop(instance, None)) is not None:
            self._limiter.wake(self._shares.withdraw(one))

    def rest(self, waits: bool) -> None:
        """Implements `InstanceGate.rest`."""
        running = set(self._running.values())
        for one in self._all:
            if one not in running and (one.granted or (one.waits and not waits)):
                self._limiter.wake(self._shares.withdraw(one))

    def forget(self, instance: Instance) -> None:
        """Implements `InstanceGate.forget`; another one of its worker may still run."""
        assert isinstance(instance, NamedInstance), "an instance without a name. This is a bug."
        one = self._leaving.pop(instance.name, None)
        if one is not None and one not in self._running.values():
            self._limiter.part(one)

    @property
    def _all(self) -> Sequence[Contender]:
        return [*self._contenders.values(), *self._leaving.values()]

    def _contender(self, instance: Instance) -> Contender | None:
        """The contender of an instance; None for one of an upstream, which has no name."""
        assert isinstance(instance, NamedInstance), "an instance without a name. This is a bug."
        if not instance.name:
            return None
        return self._contenders.get(instance.name) or self._leaving[instance.name]


def _needs(config: ModelConfig) -> Iterator[tuple[str, Mapping[Resource, int], int, int]]:
    """The name of each instance, its needs, the index of the group that says so, its priority.

    Those of further backends that run here need what the first group says.
    """
    whole = ModelConfig()
    whole.CopyFrom(config)
    whole.instance_group.extend(groups_here(config))
    own = len(config.instance_group)
    for placed in placements(whole):
        device = _CPU if placed.device is None else placed.device
        limiter = whole.instance_group[placed.group].rate_limiter
        needs: dict[Resource, int] = {}
        for resource in limiter.resources:
            key = Resource(resource.name, GLOBAL if getattr(resource, "global") else device)
            needs[key] = needs.get(key, 0) + resource.count
        yield placed.name, needs, placed.group if placed.group < own else 0, limiter.priority
