"""V2 JSON over HTTP/1.1: heads known by their bytes, pipelined requests answered in order."""

import asyncio
import struct
from collections import deque
from typing import cast

import httptools
import numpy as np
import orjson

from benchmarks.plain.batching import MAX_ROWS, Account, Array, Call, Reason, Refused, Version

_HEAD_END = b"\r\n\r\n"
_MAX_HEADS = 4096  # remembered
_OK = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    b'server-timing: queue;dur=%.3f, compute;dur=%.3f, batch;desc="%d"\r\n'
    b"content-length: %d\r\n\r\n%b"
)
_ERROR = (
    b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    b'{"error":%b}'
)


class JsonModel:
    """A version with the fixed parts of its answers in JSON."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.head = b'{"model_name":"%b","model_version":"1",' % version.name.encode()
        self.output_heads = [
            b'{"name":"%b","datatype":"%b","shape":[%%d%b],"data":'
            % (each.name.encode(), each.datatype.encode(), b"".join(b",%d" % d for d in each.shape))
            for each in version.outputs
        ]


class HttpServer:
    """The models, and what heads mean, for all connections."""

    def __init__(self, versions: list[Version], account: Account) -> None:
        self.account = account
        self.heads: dict[bytes, tuple[JsonModel | bytes, int]] = {}
        self._targets: dict[bytes, JsonModel | bytes] = {
            b"/v2/health/ready": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        }
        for version in versions:
            path = f"/v2/models/{version.name}/infer".encode()
            self._targets[path] = JsonModel(version)

    def read_head(self, head: bytes) -> tuple[JsonModel | bytes, int]:
        """The model that a head asks for, or the answer to everything else; the body's length.

        Raises `httptools.HttpParserError`.
        """
        fields: dict[bytes, bytes] = {}

        class Events:
            def on_url(self, url: bytes) -> None:
                fields[b""] = url

            def on_header(self, name: bytes, value: bytes) -> None:
                fields[name.lower()] = value

        httptools.HttpRequestParser(Events()).feed_data(head)
        target = self._targets.get(fields[b""])
        if target is None:
            target = _error(Refused(Reason.NOT_FOUND, "Request for unknown model or path"))
        if len(self.heads) >= _MAX_HEADS:
            self.heads.clear()
        self.heads[head] = known = (target, int(fields.get(b"content-length", 0)))
        return known


class HttpCall(Call):
    """A request on a connection; `held` is an answer that waits for those before it.

    `model` is set where there is one.
    """

    __slots__ = ("connection", "held", "model")

    connection: "HttpConnection"
    model: JsonModel
    held: bytes | None

    def respond(self, outputs: list[Array], began_ns: int, ended_ns: int, rows: int) -> None:
        if self.answered:
            return
        model = self.model
        if self.id is None:
            pieces = [model.head, b'"outputs":[']
        else:
            pieces = [model.head, b'"id":%b,"outputs":[' % orjson.dumps(self.id)]
        for head, array in zip(model.output_heads, outputs, strict=True):
            data = orjson.dumps(array.ravel(), option=orjson.OPT_SERIALIZE_NUMPY)
            pieces += (head % len(array), data, b"},")
        pieces[-1] = b"}]}"
        body = b"".join(pieces)
        queue_ms, compute_ms = (began_ns - self.arrived_ns) / 1e6, (ended_ns - began_ns) / 1e6
        self.connection.write(self, _OK % (queue_ms, compute_ms, rows, len(body), body))

    def refuse(self, error: Refused) -> None:
        self.connection.write(self, _error(error))


class HttpConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: HttpServer) -> None:
        self._server, self._account = server, server.account
        self._calls: deque[HttpCall] = deque()
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        for call in self._calls:
            if not call.answered:
                call.answered = True
                self._account.calls -= 1
                self._account.nbytes -= call.nbytes
        self._calls.clear()

    def data_received(self, data: bytes) -> None:
        if self._unread:
            data, self._unread = self._unread + data, b""
        position = 0
        while position < len(data):
            end = data.find(_HEAD_END, position) + len(_HEAD_END)
            if end < len(_HEAD_END):
                break
            head = data[position:end]
            try:
                target, length = self._server.heads.get(head) or self._server.read_head(head)
            except httptools.HttpParserError:
                self._transport.close()
                return
            if end + length > len(data):
                break
            position = end + length
            self._begin(target, data[end:position])
        self._unread = data[position:]

    def _begin(self, target: JsonModel | bytes, body: bytes) -> None:
        """Charge a call, decode and submit it."""
        call, account = HttpCall(), self._account
        call.connection, call.nbytes, call.answered, call.held = self, len(body), False, None
        self._calls.append(call)
        account.calls += 1
        account.nbytes += call.nbytes
        if isinstance(target, bytes):
            self.write(call, target)
            return
        call.model = target
        try:
            if account.calls > account.max_calls or account.nbytes > account.max_bytes:
                raise Refused(Reason.OVERLOADED, "the server holds as many requests as it may")
            decode(body, target.version, call)
        except Refused as error:
            call.refuse(error)
            return
        target.version.submit(call)

    def write(self, call: HttpCall, answer: bytes) -> None:
        """Discharge a call, and write its answer once those before it are written."""
        call.answered = True
        self._account.calls -= 1
        self._account.nbytes -= call.nbytes
        calls = self._calls
        if calls[0] is not call:
            call.held = answer
            return
        calls.popleft()
        self._transport.write(answer)
        while calls and (held := calls[0].held) is not None:
            calls.popleft()
            self._transport.write(held)


def decode(body: bytes, version: Version, call: Call) -> None:
    """V2 JSON to arrays of the declared datatypes; raises `Refused` for what does not fit."""
    try:
        document = orjson.loads(body)
        tensors = [(t["name"], t["datatype"], t["shape"], t["data"]) for t in document["inputs"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise Refused(Reason.INVALID, "failed to parse the request JSON buffer") from None
    inputs: dict[str, Array] = {}
    rows = -1
    for name, datatype, shape, data in tensors:
        declared = version.inputs.get(name) if type(name) is str else None
        if declared is None or name in inputs:
            raise Refused(Reason.INVALID, f"unexpected inference input {name!r}")
        if datatype != declared.datatype:
            raise Refused(
                Reason.INVALID,
                f"inference input '{name}' has datatype {datatype!r}, expected {declared.datatype}",
            )
        if (
            type(shape) is not list
            or not shape
            or shape[1:] != declared.shape
            or type(shape[0]) is not int
            or not 0 < shape[0] <= MAX_ROWS
        ):
            raise Refused(
                Reason.INVALID,
                f"unexpected shape of input '{name}', expected 1 to {MAX_ROWS} rows of"
                f" {declared.shape}",
            )
        if rows != shape[0]:
            if rows >= 0:
                raise Refused(Reason.INVALID, "inputs differ in their numbers of rows")
            rows = shape[0]
        count = rows * declared.size
        pack = declared.packers.get(count)
        if pack is None:
            pack = declared.packers[count] = struct.Struct(f"{count}{declared.code}").pack
        try:
            array = np.frombuffer(pack(*data), declared.dtype)
        except (struct.error, TypeError):
            raise Refused(
                Reason.INVALID, f"data of input '{name}' are not {count} {declared.datatype}"
            ) from None
        inputs[name] = array.reshape(shape)
    if len(inputs) != len(version.inputs):
        raise Refused(
            Reason.INVALID, f"expected {len(version.inputs)} inputs but got {len(inputs)}"
        )
    call.id, call.inputs, call.rows, call.timeout_ns = document.get("id"), inputs, rows, 0
    if (parameters := document.get("parameters")) is not None:
        micros = parameters.get("timeout", 0) if type(parameters) is dict else None
        if type(micros) is not int:
            raise Refused(Reason.INVALID, "parameters are no object, or timeout is no integer")
        call.timeout_ns = micros * 1000


def _error(error: Refused) -> bytes:
    text = orjson.dumps(error.text)
    return _ERROR % (error.http_status, len(text) + len(b'{"error":}'), text)
