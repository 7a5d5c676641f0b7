"""What a version is loaded from, as far as it matters to that version.

Two versions of equal origin are the same, so that the one that serves need not be loaded again.
Which versions are served, how many instances each has and how requests are divided between them can
be changed while a version serves; all else of a configuration is part of what it was loaded from,
since a model may read any of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile
from headrace.repository.fingerprint import Fingerprint
from headrace.repository.manifest import NAME as MANIFEST
from headrace.repository.stamps import Stamp
from headrace.repository.traffic import PARAMETER as TRAFFIC
from headrace.wire.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup

# Fields that a file may name with their default, which is then another than if it did not.
_SET_FIELDS = ("max_batch_size", "input")


@dataclass(frozen=True, slots=True)
class Content:
    """What cannot change while a version serves.

    `files` are stamps or, where a manifest gives them, digests. `config` is the configuration
    without what can, as bytes; `set_fields` are those of the fields that its file names which mean
    something else if they are not named than if they are set to their default.
    """

    directory: Path
    files: Mapping[str, Stamp | str | None]
    config: bytes
    set_fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class Origin:
    """`groups` are the instance groups, as bytes.

    `resizable` is whether instances can come and go while it serves: those on the CPU can.
    """

    content: Content
    groups: bytes
    resizable: bool


def origins(
    state: Fingerprint,
    file: ConfigFile,
    config: ModelConfig,
    versions: tuple[int, ...],
    digests: Mapping[str, str],
) -> dict[int, Origin]:
    """The origin of each of the versions; `config` is completed as far as it is without loading.

    `digests` tell what files hold, where that is known: then it does not matter which file it is.
    """
    whole = normalise(config)
    groups = ModelConfig(instance_group=whole.instance_group).SerializeToString(deterministic=True)
    on_cpu = all(g.kind != ModelInstanceGroup.KIND_GPU for g in whole.instance_group)
    text = content_of(whole)
    fields = frozenset(path for path in _SET_FIELDS if file.sets(path))
    found = {}
    for number in versions:
        stamps = {**state.shared, **state.versions[number]}
        files = {n: digests.get(n, stamp) for n, stamp in stamps.items() if not _is_manifest(n)}
        found[number] = Origin(Content(state.source.path, files, text, fields), groups, on_cpu)
    return found


def content_of(config: ModelConfig) -> bytes:
    """A normalised configuration without what can change while a version serves."""
    fixed = ModelConfig()
    fixed.CopyFrom(config)
    fixed.ClearField("version_policy")
    fixed.ClearField("instance_group")
    fixed.parameters.pop(TRAFFIC, None)
    return fixed.SerializeToString(deterministic=True)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == MANIFEST
