"""How the servers of a model take requests: in sequences, and with any number of answers.

What they say of that completes the model's configuration here, and what that says is held against
it.
"""

from collections.abc import Iterator

from google.protobuf.message import Message

from headrace.execution.remote.options import MOST_IN_FLIGHT
from headrace.execution.triton.options import MANAGED_PARAMETERS
from headrace.scheduling.sequences import SequenceRules
from headrace.wire.pb.model_config_pb2 import ModelConfig

_SEQUENCES = "sequence_batching"
_IDLE = "max_sequence_idle_microseconds"
_FEW_CALLS = 64  # that may be under way for sequences, if the servers have room for fewer


def complete(config: ModelConfig, remote: ModelConfig) -> None:
    """Write into `config` what `remote` says and it leaves open."""
    if remote.model_transaction_policy.decoupled:
        config.model_transaction_policy.decoupled = True
    if _in_sequences(remote) and config.WhichOneof("scheduling_choice") in (None, _SEQUENCES):
        config.sequence_batching.SetInParent()
        _fill(config.sequence_batching, remote.sequence_batching)


def problems(
    config: ModelConfig, remote: ModelConfig | None, calls: int
) -> Iterator[tuple[str, str]]:
    """Where the configuration is not what the servers say, or cannot be followed.

    So many `calls` may be under way, 0 if that is left open.
    """
    decoupled = config.model_transaction_policy.decoupled
    if remote is not None:
        if decoupled is not remote.model_transaction_policy.decoupled:
            kind = "not decoupled" if decoupled else "decoupled"
            yield "model_transaction_policy.decoupled", f"the remote model is {kind}"
        yield from _sequence_problems(config, remote)
    if _in_sequences(config) and calls == 1:
        text = (
            "must be at least 2 for a model with sequences: the first request of one may have to"
            " wait until another one has gone on"
        )
        yield "parameters['max_in_flight']", text
    if decoupled and config.dynamic_batching.preserve_ordering:
        text = "cannot be combined with a decoupled model, which answers when it likes"
        yield "dynamic_batching.preserve_ordering", text
    managed = MANAGED_PARAMETERS & set(config.parameters)  # its Triton has them by itself
    if (decoupled or _in_sequences(config)) and config.model_warmup and not managed:
        kind = "decoupled" if decoupled else "with sequences"
        yield "model_warmup", f"cannot be sent to a model on other servers that is {kind}"


def sequence_rules(config: ModelConfig) -> SequenceRules | None:
    """What holds for sequences, if there are any."""
    if not _in_sequences(config):
        return None
    sequences = config.sequence_batching
    return SequenceRules(
        sequences.max_sequence_idle_microseconds * 1000, not sequences.iterative_sequence
    )


def calls_for_sequences(config: ModelConfig, servers: int) -> int:
    """How many calls may be under way for a model with sequences.

    Twice as many as the servers can have sequences under way, since first requests, which may have
    to wait for room, get one half.
    """
    sequences = config.sequence_batching
    oldest = sequences.WhichOneof("strategy_choice") == "oldest"
    room = max(sequences.oldest.max_candidate_sequences if oldest else config.max_batch_size, 1)
    instances = sum(max(g.count, 1) * max(len(g.gpus), 1) for g in config.instance_group)
    return min(max(2 * room * max(instances, 1) * servers, _FEW_CALLS), MOST_IN_FLIGHT)


def _in_sequences(config: ModelConfig) -> bool:
    return config.WhichOneof("scheduling_choice") == _SEQUENCES


def _sequence_problems(config: ModelConfig, remote: ModelConfig) -> Iterator[tuple[str, str]]:
    choice = config.WhichOneof("scheduling_choice")
    if _in_sequences(remote) and choice != _SEQUENCES:
        yield (
            choice or _SEQUENCES,
            "the remote model takes its requests in sequences (sequence_batching), which are not"
            " batched here",
        )
    elif choice == _SEQUENCES and not _in_sequences(remote):
        yield _SEQUENCES, "the remote model has no sequences"
    elif choice == _SEQUENCES:
        for field in config.sequence_batching.DESCRIPTOR.fields:
            ours, theirs = (_value(c.sequence_batching, field.name) for c in (config, remote))
            if field.name != _IDLE and ours != theirs and ours is not None:
                yield f"{_SEQUENCES}.{field.name}", "the remote model's configuration differs"


def _value(message: Message, name: str) -> object:
    """What a field is, None for a part that is not there."""
    singular = message.DESCRIPTOR.fields_by_name[name].has_presence
    return getattr(message, name) if not singular or message.HasField(name) else None


def _fill(target: Message, source: Message) -> None:
    """Write into `target` what `source` has set and it has not."""
    for field, value in source.ListFields():
        if isinstance(value, Message):
            oneof = field.containing_oneof
            if oneof is None or target.WhichOneof(oneof.name) in (None, field.name):
                getattr(target, field.name).SetInParent()
                _fill(getattr(target, field.name), value)
        elif not getattr(target, field.name):
            if isinstance(value, int | float | str):
                setattr(target, field.name, value)
            else:
                getattr(target, field.name).MergeFrom(value)
