"""Schemas match the output of `to_json`."""

from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from headrace.plugins.openapi.document import message_schemas, reference, schema_name
from headrace.protocol.documents import to_json
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.pb.traffic_pb2 import ModelTrafficResponse

CONFIG = """
name: "m" platform: "p" max_batch_size: 8 version_policy { specific { versions: 3 } }
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ 2 ] } }
output { name: "y" data_type: TYPE_STRING dims: 1 label_filename: "l" }
instance_group { count: 1 kind: KIND_CPU rate_limiter { resources { name: "r" count: 2 } } }
dynamic_batching { preferred_batch_size: 4 priority_queue_policy { key: 1 value { } } }
parameters { key: "a" value { string_value: "b" } }
model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 zero_data: true } } }
model_transaction_policy { decoupled: true }
"""
TRAFFIC = """
name: "m" source: "call" rules {
  split { key: "1" value: 90 } sticky { header: "h" } shadow { version: "3" share: 0.5 }
  rollback { max_error_rate: 0.5 min_requests: 5 }
}
versions { version: "1" recent { requests: 5 } } shadows { version: "3" median_ms: 1.5 }
"""
STATISTICS = """
model_stats { name: "m" inference_stats { success { count: 1 ns: 2 } }
  batch_stats { batch_size: 1 } memory_usage { type: "CPU" byte_size: 3 }
  response_stats { key: "0" value { success { count: 1 } } } }
"""


@pytest.mark.parametrize("message", [
    ModelConfig(), text_format.Parse(CONFIG, ModelConfig()), pb.ModelStatisticsResponse(),
    text_format.Parse(STATISTICS, pb.ModelStatisticsResponse()), ModelTrafficResponse(),
    text_format.Parse(TRAFFIC, ModelTrafficResponse()),
])  # fmt: skip
def test_documents_fit_their_schemas(message: Message) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    descriptor: Any = message.DESCRIPTOR
    schemas = message_schemas([descriptor])
    whole = reference(descriptor) | {"components": {"schemas": _strict(schemas)}}
    validator(whole).validate(to_json(message))


def test_required_members() -> None:
    schemas = message_schemas([pb.ModelMetadataResponse.DESCRIPTOR])
    assert list(schemas) == ["ModelMetadataResponse", "ModelMetadataResponse.TensorMetadata"]
    assert schemas["ModelMetadataResponse.TensorMetadata"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "datatype", "shape"],
    }


def test_members_that_may_be_missing() -> None:
    schemas = message_schemas([ModelConfig.DESCRIPTOR])
    config = schemas[schema_name(ModelConfig.DESCRIPTOR)]
    assert "max_batch_size" in config["required"]
    assert "dynamic_batching" not in config["required"]
    assert config["properties"]["parameters"] == {
        "type": "object", "additionalProperties": {"$ref": "#/components/schemas/ModelParameter"}
    }  # fmt: skip
    group = schemas["ModelInstanceGroup"]["properties"]
    assert group["kind"]["enum"][:3] == ["KIND_AUTO", "KIND_GPU", "KIND_CPU"]


def _strict(schemas: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The schema without additional properties."""
    return {name: schema | {"additionalProperties": False} for name, schema in schemas.items()}
