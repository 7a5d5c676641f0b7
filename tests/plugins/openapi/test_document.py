"""OpenAPI descriptions of loaded models and of the operations."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.api.operations import OPERATIONS, Category
from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.plugins.openapi.document import document
from headrace.protocol.pb.model_config_pb2 import ModelConfig


def described(*inputs: TensorSpec, decoupled: bool = False, config: Any = None) -> Any:
    """The documented body of a model `m n` with these inputs."""
    output = TensorSpec("y", Datatype.FP32, (1,))
    version = SimpleNamespace(
        model="m n", decoupled=decoupled, config=config or ModelConfig(),
        signature=Signature("m n", 4, inputs, (output,)),
    )  # fmt: skip
    paths = document([cast(Any, version)])["paths"]
    end = "generate_stream" if decoupled else "infer"
    body = paths[f"/v2/models/m%20n/{end}"]["post"]["requestBody"]
    return body["content"]["application/json"]["schema"]


@pytest.mark.parametrize(("datatype", "data"), [
    (Datatype.BOOL, [False, False]), (Datatype.INT64, [0, 0]), (Datatype.FP32, [0.0, 0.0]),
    (Datatype.BYTES, ["", ""]),
])  # fmt: skip
def test_an_example_has_one_row_of_zeros(datatype: Datatype, data: list[object]) -> None:
    schema = described(TensorSpec("x", datatype, (2, -1)))
    expected = {"name": "x", "datatype": str(datatype), "shape": [1, 2, 1], "data": data}
    assert schema["examples"] == [{"inputs": [expected]}]


def test_no_example_where_json_has_none_or_it_is_long() -> None:
    assert "examples" not in described(TensorSpec("x", Datatype.FP16, (1,)))
    assert "examples" not in described(TensorSpec("x", Datatype.FP32, (3, 224, 224)))


def test_optional_inputs_may_be_left_out() -> None:
    optional = TensorSpec("z", Datatype.FP32, (1,), optional=True)
    schema = described(TensorSpec("x", Datatype.FP32, (1,)), optional)
    inputs = schema["properties"]["inputs"]
    assert (inputs["minItems"], inputs["maxItems"]) == (1, 2)
    assert [found["name"] for found in schema["examples"][0]["inputs"]] == ["x"]


def test_a_sequence_is_begun_and_ended() -> None:
    config = ModelConfig()
    config.sequence_batching.SetInParent()
    schema = described(TensorSpec("x", Datatype.FP32, (1,)), config=config)
    assert schema["examples"][0]["parameters"]["sequence_start"] is True


def test_a_decoupled_model_is_asked_with_flat_json() -> None:
    schema = described(TensorSpec("x", Datatype.INT32, (2,)), decoupled=True)
    assert schema["examples"] == [{"x": [0, 0]}]


def test_every_reference_leads_somewhere() -> None:
    whole = document()
    known = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    assert set(_references(whole)) <= known
    assert len(whole["paths"]) == len(
        {form for operation in OPERATIONS for route in operation.routes for form in route.forms}
    )


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + [found for member in value.values() for found in _references(member)]


def test_a_client_shows_a_key_or_a_header() -> None:
    assert "securitySchemes" not in document()["components"]
    found = document((), OPERATIONS, True, {Category.STATISTICS: "x-secret"})
    schemes = found["components"]["securitySchemes"]
    assert schemes["bearer"]["scheme"] == "bearer"
    assert schemes["header-x-secret"] == {"type": "apiKey", "in": "header", "name": "x-secret"}
    paths = found["paths"]
    assert paths["/v2/status"]["get"]["security"] == [{"bearer": [], "header-x-secret": []}]
    assert paths["/v2"]["get"]["security"] == [{"bearer": []}]
    assert "security" not in paths["/v2/health/ready"]["get"]
