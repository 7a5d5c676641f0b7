"""Protobuf messages: equal to the published protocol, and no clash with client libraries.

`service_descriptor.txt` lists the protocol. A line without indentation starts a file, a service,
a message or an enum; the lines below it are its methods, fields (number, name, type, repetition
and oneof) or values. Names are relative to the file's package.
"""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import json_format, text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.message import Message

from headrace.protocol.pb import (
    POOL,
    grpc_service_pb2,
    health_pb2,
    model_config_pb2,
    reflection_pb2,
    reflection_v1alpha_pb2,
)

TABLE = Path(__file__).with_name("service_descriptor.txt")
MODULES = {
    "model_config.proto": model_config_pb2,
    "grpc_service.proto": grpc_service_pb2,
    "health.proto": health_pb2,
}
OURS_ALONE = {  # ours that are not in the table
    "model_config.proto": set[str](),
    "grpc_service.proto": {"message ModelMetadataResponse: 6 properties map<string,string>"},
    "health.proto": {"service Health: Watch HealthCheckRequest -> stream HealthCheckResponse"},
}


def table() -> dict[str, set[str]]:
    """Facts per file, one line each: `message Name: 1 field type`."""
    files: dict[str, set[str]] = {}
    owner = ""
    for line in filter(None, TABLE.read_text().splitlines()):
        if line.startswith("file "):
            _, proto, package = line.split()
            facts = files[proto] = {f"package {package}"}
        elif line.startswith(" "):
            facts.add(f"{owner}: {line.strip()}")
        else:
            owner = line
            facts.add(owner)
    return files


def file_facts(file: FileDescriptorProto) -> Iterator[str]:
    """Facts of a descriptor."""
    yield f"package {file.package}"
    for service in file.service:
        yield from service_facts(service, file.package)
    for message in file.message_type:
        yield from message_facts(message, message.name, file.package)
    for enum in file.enum_type:
        yield from enum_facts(enum, enum.name)


def service_facts(service: ServiceDescriptorProto, package: str) -> Iterator[str]:
    owner = f"service {service.name}"
    yield owner
    for method in service.method:
        request = "stream " * method.client_streaming + relative(method.input_type, package)
        response = "stream " * method.server_streaming + relative(method.output_type, package)
        yield f"{owner}: {method.name} {request} -> {response}"


def message_facts(message: DescriptorProto, name: str, package: str) -> Iterator[str]:
    owner = f"message {name}"
    yield owner
    for field in message.field:
        yield f"{owner}: {field.number} {field.name} {field_type(field, message, package)}"
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from message_facts(nested, f"{name}.{nested.name}", package)
    for enum in message.enum_type:
        yield from enum_facts(enum, f"{name}.{enum.name}")


def enum_facts(enum: EnumDescriptorProto, name: str) -> Iterator[str]:
    owner = f"enum {name}"
    yield owner
    for value in enum.value:
        yield f"{owner}: {value.number} {value.name}"


def field_type(field: FieldDescriptorProto, message: DescriptorProto, package: str) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = (value_type(entry, package) for entry in nested.field)
            return f"map<{key},{value}>"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"{value_type(field, package)} repeated"
    if field.HasField("oneof_index"):
        return f"{value_type(field, package)} oneof {message.oneof_decl[field.oneof_index].name}"
    return value_type(field, package)


def value_type(field: FieldDescriptorProto, package: str) -> str:
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return relative(field.type_name, package) if field.type_name else scalar


def relative(name: str, package: str) -> str:
    return name.removeprefix(f".{package}.")


def descriptor(module: ModuleType) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


