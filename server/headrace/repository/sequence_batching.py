"""Validation of `sequence_batching`, for models of this server.

A model on upstreams has its sequences there, and is checked against them.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from headrace.core.datatypes import BY_CONFIG_NUMBER, Datatype
from headrace.core.tensors import brackets
from headrace.protocol.pb import model_config_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import Problem

# The datatypes of a sequence's id, with their names in a configuration.
CORRELATION: Mapping[Datatype, str] = {
    Datatype.UINT64: "UINT64", Datatype.INT64: "INT64", Datatype.UINT32: "UINT32",
    Datatype.INT32: "INT32", Datatype.BYTES: "STRING",
}  # fmt: skip
_PATH = "sequence_batching"
_Control: TypeAlias = pb.ModelSequenceBatching.Control


def problems(config: ModelConfig) -> Iterator[Problem]:
    """The problems of the field."""
    yield from _strategy_problems(config)
    yield from _control_problems(config)
    yield from _state_problems(config)


def _strategy_problems(config: ModelConfig) -> Iterator[Problem]:
    batching, most = config.sequence_batching, config.max_batch_size
    oldest, direct = batching.oldest, batching.direct
    if batching.WhichOneof("strategy_choice") == "oldest":
        at = f"{_PATH}.oldest"
        if oldest.max_candidate_sequences < 1:
            text = f"must be at least 1, got {oldest.max_candidate_sequences}"
            yield Problem(f"{at}.max_candidate_sequences", text)
        for index, size in enumerate(oldest.preferred_batch_size):
            if not 0 < size <= max(most, 1):
                yield Problem(
                    f"{at}.preferred_batch_size[{index}]",
                    f"must be between 1 and max_batch_size ({most}), got {size}",
                )
    elif not 0 <= direct.minimum_slot_utilization <= 1:
        text = f"must be between 0 and 1, got {direct.minimum_slot_utilization:g}"
        yield Problem(f"{_PATH}.direct.minimum_slot_utilization", text)


def _control_problems(config: ModelConfig) -> Iterator[Problem]:
    names = {tensor.name for tensor in config.input}
    kinds: set[int] = set()
    for index, told in enumerate(config.sequence_batching.control_input):
        at = f"{_PATH}.control_input[{index}]"
        if not told.name:
            yield Problem(f"{at}.name", "every control input must have a name")
        elif told.name in names:
            yield Problem(f"{at}.name", f"'{told.name}' is the name of another input")
        names.add(told.name)
        if len(told.control) != 1:
            text = f"must be one kind of control, got {len(told.control)}"
            yield Problem(f"{at}.control", text)
            continue
        control = told.control[0]
        kind = _Control.Kind.Name(control.kind)
        if control.kind in kinds:
            yield Problem(f"{at}.control[0].kind", f"{kind} is given twice")
        kinds.add(control.kind)
        lists = [
            field for field in ("int32_false_true", "fp32_false_true", "bool_false_true")
            if getattr(control, field)
        ]  # fmt: skip
        if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
            if lists:
                text = f"{kind} has a data_type, and no values for false and true"
                yield Problem(f"{at}.control[0].{lists[0]}", text)
            if BY_CONFIG_NUMBER.get(control.data_type) not in CORRELATION:
                expected = ", ".join(f"TYPE_{name}" for name in CORRELATION.values())
                yield Problem(f"{at}.control[0].data_type", f"must be one of {expected}")
        elif len(lists) != 1:
            text = (
                f"must have either int32_false_true, fp32_false_true or bool_false_true for {kind}"
            )
            yield Problem(f"{at}.control[0]", text)
        elif (count := len(getattr(control, lists[0]))) != 2:
            text = f"must have the values of false and true, got {count} values"
            yield Problem(f"{at}.control[0].{lists[0]}", text)


def _state_problems(config: ModelConfig) -> Iterator[Problem]:
    outputs = {tensor.name: tensor for tensor in config.output}
    inputs = {tensor.name for tensor in config.input}
    inputs.update(control.name for control in config.sequence_batching.control_input)
    kept: set[str] = set()
    for index, state in enumerate(config.sequence_batching.state):
        at = f"{_PATH}.state[{index}]"
        for field, name in (
            ("input_name", state.input_name),
            ("output_name", state.output_name),
        ):
            if not name:
                yield Problem(f"{at}.{field}", "every state must have it")
        if state.input_name in inputs:
            yield Problem(f"{at}.input_name", f"'{state.input_name}' is another input")
        if state.output_name in kept:
            yield Problem(f"{at}.output_name", f"'{state.output_name}' is given twice")
        inputs.add(state.input_name)
        kept.add(state.output_name)
        if BY_CONFIG_NUMBER.get(state.data_type) is None:
            yield Problem(f"{at}.data_type", f"is missing for '{state.input_name}'")
        dims = list(state.dims)
        if any(size < 1 and size != -1 for size in dims):
            text = f"every dimension must be positive, or -1 for variable, got {brackets(dims)}"
            yield Problem(f"{at}.dims", text)
        shown = outputs.get(state.output_name)
        if shown is not None and (shown.data_type, list(shown.dims)) != (state.data_type, dims):
            text = f"differs from output '{state.output_name}' in datatype or dims"
            yield Problem(f"{at}.output_name", text)
        yield from _initial_problems(f"{at}.initial_state", state)


def _initial_problems(at: str, state: pb.ModelSequenceBatching.State) -> Iterator[Problem]:
    if len(state.initial_state) > 1:
        yield Problem(at, f"must be one, got {len(state.initial_state)}")
    for told in state.initial_state[:1]:
        dims = list(told.dims)
        if told.data_type and told.data_type != state.data_type:
            yield Problem(f"{at}[0].data_type", "must be that of the state")
        fits = len(dims) == len(state.dims) and all(
            own in (-1, size) and size > 0 for own, size in zip(state.dims, dims, strict=True)
        )
        if dims and not fits:
            text = f"{brackets(dims)} do not fit: those of the state are {brackets(state.dims)}"
            yield Problem(f"{at}[0].dims", text)
        if told.WhichOneof("state_data") is None:
            yield Problem(f"{at}[0]", "one of zero_data and data_file must be set")
