"""The models that are served: built by code, the same bytes every time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, checker, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]

MLP = "mlp"
MLP_UNBATCHED = "mlp_unbatched"
MLP_WIDE = "mlp_wide"  # in batches of up to 1024 rows
ECHO_1M, ECHO_16M = "echo_1m", "echo_16m"
RESNET50 = "resnet50"
_WIDTHS = (64, 256, 256, 10)
_TABLE_WIDTHS = (8, 256, 256, 1)
_CASES = 16  # different requests, sent in turn
_OPSET, _IR_VERSION = 17, 8

Tensors = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs, one row unless `widened`, and the outputs that belong to them."""

    inputs: Tensors
    outputs: Tensors


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX graph; inputs and outputs have rows of `row`, all of one element type."""

    nodes: Sequence[NodeProto]
    element: int
    inputs: Mapping[str, Sequence[int]]
    outputs: Mapping[str, Sequence[int]]
    constants: Tensors


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the benchmark's repository; `config` is more text for its `config.pbtxt`."""

    name: str
    content: Callable[[], bytes]
    cases: Callable[[], list[Case]]
    max_batch_size: int = 64
    config: str = ""

    def widened(self, rows: int) -> "Model":
        """The same model, with cases of `rows` rows."""
        return self if rows == 1 else replace(self, cases=partial(_widen, self.cases, rows))

    def write(self, repository: Path) -> None:
        """Put the model into a repository."""
        folder = repository / self.name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "1" / "model.onnx").write_bytes(self.content())
        (folder / "config.pbtxt").write_text(
            f'backend: "onnxruntime"\nmax_batch_size: {self.max_batch_size}\n{self.config}'
        )


def write_repository(directory: Path, names: Iterable[str] | None = None) -> None:
    """Write the models with these names, or all that `make bench` can measure."""
    for name in MODELS if names is None else names:
        ALL_MODELS[name].write(directory)


def _widen(cases: Callable[[], list[Case]], rows: int) -> list[Case]:
    """Cases of `rows` rows each, from cases of one row each."""
    singles = cases()

    def stack(first: int, pick: Callable[[Case], Tensors]) -> Tensors:
        chosen = [pick(singles[(first + row) % len(singles)]) for row in range(rows)]
        return {name: np.concatenate([each[name] for each in chosen]) for name in chosen[0]}

    return [
        Case(stack(first, lambda case: case.inputs), stack(first, lambda case: case.outputs))
        for first in range(len(singles))
    ]


def onnx_bytes(name: str, build: Callable[[], Graph]) -> bytes:
    graph = build()

    def infos(shapes: Mapping[str, Sequence[int]]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, graph.element, ["batch", *row])
            for name, row in shapes.items()
        ]

    constants = [numpy_helper.from_array(array, key) for key, array in graph.constants.items()]
    model = helper.make_model(
        helper.make_graph(graph.nodes, name, infos(graph.inputs), infos(graph.outputs), constants),
        producer_name="headrace",
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
    )
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def mlp_weights(widths: Sequence[int] = _WIDTHS) -> dict[str, Array]:
    """An MLP's numbers: weight0, bias0, weight1 and so on."""
    random = np.random.default_rng(20)
    weights: dict[str, Array] = {}
    for layer, (rows, columns) in enumerate(pairwise(widths)):
        weight = random.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        weights[f"weight{layer}"] = weight.astype(np.float32)
        weights[f"bias{layer}"] = random.standard_normal(columns).astype(np.float32) / 10
    return weights


def _mlp_graph(widths: Sequence[int] = _WIDTHS) -> Graph:
    nodes: list[NodeProto] = []
    value, last = "input", len(widths) - 2
    for layer in range(last + 1):
        result = "output" if layer == last else f"sum{layer}"
        nodes.append(helper.make_node("Gemm", [value, f"weight{layer}", f"bias{layer}"], [result]))
        if layer < last:
            value = f"hidden{layer}"
            nodes.append(helper.make_node("Relu", [result], [value]))
    shapes = {"input": widths[:1]}, {"output": widths[-1:]}
    return Graph(nodes, TensorProto.FLOAT, *shapes, mlp_weights(widths))


