"""Which fields of a configuration have an effect on this server.

Every field of `ModelConfig` is accepted, so that a repository made for Triton loads. A field that
is set and changes nothing here is reported once, when its model is loaded; the list below is what
does change something.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator

from google.protobuf.message import Message

from headrace.repository.fail_over import PARAMETERS as FAIL_OVER
from headrace.wire.pb.model_config_pb2 import ModelConfig

EFFECTIVE = frozenset(
    {
        "name", "platform", "backend", "max_batch_size", "default_model_filename",
        "version_policy.latest.num_versions", "version_policy.all",
        "version_policy.specific.versions", "input.name", "input.data_type", "input.dims",
        "input.optional", "input.reshape", "input.reshape.shape", "output.name",
        "output.data_type", "output.dims", "output.reshape", "output.reshape.shape",
        "output.label_filename", "instance_group.name", "instance_group.kind",
        "instance_group.count", "instance_group.gpus", "dynamic_batching",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.max_queue_delay_microseconds", "dynamic_batching.preserve_ordering",
        "dynamic_batching.priority_levels", "dynamic_batching.default_priority_level",
        "dynamic_batching.default_queue_policy.timeout_action",
        "dynamic_batching.default_queue_policy.default_timeout_microseconds",
        "dynamic_batching.default_queue_policy.allow_timeout_override",
        "dynamic_batching.default_queue_policy.max_queue_size",
        "dynamic_batching.priority_queue_policy", "optimization.graph.level",
        "optimization.input_pinned_memory.enable", "optimization.output_pinned_memory.enable",
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "optimization.execution_accelerators.cpu_execution_accelerator", "metric_tags",
        "model_transaction_policy.decoupled", "sequence_batching", "model_warmup.name",
        "model_warmup.batch_size", "model_warmup.inputs", "model_warmup.count",
        "model_metrics.metric_control.metric_identifier.family",
        "model_metrics.metric_control.histogram_options.buckets",
    }
)  # fmt: skip

# Own settings in the `parameters` map; a backend reads further ones.
OWN_PARAMETERS = frozenset({"execution", "batching", "split_requests", "traffic"}) | FAIL_OVER
_ALIKE = 0.85  # from which on a name is taken for another one that was spelt wrongly


def without_effect(config: ModelConfig, reads_parameter: Callable[[str], bool]) -> list[str]:
    """The paths of fields that are set in `config` and change nothing, each once, in order."""
    unread = [
        f"parameters['{name}']"
        for name in sorted(config.parameters)
        if name not in OWN_PARAMETERS and not reads_parameter(name)
    ]
    return [*dict.fromkeys(_ineffective(config, "")), *unread]


def misspelt(config: ModelConfig, known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names of parameters that are nearly, but not quite, one of the `known`, with that."""
    names = {name.lower(): name for name in known}
    for name in sorted(config.parameters):
        near = difflib.get_close_matches(name.lower(), names, 1, _ALIKE)
        if near and name != names[near[0]]:
            yield name, names[near[0]]


def _ineffective(message: Message, prefix: str) -> Iterator[str]:
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in EFFECTIVE and not any(known.startswith(path + ".") for known in EFFECTIVE):
            continue
        if path == "parameters":
            continue  # reported by key
        nested = [value] if isinstance(value, Message) else value
        is_map = (
            descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry
        )
        if descriptor.message_type is None or is_map:
            if path not in EFFECTIVE:
                yield path
            continue
        known = any(name.startswith(path + ".") for name in EFFECTIVE)
        for item in nested:
            if not known:
                yield path
            elif isinstance(item, Message):
                yield from _ineffective(item, path + ".")
