"""Unary ModelInfer over HTTP/2: header blocks known by their bytes, flow control both ways."""

import asyncio
import struct
from typing import cast

import hpack
import numpy as np
from google.protobuf.message import DecodeError

from benchmarks.header_blocks import changes_table
from benchmarks.plain.batching import MAX_ROWS, Account, Array, Call, Reason, Refused, Version
from benchmarks.wire import ProtocolError
from headrace.protocol.pb import grpc_service_pb2 as pb

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_CONTINUATION = 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_STREAMS, _INITIAL_WINDOW = 3, 4  # settings
_PROTOCOL_ERROR = 1
_HEAD = struct.Struct("!HBBBL")  # length in 16 and 8 bits, type, flags, stream
_MAX_FRAME = 16_384
_DEFAULT_WINDOW = 65_535
_WINDOW = 4 << 20  # bytes that a client may send before it hears of the next ones
_MAX_BLOCKS = 256  # remembered
_METHOD = b"/inference.GRPCInferenceService/ModelInfer"
_UNITS_NS = {
    b"n": 1, b"u": 1_000, b"m": 10**6, b"S": 10**9, b"M": 60 * 10**9, b"H": 3600 * 10**9,
}  # fmt: skip


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that changes no table; at most 126 bytes each."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


_ANSWER = b"\x88" + _literal(b"content-type", b"application/grpc")  # :status 200
_OK = _literal(b"grpc-status", b"0")
_HELLO = _frame(
    _SETTINGS, 0, 0, struct.pack("!HLHL", _MAX_STREAMS, 1024, _INITIAL_WINDOW, _WINDOW)
) + _frame(_WINDOW_UPDATE, 0, 0, struct.pack("!L", _WINDOW))


