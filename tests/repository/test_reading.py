"""From a completed configuration to the values that the other floors work with."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from headrace.core.datatypes import BY_CONFIG_NUMBER, Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import reading
from headrace.repository.completion import normalise
from headrace.repository.reading import Placement
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction

FP32 = Datatype.FP32


def config_of(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_signature() -> None:
    config = config_of(
        """
        name: "m" max_batch_size: 8
        input [
          { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] },
          { name: "b" data_type: TYPE_STRING dims: 1 reshape { } optional: true },
          { name: "c" data_type: TYPE_INT8 dims: 6 reshape { shape: [ 2, 3 ] } }
        ]
        output { name: "y" data_type: TYPE_BF16 dims: 1 reshape { } }
        """
    )
    assert reading.signature(config) == Signature(
        "m",
        8,
        (
            TensorSpec("a", FP32, (-1, 3)),
            TensorSpec("b", Datatype.BYTES, (1,), optional=True, reshape=()),
            TensorSpec("c", Datatype.INT8, (6,), reshape=(2, 3)),
        ),
        (TensorSpec("y", Datatype.BF16, (1,), reshape=()),),
    )


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_has_its_number(datatype: Datatype) -> None:
    config = ModelConfig()
    config.input.add(name="x", data_type=datatype.config_number)
    assert reading.signature(config).inputs[0].datatype is datatype
    assert BY_CONFIG_NUMBER[datatype.config_number] is datatype


def test_a_model_that_batches_by_default() -> None:
    policy = reading.scheduling_policy(normalise(config_of("max_batch_size: 8")))
    assert policy == SchedulingPolicy(BatchPolicy(8, 0, frozenset({8}), keeps_deadlines=True))


def test_everything_that_dynamic_batching_can_say() -> None:
    config = config_of(
        """
        max_batch_size: 8
        dynamic_batching {
          preferred_batch_size: [ 4, 8 ]
          max_queue_delay_microseconds: 100
          priority_levels: 2
          default_priority_level: 1
          default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 5 }
          priority_queue_policy {
            key: 2
            value { timeout_action: DELAY allow_timeout_override: true }
          }
        }
        """
    )
    assert reading.scheduling_policy(config) == SchedulingPolicy(
        BatchPolicy(8, 100_000, frozenset({4, 8})),
        QueuePolicy(9, 5_000),
        2,
        1,
        {2: QueuePolicy(0, 0, TimeoutAction.DELAY, True)},
    )


@pytest.mark.parametrize(
    "text",
    ["", 'max_batch_size: 8 parameters { key: "batching" value { string_value: "off" } }'],
)
def test_a_model_that_does_not_batch_keeps_its_queues_limits(text: str) -> None:
    assert reading.scheduling_policy(config_of(text)) == SchedulingPolicy(BatchPolicy(0))
    queue = """dynamic_batching {
        preferred_batch_size: 1
        max_queue_delay_microseconds: 7
        preserve_ordering: true
        default_queue_policy { max_queue_size: 3 }
    }"""
    assert reading.scheduling_policy(config_of(text + queue)) == SchedulingPolicy(
        BatchPolicy(0), QueuePolicy(3), preserve_ordering=True
    )


@pytest.mark.parametrize(("text", "placements"), [
    ("", [("m_0", None)]),
    ('instance_group { name: "g" count: 2 }', [("g_0", None), ("g_1", None)]),
    ("instance_group [ { kind: KIND_CPU }, { kind: KIND_MODEL } ]", [("m_0_0", None), ("m_1_0",
     None, 1, True)]),
    ("instance_group { kind: KIND_GPU }", [("m_0_0", 0)]),
    ("instance_group { gpus: [ 2, 3 ] }", [("m_0_0_gpu2", 2), ("m_0_0_gpu3", 3)]),
    ("instance_group { count: 2 gpus: 1 }", [("m_0_0", 1), ("m_0_1", 1)]),
    ("instance_group { count: 2 gpus: [ 1, 0 ] }", [("m_0_0_gpu1", 1), ("m_0_1_gpu1", 1),
     ("m_0_0_gpu0", 0), ("m_0_1_gpu0", 0)]),
])  # fmt: skip
def test_placements(text: str, placements: list[Any]) -> None:
    config = normalise(config_of('name: "m" ' + text))
    assert reading.placements(config) == [Placement(*placement) for placement in placements]


def test_load_spec() -> None:
    config = config_of(
        """
        name: "m" default_model_filename: "model.onnx"
        parameters { key: "execution_mode" value { string_value: "1" } }
        optimization {
          graph { level: 2 }
          execution_accelerators {
            cpu_execution_accelerator { name: "openvino" }
            gpu_execution_accelerator {
              name: "tensorrt" parameters { key: "precision_mode" value: "FP16" }
            }
            gpu_execution_accelerator { name: "cuda" }
          }
        }
        """
    )
    root = Path("/models/m")
    on_cpu = reading.load_spec(config, root, 3, Placement("m_0", None), 2)
    assert (on_cpu.model, on_cpu.path, on_cpu.root) == ("m", root / "3" / "model.onnx", root)
    assert (on_cpu.parameters, on_cpu.graph_level, on_cpu.threads) == (
        {"execution_mode": "1"},
        2,
        2,
    )
    assert (on_cpu.accelerators, on_cpu.device) == ((("openvino", {}),), None)
    assert on_cpu.group == 0
    on_gpu = reading.load_spec(config, root, 3, Placement("m_0", 1, 4), 2)
    assert on_gpu.accelerators == (("tensorrt", {"precision_mode": "FP16"}), ("cuda", {}))
    assert (on_gpu.device, on_gpu.group) == (1, 4)


@pytest.mark.parametrize("kind", ["auto", "inline", "thread"])
def test_execution(kind: str) -> None:
    config = ModelConfig()
    assert reading.execution(config) == "auto"
    config.parameters["execution"].string_value = kind
    assert reading.execution(config) == kind


@pytest.mark.parametrize(("policy", "available", "chosen"), [
    ("", (1, 2, 3), (3,)), ("version_policy { latest { } }", (1, 2, 3), (3,)),
    ("version_policy { latest { num_versions: 2 } }", (1, 2, 3), (2, 3)),
    ("version_policy { latest { num_versions: 9 } }", (1, 2, 3), (1, 2, 3)),
    ("version_policy { all { } }", (1, 2, 3), (1, 2, 3)),
    ("version_policy { specific { versions: [ 3, 1, 7 ] } }", (1, 2, 3), (1, 3)),
    ("version_policy { specific { } }", (1, 2, 3), ()), ("version_policy { all { } }", (), ()),
    ("", (), ()),
])  # fmt: skip
def test_versions(policy: str, available: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    assert reading.chosen_versions(config_of(policy), available) == chosen
