"""What Triton gets to see of a model: a configuration of its own, and links to the model's files.

`remote_config` is a plain function over messages; the rest is for threads that may wait.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import text_format

from headrace.core.errors import LoadFailed
from headrace.execution.remote.options import REMOTE_PARAMETERS
from headrace.execution.triton.options import BACKEND, PLATFORM, TRITON_PARAMETERS
from headrace.wire.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup

_CONFIG = "config.pbtxt"
_NOT_LINKED = frozenset({_CONFIG, "configs"})
# What is read here: of any model, and of one that others run.
_OWN_PARAMETERS = REMOTE_PARAMETERS | TRITON_PARAMETERS | {
    "execution", "batching", "split_requests", "traffic", "fail_over", "fail_over_instances",
    "fail_over_queue_size",
}  # fmt: skip
_ODD = re.compile(r"[^A-Za-z0-9._@+-]")


def remote_name(model: str, version: int, serial: int) -> str:
    """What a version is called there. Each load is a model of its own, so that one that is loaded
    in place of another can be tried while that goes on.
    """
    return f"{_ODD.sub('_', model)}.{version}.{serial}"


def remote_config(
    config: ModelConfig, name: str, version: int, groups: Sequence[ModelInstanceGroup]
) -> ModelConfig:
    """The configuration of one version for a Triton process with these instance groups.

    All that the model's own says, but what is done here: requests are batched here unless
    `batching` is off or `forward` is transparent, and would only wait once more there.
    """
    result = ModelConfig()
    result.CopyFrom(config)
    result.name = name
    parameters = config.parameters
    result.backend = parameters[BACKEND].string_value if BACKEND in parameters else ""
    result.platform = parameters[PLATFORM].string_value if PLATFORM in parameters else ""
    alone = any(
        name in parameters and parameters[name].string_value == value
        for name, value in (("batching", "off"), ("forward", "transparent"))
    )
    if not alone and result.WhichOneof("scheduling_choice") == "dynamic_batching":
        result.ClearField("dynamic_batching")
    for own in _OWN_PARAMETERS & set(result.parameters):
        del result.parameters[own]
    result.ClearField("version_policy")
    result.version_policy.specific.versions.append(version)
    result.ClearField("instance_group")
    result.instance_group.extend(groups)
    return result


def write_model(directory: Path, root: Path, version: int, config: ModelConfig) -> None:
    """Make a model directory for Triton of the model directory `root`; raises `LoadFailed`.

    Nothing is copied: what a large file holds is there once.
    """
    source = Path(os.path.abspath(root))
    if not (source / str(version)).is_dir():
        raise LoadFailed(
            "it has no version directory, in which the files lie that Triton is to load"
        )
    try:
        directory.mkdir(mode=0o700)
        for entry in os.listdir(source):
            other = entry.isdecimal() and entry != str(version)
            if entry not in _NOT_LINKED and not other and not entry.startswith("."):
                (directory / entry).symlink_to(source / entry)
        (directory / _CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise LoadFailed(f"its directory for Triton cannot be written: {error.strerror}") from error


def remove_model(directory: Path) -> None:
    """Remove a directory that `write_model` has made; the links, not what they lead to."""
    shutil.rmtree(directory, ignore_errors=True)