class GrpcModel:
    """A version with the fixed parts of its answers: all but the id and the data."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self._heads: dict[int, bytes] = {}  # by number of rows

    def head(self, outputs: list[Array]) -> bytes:
        """The encoded bytes before the data of an answer with these outputs."""
        rows = len(outputs[0])
        head = self._heads.get(rows)
        if head is None:
            message = pb.ModelInferResponse(model_name=self.version.name, model_version="1")
            for each in self.version.outputs:
                message.outputs.add(
                    name=each.name, datatype=each.datatype, shape=[rows, *each.shape]
                )
            head = self._heads[rows] = message.SerializeToString()
        return head


class GrpcServer:
    """The models by name, for all connections."""

    def __init__(self, versions: list[Version], account: Account) -> None:
        self.account = account
        self.models = {version.name: GrpcModel(version) for version in versions}


class GrpcCall(Call):
    """A unary call on a stream; `message` grows as it comes, `window` is for its answer."""

    __slots__ = ("connection", "message", "model", "stream", "window")

    connection: "GrpcConnection"
    stream: int
    window: int
    message: bytes
    model: GrpcModel

    def respond(self, outputs: list[Array], began_ns: int, ended_ns: int, rows: int) -> None:
        if self.answered:
            return
        pieces = [self.model.head(outputs)]
        if self.id:
            text = self.id.encode()
            pieces += (b"\x1a", _varint(len(text)), text)
        for array in outputs:
            data = array.tobytes()
            pieces += (b"\x32", _varint(len(data)), data)
        message = b"".join(pieces)
        self.answered = True
        self.connection.send(self, b"\0" + len(message).to_bytes(4) + message, _OK)

    def refuse(self, error: Refused) -> None:
        self.answered = True
        status = _literal(b"grpc-status", b"%d" % error.grpc_status)
        text = error.text.encode("ascii", "replace")[:120]
        self.connection.send(self, b"", status + _literal(b"grpc-message", text))


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection without TLS."""

    def __init__(self, server: GrpcServer) -> None:
        self._models, self._account = server.models, server.account
        self._decoder = hpack.Decoder()
        self._blocks: dict[bytes, int] = {}  # time-outs; valid until the decoder's table changes
        self._calls: dict[int, GrpcCall] = {}
        self._waiting: list[tuple[GrpcCall, bytes, bytes]] = []  # answers larger than a window
        self._unread = b""
        self._begun = False
        self._window = self._stream_window = _DEFAULT_WINDOW
        self._unacknowledged = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_HELLO)

    def connection_lost(self, error: Exception | None) -> None:
        for call in list(self._calls.values()):
            self._discharge(call)

    def data_received(self, data: bytes) -> None:
        if self._unread:
            data = self._unread + data
        position, size = 0, len(data)
        if not self._begun:
            if size < len(_PREFACE):
                self._unread = data
                return
            self._begun, position = True, len(_PREFACE)
        while position + 9 <= size:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, position)
            end = position + 9 + (high << 8 | low)
            if end > size:
                break
            payload = data[position + 9 : end]
            position = end
            if kind == _DATA and not flags & _PADDED:
                self._on_data(stream, flags, payload)
            elif kind == _HEADERS and flags & (_END_HEADERS | _PADDED | _PRIORITY) == _END_HEADERS:
                self._on_headers(stream, flags, payload)
            else:
                self._on_other(kind, flags, stream, payload)
        self._unread = data[position:]

    def _on_headers(self, stream: int, flags: int, block: bytes) -> None:
        timeout_ns = self._blocks.get(block)
        if timeout_ns is None:
            timeout_ns = self._read_block(block)
        call, account = GrpcCall(), self._account
        call.connection, call.stream, call.window = self, stream, self._stream_window
        call.message, call.answered, call.nbytes, call.timeout_ns = b"", False, 0, timeout_ns
        self._calls[stream] = call
        account.calls += 1
        if account.calls > account.max_calls or account.nbytes > account.max_bytes:
            call.refuse(Refused(Reason.OVERLOADED, "the server holds as many requests as it may"))
        elif timeout_ns < 0 or flags & _END_STREAM:
            call.refuse(Refused(Reason.NO_METHOD, "unknown method, or a call without a message"))

    def _read_block(self, block: bytes) -> int:
        """The time-out that a header block names: 0 for none, -1 for another method."""
        try:
            lasting = not changes_table(block)
            fields = dict(self._decoder.decode(block, raw=True))
        except (ProtocolError, hpack.HPACKError):
            self._go_away()
            return -1
        timeout = fields.get(b"grpc-timeout", b"0n")
        unit_ns = _UNITS_NS.get(timeout[-1:])
        if unit_ns is None or not timeout[:-1].isdigit() or fields.get(b":path") != _METHOD:
            timeout_ns = -1
        else:
            timeout_ns = int(timeout[:-1]) * unit_ns
        if not lasting or len(self._blocks) >= _MAX_BLOCKS:
            self._blocks.clear()
        if lasting:
            self._blocks[block] = timeout_ns
        return timeout_ns

    def _on_data(self, stream: int, flags: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged > _WINDOW // 2:
            increment = struct.pack("!L", self._unacknowledged)
            self._transport.write(_frame(_WINDOW_UPDATE, 0, 0, increment))
            self._unacknowledged = 0
        call = self._calls.get(stream)
        if call is None or call.answered:
            return
        call.nbytes += len(payload)
        self._account.nbytes += len(payload)
        if not flags & _END_STREAM:
            call.message += payload
            return
        message = call.message + payload if call.message else payload
        try:
            if len(message) < 5 or len(message) != 5 + int.from_bytes(message[1:5]):
                raise Refused(Reason.INVALID, "the call has not exactly one message")
            model = decode(message[5:], self._models, call)
        except Refused as error:
            call.refuse(error)
            return
        model.version.submit(call)

    def _on_other(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Take a frame that is not part of a usual call."""
        if kind == _WINDOW_UPDATE:
            self._on_window(stream, int.from_bytes(payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST_STREAM and (call := self._calls.get(stream)):
            self._discharge(call)
        elif kind in (_DATA, _HEADERS, _CONTINUATION):
            self._go_away()  # padding, priorities, and header blocks in parts

    def _go_away(self) -> None:
        self._transport.write(_frame(_GOAWAY, 0, 0, struct.pack("!LL", 0, _PROTOCOL_ERROR)))
        self._transport.close()

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack("!HL", payload):
            if name == _INITIAL_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self._transport.write(_frame(_SETTINGS, _ACK, 0))

    def _on_window(self, stream: int, increment: int) -> None:
        if not stream:
            self._window += increment
        elif call := self._calls.get(stream):
            call.window += increment
        waiting, self._waiting = self._waiting, []
        for call, message, trailer in waiting:
            self.send(call, message, trailer)

    def send(self, call: GrpcCall, message: bytes, trailer: bytes) -> None:
        """Write an answer in one piece as soon as the windows have room, and discharge its call."""
        size, stream = len(message), call.stream
        if stream not in self._calls:
            return
        if size > self._window or size > call.window:
            self._waiting.append((call, message, trailer))
            return
        self._window -= size
        frames = [_frame(_HEADERS, _END_HEADERS, stream, _ANSWER)]
        frames += [
            _frame(_DATA, 0, stream, message[start : start + _MAX_FRAME])
            for start in range(0, size, _MAX_FRAME)
        ]
        frames.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, trailer))
        self._transport.write(b"".join(frames))
        self._discharge(call)

    def _discharge(self, call: GrpcCall) -> None:
        call.answered = True
        del self._calls[call.stream]
        self._account.calls -= 1
        self._account.nbytes -= call.nbytes


def decode(message: bytes, models: dict[str, GrpcModel], call: GrpcCall) -> GrpcModel:
    """A serialised ModelInferRequest to arrays; raises `Refused` for what does not fit."""
    try:
        request = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        raise Refused(Reason.INVALID, "the message is not a ModelInferRequest") from None
    model = models.get(request.model_name)
    if model is None:
        raise Refused(Reason.NOT_FOUND, f"unknown model '{request.model_name}'")
    known, raw, rows = model.version.inputs, request.raw_input_contents, -1
    inputs: dict[str, Array] = {}
    if not len(raw) == len(request.inputs) == len(known):
        raise Refused(Reason.INVALID, f"expected {len(known)} inputs with raw contents")
    for tensor, data in zip(request.inputs, raw, strict=True):
        name, shape = tensor.name, list(tensor.shape)
        declared = known.get(name)
        if declared is None or name in inputs or tensor.datatype != declared.datatype:
            raise Refused(Reason.INVALID, f"unexpected inference input '{name}' {tensor.datatype}")
        if (
            not shape
            or shape[1:] != declared.shape
            or not 0 < shape[0] <= MAX_ROWS
            or rows not in (-1, shape[0])
        ):
            raise Refused(Reason.INVALID, f"unexpected shape of input '{name}'")
        rows = shape[0]
        if len(data) != rows * declared.size * declared.dtype.itemsize:
            raise Refused(Reason.INVALID, f"unexpected size of the data of input '{name}'")
        inputs[name] = np.frombuffer(data, declared.dtype).reshape(shape)
    call.id, call.inputs, call.rows, call.model = request.id, inputs, rows, model
    return model


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
