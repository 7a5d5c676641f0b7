"""Requests and responses that nobody here reads, as what `headrace.wire.link_infer` writes.

Their bodies travel as those of raw requests do: as a tensor without a name.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.requests import (
    InferRequest,
    InferResponse,
    OpaqueRequest,
    OpaqueResponse,
    Parameter,
)
from headrace.core.tensors import Buffer, Tensor

_STATUS, _HEADERS = "status", "headers"


def shut(body: Buffer) -> Tensor:
    """A body as a tensor."""
    return Tensor("", Datatype.UINT8, np.frombuffer(body, np.uint8))


def request_fields(request: OpaqueRequest) -> Mapping[str, object]:
    """What such a request has that others have not, as JSON has it."""
    return {"path": request.path, "headers": request.headers}


def request_kind(fields: Any) -> Callable[..., InferRequest]:
    """What makes requests with these fields; raises `TypeError`."""
    path, headers = fields["path"], _pairs(fields["headers"])
    if type(path) is not str:
        raise TypeError("a path that is no text")
    return partial(_opaque, path, headers)


def _opaque(path: str, headers: Sequence[tuple[str, str]], *given: Any) -> OpaqueRequest:
    request = OpaqueRequest(*given)
    request.path, request.headers = path, headers
    if "" not in request.inputs:
        raise InvalidRequest("a request without a body")
    request.body = request.inputs.pop("").array.data
    return request


def shut_response(response: OpaqueResponse) -> InferResponse:
    """A response as one that can be written."""
    told: dict[str, Parameter] = {
        _STATUS: response.status, _HEADERS: orjson.dumps(response.headers).decode()
    }  # fmt: skip
    return InferResponse(
        response.model_name, response.model_version, response.id, [shut(response.body)],
        response.timing, told,
    )  # fmt: skip


def opened_response(response: InferResponse) -> OpaqueResponse:
    """The response that was written like this."""
    [tensor] = response.outputs
    status, headers = response.parameters[_STATUS], response.parameters[_HEADERS]
    return OpaqueResponse(
        response.model_name, response.model_version, response.id, [], response.timing,
        body=tensor.array.data, status=int(status), headers=_pairs(orjson.loads(str(headers))),
    )  # fmt: skip


def _pairs(given: Any) -> list[tuple[str, str]]:
    pairs = [(name, value) for name, value in given]
    if not all(type(text) is str for pair in pairs for text in pair):
        raise TypeError("a header that is no text")
    return pairs
