"""The body of an HTTP inference request to an `Call`.

Layout of a body with binary tensors: JSON of `Inference-Header-Content-Length` bytes, then the
bytes of each binary tensor in the order in which the JSON names them. Without that header the whole
body is JSON; with the value 0 the whole body is the data of the model's only input.

Strategy for speed: orjson reads the JSON at once; binary tensors become views into the body.
"""

import re
from typing import Any

import numpy as np
import orjson

from headrace.core.bytes_array import bytes_array
from headrace.core.call import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    Call,
    Parameter,
    Raw,
    Shared,
)
from headrace.core.datatypes import BY_NAME, ITEM_SIZES, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Signature, quoted
from headrace.core.tensors import MAX_RANK, Buffer, Tensor, brackets, elsewhere, too_many_dimensions
from headrace.core.texts import bounded
from headrace.wire.classification import check_class_count
from headrace.wire.elements import (
    Charge,
    json_name,
    tensor_from_flat,
    tensor_from_json,
    tensor_from_long,
    uncharged,
)
from headrace.wire.http_response import ResponseForm, SharedForm
from headrace.wire.json_text import LONG, LongArray, parse_json, parse_piece
from headrace.wire.parameters import (
    REGION,
    shared_input,
    shared_output,
    split_parameters,
    too_many_parameters,
)

_TRANSPORT = frozenset({"binary_data_output"})
_INT = frozenset({int})
# Of `Shared`, among the arguments for a request.
_SHARED_INPUTS, _SHARED_OUTPUTS = "shared_inputs", "shared_outputs"
_SHARED = frozenset({_SHARED_INPUTS, _SHARED_OUTPUTS})
_JSON_SIZE = re.compile(r"-?[0-9]{1,10}")


def decode_infer(
    model: str,
    version: str,
    body: Buffer,
    json_size: int | None,
    signature: Signature | None = None,
    charge: Charge = uncharged,
) -> tuple[Call, ResponseForm]:
    """Decode a body whose first `json_size` bytes are JSON, all of it for None.

    Inputs with much data that do not fit `signature`, if there is one, are refused before their
    data is decoded; the check as a whole comes later. `charge` is called with the bytes that long
    data is about to take. Raises `InvalidRequest`, and what `charge` raises.
    """
    size = len(body)
    quick = False
    if size <= LONG:
        body = bytes(body)
        quick = body.rfind(b"true", 0, json_size) < 0 and body.rfind(b"false", 0, json_size) < 0
    if json_size is None:
        document, tail = parse_json(body, lifts=True), memoryview(b"")
    else:
        view = memoryview(body)
        document, tail = parse_json(view[:json_size], lifts=True), view[json_size:]
    if type(document) is not dict:
        raise InvalidRequest(f"the request must be a JSON object, got {json_name(type(document))}")
    request_id = document.get("id", "")
    if type(request_id) is not str:
        request_id = _member(document, "id", str, "")
    form = ResponseForm()
    reserved: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    if document.get("parameters") is not None:
        parameters = _member(document, "parameters", dict, None)
        reserved, custom = split_parameters(parameters, _TRANSPORT)
        form.binary = parameters.get("binary_data_output", False)
        if type(form.binary) is not bool:
            raise InvalidRequest(
                "parameter 'binary_data_output' must be a boolean,"
                f" got {json_name(type(form.binary))}"
            )
    inputs = document.get("inputs")
    if type(inputs) is not list:
        inputs = _member(document, "inputs", list, None)
    if len(inputs) > MAX_TENSORS:
        raise InvalidRequest(f"a request may have {MAX_TENSORS} inputs, got {len(inputs)}")
    tensors: dict[str, Tensor] = {}
    position = 0
    for item in inputs:
        flat = tensor_from_flat(item) if quick and type(item) is dict else None
        if flat is None:
            tensor, position = _input(
                item, tail, position, signature, reserved, charge, model, request_id
            )
        else:
            tensor = flat
        if tensor.name in tensors:
            raise InvalidRequest(f"input '{tensor.name}' already exists in request")
        tensors[tensor.name] = tensor
    if position != len(tail):
        raise InvalidRequest(
            f"unexpected additional input data for model '{model}':"
            f" {len(tail)} bytes follow the JSON, the inputs use {position}"
        )
    outputs: tuple[str, ...] = ()
    classes: dict[str, int] | None = None
    if document.get("outputs") is not None:
        wanted = _member(document, "outputs", list, None)
        classes = _outputs(wanted, form, reserved) or None
        outputs = tuple(form.named)
    if not reserved:  # as nearly always; arguments without names are the quickest
        request = Call(
            model, version, request_id, tensors, outputs, custom, 0, 0, 0, False, False, classes,
            size,
        )  # fmt: skip
        return request, form
    if not reserved.keys().isdisjoint(_SHARED):
        here = {n: t for n, t in tensors.items() if n not in reserved.get(_SHARED_INPUTS, ())}
        shared = Shared(reserved.pop(_SHARED_INPUTS, {}), reserved.pop(_SHARED_OUTPUTS, {}))
        request = Call(
            model, version, request_id, here, outputs, custom, classes=classes or {}, nbytes=size,
            shared=shared, **reserved,
        )  # fmt: skip
        if shared.outputs:
            form = SharedForm(form.binary, form.named, frozenset(shared.outputs))
        return request, form
    request = Call(
        model, version, request_id, tensors, outputs, custom, classes=classes, nbytes=size,
        **reserved,
    )  # fmt: skip
    return request, form


