"""A configuration from a request, in place of the one in the repository.

It is written by whoever may load models, and must not reach further than that: it may say how a
model is served, but not which code runs, which files are read or written, or what the model is told
to trust. So some fields it may give any value; the others stay as the repository has them.
"""

from collections.abc import Iterator, Set

from headrace.repository.config import ConfigFile, Problem, refuse
from headrace.wire.pb.model_config_pb2 import ModelConfig

# How a model is served.
FREE_FIELDS = (
    "name", "max_batch_size", "input", "output", "instance_group", "version_policy",
    "dynamic_batching", "sequence_batching", "model_transaction_policy", "response_cache",
)  # fmt: skip
FREE_PARAMETERS = frozenset(
    {
        "batching", "split_requests", "max_concurrency", "intra_op_thread_count",
        "inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern",
        "memory.enable_memory_arena_shrinkage", "cudnn_conv_algo_search", "gpu_mem_limit",
        "arena_extend_strategy", "do_copy_in_default_stream",
    }
)  # fmt: skip
_MOST_INSTANCES = 64
_ALLOWED = "; --load-overrides=code lets a request decide that"


def overridden(base: ConfigFile, whole: ModelConfig, override: ConfigFile) -> ConfigFile:
    """The repository's configuration with what `override` may change of it.

    `base` is as it is written, `whole` completed, as clients see it: what they send back unchanged
    is no change. Raises `InvalidConfig` naming all that may not be changed.
    """
    change = override.config
    labels = {output.label_filename for output in whole.output}
    refuse(override, _problems(whole, change, labels))
    return _merged(base, override)


def of_own_files(override: ConfigFile) -> ConfigFile:
    """A configuration for files that came along with it; raises `InvalidConfig` as `overridden`."""
    change = override.config
    whole = ModelConfig(
        backend=change.backend,
        platform=change.platform,
        default_model_filename=change.default_model_filename,
    )
    labels = {output.label_filename for output in change.output}
    refuse(override, _problems(whole, change, labels))
    return override


def _problems(whole: ModelConfig, change: ModelConfig, labels: Set[str]) -> Iterator[Problem]:
    for field, _ in change.ListFields():
        name = field.name
        if name == "parameters":
            yield from _parameter_problems(whole, change)
        elif name == "optimization":
            if _changes_accelerators(whole, change):
                yield _kept("optimization.execution_accelerators")
        elif name not in FREE_FIELDS and _alone(change, name) != _alone(whole, name):
            yield _kept(name)
    for index, output in enumerate(change.output):
        if output.label_filename and output.label_filename not in labels:
            yield _kept(f"output[{index}].label_filename")
    count = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in change.instance_group)
    if count > _MOST_INSTANCES:
        yield Problem("instance_group", f"at most {_MOST_INSTANCES} instances, got {count}")


def _parameter_problems(whole: ModelConfig, change: ModelConfig) -> Iterator[Problem]:
    for name in sorted(change.parameters):
        if name in FREE_PARAMETERS:
            continue
        if change.parameters[name] != whole.parameters.get(name):
            yield _kept(f"parameters['{name}']")


def _changes_accelerators(whole: ModelConfig, change: ModelConfig) -> bool:
    given = change.optimization
    if not given.HasField("execution_accelerators"):
        return False
    return given.execution_accelerators != whole.optimization.execution_accelerators


def _alone(config: ModelConfig, name: str) -> bytes:
    """One field of a configuration."""
    alone = ModelConfig()
    alone.CopyFrom(config)
    for field, _ in config.ListFields():
        if field.name != name:
            alone.ClearField(field.name)  # type: ignore[arg-type]  # a name of a field
    return alone.SerializeToString(deterministic=True)


def _kept(path: str) -> Problem:
    text = f"a request cannot change this, it stays as the repository has it{_ALLOWED}"
    return Problem(path, text)


def _merged(base: ConfigFile, override: ConfigFile) -> ConfigFile:
    change, merged = override.config, ModelConfig()
    merged.CopyFrom(base.config)
    for name in FREE_FIELDS:
        merged.ClearField(name)  # type: ignore[arg-type]  # a name of a field
    for name in [name for name in merged.parameters if name in FREE_PARAMETERS]:
        del merged.parameters[name]
    free = ModelConfig()
    free.CopyFrom(change)
    for field, _ in change.ListFields():
        if field.name not in FREE_FIELDS:
            free.ClearField(field.name)  # type: ignore[arg-type]
    merged.MergeFrom(free)
    for name in FREE_PARAMETERS & set(change.parameters):
        merged.parameters[name].CopyFrom(change.parameters[name])
    if change.HasField("optimization"):
        kept_ones = base.config.optimization
        merged.optimization.CopyFrom(change.optimization)
        merged.optimization.ClearField("execution_accelerators")
        if kept_ones.HasField("execution_accelerators"):
            merged.optimization.execution_accelerators.CopyFrom(kept_ones.execution_accelerators)
    kept = {p: line for p, line in base.lines.items() if not p.startswith(FREE_FIELDS)}
    return ConfigFile(override.name, merged, {**dict.fromkeys(kept, 0), **override.lines})
