import pytest
from google.protobuf import text_format

from headrace.placement.upstream.connection import RemoteDescription
from headrace.placement.upstream.reconciler import differences
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig

METADATA = text_format.Parse(
    'name: "m" versions: ["1", "2"]'
    ' inputs { name: "A" datatype: "FP32" shape: [-1, 3, -1] }'
    ' inputs { name: "B" datatype: "INT64" shape: [-1, 1] }'
    ' outputs { name: "C" datatype: "BYTES" shape: [-1, 5] }'
    ' properties { key: "columns" value: \'{"A": ["y", "x"]}\' }',
    pb.ModelMetadataResponse(),
)
CONFIG = text_format.Parse(
    'max_batch_size: 8 input { name: "A" } input { name: "B" optional: true }'
    " instance_group { kind: KIND_CPU count: 2 }",
    ModelConfig(),
)
A = ' input { name: "A" data_type: TYPE_FP32 dims: [3, 7] }'
B = ' input { name: "B" data_type: TYPE_INT64 dims: [1] }'


@pytest.mark.parametrize(
    ("asked", "version", "expected"),
    [
        ("", "", []),
        ("max_batch_size: 8" + A + B, "2", []),
        ("max_batch_size: 8" + A, "", []),  # B need not be given
        (
            "max_batch_size: 8" + B, "",
            ["input 'A': no such one is asked for, a needed one is there"],
        ),
        ("max_batch_size: 4 instance_group { count: 2 }", "", []),
        ("max_batch_size: 9", "", ["max_batch_size: 9 asked for, 8 there"]),
        ("", "3", ["version: 3 asked for, 1, 2 there"]),
        (
            "instance_group { kind: KIND_GPU count: 2 gpus: [0] }", "",
            ["instance_group: 2 x GPU 0 asked for, 2 x CPU there"],
        ),
        (
            'max_batch_size: 8 output { name: "C" data_type: TYPE_STRING dims: [4] }', "",
            ["output 'C' shape: [4] asked for, [5] there"],
        ),
        (
            'max_batch_size: 8 output { name: "C" data_type: TYPE_INT8 }', "",
            ["output 'C' datatype: INT8 asked for, BYTES there"],
        ),
        (
            'parameters { key: "columns" value { string_value: \'{"A": ["x", "y"]}\' } }', "",
            ["parameters['columns']: "
             '{"A": ["x", "y"]} asked for, {"A": ["y", "x"]} there'],
        ),
        (
            'parameters { key: "columns" value { string_value: \'{"A":["y","x"]}\' } }', "", [],
        ),
        ('output { name: "D" }', "", ["output 'D': it is asked for, it is not there"]),
        (
            'max_batch_size: 8 output { name: "C" dims: [1, 5] reshape { shape: [5] } }', "", [],
        ),
    ],
)  # fmt: skip
def test_differences(asked: str, version: str, expected: list[str]) -> None:
    found = differences(
        text_format.Parse(asked, ModelConfig()), RemoteDescription(METADATA, CONFIG), version
    )
    assert [str(one).replace("[-1,", "[") for one in found] == expected


def test_an_incomplete_configuration_of_a_server() -> None:
    asked = text_format.Parse("max_batch_size: 8 instance_group { count: 2 }", ModelConfig())
    found = differences(asked, RemoteDescription(METADATA, None))
    assert [one.field for one in found] == ["instance_group"]
    assert differences(ModelConfig(), RemoteDescription(METADATA, None)) == []
    # As KServe's Python servers: the declaration is neither confirmed nor denied.
    asked = text_format.Parse("max_batch_size: 8" + A, ModelConfig())
    assert not list(differences(asked, RemoteDescription(pb.ModelMetadataResponse(), None)))
