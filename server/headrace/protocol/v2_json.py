"""V2 JSON over HTTP, both directions, for the server and for clients of upstreams.

Layout of a body with binary tensors: JSON of `Inference-Header-Content-Length` bytes, then the
bytes of each binary tensor in the order of the JSON. Without that header the whole body is JSON;
with the value 0 the whole body of a request is the data of the model's only input.

A server decodes requests by `decode_infer` and encodes responses by a `ResponseForm`. orjson parses
the JSON at once; binary tensors become views into the body; orjson writes arrays, which are
inserted into the response as ready fragments. Plain requests and responses take the fast path of
`plain_json`.

A client encodes requests by `write_request`, which sends binary tensors without copying them, and
decodes responses by `read_answer`, whose binary tensors are views, too.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import orjson

from headrace.core.bytes_array import bytes_array
from headrace.core.call import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    SHORT_TEXT,
    Call,
    CallOptions,
    InferResponse,
    Parameter,
    Raw,
    RegionSlice,
    Shared,
    SharedInput,
    Timing,
)
from headrace.core.datatypes import BY_NAME, ITEM_SIZES, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature, quoted
from headrace.core.tensors import (
    MAX_RANK,
    Buffer,
    Tensor,
    TensorArray,
    brackets,
    concatenated,
    elsewhere,
    raw_bytes,
    too_many_dimensions,
)
from headrace.core.texts import bounded
from headrace.protocol.classification import check_class_count
from headrace.protocol.elements import (
    NOT_IN_JSON,
    array_of_json,
    json_elements,
    json_name,
    json_pieces,
    tensor_from_flat,
    tensor_from_json,
    tensor_from_long,
)
from headrace.protocol.json_text import LONG, LongArray, parse_json
from headrace.protocol.parameters import (
    ALL_OUTPUTS,
    REGION,
    call_options,
    check_text,
    json_parameters,
    region_parameters,
    shared_input,
    shared_output,
    split_parameters,
    too_many_parameters,
)

JSON_SIZE = "inference-header-content-length"  # the header's name
_JSON_SIZE = re.compile(r"-?[0-9]{1,10}")
_TRANSPORT = frozenset({"binary_data_output", ALL_OUTPUTS})
# Bytes of JSON beside long arrays: more than all tensors and parameters that a request may have.
MAX_BESIDE = 8 << 20
_INT = frozenset({int})
_NOTHING: dict[str, Any] = {}


@dataclass(slots=True)
class ResponseForm:
    """Forms of the outputs: `named` ones are set singly, all others by `binary`.

    Outputs in `shared` are in shared memory: they come without data, after the others, unless they
    did not fit.
    """

    binary: bool = False
    named: dict[str, bool] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    def encode(
        self, response: InferResponse, charge: Charge = uncharged
    ) -> tuple[list[Buffer], int | None]:
        """Return the body as buffers, and the size of the JSON if binary tensors follow it.

        `charge` is called with the size of each piece of long JSON. Raises `InvalidRequest` if an
        output has no JSON form, and whatever `charge` raises.
        """
        parts = [b"{"]
        if response.id:
            parts += (b'"id":', orjson.dumps(response.id), b",")
        parts.append(model_text(response.model_name, response.model_version))
        if response.parameters:
            parts += (b'"parameters":', json_parameters(response.parameters), b",")
        parts.append(b'"outputs":[')
        buffers: list[Buffer] = [b""]
        behind: list[bytes] = []
        binary = written = False
        for tensor in response.outputs:
            name, datatype, array = tensor
            head = tensor_text(name, datatype, array.shape)
            if name in self.shared and not array.nbytes:
                behind += (head[:-1], b"},")
            elif self.named.get(name, self.binary):
                raw = raw_bytes(array)
                parts += (head, b'"parameters":{"binary_data_size":%d}},' % len(raw))
                if raw:
                    buffers.append(raw)
                    binary = True
            else:
                parts += (head, b'"data":', *json_pieces(tensor, charge=charge), b"},")
                written = True
        parts += behind
        if response.outputs:
            parts[-1] = parts[-1][:-1]  # no trailing comma
        parts.append(b"]}")
        size = sum(map(len, parts)) if written else 0
        if size > LONG:  # stays in pieces: one buffer for all of it would take its size once more
            buffers[:1] = parts
        else:
            buffers[0] = text = b"".join(parts)
            size = len(text)
        return buffers, size if binary else None


@lru_cache(1024)
def model_text(model: str, version: str) -> bytes:
    """The members of a response that name its model and version."""
    return orjson.dumps({"model_name": model, "model_version": version})[1:-1] + b","


@lru_cache(4096)
def tensor_text(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    """The beginning of an output, up to its data or parameters."""
    return orjson.dumps({"name": name, "datatype": datatype, "shape": shape})[:-1] + b","


# --- requests, decoded by the server


def decode_infer(
    model: str,
    version: str,
    body: Buffer,
    json_size: int | None,
    signature: Signature | None = None,
    charge: Charge = uncharged,
) -> tuple[Call, ResponseForm]:
    """Decode a body whose first `json_size` bytes are JSON; None: all of it.

    Large inputs that do not fit `signature`, if given, are refused before their data is decoded;
    the complete check is the caller's. `charge` is called with the decoded size of long data, and
    of what is beside it in a long body. Raises `InvalidRequest`, and whatever `charge` raises.
    """
    size = len(body)
    quick = False
    if size <= LONG:
        body = bytes(body)
        quick = body.rfind(b"true", 0, json_size) < 0 and body.rfind(b"false", 0, json_size) < 0
    document, tail = _parse(body, json_size, MAX_BESIDE, charge)
    if type(document) is not dict:
        raise InvalidRequest(f"the request must be a JSON object, got {json_name(type(document))}")
    request_id = document.get("id", "")
    if type(request_id) is not str:
        request_id = _member(document, "id", str, "")
    if len(request_id) > SHORT_TEXT:
        check_text("the id of a request", request_id)
    form = ResponseForm()
    every = False  # output is requested
    reserved: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    if document.get("parameters") is not None:
        parameters = _member(document, "parameters", dict)
        reserved, custom = split_parameters(parameters, _TRANSPORT)
        every = parameters.get(ALL_OUTPUTS) is True
        form.binary = parameters.get("binary_data_output", False)
        if type(form.binary) is not bool:
            raise InvalidRequest(
                "parameter 'binary_data_output' must be a boolean,"
                f" got {json_name(type(form.binary))}"
            )
    inputs = _Inputs(tail, signature, charge, model, request_id)
    items = _tensors(document, "inputs")
    if len(items) > MAX_TENSORS:
        raise InvalidRequest(f"a request may have {MAX_TENSORS} inputs, got {len(items)}")
    for item in items:
        tensor = (tensor_from_flat(item) if quick else None) or inputs.read(item)
        if tensor.name in inputs.found:
            raise InvalidRequest(f"input '{tensor.name}' already exists in request")
        inputs.found[tensor.name] = tensor
    if inputs.position != len(tail):
        raise InvalidRequest(
            f"unexpected additional input data for model '{model}':"
            f" {len(tail)} bytes follow the JSON, the inputs use {inputs.position}"
        )
    classes: dict[str, int] = {}
    places: dict[str, RegionSlice] = {}
    if document.get("outputs") is not None:
        classes, places = _outputs(_tensors(document, "outputs"), form)
    tensors, shared = inputs.found, None
    if inputs.shared or places:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in inputs.shared}
        shared = Shared(inputs.shared, places)
        form.shared = frozenset(places)
    call = Call(
        model, version, request_id, tensors, () if every else tuple(form.named), custom,
        call_options(reserved, classes, shared), size,
    )  # fmt: skip
    return call, form


class _Inputs:
    """Decoder for the inputs of one request."""

    def __init__(
        self,
        tail: memoryview,
        signature: Signature | None,
        charge: Charge,
        model: str,
        request_id: str,
    ) -> None:
        self.found: dict[str, Tensor] = {}
        self.shared: dict[str, SharedInput] = {}  # the inputs in shared memory
        self.position = 0  # start of the next input's binary data
        self._tail = tail
        self._signature = signature
        self._charge = charge
        self._model = model
        self._id = request_id

    def read(self, item: dict[str, Any]) -> Tensor:
        """Decode the next input; raises `InvalidRequest`, and whatever `charge` raises."""
        name, datatype, shape, parameters = _head(item, "input")
        binary_size, region = parameters.get("binary_data_size"), parameters.get(REGION)
        if (("data" in item) + (binary_size is not None) + (region is not None)) != 1:
            raise InvalidRequest(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in"
                " 'parameters', 'shared_memory_region' in 'parameters'."
                f" Input '{name}' sets none or several"
            )
        if region is not None:
            if name not in self.shared:  # the caller refuses duplicates
                place = shared_input(name, datatype, shape, parameters, self._model, self._id)
                self.shared[name] = place
            return elsewhere(name, datatype, shape)
        if binary_size is None:
            return self._read_json(name, datatype, shape, item)
        raw = _binary("input", name, binary_size, self._tail, self.position)
        self.position += binary_size
        if datatype is Datatype.BYTES and binary_size > LONG:
            self._check(name, datatype, shape)
        return Tensor.from_bytes(name, datatype, shape, raw, self._model, self._id)

    def _read_json(
        self, name: str, datatype: Datatype, shape: list[int], item: dict[str, Any]
    ) -> Tensor:
        data = item["data"]
        if type(data) is LongArray:
            self._check(name, datatype, shape)
            return tensor_from_long(name, datatype, shape, data, self._charge)
        data = _member(item, "data", list)
        if len(data) > LONG:
            self._check(name, datatype, shape)
        return tensor_from_json(name, datatype, shape, data)

    def _check(self, name: str, datatype: Datatype, shape: list[int]) -> None:
        if self._signature is not None:
            self._signature.check_tensor(name, datatype, shape)


def _outputs(
    items: list[dict[str, Any]], form: ResponseForm
) -> tuple[dict[str, int], dict[str, RegionSlice]]:
    """Store the form of each named output in `form`.

    Returns class counts of classified outputs, and the places of outputs in shared memory.
    """
    classes: dict[str, int] = {}
    places: dict[str, RegionSlice] = {}
    if len(items) > MAX_TENSORS:
        raise InvalidRequest(f"a request may name {MAX_TENSORS} outputs, got {len(items)}")
    for item in items:
        name = _member(item, "name", str)
        if name in form.named:
            raise InvalidRequest(f"output '{name}' already exists in request")
        parameters = _parameters(item, f"output '{name}'")
        if (count := parameters.get("classification", 0)) != 0:
            classes[name] = check_class_count(name, count)
        binary = parameters.get("binary_data", False)
        if type(binary) is not bool:
            raise InvalidRequest(
                f"'binary_data' of output '{name}' must be a boolean, got {json_name(type(binary))}"
            )
        form.named[name] = binary
        if parameters.get(REGION) is not None:
            if binary:
                raise InvalidRequest(
                    f"output '{name}': 'binary_data' can not be true with '{REGION}'"
                )
            places[name] = shared_output(name, parameters)
    return classes, places


def decode_raw(
    signature: Signature, model: str, version: str, body: Buffer
) -> tuple[Call, ResponseForm]:
    """Decode a body that consists of the data of a model's only input; one row if it batches.

    One variable dimension is derived from the number of bytes. Raises `InvalidRequest`.
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
    """Wrap an undecoded body, for callers without the signature; `body_of` returns it."""
    tensor = Tensor("", Datatype.UINT8, np.frombuffer(body, np.uint8))
    return Call(model, version, "", {"": tensor}, options=CallOptions(raw=raw), nbytes=len(body))


