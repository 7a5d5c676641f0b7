"""`ModelInferRequest` messages to requests, and responses to `ModelInferResponse` messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from headrace.core.call import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    Call,
    InferResponse,
    Parameter,
    Shared,
    SharedInput,
    Stretch,
)
from headrace.core.datatypes import BY_NAME, ITEM_SIZES, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Signature, quoted
from headrace.core.tensors import Buffer, Tensor, byte_size_mismatch, element_count, raw_bytes
from headrace.wire.classification import check_class_count
from headrace.wire.elements import tensor_from_values
from headrace.wire.grpc_contents import CONTENTS, Contents, check_fields, tensor_from_contents
from headrace.wire.parameters import (
    PARAMETERS,
    REGION,
    shared_input,
    shared_output,
    split_parameters,
    too_many_parameters,
)
from headrace.wire.pb import grpc_service_pb2 as pb

LONG = 64 << 10  # bytes of a message above which it pays to look before it is parsed
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_TRANSPORT = frozenset({EMPTY_FINAL_RESPONSE, "binary_data_output"})
_OF_SHARED = frozenset({*PARAMETERS, "classification"})


def parse_infer(data: Buffer) -> pb.ModelInferRequest:
    """The message in `data`; raises `InvalidRequest`."""
    if len(data) > LONG:
        check_fields(data)
    try:
        return pb.ModelInferRequest.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError as error:
        raise InvalidRequest(f"not a valid ModelInferRequest message: {error}") from None


def decode_infer(
    message: pb.ModelInferRequest,
    nbytes: int,
    raw: Sequence[Buffer] | None = None,
    signature: Signature | None = None,
    contents: Contents | None = None,
) -> Call:
    """Turn a message of `nbytes` bytes into a request; raises `InvalidRequest`.

    `raw` are its raw contents where the message itself was parsed without them, `contents` those of
    each input where it was parsed without these. Inputs with much data that do not fit `signature`,
    if there is one, are refused before their data is decoded; the check as a whole comes later.
    """
    parameters = {name: _value(name, value) for name, value in message.parameters.items()}
    reserved, custom = split_parameters(parameters, _TRANSPORT)
    if type(parameters.get(EMPTY_FINAL_RESPONSE, False)) is not bool:
        raise InvalidRequest(
            f"invalid value type for '{EMPTY_FINAL_RESPONSE}' parameter, expected bool_param"
        )
    if len(message.inputs) > MAX_TENSORS:
        raise InvalidRequest(f"a request may have {MAX_TENSORS} inputs, got {len(message.inputs)}")
    tensors: dict[str, Tensor] = {}
    shared: dict[str, SharedInput] = {}
    if raw is None:
        raw = message.raw_input_contents
    for number, item in enumerate(message.inputs):
        name = item.name
        if name in tensors or name in shared:
            raise InvalidRequest(f"input '{name}' already exists in request")
        datatype = BY_NAME.get(item.datatype)
        if datatype is None:
            raise InvalidRequest(
                f"input '{name}' has the unknown datatype '{item.datatype}',"
                f" expected one of {quoted(BY_NAME)}"
            )
        if len(item.parameters) > MAX_PARAMETERS:
            raise too_many_parameters(f"input '{name}'", len(item.parameters))
        filled = item.HasField("contents") if contents is None else bool(contents.spans[number])
        if REGION in item.parameters:
            if filled:
                raise InvalidRequest(
                    "unexpected 'content' provided when using shared memory for input tensor"
                    f" '{name}' for model '{message.model_name}'"
                )
            shared[name] = shared_input(
                name, datatype, item.shape, _values(item.parameters), message.model_name,
                message.id,
            )  # fmt: skip
            continue
        if not raw:
            if contents is None:
                tensors[name] = _from_contents(item, datatype, message.model_name, message.id)
                continue
            if signature is not None:
                signature.check_tensor(name, datatype, item.shape)
            tensors[name] = tensor_from_contents(
                name, datatype, list(item.shape), contents.data, contents.spans[number],
                message.model_name, message.id, contents.charge,
            )  # fmt: skip
            continue
        if filled:
            raise InvalidRequest(
                f"contents field must not be specified when using raw_input_contents for '{name}'"
                f" for model '{message.model_name}'"
            )
        index = len(tensors)  # those in shared memory have no entry
        if index >= len(raw):
            raise InvalidRequest(
                f"unable to find data for input tensor '{name}' for model '{message.model_name}'"
                " in request. Expected an entry in raw_input_contents for each input that is not in"
                f" shared memory, of {len(message.inputs)} inputs, got {len(raw)}"
            )
        if datatype is Datatype.BYTES and signature is not None and len(raw[index]) > LONG:
            signature.check_tensor(name, datatype, item.shape)
        tensors[name] = Tensor.from_bytes(
            name, datatype, list(item.shape), raw[index], message.model_name, message.id
        )
    outputs, classes, places = _outputs(message)
    names = message.model_name, message.model_version, message.id
    if shared or places:
        return Call(
            *names, tensors, outputs, custom, classes=classes, nbytes=nbytes, **reserved,
            shared=Shared(shared, places),
        )  # fmt: skip
    return Call(
        *names, tensors, outputs, custom, classes=classes or None, nbytes=nbytes, **reserved
    )


def wants_empty_final(message: pb.ModelInferRequest) -> bool:
    """Whether an end without a response is to be a message; after `decode_infer`."""
    return EMPTY_FINAL_RESPONSE in message.parameters and bool(
        message.parameters[EMPTY_FINAL_RESPONSE].bool_param
    )


def encode_infer(response: InferResponse) -> pb.ModelInferResponse:
    """The answer as a message; tensors are always in `raw_output_contents`, as Triton does it."""
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


def set_parameter(
    message: pb.ModelInferRequest | pb.ModelInferResponse, name: str, value: Parameter
) -> None:
    """Put a parameter into a message under the field of its type."""
    parameter = message.parameters[name]
    if isinstance(value, bool):  # before int: bool is one
        parameter.bool_param = value
    elif isinstance(value, int):
        if value >> 63 > 0:  # JSON has such ones
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def parameter_values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Parameter]:
    """Parameters of a message as values; one without a value is left out."""
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        if choice := parameter.WhichOneof("parameter_choice"):
            found[name] = getattr(parameter, choice)
    return found


def _value(name: str, parameter: pb.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None or (choice == "uint64_param" and name != "priority"):
        raise InvalidRequest(
            f"invalid value type for '{name}' parameter,"
            " expected int64_param, bool_param, string_param or double_param"
        )
    return getattr(parameter, choice)


def _from_contents(
    item: pb.ModelInferRequest.InferInputTensor, datatype: Datatype, model: str, request_id: str
) -> Tensor:
    name = item.name
    expected = CONTENTS.get(datatype)
    if expected is None:
        raise InvalidRequest(
            f"{datatype} data has no typed contents; use raw_input_contents for input '{name}'"
            f" for model '{model}'"
        )
    filled = [field.name for field, _ in item.contents.ListFields()]
    if any(field != expected for field in filled):
        raise InvalidRequest(
            f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type"
            f" '{datatype}', expected {expected}, got {' and '.join(filled)}"
        )
    values: Sequence[Any] = getattr(item.contents, expected)
    shape = list(item.shape)
    if len(values) != (count := element_count(name, shape)):
        if datatype is Datatype.BYTES:
            raise InvalidRequest(
                f"expected {count} string elements for inference input '{name}'"
                f" for model '{model}', got {len(values)}"
            )
        got = len(values) * ITEM_SIZES[datatype]
        raise byte_size_mismatch(name, datatype, shape, got, model, request_id)
    return tensor_from_values(name, datatype, shape, values)


def _outputs(
    message: pb.ModelInferRequest,
) -> tuple[tuple[str, ...], dict[str, int], dict[str, Stretch]]:
    """The wanted outputs, the class counts of some, and the places of those for shared memory."""
    classes: dict[str, int] = {}
    shared: dict[str, Stretch] = {}
    if len(message.outputs) > MAX_TENSORS:
        raise InvalidRequest(
            f"a request may name {MAX_TENSORS} outputs, got {len(message.outputs)}"
        )
    names: dict[str, None] = {}
    for item in message.outputs:
        if item.name in names:
            raise InvalidRequest(f"output '{item.name}' already exists in request")
        if REGION in item.parameters:
            shared[item.name] = shared_output(item.name, _values(item.parameters))
        elif "classification" in item.parameters:
            count = _value("classification", item.parameters["classification"])
            classes[item.name] = check_class_count(item.name, count)
        if len(item.parameters) > MAX_PARAMETERS:
            raise too_many_parameters(f"output '{item.name}'", len(item.parameters))
        names[item.name] = None
    return tuple(names), classes, shared


def _values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Those parameters of a tensor that have to do with shared memory."""
    return {n: _value(n, given) for n, given in parameters.items() if n in _OF_SHARED}