def run(code: str) -> None:
    """Run `code` in a fresh interpreter; it must succeed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("proto", MODULES)
def test_descriptors_are_those_of_the_table(proto: str) -> None:
    expected = table()[proto]
    assert expected.isdisjoint(OURS_ALONE[proto])
    assert set(file_facts(descriptor(MODULES[proto]))) == expected | OURS_ALONE[proto]


def test_table_has_no_other_files() -> None:
    assert table().keys() == MODULES.keys()


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_syntax_is_proto3_without_options(module: ModuleType) -> None:
    file = descriptor(module)
    assert file.syntax == "proto3"  # repeated numbers are packed, absent scalars are zero
    assert not [f for m in file.message_type for f in m.field if f.HasField("options")]


def test_both_reflection_packages_have_the_same_messages() -> None:
    v1, v1alpha = descriptor(reflection_pb2), descriptor(reflection_v1alpha_pb2)
    assert (v1.package, v1alpha.package) == ("grpc.reflection.v1", "grpc.reflection.v1alpha")
    assert set(file_facts(v1)) - {f"package {v1.package}"} == (
        set(file_facts(v1alpha)) - {f"package {v1alpha.package}"}
    )


@pytest.mark.parametrize(
    "module", [*MODULES.values(), reflection_pb2, reflection_v1alpha_pb2], ids=lambda m: m.__name__
)
def test_module_has_all_top_level_names(module: ModuleType) -> None:
    for message in descriptor(module).message_type:
        assert issubclass(getattr(module, message.name), Message)
    for enum in descriptor(module).enum_type:
        assert getattr(module, enum.name).keys() == [value.name for value in enum.value]
        assert all(getattr(module, value.name) == value.number for value in enum.value)


def test_messages_come_from_the_private_pool() -> None:
    assert grpc_service_pb2.DESCRIPTOR.pool is POOL
    assert grpc_service_pb2.ModelInferRequest.DESCRIPTOR is (
        POOL.FindMessageTypeByName("inference.ModelInferRequest")
    )


def test_enum_values_and_names() -> None:
    assert model_config_pb2.TYPE_FP32 == model_config_pb2.DataType.Value("TYPE_FP32") == 11
    assert model_config_pb2.DataType.Name(3) == "TYPE_UINT16"
    assert model_config_pb2.ModelInstanceGroup.KIND_CPU == 2
    assert health_pb2.HealthCheckResponse.SERVING == 1


def test_infer_request_has_the_expected_bytes() -> None:
    request = grpc_service_pb2.ModelInferRequest(
        model_name="m",
        parameters={"priority": grpc_service_pb2.InferParameter(uint64_param=3)},
        inputs=[
            grpc_service_pb2.ModelInferRequest.InferInputTensor(
                name="x",
                datatype="INT64",
                shape=[2, 300],
                contents=grpc_service_pb2.InferTensorContents(int64_contents=[1, -1]),
            )
        ],
        raw_input_contents=[b"\x00\xff"],
    )
    wire = bytes.fromhex(
        "0a016d"  # model_name
        "220e 0a087072696f72697479 12022803"  # parameters: key, value
        "2a1e 0a0178 1205494e543634 1a0302ac02"  # inputs: name, datatype, packed shape
        "2a0d 1a0b01 ffffffffffffffffff01"  # its contents: packed, ten bytes for -1
        "3a0200ff"  # raw_input_contents
    )
    assert request.SerializeToString(deterministic=True) == wire
    assert grpc_service_pb2.ModelInferRequest.FromString(wire) == request


def test_config_survives_text_and_json() -> None:
    text = """
        name: "m" backend: "onnxruntime" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
        dynamic_batching { max_queue_delay_microseconds: 100 }
        instance_group { kind: KIND_CPU count: 2 }
        parameters { key: "k" value { string_value: "v" } }
    """
    config = text_format.Parse(text, model_config_pb2.ModelConfig(), descriptor_pool=POOL)
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    printed = text_format.MessageToString(config, descriptor_pool=POOL)
    assert text_format.Parse(printed, model_config_pb2.ModelConfig()) == config
    json = json_format.MessageToJson(config, preserving_proto_field_name=True, descriptor_pool=POOL)
    assert '"TYPE_FP32"' in json
    empty = model_config_pb2.ModelConfig()
    assert json_format.Parse(json, empty, descriptor_pool=POOL) == config


OURS = "import headrace.protocol.pb.grpc_service_pb2 as ours"
EXCHANGE = """
request = ours.ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
assert theirs.ModelInferRequest.FromString(request.SerializeToString()).model_name == "m"
"""


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
@pytest.mark.parametrize(("package", "theirs"), [
    ("tritonclient", "import tritonclient.grpc; from tritonclient.grpc import service_pb2"),
    ("kserve", "import kserve; from kserve.protocol.grpc import grpc_predict_v2_pb2"),
], ids=["tritonclient", "kserve"])  # fmt: skip
def test_imports_beside_a_client_in_either_order(
    package: str, theirs: str, ours_first: bool
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it cannot clash with our messages here")
    imports = [OURS, f"{theirs} as theirs"]
    run("\n".join(imports if ours_first else reversed(imports)) + EXCHANGE)


@pytest.mark.slow
def test_pure_python_protobuf_will_do() -> None:
    """The pure Python implementation is used where no wheel fits."""
    run(
        "import os; os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'python'\n"
        f"{OURS}\n"
        "from google.protobuf.internal import api_implementation\n"
        "assert api_implementation.Type() == 'python'\n"
        "m = ours.ModelConfigResponse(); m.config.name = 'm'\n"
        "assert ours.ModelConfigResponse.FromString(m.SerializeToString()) == m"
    )
