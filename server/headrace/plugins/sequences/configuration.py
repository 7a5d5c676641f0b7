"""The `sequence_batching` of a configuration, and the tensors that a model is given by it.

A model is given more than its clients send: control inputs, and states, which it gives back. Those
are no tensors of `input` and `output`; `SequenceBatching.given` is the configuration with them.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TypeAlias

from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.errors import InvalidOption
from headrace.core.model_spec import TensorInfo
from headrace.core.tensors import Tensor
from headrace.placement.warming import zeros
from headrace.plugins.sequences.controls import CarriedState, ControlInput, Controls, Kind
from headrace.plugins.sequences.scheduler import LocalSequencePlan
from headrace.protocol.pb import model_config_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.reading import file_arrays
from headrace.scheduling.policy import BatchPolicy

_PATH = "sequence_batching"
_FOLDER = "initial_state"  # of the model, with the files of initial states
_Message: TypeAlias = pb.ModelSequenceBatching.Control


class SequenceBatching:
    """The sequences of one model's configuration; a `headrace.engine.sequencing.Sequencing`."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._batching = config.sequence_batching

    @property
    def names(self) -> frozenset[str]:
        """The names of tensors of the model that its clients do not see."""
        names = {control.name for control in self._batching.control_input}
        shown = {tensor.name for tensor in self._config.output}
        for state in self._batching.state:
            names.update({state.input_name}, {state.output_name} - shown)
        return frozenset(names)

    def given(self, inputs: Sequence[TensorInfo]) -> ModelConfig:
        """A copy of the configuration whose `input` and `output` have all tensors of the model.

        `inputs` are those of the loaded model, which may see one number for each row, or a column
        of them; empty if its code does not declare them.
        """
        result = deepcopy(self._config)
        ranks = {info.name: len(info.shape) for info in inputs}
        lead = 1 if self._config.max_batch_size > 0 else 0
        for control in self._batching.control_input:
            told = result.input.add(name=control.name, dims=[1])
            told.data_type = _data_type(control.control[0])
            if ranks.get(control.name) == lead:
                told.reshape.SetInParent()
        seen = {tensor.name for tensor in result.output}
        for state in self._batching.state:
            result.input.add(name=state.input_name, data_type=state.data_type, dims=state.dims)
            if state.output_name not in seen:
                result.output.add(
                    name=state.output_name, data_type=state.data_type, dims=state.dims
                )
        return result

    def plan(self, root: Path) -> LocalSequencePlan:
        """The plan of the scheduler, for the model directory `root`.

        Reads files. Raises `InvalidOption`.
        """
        batching, most = self._batching, self._config.max_batch_size
        oldest, direct = batching.oldest, batching.direct
        is_oldest = batching.WhichOneof("strategy_choice") == "oldest"
        policy = BatchPolicy(most)
        if is_oldest and most:
            delay = oldest.max_queue_delay_microseconds * 1_000
            policy = BatchPolicy(most, delay, frozenset(oldest.preferred_batch_size or [most]))
        elif most and direct.minimum_slot_utilization:
            # Any batch from this number on runs at once, whole.
            enough = max(math.ceil(direct.minimum_slot_utilization * most), 1)
            delay = direct.max_queue_delay_microseconds * 1_000
            policy = BatchPolicy(most, delay, frozenset(range(enough, most + 1)))
        return LocalSequencePlan(
            model=self._config.name,
            seats=oldest.max_candidate_sequences if is_oldest else max(most, 1),
            idle_ns=batching.max_sequence_idle_microseconds * 1_000,
            policy=policy,
            ordered=is_oldest and oldest.preserve_ordering,
            fixed=bool(most) and not is_oldest,
            iterative=batching.iterative_sequence,
            controls=Controls(
                self._config.name,
                [_control(told.name, told.control[0]) for told in batching.control_input],
                batches=most > 0,
            ),
            states=self._states(root),
        )

    def _states(self, root: Path) -> tuple[CarriedState, ...]:
        """The states with their initial values; raises `InvalidOption`."""
        shown = {tensor.name for tensor in self._config.output}
        lead = (1,) if self._config.max_batch_size > 0 else ()
        found = []
        for index, state in enumerate(self._batching.state):
            datatype = BY_CONFIG_NUMBER[state.data_type]
            dims = tuple(1 if size == -1 else size for size in state.dims)
            initial = zeros(state.input_name, datatype, (*lead, *dims), 0)
            for told in state.initial_state[:1]:
                shape = (*lead, *told.dims) if told.dims else initial.array.shape
                initial = zeros(state.input_name, datatype, shape, 0)
                if told.WhichOneof("state_data") == "data_file":
                    try:
                        (array,) = file_arrays(root, _FOLDER, told.data_file, datatype, shape)
                    except ValueError as error:
                        at = f"{_PATH}.state[{index}].initial_state[0].data_file"
                        raise InvalidOption(at, str(error)) from error
                    initial = Tensor(state.input_name, datatype, array)
            name = state.output_name
            found.append(CarriedState(state.input_name, name, initial, name in shown))
        return tuple(found)


def _data_type(control: _Message) -> pb.DataType.ValueType:
    """The datatype of a control input."""
    if control.kind == _Message.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return pb.TYPE_INT32
    return pb.TYPE_FP32 if control.fp32_false_true else pb.TYPE_BOOL


def _control(name: str, told: _Message) -> ControlInput:
    datatype = BY_CONFIG_NUMBER[_data_type(told)]
    values = told.int32_false_true or told.fp32_false_true or told.bool_false_true
    return ControlInput(name, Kind(told.kind), datatype, tuple(values))