def decode_raw(
    signature: Signature, model: str, version: str, body: Buffer
) -> tuple[Call, ResponseForm]:
    """Decode a body that is nothing but the data of a model's only input; one row if it batches.

    A variable dimension (one at most) is found from the number of bytes. Raises `InvalidRequest`.
    """
    if len(signature.inputs) != 1:
        raise InvalidRequest(
            f"Raw request must only have 1 input (found 1) to be deduced but got"
            f" {len(signature.inputs)} inputs in '{signature.model}' model configuration"
        )
    spec = signature.inputs[0]
    lead = [1] if signature.batches else []
    if spec.datatype is Datatype.BYTES:
        if any(d != 1 for d in spec.dims):
            raise InvalidRequest(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1],"
                f" not {brackets(spec.dims)}"
            )
        tensor = Tensor(
            spec.name, spec.datatype, bytes_array([bytes(body)], [*lead, *(1 for _ in spec.dims)])
        )
    else:
        shape = lead + list(spec.dims)
        if shape.count(-1) > 1:
            raise InvalidRequest(
                f"The shape of the raw input '{spec.name}' can not be deduced because there are"
                f" more than one variable-sized dimension in {brackets(spec.dims)}"
            )
        if -1 in shape:
            unit = ITEM_SIZES[spec.datatype]
            for d in shape:
                unit *= 1 if d == -1 else d
            shape[shape.index(-1)] = len(body) // unit if unit else 0
        tensor = Tensor.from_bytes(spec.name, spec.datatype, shape, body, model)
    request = Call(model, version, "", {spec.name: tensor}, nbytes=len(body))
    return request, ResponseForm(binary=True)


def pass_raw(model: str, version: str, body: Buffer, raw: Raw = Raw.INFER) -> Call:
    """Take a body as it is where the signature is not known; `body_of` gives it back."""
    tensor = Tensor("", Datatype.UINT8, np.frombuffer(body, np.uint8))
    return Call(model, version, "", {"": tensor}, nbytes=len(body), raw=raw)


def body_of(request: Call) -> Buffer:
    """The body that `pass_raw` was given."""
    return request.inputs[""].array.data


def parse_json_size(header: str | None, body_size: int) -> int | None:
    """The value of Inference-Header-Content-Length, None if there is no such header.

    Raises `InvalidRequest` unless it is a number from 0 to the size of the body.
    """
    if header is None:
        return None
    if not _JSON_SIZE.fullmatch(header):  # int() takes "1_0", " 1" and digits of other scripts too
        raise InvalidRequest(f"Unable to parse Inference-Header-Content-Length, got: {header[:40]}")
    value = int(header)
    if not 0 <= value <= body_size:
        raise InvalidRequest(
            f"inference header size should be in range (0, {body_size}), got: {value}"
        )
    return value


def error_body(text: str) -> bytes:
    """The protocol's form of an error; what is not Unicode in the text becomes question marks.

    The text is cut to a length that holds for all doors.
    """
    return orjson.dumps({"error": bounded(text)})


def takes_long(body: Buffer, json_size: str | None, signature: Signature | None) -> bool:
    """Whether a body of more than `LONG` bytes takes long to decode; `json_size` is the header.

    Binary tensors of fixed size do not: they stay where they are.
    """
    if json_size is None:
        return True
    if json_size == "0":
        return signature is not None and any(s.datatype is Datatype.BYTES for s in signature.inputs)
    if not _JSON_SIZE.fullmatch(json_size) or int(json_size) > LONG:
        return True
    head = bytes(body[: max(int(json_size), 0)])
    return b"BYTES" in head or b"\\" in head  # by which it can be written otherwise


