"""Infer messages encoded by protobuf alone."""

from headrace.core.call import InferResponse
from headrace.core.tensors import raw_bytes
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_protobuf import set_parameter


def encode_infer(response: InferResponse) -> pb.ModelInferResponse:
    """Encode a response with `raw_output_contents`, like Triton."""
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    for tensor in response.outputs:
        message.outputs.add(
            name=tensor.name, datatype=tensor.datatype.value, shape=tensor.array.shape
        )
        message.raw_output_contents.append(bytes(raw_bytes(tensor.array)))
    for name, value in response.parameters.items():
        set_parameter(message, name, value)
    return message