def body_of(request: Call) -> Buffer:
    """The body passed to `pass_raw`."""
    return request.inputs[""].array.data


def parse_json_size(header: str | None, body_size: int) -> int | None:
    """Parse Inference-Header-Content-Length; None if the header is missing.

    Raises `InvalidRequest` unless it is a number from 0 to the size of the body.
    """
    if header is None:
        return None
    if not _JSON_SIZE.fullmatch(header):  # int() accepts "1_0", " 1" and non-ASCII digits, too
        raise InvalidRequest(f"Unable to parse Inference-Header-Content-Length, got: {header[:40]}")
    value = int(header)
    if not 0 <= value <= body_size:
        raise InvalidRequest(
            f"inference header size should be in range (0, {body_size}), got: {value}"
        )
    return value


def error_body(text: str) -> bytes:
    """The protocol's form of an error; characters that are not valid Unicode become question marks.

    The text is cut to the length common to all doors.
    """
    return orjson.dumps({"error": bounded(text)})


def takes_long(body: Buffer, json_size: str | None, signature: Signature | None) -> bool:
    """True if a body of more than `LONG` bytes is slow to decode; `json_size` is the header.

    Binary tensors of fixed-size datatypes are not: they are used in place.
    """
    if json_size is None:
        return True
    if json_size == "0":
        return signature is not None and any(s.datatype is Datatype.BYTES for s in signature.inputs)
    if not _JSON_SIZE.fullmatch(json_size) or int(json_size) > LONG:
        return True
    head = bytes(body[: max(int(json_size), 0)])
    return b"BYTES" in head or b"\\" in head  # an escape may spell BYTES differently