def _mlp_cases() -> list[Case]:
    weights = mlp_weights()
    rows = np.random.default_rng(21).standard_normal((_CASES, 1, _WIDTHS[0])).astype(np.float32)
    cases = []
    for row in rows:
        hidden = row
        for layer in range(len(_WIDTHS) - 1):
            hidden = hidden @ weights[f"weight{layer}"] + weights[f"bias{layer}"]
            if layer < len(_WIDTHS) - 2:
                hidden = np.maximum(hidden, 0)
        cases.append(Case({"input": row}, {"output": hidden}))
    return cases


def _simple_graph() -> Graph:
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    inputs, outputs = {"INPUT0": [16], "INPUT1": [16]}, {"OUTPUT0": [16], "OUTPUT1": [16]}
    return Graph(nodes, TensorProto.INT32, inputs, outputs, {})


def _simple_cases() -> list[Case]:
    random = np.random.default_rng(22)
    cases = []
    for _ in range(_CASES):
        left, right = random.integers(-999, 999, (2, 1, 16), np.int32)
        outputs = {"OUTPUT0": left + right, "OUTPUT1": left - right}
        cases.append(Case({"INPUT0": left, "INPUT1": right}, outputs))
    return cases


def _resnet50() -> bytes:
    """A CNN of ResNet-50's size, from the test data of the `onnx` package, with a free batch axis.

    Its weights are constants made in the graph, so its answers mean nothing; its cost is real.
    """
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    model = onnx.load(folder / "light_resnet50.onnx")
    constants = {constant.name: constant for constant in model.graph.initializer}
    flat = constants["OC2_DUMMY_1"]  # the shape of the one Reshape: one row, as it comes
    flat.CopyFrom(numpy_helper.from_array(np.array([-1, 2048], np.int64), flat.name))
    for info in (*model.graph.input, *model.graph.output):
        if info.name not in constants:
            info.type.tensor_type.shape.dim[0].dim_param = "batch"
    return bytes(model.SerializeToString(deterministic=True))


def _resnet50_cases() -> list[Case]:
    image = np.random.default_rng(24).random((1, 3, 224, 224), np.float32)
    return [
        Case({"gpu_0/data_0": image}, {"gpu_0/softmax_1": np.full((1, 1000), 1e-3, np.float32)})
    ]


def echo(name: str, elements: int) -> Model:
    """A model that gives back what it gets: `elements` numbers of 4 bytes a row."""

    def graph() -> Graph:
        nodes = [helper.make_node("Identity", ["input"], ["output"])]
        return Graph(nodes, TensorProto.FLOAT, {"input": [elements]}, {"output": [elements]}, {})

    def cases() -> list[Case]:
        rows = np.random.default_rng(23).standard_normal((4, 1, elements)).astype(np.float32)
        return [Case({"input": row}, {"output": row}) for row in rows]

    return Model(name, partial(onnx_bytes, name, graph), cases, max_batch_size=8)


_BATCHED = "dynamic_batching { }\n"
_UNBATCHED = 'parameters { key: "batching" value { string_value: "off" } }\n'

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model(MLP, partial(onnx_bytes, MLP, _mlp_graph), _mlp_cases, config=_BATCHED),
        Model(
            MLP_UNBATCHED,
            partial(onnx_bytes, MLP_UNBATCHED, _mlp_graph),
            _mlp_cases,
            config=_UNBATCHED,
        ),
        Model("simple", partial(onnx_bytes, "simple", _simple_graph), _simple_cases, 8, _BATCHED),
        echo("echo_4k", 1 << 10),
        echo(ECHO_1M, 1 << 18),
    )
}

# Of tables with eight columns, in batches of some thousand rows; without cases.
MLP_OF_TABLES = Model(
    "mlp_table", partial(onnx_bytes, "mlp_table", partial(_mlp_graph, _TABLE_WIDTHS)), list, 8192
)

# What only the scorecard serves: models and batches that are large.
ALL_MODELS: Mapping[str, Model] = {
    **MODELS,
    MLP_WIDE: Model(
        MLP_WIDE, partial(onnx_bytes, MLP_WIDE, _mlp_graph), _mlp_cases, 1024, _BATCHED
    ),
    ECHO_16M: echo(ECHO_16M, 1 << 22),
    RESNET50: Model(RESNET50, _resnet50, _resnet50_cases, max_batch_size=8, config=_BATCHED),
}
