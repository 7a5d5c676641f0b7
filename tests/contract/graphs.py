"""ONNX models of the contract suite alone; shared ones are in `tests.models.onnx_graphs`."""

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import ELEMENT_TYPES

Shape = Sequence[int | str]


def add_constant(value: float) -> bytes:
    """OUTPUT0 = INPUT0 + value, one FP32 per row."""
    return _model(
        [helper.make_node("Add", ["INPUT0", "value"], ["OUTPUT0"])],
        [_tensor("INPUT0", "FP32", ["rows", 1])],
        [_tensor("OUTPUT0", "FP32", ["rows", 1])],
        _constant("value", [value], np.float32),
    )


def add_with_ballast(value: float, nbytes: int) -> bytes:
    """`add_constant` in a file that is larger by unused weights."""
    return _model(
        [helper.make_node("Add", ["INPUT0", "value"], ["OUTPUT0"])],
        [_tensor("INPUT0", "FP32", ["rows", 1])],
        [_tensor("OUTPUT0", "FP32", ["rows", 1])],
        _constant("value", [value], np.float32),
        _constant("ballast", np.zeros(nbytes // 4), np.float32),
    )


def row_sum() -> bytes:
    """OUTPUT0 = the sum of each row of INPUT0, of any length."""
    return _model(
        [helper.make_node("ReduceSum", ["INPUT0", "axes"], ["OUTPUT0"], keepdims=1)],
        [_tensor("INPUT0", "FP32", ["rows", "length"])],
        [_tensor("OUTPUT0", "FP32", ["rows", 1])],
        _constant("axes", [1], np.int64),
    )


def optional_bias() -> bytes:
    """OUTPUT0 = INPUT0 + BIAS; BIAS may be left out and is 100 then."""
    return _model(
        [helper.make_node("Add", ["INPUT0", "BIAS"], ["OUTPUT0"])],
        [_tensor("INPUT0", "FP32", ["length"]), _tensor("BIAS", "FP32", [1])],
        [_tensor("OUTPUT0", "FP32", ["length"])],
        _constant("BIAS", [100], np.float32),
    )


def convert() -> bytes:
    """INPUT0 (INT32) as FP32, INT64 and BYTES, in the outputs of these names."""
    types = ("FP32", "INT64", "BYTES")
    return _model(
        [
            helper.make_node("Cast", ["INPUT0"], [name], to=ELEMENT_TYPES[Datatype(name)])
            for name in types
        ],
        [_tensor("INPUT0", "INT32", ["rows", 4])],
        [_tensor(name, name, ["rows", 4]) for name in types],
    )


def first_row() -> bytes:
    """OUTPUT0 = the first row of INPUT0: invalid for a batched model."""
    return _model(
        [helper.make_node("Slice", ["INPUT0", "zero", "one"], ["OUTPUT0"])],
        [_tensor("INPUT0", "FP32", ["rows", 1])],
        [_tensor("OUTPUT0", "FP32", ["some", 1])],
        _constant("zero", [0], np.int64),
        _constant("one", [1], np.int64),
    )


def spin(rows: Shape = ("rows", 1), rounds: int | None = None) -> bytes:
    """OUTPUT0 = ROUNDS, after counting to the largest of ROUNDS (or to `rounds`) one by one."""
    nodes = [
        helper.make_node("ReduceMax", ["ROUNDS"], ["largest"], keepdims=0),
        helper.make_node(
            "Loop", ["largest" if rounds is None else "fixed", "", "zero"], ["counted"],
            body=_counting(),
        ),
        helper.make_node("Mul", ["counted", "zero"], ["nothing"]),
        helper.make_node("Add", ["ROUNDS", "nothing"], ["OUTPUT0"]),
    ]  # fmt: skip
    return _model(
        nodes,
        [_tensor("ROUNDS", "INT64", rows)],
        [_tensor("OUTPUT0", "INT64", rows)],
        _constant("zero", 0, np.int64),
        _constant("fixed", rounds or 0, np.int64),
    )


def _counting() -> GraphProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["count", "one"], ["count_on"]),
        ],
        "counting",
        [_tensor("round", "INT64", []), _tensor("go", "BOOL", []), _tensor("count", "INT64", [])],
        [_tensor("go_on", "BOOL", []), _tensor("count_on", "INT64", [])],
    )
    body.initializer.append(_constant("one", 1, np.int64))
    return body


def _tensor(name: str, datatype: str, shape: Shape) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[Datatype(datatype)], list(shape))


def _constant(name: str, value: object, dtype: type[np.generic]) -> TensorProto:
    return numpy_helper.from_array(np.array(value, dtype), name)


def _model(
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
    *constants: TensorProto,
) -> bytes:
    graph = helper.make_graph(nodes, "contract", inputs, outputs, constants)
    opset = helper.make_opsetid("", 17)
    # An older format than the installed onnx writes, for older versions of ONNX Runtime.
    return bytes(helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())


def tenths() -> bytes:
    """OUTPUT0 = 0, 0.1, 0.2 and so on, as many as INPUT0 (INT64, one element) says."""
    return _model(
        [
            helper.make_node("Squeeze", ["INPUT0"], ["count"]),
            helper.make_node("Range", ["zero", "count", "one"], ["numbers"]),
            helper.make_node("Cast", ["numbers"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["floats", "tenth"], ["OUTPUT0"]),
        ],
        [_tensor("INPUT0", "INT64", [1])],
        [_tensor("OUTPUT0", "FP32", ["length"])],
        _constant("zero", 0, np.int64),
        _constant("one", 1, np.int64),
        _constant("tenth", [0.1], np.float32),
    )