# --- common to requests and responses


def _parse(
    body: Buffer, json_size: int | None, lifts: int = 0, charge: Charge = uncharged
) -> tuple[Any, memoryview]:
    """Parse the JSON part; returns it and the binary data behind it.

    `lifts` and `charge` as in `parse_json`.
    """
    if json_size is None:
        return parse_json(body, lifts, charge), memoryview(b"")
    view = memoryview(body)
    return parse_json(view[:json_size], lifts, charge), view[json_size:]


def _member(
    document: dict[str, Any], name: str, kind: type, default: Any = None, whole: str = "request"
) -> Any:
    """A member of a JSON object, checked for its type; required if `default` is None."""
    value = document.get(name)
    if type(value) is kind:
        return value
    if value is None and default is not None:
        return default  # many clients write null for unset members
    if name not in document:
        raise InvalidRequest(f"Unable to parse '{name}': the {whole} has no member '{name}'")
    raise InvalidRequest(
        f"Unable to parse '{name}': expected {json_name(kind)}, got {json_name(type(value))}"
    )


def _tensors(document: dict[str, Any], name: str, whole: str = "request") -> list[dict[str, Any]]:
    """The inputs or outputs of a document; each must be an object."""
    items: list[dict[str, Any]] = _member(document, name, list, None, whole)
    for item in items:
        if type(item) is not dict:
            raise InvalidRequest(
                f"Unable to parse '{name}': expected an object, got {json_name(type(item))}"
            )
    return items


