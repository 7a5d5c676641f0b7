"""The generate extension: flat JSON to a `Call`, and an `InferResponse` to flat JSON.

A request has neither shapes nor datatypes: members named like inputs of the model become these
inputs, by the model's signature. All others become parameters if the model may read any, and are
refused if it reads inputs alone: they are misspelt inputs, and ignoring an optional one would
silently give a wrong answer. A response has its id, model, parameters and outputs side by side, in
alphabetical order.
"""

import difflib
from math import prod
from typing import Any

import orjson

from headrace.core.call import MAX_TENSORS, Call, InferResponse, Parameter
from headrace.core.errors import InvalidRequest
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature, TensorSpec, quoted
from headrace.core.tensors import Buffer, Tensor, brackets
from headrace.core.texts import shown
from headrace.protocol.elements import json_elements, json_name, tensor_from_json, tensor_from_long
from headrace.protocol.json_text import LongArray, parse_json
from headrace.protocol.parameters import (
    TIMING_PARAMETER,
    call_options,
    check_text,
    is_reserved,
    json_parameter,
    split_parameters,
)

EVENT_STREAM = b"text/event-stream; charset=utf-8"
_PARAMETERS = "parameters"
_NOTHING: frozenset[str] = frozenset()
_MOST_TEXT = 32 << 20  # bytes beside long arrays, which are parsed at once: 50 ms
# Characters of an unknown name, and most names of a model, that are compared for a suggestion: each
# of them takes up to 0.1 ms.
_COMPARED = 64


class _Members:
    """Inputs and parameters read so far from a request's members."""

    def __init__(self, signature: Signature, charge: Charge) -> None:
        self._signature = signature
        self._charge = charge
        self._specs = {spec.name: spec for spec in signature.inputs}
        self.inputs: dict[str, Tensor] = {}
        self.reserved: dict[str, Any] = {}
        self.custom: dict[str, Parameter] = {}

    def add(self, name: str, value: Any) -> None:
        """Add one member; raises `InvalidRequest`."""
        spec = self._specs.get(name)
        if spec is None:
            self._check_parameter(name)
            reserved, custom = split_parameters({name: value}, _NOTHING)
            self.reserved |= reserved
            self.custom |= custom
            return
        if name in self.inputs:
            raise InvalidRequest(f"input '{name}' already exists in request")
        long = value if type(value) is LongArray else None
        data = [] if long is not None else value if type(value) is list else [value]
        try:
            count = len(data) if long is None else long.elements()
            shape = _shape(name, self._signature.wire_shape(spec), count)
            # Checked first, because decoding the elements is expensive.
            self._signature.check_tensor(name, spec.datatype, shape)
            self.inputs[name] = (
                tensor_from_json(name, spec.datatype, shape, data)
                if long is None
                else tensor_from_long(name, spec.datatype, shape, long, self._charge)
            )
        except InvalidRequest as error:
            raise InvalidRequest(self._worded(str(error), spec, data)) from None

    def _check_parameter(self, name: str) -> None:
        """Refuse a parameter that the model does not read; raises `InvalidRequest`."""
        read = self._signature.parameters
        if read is None or name in read or name == TIMING_PARAMETER or is_reserved(name):
            return
        known = [*self._specs, *read]
        folded = {one.casefold(): one for one in known} if len(known) <= _COMPARED else {}
        near = difflib.get_close_matches(name.casefold()[:_COMPARED], folded, 1)
        raise InvalidRequest(
            f"unknown member {shown(name)} for model '{self._signature.model}', which has the"
            f" inputs {quoted(self._specs)}"
            + (f"; did you mean '{folded[near[0]]}'?" if near else "")
        )

    def _worded(self, text: str, spec: TensorSpec, data: list[Any]) -> str:
        """Reword an error about an input's value so that it fits flat JSON."""
        types = set(map(type, data))
        if list in types:
            hint = "a value is one element or a flat array of them, not an array of arrays"
            # The texts of infer requests mention the member `data`, which does not exist here.
            return f"input '{spec.name}': {hint}" if "'data'" in text else f"{text}; {hint}"
        if type(None) in types:
            if (flags := f"{spec.name}.null") in self._specs:
                return (
                    f"{text}; which values are missing is said by true in '{flags}', with any value"
                    " in their places"
                )
            if spec.optional:
                return f"{text}; it is optional, and can be left out"
        return text


