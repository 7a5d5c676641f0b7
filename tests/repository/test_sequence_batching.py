"""Validation of `sequence_batching`: each problem names the field and what was expected."""

import pytest
from google.protobuf import text_format

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.sequence_batching import problems

START = "kind: CONTROL_SEQUENCE_START"
STATE = 'input_name: "S" output_name: "T" data_type: TYPE_FP32'


def parsed(sequences: str) -> ModelConfig:
    text = f"""
        name: "m" max_batch_size: 4 sequence_batching {{ {sequences} }}
        input {{ name: "X" data_type: TYPE_INT32 dims: [ 2 ] }}
        output {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }}
    """
    return text_format.Parse(text, ModelConfig())


def control(kind: str, name: str = "C") -> str:
    return f'control_input {{ name: "{name}" control {{ {kind} }} }}'


@pytest.mark.parametrize(("sequences", "told"), [
    ("", ""),
    ("direct { minimum_slot_utilization: 0.5 }", ""),
    ("direct { minimum_slot_utilization: 1.5 }",
     "direct.minimum_slot_utilization: must be between 0 and 1, got 1.5"),
    ("oldest { }", "oldest.max_candidate_sequences: must be at least 1, got 0"),
    ("oldest { max_candidate_sequences: 9 preferred_batch_size: [ 2, 5 ] }",
     "oldest.preferred_batch_size[1]: must be between 1 and max_batch_size (4), got 5"),
    (control(f"{START} int32_false_true: [ 0, 1 ]"), ""),
    (control(START), "control_input[0].control[0]: must have either int32_false_true,"
     " fp32_false_true or bool_false_true for CONTROL_SEQUENCE_START"),
    (control(f"{START} int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"),
     "control_input[0].control[0]: must have either int32_false_true, fp32_false_true or"
     " bool_false_true for CONTROL_SEQUENCE_START"),
    (control(f"{START} fp32_false_true: [ 0 ]"), "control_input[0].control[0].fp32_false_true: must"
     " have the values of false and true, got 1 values"),
    (2 * control(f"{START} bool_false_true: [ false, true ]"),
     "control_input[1].name: 'C' is the name of another input control_input[1].control[0].kind:"
     " CONTROL_SEQUENCE_START is given twice"),
    (control(f"{START} bool_false_true: [ false, true ]")
     + control(f"{START} bool_false_true: [ false, true ]", "D"),
     "control_input[1].control[0].kind: CONTROL_SEQUENCE_START is given twice"),
    (control(f"{START} int32_false_true: [ 0, 1 ]", "X"),
     "control_input[0].name: 'X' is the name of another input"),
    (control(f"{START} int32_false_true: [ 0, 1 ]", ""),
     "control_input[0].name: every control input must have a name"),
    ('control_input { name: "C" }', "control_input[0].control: must be one kind of control, got 0"),
    (control("kind: CONTROL_SEQUENCE_CORRID"), "control_input[0].control[0].data_type: must be one"
     " of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING"),
    (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 int32_false_true: [ 0, 1 ]"),
     "control_input[0].control[0].int32_false_true: CONTROL_SEQUENCE_CORRID has a data_type, and no"
     " values for false and true"),
    (f"state {{ {STATE} dims: [ -1 ] }}", ""),
    (f"state {{ {STATE} use_same_buffer_for_input_output: true use_growable_memory: true }}", ""),
    (f"state {{ {STATE} dims: [ 0 ] }}", "state[0].dims: every dimension must be positive, or -1"
     " for variable, got [0]"),
    ('state { output_name: "T" data_type: TYPE_FP32 }',
     "state[0].input_name: every state must have it"),
    ('state { input_name: "S" output_name: "T" }', "state[0].data_type: is missing for 'S'"),
    ('state { input_name: "X" output_name: "T" data_type: TYPE_FP32 }',
     "state[0].input_name: 'X' is another input"),
    (f"state {{ {STATE} }} state {{ {STATE} }}",
     "state[1].input_name: 'S' is another input state[1].output_name: 'T' is given twice"),
    ('state { input_name: "S" output_name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }', ""),
    ('state { input_name: "S" output_name: "Y" data_type: TYPE_FP32 dims: [ 3 ] }',
     "state[0].output_name: differs from output 'Y' in datatype or dims"),
    (f"state {{ {STATE} dims: [ -1 ] initial_state {{ zero_data: true dims: [ 7 ] }} }}", ""),
    (f"state {{ {STATE} dims: [ 2 ] initial_state {{ zero_data: true dims: [ 7 ] }} }}",
     "state[0].initial_state[0].dims: [7] do not fit: those of the state are [2]"),
    (f"state {{ {STATE} initial_state {{ data_type: TYPE_INT8 zero_data: true }} }}",
     "state[0].initial_state[0].data_type: must be that of the state"),
    (f"state {{ {STATE} initial_state {{ }} }}",
     "state[0].initial_state[0]: one of zero_data and data_file must be set"),
    (f"state {{ {STATE} initial_state {{ zero_data: true }} initial_state {{ zero_data: true }} }}",
     "state[0].initial_state: must be one, got 2"),
])  # fmt: skip
def test_problems(sequences: str, told: str) -> None:
    found = [f"{problem.path}: {problem.text}" for problem in problems(parsed(sequences))]
    assert " ".join(found).replace("sequence_batching.", "") == told
