"""Captured calls, and their documents.

A document has a request as the protocol's JSON has it, with its responses or error. Data are lists
where JSON holds the exact values: whole numbers, finite floats, and strings of UTF-8. Other data
are `raw`: base64 of their bytes as over gRPC, with lengths for BYTES. Tensors that are `redacted`
or `omitted`, for their size, have neither.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from sys import getsizeof
from typing import Any

import numpy as np
import orjson

from headrace.core.datatypes import FLOATS, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor, TensorArray, raw_bytes

REDACTED, OMITTED = "redacted", "omitted"
_TENSOR_BYTES = 400  # of its objects: the array without its data, the shape, and places in lists


@dataclass(slots=True)
class CapturedCall:
    """One call: its request and, once it is over, responses or an error.

    A tensor is a text instead, `REDACTED` or `OMITTED`, if its data were left out; `shape` and
    datatype stay. `began` is nanoseconds since the epoch, `key` a digest of the sampling key's
    value. `nbytes` is the size of the payloads.
    """

    model: str
    version: str
    id: str
    door: str
    began: int
    key: str
    parameters: Mapping[str, object]
    inputs: list["CapturedTensor"]
    responses: list[list["CapturedTensor"]] = field(default_factory=list)
    duration_ns: int = 0
    error: str = ""
    status: int = 200
    nbytes: int = 0

    def size(self) -> int:
        """Memory that the call takes: payloads, texts, and the objects of tensors.

        A stream of thousands of small outputs, or a client with thousands of long parameters, has
        hardly any payload.
        """
        texts = self.id, self.error, *self.parameters, *self.parameters.values()
        tensors = len(self.inputs) + sum(map(len, self.responses))
        return self.nbytes + sum(map(getsizeof, texts)) + _TENSOR_BYTES * tensors


@dataclass(slots=True)
class CapturedTensor:
    """A tensor; `data` is a copy of its array, or the reason why there is none."""

    name: str
    datatype: Datatype
    shape: Sequence[int]
    data: Any


def document_of(call: CapturedCall) -> dict[str, Any]:
    """The document of a call; slow for large payloads."""
    time = datetime.fromtimestamp(call.began / 1e9, UTC)
    found: dict[str, Any] = {
        "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "model": call.model,
        "version": call.version,
        "id": call.id,
        "door": call.door,
        "key": call.key,
        "duration_ms": round(call.duration_ns / 1e6, 3),
        "status": call.status,
        "error": call.error,
        "parameters": dict(call.parameters),
        "inputs": [_tensor(tensor) for tensor in call.inputs],
        "responses": [[_tensor(tensor) for tensor in outputs] for outputs in call.responses],
    }
    return {name: value for name, value in found.items() if value not in ("", {}, [])}


def json_of(document: object) -> bytes:
    """A document, or a part of one, as JSON in one line."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _tensor(tensor: CapturedTensor) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": tensor.name, "datatype": tensor.datatype.value, "shape": list(tensor.shape),
    }  # fmt: skip
    data = tensor.data
    if isinstance(data, str):
        return found | {data: True}
    if tensor.datatype is Datatype.BYTES:
        strings = [bytes(each) for each in data.ravel().tolist()]
        try:
            return found | {"data": [each.decode() for each in strings]}
        except UnicodeDecodeError:
            return found | _raw(data)
    array = np.ascontiguousarray(data).ravel()
    if tensor.datatype in FLOATS:
        wide = array.astype(np.float64)
        if not np.isfinite(wide).all():
            return found | _raw(array)
        # The shortest text of a float32 is exact for that, and shorter than a float64's.
        return found | {"data": array if tensor.datatype is Datatype.FP32 else wide}
    return found | {"data": array}


def _raw(array: TensorArray) -> dict[str, str]:
    return {"raw": b64encode(raw_bytes(array)).decode()}


# --- and back


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """A request to send again: `at` is seconds since the epoch, `outputs` those of its responses.

    `missing` says why it cannot be sent: data that are redacted or omitted.
    """

    at: float
    model: str
    version: str
    id: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: Sequence[Mapping[str, Tensor]]
    status: int
    missing: str = ""


def request_of(document: Mapping[str, Any]) -> CapturedRequest:
    """Read a document; raises `ValueError` for anything else."""
    try:
        inputs, missing = _tensors(document.get("inputs", ()))
        outputs = [_tensors(outputs)[0] for outputs in document.get("responses", ())]
        parameters = dict(document.get("parameters", {}))
        hidden = [name for name, value in parameters.items() if value == f"<{REDACTED}>"]
        if hidden and not missing:
            missing = f"parameter {hidden[0]} is {REDACTED}"
        return CapturedRequest(
            datetime.fromisoformat(document["time"]).timestamp(), document["model"],
            document.get("version", ""), document.get("id", ""), parameters, inputs, outputs,
            int(document.get("status", 200)), missing,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError, InvalidRequest) as error:
        raise ValueError(f"not a captured request: {error!r}") from None


def _tensors(documents: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Tensor], str]:
    found: dict[str, Tensor] = {}
    missing = ""
    for document in documents:
        name, datatype = document["name"], Datatype(document["datatype"])
        shape = tuple(document["shape"])
        if "raw" in document:
            raw = b64decode(document["raw"], validate=True)
            found[name] = Tensor.from_bytes(name, datatype, shape, raw)
        elif "data" in document:
            data = document["data"]
            if datatype is Datatype.BYTES:
                array = np.array([text.encode() for text in data], object)
            else:
                exact = np.float64 if datatype in FLOATS else NUMPY[datatype]
                array = np.array(data, exact).astype(NUMPY[datatype])
            found[name] = Tensor(name, datatype, array.reshape(shape))
        else:
            why = REDACTED if document.get(REDACTED) else OMITTED
            missing = missing or f"tensor {name} is {why}"
    return found, missing
