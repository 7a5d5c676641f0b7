"""Version 1 of KServe's protocol on the HTTP door: rows in, predictions out.

A request is `{"instances": [...]}`, or has `inputs` in its place, with an element for each row: the
value of the only input, or an object with each input under its name. Values are nested arrays,
whose nesting is their shape; bytes that are no text are `{"b64": ...}`. The answer is
`{"predictions": [...]}`, with the value of the only output for each row, or an object of all
outputs. Outputs that differ in their number of rows are in one object instead of a list.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response

from headrace.api.gate import Gate
from headrace.api.operations import NAMED, Operation
from headrace.core.call import Call, InferResponse
from headrace.core.errors import InvalidRequest, ModelNotReady, NotFound, ServerError, Unsupported
from headrace.core.identity import NO_PEER, Identity
from headrace.core.limits import Payer
from headrace.core.signature import Signature, TensorSpec, quoted
from headrace.core.tensors import Buffer, Tensor
from headrace.doors.door import DoorCall
from headrace.doors.http.app import whole_body
from headrace.doors.http.asgi import ACCOUNT, NAMES, OPERATION, PEER
from headrace.doors.http.head import InferHead, passed, values_in
from headrace.doors.http.infer import watch_disconnect
from headrace.engine.admission import Account
from headrace.engine.engine import Engine
from headrace.engine.entrance import HTTP_NOT_DECOUPLED
from headrace.engine.workbench import LARGE
from headrace.observability.statistics import Answers
from headrace.protocol.compression import decompress, decompress_small
from headrace.protocol.elements import array_of_nested, json_name, nested_json
from headrace.protocol.json_text import parse_json

_JSON = "application/json"
_ROWS = ("instances", "inputs")
_UNSHOWN = Answers().of("http", "predict")  # the HTTP door counts the answers itself


class PredictCall(DoorCall):
    """A predict request, and its response, once it is `over`."""

    door = "HTTP"

    def __init__(self, account: Account, gate: Gate, head: InferHead) -> None:
        super().__init__(account, _UNSHOWN, gate)
        self.named = head.client
        self.response: InferResponse | None = None
        self.error: ServerError | None = None
        self._head = head

    @property
    def payer(self) -> Payer:
        """Implements `Call.payer`."""
        return self.account

    def header(self, name: str) -> str:
        """Implements `Call.header`."""
        return self._head.headers.get(name.encode("latin-1"), "")

    def enter_gate(self, model: str, version: str) -> Identity:
        """The client, by the head, which has passed the gate."""
        return self._head.context.identity

    def write(self, response: InferResponse) -> None:
        """Implements `DoorCall.write`."""
        self.response = response

    def write_error(self, error: ServerError) -> None:
        """Implements `DoorCall.write_error`."""
        self.error = error


def add_v1(app: FastAPI, engine: Engine, gate: Gate, operations: Sequence[Operation]) -> None:
    """Add the routes of version 1."""
    reading = asyncio.Lock()  # long bodies are parsed one at a time, as those of other operations

    def enter(request: Request, name: str, model: str = "") -> Identity:
        """The client, by the rules for the operation of version 2; raises `ServerError`."""
        scope, operation = request.scope, NAMED[name]
        scope[OPERATION] = operation.counted
        values, peer = values_in(scope["headers"]), scope.get(PEER, NO_PEER)
        identity = gate.enter(operation, values, peer)
        if model:
            gate.check(operation, identity, values, peer, model)
        return identity

    @app.get("/v1/models", include_in_schema=False)
    async def models(request: Request) -> Response:
        identity = enter(request, "ServerMetadata")
        names = sorted({version.model for version in engine.versions()})
        return _json({"models": [name for name in names if identity.sees(name)]})

    @app.post("/v1/models/{name}:predict", include_in_schema=False)
    async def predict(request: Request, name: str) -> Response:
        scope, operation = request.scope, NAMED["ModelInfer"]
        scope[OPERATION] = operation.counted
        headers = scope["headers"]
        names, peer = scope.get(NAMES) or headers, scope.get(PEER, NO_PEER)
        head = passed(gate, operation, engine, scope["path"], {"name": name}, headers, names, peer)
        if head.fault:
            raise InvalidRequest(head.fault)
        account: Account = scope.get(ACCOUNT) or engine.admission
        await engine.bring(name)
        target = engine.find(name)
        if target.decoupled:
            raise Unsupported(HTTP_NOT_DECOUPLED)
        if (signature := target.signature) is None:  # unloaded again
            raise ModelNotReady(f"model '{name}' is not ready")
        limit = engine.admission.max_request_bytes
        async with (
            whole_body(request.stream(), account, limit) as given,
            _unpacked(memoryview(given), head.content_encoding, account, limit) as body,
        ):
            size = len(body)
            if size > LARGE:
                account.grow(size, size)  # what is decoded is about as long
                try:
                    async with reading:
                        call = await asyncio.to_thread(decode_predict, signature, name, body)
                finally:
                    account.count(-size)
            else:
                call = decode_predict(signature, name, body)
        call.parameters.update(head.told)
        call.bound_wait(head.timeout)
        return await _answer(request, engine, PredictCall(account, gate, head), call, size)

    @app.get("/v1/models/{name}", include_in_schema=False)
    async def model(request: Request, name: str) -> Response:
        enter(request, "ModelReady", name)
        obstacle = engine.model_obstacle(name)
        if not obstacle:
            return _json({"name": name, "ready": True})
        if all(each.source.name != name for each in engine.models()):
            raise NotFound(obstacle)
        raise ModelNotReady(obstacle)


@asynccontextmanager
async def _unpacked(
    body: Buffer, encoding: str | None, account: Account, limit: int
) -> AsyncIterator[Buffer]:
    """A body without its content encoding, charged as those of infer requests are.

    Raises what `decompress` raises.
    """
    small = None if encoding is None else decompress_small(body, encoding)
    if encoding is None or small is not None:
        yield body if small is None else small
        return
    packed, charged = len(body), 0
    unpacked: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()

    def charge(nbytes: int) -> None:
        nonlocal charged
        account.grow(nbytes, packed + charged)
        charged += nbytes

    def done(found: Buffer | None, error: Exception | None) -> None:
        if error is not None:
            unpacked.set_exception(error)
        elif found is not None:
            unpacked.set_result(found)

    job = account.server.workbench.do(
        packed << 3, lambda charge: decompress(body, encoding, limit, charge=charge), done, charge,
        account,
    )  # fmt: skip
    try:
        yield await unpacked
    finally:
        job.cancel()
        account.count(-charged)


async def _answer(
    request: Request, engine: Engine, call: PredictCall, asked: Call, size: int
) -> Response:
    """Run a call and encode its response; cancels it if the client disconnects."""
    call.start(engine, asked.model_name, size, lambda _: asked)
    watch = asyncio.create_task(watch_disconnect(request.receive, call.leave))
    try:
        await call.over.wait()
    finally:
        watch.cancel()
        call.leave()  # if this was cancelled
    if call.error is not None:
        raise call.error
    if call.response is None:
        return Response(status_code=499)  # nobody reads it: the client has left
    nbytes = call.response.nbytes
    if nbytes <= LARGE:
        return Response(encode_predictions(call.response), media_type=_JSON)
    account, model = call.account, call.response.model_name
    account.check_answer(model, nbytes)
    account.grow_answer(nbytes, 0)
    try:
        text = await asyncio.to_thread(encode_predictions, call.response)
    finally:
        account.leave_answer(nbytes)
    account.check_answer(model, len(text))
    return Response(text, media_type=_JSON)


def decode_predict(signature: Signature, model: str, body: Buffer) -> Call:
    """Decode a predict request for a model of this signature; raises `InvalidRequest`."""
    document = parse_json(body)
    if type(document) is not dict:
        raise InvalidRequest(f"the request must be a JSON object, got {json_name(type(document))}")
    [*given] = [name for name in _ROWS if name in document]
    if len(given) != 1:
        raise InvalidRequest("a predict request has either 'instances' or 'inputs'")
    rows = document[given[0]]
    if type(rows) is not list or not rows:
        got = "an empty array" if rows == [] else json_name(type(rows))
        raise InvalidRequest(f"'{given[0]}' is an array with an element for each row, got {got}")
    specs = {spec.name: spec for spec in signature.inputs}
    values = _columns(given[0], rows, specs)
    for name in values:
        signature.input(name)  # raises for an unknown one
    inputs = {name: _tensor(signature, specs[name], column) for name, column in values.items()}
    return Call(model, "", "", inputs, nbytes=len(body))


def encode_predictions(response: InferResponse) -> bytes:
    """The answer to a predict request, as JSON."""
    outputs = [
        (output.name, output.datatype, np.asarray(output.array)) for output in response.outputs
    ]
    if len(outputs) == 1:
        [(_, datatype, array)] = outputs
        return b'{"predictions":%b}' % nested_json(datatype, array)
    lengths = {array.shape[:1] for _, _, array in outputs}
    names = [orjson.dumps(name) for name, _, _ in outputs]
    if len(lengths) != 1 or lengths == {()}:
        whole = [nested_json(datatype, array) for _, datatype, array in outputs]
        return b'{"predictions":%b}' % _object(names, whole)
    columns = [
        [nested_json(datatype, array[index, ...]) for index in range(len(array))]
        for _, datatype, array in outputs
    ]
    rows = b",".join(_object(names, row) for row in zip(*columns, strict=True))
    return b'{"predictions":[%b]}' % rows


def _columns(member: str, rows: list[Any], specs: dict[str, TensorSpec]) -> dict[str, list[Any]]:
    """The values of each input, for all rows."""
    if not (type(rows[0]) is dict and rows[0].keys() != {"b64"}):
        needed = [name for name, spec in specs.items() if not spec.optional] or [*specs]
        if len(needed) != 1:
            raise InvalidRequest(
                f"each of '{member}' is an object, with values for the inputs {quoted(specs)}"
            )
        return {needed[0]: rows}
    names = rows[0].keys()
    for index, row in enumerate(rows):
        if type(row) is not dict or row.keys() != names:
            raise InvalidRequest(
                f"row {index} of '{member}' is no object with the members {quoted(names)}, as the"
                " first one is"
            )
    return {name: [row[name] for row in rows] for name in names}


def _tensor(signature: Signature, spec: TensorSpec, column: list[Any]) -> Tensor:
    """An input; dimensions of one element that come last may be missing in the nesting."""
    array = array_of_nested(spec.name, spec.datatype, column, "input")
    declared = signature.wire_shape(spec)
    missing = declared[array.ndim :]
    if missing and set(missing) <= {1, -1}:
        array = array.reshape([*array.shape, *(1 for _ in missing)])
    return Tensor(spec.name, spec.datatype, array)


def _object(names: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    members = [b"%b:%b" % member for member in zip(names, values, strict=True)]
    return b"{%b}" % b",".join(members)


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type=_JSON)