def decode_generate(
    signature: Signature, model: str, version: str, body: Buffer, charge: Charge = uncharged
) -> Call:
    """Decode a generate body for a model of this signature.

    Members are read in order, those of the member `parameters` in its place; the first mismatch is
    reported. `charge` is called with the decoded size of long values, and of long texts. Raises
    `InvalidRequest`, and whatever `charge` raises.
    """
    document = parse_json(body, _MOST_TEXT, charge)
    if type(document) is not dict:
        raise InvalidRequest(f"the request must be a JSON object, got {json_name(type(document))}")
    members = _Members(signature, charge)
    request_id = ""
    takes_id = any(spec.name == "id" for spec in signature.inputs)
    _check_count(document)
    for name, value in document.items():
        is_id = name == "id" and not takes_id
        if value is None and (is_id or name == _PARAMETERS):
            continue  # as in infer requests
        if name == _PARAMETERS:
            _add_parameters(members, value)
            continue
        if is_id:
            request_id = _text(value)
            if signature.parameters is not None:
                continue  # not a parameter that a model reads
        members.add(name, value)
    return Call(
        model, version, request_id, members.inputs, (), members.custom,
        call_options(members.reserved, {}), len(body),
    )  # fmt: skip


def encode_generate(response: InferResponse, charge: Charge = uncharged) -> bytes:
    """Encode a response as one JSON object on one line; `charge` as in `json_elements`.

    Where names clash, an output hides a parameter, and both hide the model's name and version.
    Raises `InvalidRequest` if an output has no JSON form.
    """
    members = {
        "model_name": orjson.dumps(response.model_name),
        "model_version": orjson.dumps(response.model_version),
    }
    if response.id:
        members["id"] = orjson.dumps(response.id)
    for name, value in response.parameters.items():
        members[name] = json_parameter(value)
    for tensor in response.outputs:
        # Dimensions of one element, such as the batch's of a single row, are left out.
        sizes = [size for size in tensor.array.shape if size != 1]
        text = json_elements(tensor, sizes[1:] if tensor.array.size else (), charge)
        members[tensor.name] = text[1:-1] if tensor.array.size == 1 else text
    return b"{%b}" % b",".join(
        [orjson.dumps(name) + b":" + text for name, text in sorted(members.items())]
    )


def event(document: bytes) -> bytes:
    """Format one server-sent event; `document` has no line breaks."""
    return b"data: %b\n\n" % document


def _add_parameters(members: _Members, value: Any) -> None:
    if type(value) is not dict:
        raise InvalidRequest(
            f"Expected JSON object for keyword: '{_PARAMETERS}', got {json_name(type(value))}"
        )
    _check_count(value)
    try:
        for name, inner in value.items():
            members.add(name, inner)
    except InvalidRequest as error:
        raise InvalidRequest(f"Converting keyword: '{_PARAMETERS}': {error}") from None


def _check_count(document: dict[str, Any]) -> None:
    if len(document) > MAX_TENSORS:
        raise InvalidRequest(
            f"a generate request may have {MAX_TENSORS} members, got {len(document)}"
        )


def _text(value: Any) -> str:
    if type(value) is not str:
        raise InvalidRequest(
            f"Unable to parse 'id': expected a string, got {json_name(type(value))}"
        )
    check_text("the id of a request", value)
    return value


def _shape(name: str, declared: tuple[int, ...], count: int) -> list[int]:
    """The shape for `count` elements: the innermost variable dimension takes what remains."""
    shape = list(declared)
    unit = prod(d for d in shape if d != -1)
    rest, left = divmod(count, unit) if unit else (1, count)
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == -1:
            shape[axis], rest = rest, 1
    if left or rest != 1:
        raise InvalidRequest(
            f"The schema can not convert input '{name}' to tensor with proper shape:"
            f" {count} elements do not fit {brackets(declared)}"
        )
    return shape
