"""Inference requests over HTTP as a client of another server writes and reads them.

What requests of the same names, datatypes and shapes have in common is serialised once. Where the
server takes binary tensors, what a batch's requests have brought is sent as it lies; in an answer,
binary tensors are views into what was received.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headrace.core.call import Parameter
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer, Tensor, TensorArray, concatenated, raw_bytes
from headrace.wire.elements import flatten, json_elements, tensor_from_json
from headrace.wire.json_text import parse_json
from headrace.wire.parameters import json_parameters
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_infer import RemoteAnswer, RemoteInput

_REMEMBERED = 256  # kinds of request
_LARGEST_ERROR = 1 << 20
NOT_IN_JSON = (Datatype.FP16, Datatype.BF16)
_FLOATS = (*NOT_IN_JSON, Datatype.FP32, Datatype.FP64)
_DATA, _SIZE = b'"data":', b'"parameters":{"binary_data_size":'


class RestMessages:
    """Writes requests to one server's model.

    Tensors are `binary`, or JSON but for those that have no form in it; of the outputs, those are
    named by `only_binary`.
    """

    def __init__(self, binary: bool, only_binary: Collection[str] = ()) -> None:
        self._binary = binary
        self._only_binary = only_binary
        self._known: dict[object, tuple[list[bytes], bytes]] = {}

    def request(
        self,
        inputs: Sequence[RemoteInput],
        outputs: Sequence[str],
        parameters: Mapping[str, Parameter],
        id: str = "",
    ) -> tuple[list[Buffer], int | None]:
        """A body, and the size of the JSON in front if binary tensors follow it.

        Raises `InvalidRequest` for a tensor that can only be sent in binary to a server that takes
        none.
        """
        key = (tuple(outputs), *[(i.name, i.datatype, i.shape) for i in inputs])
        known = self._known.get(key)
        if known is None:
            known = self._remember(key, inputs, outputs)
        heads, tail = known
        parts: list[bytes] = [b"{"]
        if id:
            parts += (b'"id":', orjson.dumps(id), b",")
        if parameters:
            parts += (b'"parameters":', json_parameters(dict(parameters)), b",")
        buffers: list[Buffer] = [b""]
        for head, item in zip(heads, inputs, strict=True):
            parts.append(head)
            if head.endswith(_DATA):
                parts.append(_json(item))
            else:
                raw = _raw(item)
                parts.append(b"%d}" % sum(map(len, raw)))
                buffers += raw
        parts.append(tail)
        buffers[0] = text = b"".join(parts)
        binary = self._binary or len(buffers) > 1
        return buffers, len(text) if binary else None

    def _remember(
        self, key: object, inputs: Sequence[RemoteInput], outputs: Sequence[str]
    ) -> tuple[list[bytes], bytes]:
        heads: list[bytes] = []
        for item in inputs:
            what = {"name": item.name, "datatype": item.datatype.value, "shape": item.shape}
            binary = self._binary or item.datatype in NOT_IN_JSON
            start = b"}," if heads else b'"inputs":['
            heads.append(start + orjson.dumps(what)[:-1] + b"," + (_SIZE if binary else _DATA))
        wanted: list[dict[str, Any]] = []
        for name in outputs:
            binary = self._binary or name in self._only_binary
            wanted.append(
                {"name": name, "parameters": {"binary_data": True}} if binary else {"name": name}
            )
        tail = (b"}]" if heads else b'"inputs":[]') + b',"outputs":' + orjson.dumps(wanted) + b"}"
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = heads, tail
        return heads, tail


def read_rest_answer(body: Buffer, json_size: int | None) -> RemoteAnswer:
    """The response whose first `json_size` bytes are JSON, all of it for None.

    Its binary tensors are views into `body`. Raises `InvalidRequest`.
    """
    view = memoryview(body)
    text, tail = (view, view[:0]) if json_size is None else (view[:json_size], view[json_size:])
    document = parse_json(text)
    if type(document) is not dict or type(document.get("outputs")) is not list:
        raise InvalidRequest("not an inference response")
    outputs: dict[str, TensorArray] = {}
    position = 0
    for item in document["outputs"]:
        name, datatype, shape = _head(item)
        parameters = item.get("parameters")
        size = parameters.get("binary_data_size") if type(parameters) is dict else None
        if size is None:
            outputs[name] = _from_json(item, name, datatype, shape)
            continue
        if type(size) is not int or not 0 <= size <= len(tail) - position:
            raise InvalidRequest(f"output '{name}' has a wrong binary_data_size")
        raw = tail[position : position + size]
        position += size
        outputs[name] = Tensor.from_bytes(name, datatype, shape, raw).array
    return RemoteAnswer(outputs, _parameters(document.get("parameters")))


def read_metadata(body: Buffer) -> pb.ModelMetadataResponse:
    """What a server says of a model; raises `InvalidRequest`."""
    document = parse_json(body)
    if type(document) is not dict:
        raise InvalidRequest("the metadata of a model are no JSON object")
    result = pb.ModelMetadataResponse(name=str(document.get("name", "")))
    for kind, tensors in (("inputs", result.inputs), ("outputs", result.outputs)):
        given = document.get(kind) or []
        if type(given) is not list:
            raise InvalidRequest(f"'{kind}' of a model's metadata is no array")
        for item in given:
            try:
                tensors.add(name=item["name"], datatype=item["datatype"], shape=item["shape"])
            except (KeyError, TypeError, ValueError):
                raise InvalidRequest(
                    f"'{kind}' of a model's metadata is no list of tensors"
                ) from None
    return result


def _raw(item: RemoteInput) -> list[Buffer]:
    return [raw_bytes(part) for part in item.parts]


def _json(item: RemoteInput) -> bytes:
    parts = item.parts
    array = parts[0] if len(parts) == 1 else concatenated([part.ravel() for part in parts])
    try:
        return json_elements(Tensor(item.name, item.datatype, array))
    except InvalidRequest:
        raise InvalidRequest(
            f"input '{item.name}' holds bytes that are not UTF-8, which the model's server cannot"
            " be sent"
        ) from None


def _head(item: Any) -> tuple[str, Datatype, list[int]]:
    """Name, datatype and shape of an output; raises `InvalidRequest`."""
    if type(item) is not dict or type(item.get("name")) is not str:
        raise InvalidRequest("an output without a name")
    name, shape = item["name"], item.get("shape")
    datatype = BY_NAME.get(str(item.get("datatype")))
    if datatype is None:
        raise InvalidRequest(f"output '{name}' has the datatype {item.get('datatype')!r}")
    if type(shape) is not list or not set(map(type, shape)) <= {int}:
        raise InvalidRequest(f"output '{name}' has no shape")
    return name, datatype, shape


def _from_json(
    item: dict[str, Any], name: str, datatype: Datatype, shape: list[int]
) -> TensorArray:
    data = item.get("data")
    if type(data) is not list:
        raise InvalidRequest(f"output '{name}' has no data")
    return array_of_json(name, datatype, shape, data)


def array_of_json(name: str, datatype: Datatype, shape: list[int], data: list[Any]) -> TensorArray:
    """What another server has written as JSON, flat or nested; raises `InvalidRequest`.

    It may be written with less care than is asked of clients: null is taken for what is no number.
    """
    values, types = flatten(name, data)
    if datatype not in _FLOATS:
        return tensor_from_json(name, datatype, shape, values).array
    if type(None) in types:
        values = [np.nan if value is None else value for value in values]
    wide = Datatype.FP32 if datatype in NOT_IN_JSON else datatype
    array = np.asarray(tensor_from_json(name, wide, shape, values).array)
    with np.errstate(over="ignore"):  # what is too large is infinite
        return array.astype(NUMPY[datatype], copy=False)


def _parameters(given: Any) -> dict[str, Parameter]:
    if type(given) is not dict:
        return {}
    return {n: v for n, v in given.items() if type(v) in (str, int, float, bool)}


def error_text(body: Buffer) -> str:
    """The error in a body that has the form of one; empty if there is none."""
    try:
        document = orjson.loads(body) if len(body) <= _LARGEST_ERROR else None
    except orjson.JSONDecodeError:
        return ""
    if type(document) is not dict:
        return ""
    # TorchServe has a message beside a code and a type.
    said = document.get("error", document.get("message") if "code" in document else None)
    return said if type(said) is str else ""
