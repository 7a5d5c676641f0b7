"""Tiny ONNX models as code.

Each function returns the bytes of a model file; `write_model` writes one into a model repository.
"rows" is the variable first dimension of those that batch.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from headrace.core.datatypes import Datatype

Dims = Sequence[int | str]
ROWS = "rows"

ELEMENT_TYPES: dict[Datatype, int] = {
    Datatype.BOOL: TensorProto.BOOL, Datatype.UINT8: TensorProto.UINT8,
    Datatype.UINT16: TensorProto.UINT16, Datatype.UINT32: TensorProto.UINT32,
    Datatype.UINT64: TensorProto.UINT64, Datatype.INT8: TensorProto.INT8,
    Datatype.INT16: TensorProto.INT16, Datatype.INT32: TensorProto.INT32,
    Datatype.INT64: TensorProto.INT64, Datatype.FP16: TensorProto.FLOAT16,
    Datatype.FP32: TensorProto.FLOAT, Datatype.FP64: TensorProto.DOUBLE,
    Datatype.BYTES: TensorProto.STRING, Datatype.BF16: TensorProto.BFLOAT16,
}  # fmt: skip


def write_model(
    repository: Path,
    name: str,
    model: bytes,
    config: str | None = None,
    *,
    version: int = 1,
    filename: str = "model.onnx",
) -> Path:
    """Write a model, with a `config.pbtxt` if given, into `repository`; the model's directory."""
    directory = repository / name
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    (directory / str(version) / filename).write_bytes(model)
    if config is not None:
        (directory / "config.pbtxt").write_text(config)
    return directory


def identity(datatype: Datatype = Datatype.FP32, dims: Dims = (ROWS, 2)) -> bytes:
    """OUTPUT0 = INPUT0."""
    element = ELEMENT_TYPES[datatype]
    return _model(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        [_info("INPUT0", element, dims)],
        [_info("OUTPUT0", element, dims)],
    )


