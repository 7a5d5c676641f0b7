"""The models that are served: built by code, the same bytes every time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, checker, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]

MLP = "mlp"
MLP_UNBATCHED = "mlp_unbatched"
_WIDTHS = (64, 256, 256, 10)
_CASES = 16  # different requests, sent in turn
_OPSET, _IR_VERSION = 17, 8

Tensors = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one row, and the outputs that belong to them."""

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
    graph: Callable[[], Graph]
    cases: Callable[[], list[Case]]
    max_batch_size: int = 64
    config: str = ""

    def write(self, repository: Path) -> None:
        """Put the model into a repository."""
        folder = repository / self.name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "1" / "model.onnx").write_bytes(_onnx(self.name, self.graph()))
        (folder / "config.pbtxt").write_text(
            f'backend: "onnxruntime"\nmax_batch_size: {self.max_batch_size}\n{self.config}'
        )


def write_repository(directory: Path) -> None:
    """Write every model."""
    for model in MODELS.values():
        model.write(directory)


def _onnx(name: str, graph: Graph) -> bytes:
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


def _weights() -> dict[str, Array]:
    random = np.random.default_rng(20)
    weights: dict[str, Array] = {}
    for layer, (rows, columns) in enumerate(pairwise(_WIDTHS)):
        weight = random.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        weights[f"weight{layer}"] = weight.astype(np.float32)
        weights[f"bias{layer}"] = random.standard_normal(columns).astype(np.float32) / 10
    return weights


def _mlp_graph() -> Graph:
    nodes: list[NodeProto] = []
    value, last = "input", len(_WIDTHS) - 2
    for layer in range(last + 1):
        result = "output" if layer == last else f"sum{layer}"
        nodes.append(helper.make_node("Gemm", [value, f"weight{layer}", f"bias{layer}"], [result]))
        if layer < last:
            value = f"hidden{layer}"
            nodes.append(helper.make_node("Relu", [result], [value]))
    shapes = {"input": _WIDTHS[:1]}, {"output": _WIDTHS[-1:]}
    return Graph(nodes, TensorProto.FLOAT, *shapes, _weights())


def _mlp_cases() -> list[Case]:
    weights = _weights()
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


def _echo(name: str, elements: int) -> Model:
    """A model that gives back what it gets: `elements` numbers of 4 bytes a row."""

    def graph() -> Graph:
        nodes = [helper.make_node("Identity", ["input"], ["output"])]
        return Graph(nodes, TensorProto.FLOAT, {"input": [elements]}, {"output": [elements]}, {})

    def cases() -> list[Case]:
        rows = np.random.default_rng(23).standard_normal((4, 1, elements)).astype(np.float32)
        return [Case({"input": row}, {"output": row}) for row in rows]

    return Model(name, graph, cases, max_batch_size=8)


_UNBATCHED = 'parameters { key: "batching" value { string_value: "off" } }\n'

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model(MLP, _mlp_graph, _mlp_cases, config="dynamic_batching { }\n"),
        Model(MLP_UNBATCHED, _mlp_graph, _mlp_cases, config=_UNBATCHED),
        Model("simple", _simple_graph, _simple_cases, 8, "dynamic_batching { }\n"),
        _echo("echo_4k", 1 << 10),
        _echo("echo_1m", 1 << 18),
    )
}