def _member(document: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A member of a JSON object, checked for its type; required if `default` is None."""
    value = document.get(name)
    if type(value) is kind:
        return value
    if value is None and default is not None:
        return default  # many clients write null for what they do not set
    if name not in document:
        raise InvalidRequest(f"Unable to parse '{name}': the request has no member '{name}'")
    raise InvalidRequest(
        f"Unable to parse '{name}': expected {json_name(kind)}, got {json_name(type(value))}"
    )


def _input(
    item: Any,
    tail: memoryview,
    position: int,
    signature: Signature | None,
    reserved: dict[str, Any],
    charge: Charge,
    model: str,
    request_id: str,
) -> tuple[Tensor, int]:
    """One tensor, and where the binary data of the next one begins.

    Of one in shared memory the place is put into `reserved`.
    """
    if type(item) is not dict:
        raise InvalidRequest(
            f"Unable to parse 'inputs': expected an object, got {json_name(type(item))}"
        )
    name = _member(item, "name", str, None)
    shape = _member(item, "shape", list, None)
    if len(shape) > MAX_RANK:  # first, because the other messages show the shape
        raise too_many_dimensions(name, shape)
    # bool is an int to Python, not to JSON; a set of exact types tells them apart.
    if not set(map(type, shape)) <= _INT or (shape and min(shape) < 0):
        raise InvalidRequest(
            f"Unable to parse 'shape' of input '{name}': expected non-negative integers"
            " (attempt to access JSON non-unsigned-integer as unsigned-integer)"
        )
    text = _member(item, "datatype", str, None)
    datatype = BY_NAME.get(text)
    if datatype is None:
        raise InvalidRequest(
            f"input '{name}' has the unknown datatype '{text}', expected one of {quoted(BY_NAME)}"
        )
    binary_size = region = None
    if item.get("parameters") is not None:
        parameters = _member(item, "parameters", dict, None)
        if len(parameters) > MAX_PARAMETERS:
            raise too_many_parameters(f"input '{name}'", len(parameters))
        binary_size = parameters.get("binary_data_size")
        region = parameters.get(REGION)
    if (("data" in item) + (binary_size is not None) + (region is not None)) != 1:
        raise InvalidRequest(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in"
            " 'parameters', 'shared_memory_region' in 'parameters'."
            f" Input '{name}' sets none or several"
        )
    if region is not None:
        shared = reserved.setdefault(_SHARED_INPUTS, {})
        if name not in shared:  # the caller complains of a second one
            shared[name] = shared_input(name, datatype, shape, parameters, model, request_id)
        return elsewhere(name, datatype, shape), position
    if binary_size is None:
        data = item["data"]
        if type(data) is LongArray:
            if signature is not None:
                signature.check_tensor(name, datatype, shape)
            return tensor_from_long(name, datatype, shape, data, parse_piece, charge), position
        data = _member(item, "data", list, None)
        if len(data) > LONG and signature is not None:
            signature.check_tensor(name, datatype, shape)
        return tensor_from_json(name, datatype, shape, data), position
    if type(binary_size) is not int or binary_size < 0:
        raise InvalidRequest(f"'binary_data_size' of input '{name}' must be a non-negative integer")
    end = position + binary_size
    if end > len(tail):
        raise InvalidRequest(
            f"unexpected size for input '{name}', expecting {end - len(tail)} additional bytes"
        )
    raw = tail[position:end]
    if datatype is Datatype.BYTES and binary_size > LONG and signature is not None:
        signature.check_tensor(name, datatype, shape)
    return Tensor.from_bytes(name, datatype, shape, raw, model, request_id), end


def _outputs(items: list[Any], form: ResponseForm, reserved: dict[str, Any]) -> dict[str, int]:
    """Put how each named output is to be sent into `form`; the class counts of those that ask.

    Of one that is to be put into shared memory the place is put into `reserved`.
    """
    classes: dict[str, int] = {}
    if len(items) > MAX_TENSORS:
        raise InvalidRequest(f"a request may name {MAX_TENSORS} outputs, got {len(items)}")
    for item in items:
        if type(item) is not dict:
            raise InvalidRequest(
                f"Unable to parse 'outputs': expected an object, got {json_name(type(item))}"
            )
        name = _member(item, "name", str, None)
        if name in form.named:
            raise InvalidRequest(f"output '{name}' already exists in request")
        parameters = _member(item, "parameters", dict, {})
        if len(parameters) > MAX_PARAMETERS:
            raise too_many_parameters(f"output '{name}'", len(parameters))
        if (count := parameters.get("classification", 0)) != 0:
            classes[name] = check_class_count(name, count)
        binary = parameters.get("binary_data", False)
        if type(binary) is not bool:
            raise InvalidRequest(
                f"'binary_data' of output '{name}' must be a boolean, got {json_name(type(binary))}"
            )
        form.named[name] = binary
        if REGION in parameters and parameters[REGION] is not None:
            if binary:
                raise InvalidRequest(
                    f"output '{name}': 'binary_data' can not be true with '{REGION}'"
                )
            place = shared_output(name, parameters)
            reserved.setdefault(_SHARED_OUTPUTS, {})[name] = place
    return classes