def _parameters(item: dict[str, Any], what: str) -> dict[str, Any]:
    """The parameters of a tensor."""
    if item.get("parameters") is None:
        return _NOTHING
    parameters: dict[str, Any] = _member(item, "parameters", dict)
    if len(parameters) > MAX_PARAMETERS:
        raise too_many_parameters(what, len(parameters))
    return parameters


def _head(
    item: dict[str, Any], kind: str, whole: str = "request"
) -> tuple[str, Datatype, list[int], dict[str, Any]]:
    """Return name, datatype, shape and parameters of a tensor; `kind` is `input` or `output`."""
    name = _member(item, "name", str, None, whole)
    shape = _member(item, "shape", list, None, whole)
    if len(shape) > MAX_RANK:  # checked first, because the other messages show the shape
        raise too_many_dimensions(name, shape)
    # bool is an int in Python, but not in JSON; a set of exact types tells them apart.
    if not set(map(type, shape)) <= _INT or (shape and min(shape) < 0):
        raise InvalidRequest(
            f"Unable to parse 'shape' of {kind} '{name}': expected non-negative integers"
            " (attempt to access JSON non-unsigned-integer as unsigned-integer)"
        )
    text = _member(item, "datatype", str, None, whole)
    datatype = BY_NAME.get(text)
    if datatype is None:
        raise InvalidRequest(
            f"{kind} '{name}' has the unknown datatype '{text}', expected one of {quoted(BY_NAME)}"
        )
    return name, datatype, shape, _parameters(item, f"{kind} '{name}'")


def _binary(kind: str, name: str, size: Any, tail: memoryview, position: int) -> memoryview:
    """The binary data of a tensor."""
    if type(size) is not int or size < 0:
        raise InvalidRequest(
            f"'binary_data_size' of {kind} '{name}' must be a non-negative integer"
        )
    end = position + size
    if end > len(tail):
        raise InvalidRequest(
            f"unexpected size for {kind} '{name}', expecting {end - len(tail)} additional bytes"
        )
    return tail[position:end]


# --- for clients

_LARGEST_ERROR = 1 << 20
_NOWHERE: Mapping[str, RegionSlice] = {}
_UNSHARED: Mapping[str, memoryview] = {}
_SIZE_HEADER = JSON_SIZE.encode()
# Name, datatype and shape of an input, and its parts along axis 0.
Input = tuple[str, Datatype, tuple[int, ...], Sequence[TensorArray]]


