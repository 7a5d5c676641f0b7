"""Graphs of ensembles for the tests, whose models have one tensor of text or several."""

from collections.abc import Collection, Mapping

import numpy as np

from headrace.core.datatypes import Datatype
from headrace.core.model_spec import Used
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.plugins.ensembles.graph import Graph, make_graph, use_problems
from headrace.protocol.pb.model_config_pb2 import ModelConfig

Steps = Mapping[str, tuple[Collection[str], Collection[str]]]  # inputs and outputs, by model


def text(value: str, name: str = "") -> Tensor:
    return Tensor(name, Datatype.BYTES, np.array([value], object))


def value(tensor: Tensor) -> str:
    [found] = tensor.array.tolist()
    assert isinstance(found, str)
    return found


def _signature(name: str, inputs: Collection[str], outputs: Collection[str]) -> Signature:
    given, made = (
        tuple(TensorSpec(one, Datatype.BYTES, (1,)) for one in names) for names in (inputs, outputs)
    )
    return Signature(name, 0, given, made)


def described(
    inputs: Collection[str], outputs: Collection[str], steps: Steps,
    decoupled: Collection[str] = (), most: int = 0,
) -> tuple[ModelConfig, Signature, dict[Used, Signature]]:  # fmt: skip
    """An ensemble whose tensors are called as its models call them."""
    config = ModelConfig()
    config.ensemble_scheduling.max_inflight_requests = most
    used: dict[Used, Signature] = {}
    for model, (given, made) in steps.items():
        step = config.ensemble_scheduling.step.add(model_name=model, model_version=-1)
        step.input_map.update({name: name for name in given})
        step.output_map.update({name: name for name in made})
        signature = _signature(model, given, made)
        object.__setattr__(signature, "decoupled", model in decoupled)
        used[model, ""] = signature
    return config, _signature("ensemble", inputs, outputs), used


def graph_of(
    inputs: Collection[str], outputs: Collection[str], steps: Steps,
    decoupled: Collection[str] = (), most: int = 0,
) -> Graph:  # fmt: skip
    """A graph without problems."""
    config, signature, used = described(inputs, outputs, steps, decoupled, most)
    assert list(use_problems(config, signature, used)) == []
    return make_graph(config, signature, used)
