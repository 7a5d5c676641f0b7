"""Bringing a version that serves to what it is to be, with as little loading as that takes.

A version of the same origin stays as it is. If only its instance groups have changed, instances are
loaded beside those that serve, or some of them go. Anything else makes it another version.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headrace.engine.fail_over_loading import load
from headrace.engine.loading import LoadedInstance, LoadedVersion, load_instances
from headrace.engine.opening import LoadOptions, Opened
from headrace.repository import reading
from headrace.repository.completion import normalise
from headrace.repository.model_files import Origin, content_of
from headrace.repository.reading import Placement
from headrace.repository.validation import TRAFFIC
from headrace.wire.pb.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class Serving:
    """A version that serves, as it is when its model is loaded again.

    `names` are those of its instances, `inline` is whether they run on the event loop, and
    `resizable` whether some of them may come and go.
    """

    origin: Origin
    config: ModelConfig
    names: tuple[str, ...]
    inline: bool
    resizable: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """What makes a version that goes on serving what it is to be.

    `config` has the version policy, the instance groups and the traffic rules of now. `instances`
    are further ones, `removed` the names of those that are too many.
    """

    origin: Origin
    config: ModelConfig
    instances: Sequence[LoadedInstance] = ()
    removed: Sequence[str] = ()


class Step(Enum):
    """How a version comes to what it is to be."""

    KEEP = "keep"
    RESIZE = "resize"
    LOAD = "load"


def step(before: Origin | None, after: Origin) -> Step:
    """What to do with what was loaded from `before`, None if nothing serves well."""
    if before is None or before.content != after.content:
        return Step.LOAD
    if before.groups == after.groups:
        return Step.KEEP
    return Step.RESIZE if before.resizable and after.resizable else Step.LOAD


def update(
    serving: Serving | None, opened: Opened, version: int, options: LoadOptions
) -> LoadedVersion | Change:
    """Load what a version lacks; raises as `load` does, with everything closed again.

    It may take seconds, and is for a loading thread. `serving` is None if nothing serves well.
    """
    origin = opened.origins[version]
    before = serving.origin if serving is not None else None
    if serving is not None and _completes(serving, opened, origin):
        before = replace(serving.origin, content=origin.content)
    kind = step(before, origin)
    if kind is Step.RESIZE and serving is not None and not serving.resizable:
        kind = Step.LOAD
    if serving is None or kind is Step.LOAD:
        return load(opened, version, options)
    config = adjusted(serving.config, normalise(opened.config))
    if kind is Step.KEEP:  # with the instance groups that it was completed with
        config.ClearField("instance_group")
        config.instance_group.extend(serving.config.instance_group)
        return Change(origin, config)
    removed, missing = resize(serving.names, reading.placements(config))
    added = load_instances(opened, version, config, missing, serving.inline, options)
    return Change(origin, config, added, removed)


def _completes(serving: Serving, opened: Opened, origin: Origin) -> bool:
    """Whether a configuration is what the one of a version that serves was completed to.

    Clients get it like that and send it back with other instance groups.
    """
    there, wanted = serving.origin.content, origin.content
    return (
        (there.directory, there.files) == (wanted.directory, wanted.files)
        and not opened.fail_over
        and content_of(serving.config) == content_of(normalise(opened.config))
    )


def resize(
    names: Sequence[str], placements: Sequence[Placement]
) -> tuple[list[str], list[Placement]]:
    """Which instances are too many, by name, and which are missing; all of them are on the CPU.

    Those that are wanted under their names stay, then as many others as are wanted at all.
    """
    there = Counter(names)
    missing: list[Placement] = []
    for placement in placements:
        if there[placement.name]:
            there[placement.name] -= 1
        else:
            missing.append(placement)
    others = list(there.elements())
    stay = min(len(others), len(missing))
    return others[stay:], missing[stay:]


def adjusted(config: ModelConfig, wanted: ModelConfig) -> ModelConfig:
    """A copy of a complete configuration with what another has that is changed in place."""
    result = ModelConfig()
    result.CopyFrom(config)
    result.version_policy.CopyFrom(wanted.version_policy)
    result.ClearField("instance_group")
    result.instance_group.extend(wanted.instance_group)
    result.parameters.pop(TRAFFIC, None)
    if TRAFFIC in wanted.parameters:
        result.parameters[TRAFFIC].CopyFrom(wanted.parameters[TRAFFIC])
    return result