def write_request(
    inputs: Sequence[Input],
    outputs: Sequence[str],
    parameters: Mapping[str, Parameter],
    id: str = "",
    classes: Mapping[str, int] = _NOTHING,
    binary: bool = True,
    only_binary: Collection[str] = (),
    places: Mapping[str, RegionSlice] = _NOWHERE,
    rooms: Mapping[str, RegionSlice] = _NOWHERE,
) -> tuple[list[Buffer], int | None]:
    """The body of a request, and the size of the JSON if binary tensors follow it.

    Tensors are sent and requested in binary if `binary`, otherwise as JSON except for datatypes
    without a JSON form; `only_binary` names the outputs of such datatypes. No `outputs` means all;
    for those in `classes`, only the highest classes are requested. Inputs in `places` and outputs
    in `rooms` are in shared memory, and not in the body. Raises `InvalidRequest` for
    bytes without a JSON form.
    """
    buffers: list[Buffer] = [b""]
    items: list[dict[str, Any]] = []
    for name, datatype, shape, arrays in inputs:
        item: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if name in places:
            item["parameters"] = region_parameters(places[name])
        elif binary or datatype in NOT_IN_JSON:
            raw = [raw_bytes(array) for array in arrays]
            buffers += raw
            item["parameters"] = {"binary_data_size": sum(map(len, raw))}
        else:
            item["data"] = orjson.Fragment(_json(name, datatype, arrays))
        items.append(item)
    document: dict[str, Any] = {"id": id} if id else {}
    if parameters:
        document["parameters"] = orjson.Fragment(json_parameters(parameters))
    document["inputs"] = items
    if outputs:
        wanted: list[dict[str, Any]] = [{"name": name} for name in outputs]
        document["outputs"] = wanted
        for asked in wanted:
            if asked["name"] in classes:
                asked["parameters"] = {"classification": classes[asked["name"]]}
            elif asked["name"] in rooms:
                asked["parameters"] = region_parameters(rooms[asked["name"]])
            elif binary or asked["name"] in only_binary:
                asked["parameters"] = {"binary_data": True}
    buffers[0] = text = orjson.dumps(document)
    return buffers, len(text) if binary or len(buffers) > 1 else None


def request_headers(json_size: int | None) -> dict[str, str]:
    """The headers for a body from `write_request`."""
    if json_size is None:
        return {"content-type": "application/json"}
    return {"content-type": "application/octet-stream", JSON_SIZE: str(json_size)}


def read_answer(
    headers: Mapping[bytes, bytes], body: Buffer, shared: Mapping[str, memoryview] = _UNSHARED
) -> InferResponse:
    """Decode a response; binary tensors are views into `body`. Raises `InvalidRequest`.

    An output in `shared` is a view of that memory, unless the response has its data.
    """
    size = headers.get(_SIZE_HEADER)
    header = None if size is None else size.decode("latin-1")
    document, tail = _parse(body, parse_json_size(header, len(body)))
    if type(document) is not dict:
        raise InvalidRequest("not an inference response")
    outputs: list[Tensor] = []
    position = 0
    for item in _tensors(document, "outputs", "answer"):
        name, datatype, shape, parameters = _head(item, "output", "answer")
        size = parameters.get("binary_data_size")
        if size is None and "data" not in item and name in shared:
            raw = shared[name][: prod(shape) * ITEM_SIZES[datatype]]
            outputs.append(Tensor.from_bytes(name, datatype, shape, raw))
        elif size is None:
            data = _member(item, "data", list, None, "answer")
            outputs.append(Tensor(name, datatype, array_of_json(name, datatype, shape, data)))
        else:
            raw = _binary("output", name, size, tail, position)
            position += len(raw)
            outputs.append(Tensor.from_bytes(name, datatype, shape, raw))
    given = document.get("parameters")
    values = given if type(given) is dict else _NOTHING
    model, version, id = (
        str(document.get(name) or "") for name in ("model_name", "model_version", "id")
    )
    return InferResponse(
        model, version, id, outputs, Timing(0, 0, 0),
        {name: value for name, value in values.items() if type(value) in (str, int, float, bool)},
    )  # fmt: skip


def error_text(body: Buffer) -> str:
    """The error text in a body of the protocol's error form; "" for any other body."""
    try:
        document = orjson.loads(body) if len(body) <= _LARGEST_ERROR else None
    except orjson.JSONDecodeError:
        return ""
    if type(document) is not dict:
        return ""
    # TorchServe sends a message beside a code and a type.
    said = document.get("error", document.get("message") if "code" in document else None)
    return said if type(said) is str else ""


def _json(name: str, datatype: Datatype, arrays: Sequence[TensorArray]) -> bytes:
    array = arrays[0] if len(arrays) == 1 else concatenated([part.ravel() for part in arrays])
    try:
        return json_elements(Tensor(name, datatype, array))
    except InvalidRequest:
        raise InvalidRequest(
            f"input '{name}' holds bytes that are not UTF-8, which the model's server cannot be"
            " sent"
        ) from None
