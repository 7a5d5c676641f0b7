"""The `sequence_batching` of configurations, and the tensors that a model is given by it."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidOption, InvalidRequest
from headrace.core.model_spec import TensorInfo
from headrace.core.tensors import Tensor
from headrace.plugins.sequences import SequenceBatching
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.reading import signature
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy

BATCHED = "max_batch_size: 4"
SINGLE = "max_batch_size: 0"
START = "kind: CONTROL_SEQUENCE_START"
STATE = 'input_name: "S" output_name: "T" data_type: TYPE_FP32'


def batching(sequences: str, others: str = BATCHED) -> SequenceBatching:
    text = f"""
        name: "m" {others} sequence_batching {{ max_sequence_idle_microseconds: 5 {sequences} }}
        input {{ name: "X" data_type: TYPE_INT32 dims: [ 2 ] }}
        output {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }}
    """
    return SequenceBatching(text_format.Parse(text, ModelConfig()))


def control(kind: str, name: str = "C") -> str:
    return f'control_input {{ name: "{name}" control {{ {kind} }} }}'


@pytest.mark.parametrize(("sequences", "others", "seats", "fixed", "policy"), [
    ("", BATCHED, 4, True, BatchPolicy(4)),
    ("direct { }", SINGLE, 1, False, BatchPolicy(0)),
    ("direct { max_queue_delay_microseconds: 7 }", BATCHED, 4, True, BatchPolicy(4)),
    ("direct { max_queue_delay_microseconds: 7 minimum_slot_utilization: 0.6 }", BATCHED, 4, True,
     BatchPolicy(4, 7_000, frozenset({3, 4}))),
    ("oldest { max_candidate_sequences: 9 }", BATCHED, 9, False,
     BatchPolicy(4, 0, frozenset({4}))),
    ("oldest { max_candidate_sequences: 9 max_queue_delay_microseconds: 7"
     " preferred_batch_size: [ 2, 3 ] }", BATCHED, 9, False,
     BatchPolicy(4, 7_000, frozenset({2, 3}))),
    ("oldest { max_candidate_sequences: 9 }", SINGLE, 9, False, BatchPolicy(0)),
])  # fmt: skip
def test_strategies(
    sequences: str, others: str, seats: int, fixed: bool, policy: BatchPolicy
) -> None:
    plan = batching(sequences, others).plan(Path())
    assert (plan.seats, plan.fixed, plan.idle_ns) == (seats, fixed, 5_000)
    scheduling = plan.scheduling(SchedulingPolicy(BatchPolicy(1)))
    assert (scheduling.batch, scheduling.queue) == (policy, QueuePolicy())
    assert not scheduling.preserve_ordering


def test_ordering() -> None:
    plan = batching("oldest { max_candidate_sequences: 9 preserve_ordering: true }").plan(Path())
    assert plan.scheduling(SchedulingPolicy(BatchPolicy(1))).preserve_ordering


CONTROLS = "".join(
    (
        control(f"{START} int32_false_true: [ 0, 1 ]", "start"),
        control("kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 0.5 ]", "end"),
        control("kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ]", "ready"),
    )
)


@pytest.mark.parametrize(("others", "shape"), [(BATCHED, (1, 1)), (SINGLE, (1,))])
def test_flags(others: str, shape: tuple[int, ...]) -> None:
    controls = batching(CONTROLS, others).plan(Path()).controls
    for start in (False, True):
        for end in (False, True):
            flags = controls.flags(start, end)
            assert {tensor.array.shape for tensor in flags.values()} == {shape}
            assert values(flags) == {"start": start, "end": 0.5 if end else -1, "ready": True}
    assert values(controls.idle) == {"start": 0, "end": -1, "ready": False}
    assert [flags[name].datatype for name in ("start", "end", "ready")] == [
        Datatype.INT32, Datatype.FP32, Datatype.BOOL,
    ]  # fmt: skip


def values(tensors: dict[str, Tensor]) -> dict[str, object]:
    return {name: np.asarray(tensor.array).item() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("datatype", "id", "given"), [
    ("UINT64", 2**64 - 1, 2**64 - 1), ("INT64", 5, 5), ("INT64", 2**64 - 1, -1),
    ("UINT32", 2**32 + 7, 7), ("INT32", 2**31, -(2**31)), ("STRING", "ä", "ä".encode()),
    ("UINT64", -2, 2**64 - 2),
])  # fmt: skip
def test_ids(datatype: str, id: int | str, given: object) -> None:
    told = control(f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype}", "id")
    controls = batching(told).plan(Path()).controls
    controls.check(id)
    assert values(controls.of_id(id)) == {"id": given}
    assert values(controls.idle) == {"id": b"" if datatype == "STRING" else 0}


def test_ids_of_the_other_kind() -> None:
    for datatype, id, found in (("STRING", 1, "TYPE_UINT64"), ("INT32", "a", "TYPE_STRING")):
        told = control(f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype}", "id")
        with pytest.raises(InvalidRequest) as raised:
            batching(told).plan(Path()).controls.check(id)
        assert str(raised.value) == (
            f"sequence batching control 'id' data-type is '{found}', but model 'm' expects"
            f" 'TYPE_{datatype}'"
        )


def test_ids_without_a_control() -> None:
    controls = batching("").plan(Path()).controls
    for id in (1, "a", "x" * 128):
        controls.check(id)
        assert controls.of_id(id) == {}
    with pytest.raises(InvalidRequest, match="cannot be longer than 128 characters in length"):
        controls.check("x" * 129)


def test_the_signature_of_the_model() -> None:
    """Control inputs may be a column or a number for each row; states are both in and out."""
    state = 'state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 3 ] }'
    shown = 'state { input_name: "U" output_name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }'
    sequences = batching(CONTROLS + state + shown)
    assert sequences.names == {"start", "end", "ready", "S", "T", "U"}
    infos = [TensorInfo("start", Datatype.INT32, (-1,)), TensorInfo("end", Datatype.FP32, (-1, 1))]
    given = signature(sequences.given(infos))
    assert {spec.name: (spec.dims, spec.reshape) for spec in given.inputs} == {
        "X": ((2,), None), "start": ((1,), ()), "end": ((1,), None), "ready": ((1,), None),
        "S": ((3,), None), "U": ((2,), None),
    }  # fmt: skip
    assert given.names == ["Y", "T"]
    assert [spec.dims for spec in given.outputs] == [(2,), (3,)]


def test_initial_states(tmp_path: Path) -> None:
    def initial(told: str, dims: str = "-1, 2", others: str = BATCHED) -> np.ndarray:
        state = f"state {{ {STATE} dims: [ {dims} ] {told} }}"
        (kept,) = batching(state, others).plan(tmp_path).states
        assert (kept.input, kept.output, kept.shown) == ("S", "T", False)
        return np.asarray(kept.initial.array)

    assert initial("").tolist() == [[[0, 0]]]
    assert initial("", others=SINGLE).tolist() == [[0, 0]]
    told = "initial_state { zero_data: true dims: [ 3, 2 ] }"
    assert initial(told).shape == (1, 3, 2)
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "begin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    told = 'initial_state { data_file: "begin" dims: [ 2, 2 ] }'
    assert initial(told).tolist() == [[[0, 1], [2, 3]]]
    for file, text in (("none", "cannot be read"), ("../x", "outside of the model's directory")):
        with pytest.raises(InvalidOption, match=text):
            initial(told.replace("begin", file))
    with pytest.raises(InvalidOption) as raised:
        initial(told.replace("2, 2", "3, 2"))
    assert str(raised.value) == (
        "sequence_batching.state[0].initial_state[0].data_file: 'begin': FP32 of shape [1,3,2]"
        " takes 24 bytes, the file has 16"
    )