def add_sub(datatype: Datatype = Datatype.FP32, width: int = 4) -> bytes:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1."""
    element, dims = ELEMENT_TYPES[datatype], (ROWS, width)
    return _model(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        [_info("INPUT0", element, dims), _info("INPUT1", element, dims)],
        [_info("OUTPUT0", element, dims), _info("OUTPUT1", element, dims)],
    )


def constant(number: float) -> bytes:
    """A and B are X with every element replaced by `number`."""
    value = helper.make_tensor("number", TensorProto.FLOAT, [], [number])
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [], [0])
    return _model(
        [
            helper.make_node("Mul", ["X", "zero"], ["nothing"]),
            helper.make_node("Add", ["nothing", "number"], ["A"]),
            helper.make_node("Add", ["nothing", "number"], ["B"]),
        ],
        [_info("X", TensorProto.FLOAT, (ROWS, 1))],
        [_info(name, TensorProto.FLOAT, (ROWS, 1)) for name in ("A", "B")],
        [value, zero],
    )


def without_inputs() -> bytes:
    """GIVEN is the numbers from 0 to 5, in three rows."""
    value = helper.make_tensor("value", TensorProto.INT32, [3, 2], range(6))
    return _model(
        [helper.make_node("Constant", [], ["GIVEN"], value=value)],
        [],
        [_info("GIVEN", TensorProto.INT32, (3, 2))],
    )


def fixed_shape(rows: int = 3, width: int = 2) -> bytes:
    """OUTPUT0 = INPUT0, both of one fixed shape: a model that does not batch."""
    return identity(Datatype.FP32, (rows, width))


def lookup(entries: int = 10) -> bytes:
    """OUTPUT0 = 10 * INPUT0 for indices below `entries`; any other makes the run fail."""
    table = helper.make_tensor(
        "table", TensorProto.INT64, [entries], [10 * n for n in range(entries)]
    )
    return _model(
        [helper.make_node("Gather", ["table", "INPUT0"], ["OUTPUT0"])],
        [_info("INPUT0", TensorProto.INT64, (ROWS, 1))],
        [_info("OUTPUT0", TensorProto.INT64, (ROWS, 1))],
        [table],
    )


def heavy(size: int = 256, layers: int = 8) -> bytes:
    """`layers` products with a `size` by `size` matrix: 2 * layers * size² operations per row."""
    weights = np.random.default_rng(0).standard_normal((size, size), np.float32) / size
    names = ["INPUT0", *(f"hidden{n}" for n in range(layers - 1)), "OUTPUT0"]
    return _model(
        [
            helper.make_node("MatMul", [source, "weights"], [target])
            for source, target in pairwise(names)
        ],
        [_info("INPUT0", TensorProto.FLOAT, (ROWS, size))],
        [_info("OUTPUT0", TensorProto.FLOAT, (ROWS, size))],
        [
            helper.make_tensor(
                "weights", TensorProto.FLOAT, [size, size], weights.tobytes(), raw=True
            )
        ],
    )


def casts(
    inputs: Mapping[str, tuple[Datatype, Dims]], outputs: Mapping[str, tuple[str, Datatype]]
) -> bytes:
    """Each output is an input, given by its name, in another datatype."""
    nodes, infos = [], []
    for name, (source, datatype) in outputs.items():
        given, dims = inputs[source]
        element = ELEMENT_TYPES[datatype]
        kind: dict[str, Any] = {} if given is datatype else {"to": element}
        nodes.append(helper.make_node("Cast" if kind else "Identity", [source], [name], **kind))
        infos.append(_info(name, element, dims))
    return _model(
        nodes,
        [_info(name, ELEMENT_TYPES[datatype], dims) for name, (datatype, dims) in inputs.items()],
        infos,
    )


def mixed() -> bytes:
    """Three inputs of different datatypes and ranks, each returned under another name."""
    tensors: list[tuple[str, int, Dims]] = [
        ("NUMBERS", TensorProto.FLOAT, (ROWS, "width")),
        ("TEXT", TensorProto.STRING, (ROWS, 1)),
        ("FLAG", TensorProto.BOOL, (ROWS,)),
    ]
    return _model(
        [helper.make_node("Identity", [name], [f"{name}_OUT"]) for name, _, _ in tensors],
        [_info(name, element, dims) for name, element, dims in tensors],
        [_info(f"{name}_OUT", element, dims) for name, element, dims in tensors],
    )


def running_sum() -> bytes:
    """SUM = X + STATE, which it gives as STATE_OUT, too; BEGAN = START, one number for each row."""
    return _model(
        [
            helper.make_node("Add", ["X", "STATE"], ["SUM"]),
            helper.make_node("Identity", ["SUM"], ["STATE_OUT"]),
            helper.make_node("Identity", ["START"], ["BEGAN"]),
        ],
        [
            _info("X", TensorProto.FLOAT, (ROWS, "width")),
            _info("STATE", TensorProto.FLOAT, (ROWS, "width")),
            _info("START", TensorProto.FLOAT, (ROWS,)),
        ],
        [
            _info("SUM", TensorProto.FLOAT, (ROWS, "width")),
            _info("STATE_OUT", TensorProto.FLOAT, (ROWS, "width")),
            _info("BEGAN", TensorProto.FLOAT, (ROWS,)),
        ],
    )


def bf16_and_others() -> bytes:
    """HALF_OUT = HALF of BF16, WHOLE_OUT = WHOLE of INT64, TEXT_OUT = the decimals of WHOLE."""
    return _model(
        [
            helper.make_node("Identity", ["HALF"], ["HALF_OUT"]),
            helper.make_node("Identity", ["WHOLE"], ["WHOLE_OUT"]),
            helper.make_node("Cast", ["WHOLE"], ["TEXT_OUT"], to=TensorProto.STRING),
        ],
        [
            _info("HALF", TensorProto.BFLOAT16, (ROWS, 2)),
            _info("WHOLE", TensorProto.INT64, (ROWS, 1)),
        ],
        [
            _info("HALF_OUT", TensorProto.BFLOAT16, (ROWS, 2)),
            _info("WHOLE_OUT", TensorProto.INT64, (ROWS, 1)),
            _info("TEXT_OUT", TensorProto.STRING, (ROWS, 1)),
        ],
    )


def bf16_and_text_input() -> bytes:
    """A BF16 and a BYTES input: a combination that Python cannot pass to ONNX Runtime."""
    return _model(
        [
            helper.make_node("Identity", ["HALF"], ["HALF_OUT"]),
            helper.make_node("Identity", ["TEXT"], ["TEXT_OUT"]),
        ],
        [
            _info("HALF", TensorProto.BFLOAT16, (ROWS, 2)),
            _info("TEXT", TensorProto.STRING, (ROWS, 1)),
        ],
        [
            _info("HALF_OUT", TensorProto.BFLOAT16, (ROWS, 2)),
            _info("TEXT_OUT", TensorProto.STRING, (ROWS, 1)),
        ],
    )


def total() -> bytes:
    """OUTPUT0 is one number, the sum of INPUT0: an output without dimensions."""
    return _model(
        [helper.make_node("ReduceSum", ["INPUT0"], ["OUTPUT0"], keepdims=0)],
        [_info("INPUT0", TensorProto.FLOAT, ("n",))],
        [_info("OUTPUT0", TensorProto.FLOAT, ())],
    )


def with_default() -> bytes:
    """OUTPUT0 = INPUT0 * SCALE, where SCALE is an input with the default value 2."""
    return _model(
        [helper.make_node("Mul", ["INPUT0", "SCALE"], ["OUTPUT0"])],
        [_info("INPUT0", TensorProto.FLOAT, (ROWS, 2)), _info("SCALE", TensorProto.FLOAT, (1,))],
        [_info("OUTPUT0", TensorProto.FLOAT, (ROWS, 2))],
        [helper.make_tensor("SCALE", TensorProto.FLOAT, [1], [2.0])],
    )


def sequence_output() -> bytes:
    """OUTPUT0 is a sequence of tensors, which the protocol lacks; OUTPUT1 = INPUT0."""
    return _model(
        [
            helper.make_node("SequenceConstruct", ["INPUT0", "INPUT0"], ["OUTPUT0"]),
            helper.make_node("Identity", ["INPUT0"], ["OUTPUT1"]),
        ],
        [_info("INPUT0", TensorProto.FLOAT, (ROWS, 2))],
        [
            helper.make_tensor_sequence_value_info("OUTPUT0", TensorProto.FLOAT, (ROWS, 2)),
            _info("OUTPUT1", TensorProto.FLOAT, (ROWS, 2)),
        ],
    )


def external_weight(location: str) -> bytes:
    """OUTPUT0 = INPUT0 + w, where the two elements of w lie in the file `location`."""
    return _model([_ADD_WEIGHT], [_INPUT], [_OUTPUT], [_external(location)])


def external_weight_in_branch(location: str) -> bytes:
    """`external_weight` with w in a graph within a node, which only runs if FLAG is true."""
    return _in_branch([_ADD_WEIGHT], [_external(location)])


def external_weight_in_attribute(location: str) -> bytes:
    """`external_weight` with w as the value of a Constant node within a branch."""
    constant = helper.make_node("Constant", [], ["w"])
    attribute = AttributeProto(name="value", type=AttributeProto.TENSOR)
    attribute.t.CopyFrom(_external(location))
    constant.attribute.append(attribute)
    return _in_branch([constant, _ADD_WEIGHT], [])


def external_weight_in_function(location: str) -> bytes:
    """`external_weight` with w as the value of a Constant node within a function of the model."""
    constant = helper.make_node("Constant", [], ["w"])
    attribute = AttributeProto(name="value", type=AttributeProto.TENSOR)
    attribute.t.CopyFrom(_external(location))
    constant.attribute.append(attribute)
    function = helper.make_function(
        "local",
        "AddWeight",
        ["INPUT0"],
        ["OUTPUT0"],
        [constant, _ADD_WEIGHT],
        [helper.make_opsetid("", 21)],
    )
    return _model(
        [helper.make_node("AddWeight", ["INPUT0"], ["OUTPUT0"], domain="local")],
        [_INPUT],
        [_OUTPUT],
        functions=[function],
    )


def ragged_sums() -> bytes:
    """SUM has the sum of each request's elements of INPUT, which end at its INDEX, and DOUBLED all
    elements, doubled.
    """
    numbers = {"ZERO": [0], "ONE": [1], "MINUS_ONE": [-1]}
    return _model(
        [
            helper.make_node("CumSum", ["INPUT", "axis"], ["totals"]),
            helper.make_node("Cast", ["INDEX"], ["ends"], to=TensorProto.INT64),
            helper.make_node("Sub", ["ends", "ONE"], ["last"]),
            helper.make_node("Gather", ["totals", "last"], ["up_to"]),
            helper.make_node("Slice", ["up_to", "ZERO", "MINUS_ONE"], ["but_one"]),
            helper.make_node("Concat", ["nothing", "but_one"], ["before"], axis=0),
            helper.make_node("Sub", ["up_to", "before"], ["sums"]),
            helper.make_node("Unsqueeze", ["sums", "ONE"], ["SUM"]),
            helper.make_node("Add", ["INPUT", "INPUT"], ["DOUBLED"]),
        ],
        [
            _info("INPUT", TensorProto.FLOAT, ("elements",)),
            _info("INDEX", TensorProto.FLOAT, ("requests",)),
        ],
        [
            _info("SUM", TensorProto.FLOAT, ("requests", 1)),
            _info("DOUBLED", TensorProto.FLOAT, ("elements",)),
        ],
        [
            *(helper.make_tensor(n, TensorProto.INT64, [1], v) for n, v in numbers.items()),
            helper.make_tensor("axis", TensorProto.INT64, [], [0]),
            helper.make_tensor("nothing", TensorProto.FLOAT, [1], [0.0]),
        ],
    )


def masked_mean() -> bytes:
    """DOUBLED has all elements of X, doubled, RAW the elements themselves, and MEAN the mean of
    those whose MASK is 1, which are LENGTH of a row.
    """
    return _model(
        [
            helper.make_node("Add", ["X", "X"], ["DOUBLED"]),
            helper.make_node("Identity", ["X"], ["RAW"]),
            helper.make_node("Mul", ["X", "MASK"], ["own"]),
            helper.make_node("ReduceSum", ["own", "axes"], ["sums"], keepdims=1),
            helper.make_node("Cast", ["LENGTH"], ["count"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["sums", "count"], ["MEAN"]),
        ],
        [
            _info("X", TensorProto.FLOAT, ("rows", "tokens")),
            _info("MASK", TensorProto.FLOAT, ("rows", "tokens")),
            _info("LENGTH", TensorProto.INT32, ("rows", 1)),
        ],
        [
            _info("DOUBLED", TensorProto.FLOAT, ("rows", "tokens")),
            _info("RAW", TensorProto.FLOAT, ("rows", "tokens")),
            _info("MEAN", TensorProto.FLOAT, ("rows", 1)),
        ],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )


def _info(name: str, element: int, dims: Dims) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, element, list(dims))


def _model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
    **more: Any,
) -> bytes:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    # An older format than the installed onnx writes, for older versions of ONNX Runtime.
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)
    return bytes(model.SerializeToString())


def _external(location: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _in_branch(nodes: Sequence[NodeProto], initializers: Sequence[TensorProto]) -> bytes:
    then: GraphProto = helper.make_graph(nodes, "then", [], [_OUTPUT], initializers)
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])], "else", [], [_OUTPUT]
    )
    branch = helper.make_node("If", ["FLAG"], ["OUTPUT0"], then_branch=then, else_branch=otherwise)
    return _model([branch], [_INPUT, _info("FLAG", TensorProto.BOOL, (1,))], [_OUTPUT])


_ADD_WEIGHT = helper.make_node("Add", ["INPUT0", "w"], ["OUTPUT0"])
_INPUT = _info("INPUT0", TensorProto.FLOAT, (ROWS, 2))
_OUTPUT = _info("OUTPUT0", TensorProto.FLOAT, (ROWS, 2))
