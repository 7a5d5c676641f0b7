"""Attacks on the server: each makes its data first, and returns the function that runs it.

An attack is bounded in count and in time, and lets go of all its connections at its end.
"""

import gzip
import json
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from hpack import Encoder, NeverIndexedHeaderTuple

from benchmarks.hostile.case import Case
from benchmarks.hostile.found import FOUND
from benchmarks.hostile.models import (
    ECHO,
    ENDLESS,
    FLOOD,
    GRAM,
    GROW,
    PYTHON,
    TEXT,
    WHOLE,
    write_many_models,
    write_models,
)
from benchmarks.hostile.replay import replay
from benchmarks.hostile.wire import (
    DATA,
    LIVE,
    METADATA,
    PREFACE,
    PUSH_PROMISE,
    REFLECTION,
    SETTINGS,
    STREAM,
    WATCH,
    Http2,
    bytes_field,
    connect,
    frame,
    post,
    post_head,
)
from benchmarks.http2 import grpc_message
from benchmarks.models import MLP
from benchmarks.server import Target
from headrace.protocol.http2.protocol import END_HEADERS, END_STREAM, HEADERS
from headrace.protocol.pb import grpc_service_pb2 as pb

MB = 1_000_000
_BODY = 63 * MB  # a little less than the server takes at most
_HOLD_SECS = 5.0
_CONNECTIONS = 10_000
_AT_ONCE = 2_000
_SHAKING = 1_000  # clients that shake hands
_HANDSHAKE_SECS = 30.0
_GATHER_SECS = 0.3  # without anything from the server, after which all go on
_CERTIFICATES = Path(__file__).parents[2] / "tests" / "support" / "tls"
# Everyone may run models, and change nothing.
LOW_ROLE = (f"--access={Path(__file__).with_name('access.toml')}",)
_TLS = (
    "--grpc-use-ssl", f"--grpc-server-cert={_CERTIFICATES}/server.pem",
    f"--grpc-server-key={_CERTIFICATES}/server.key",
)  # fmt: skip
_GREEDY = "greedy-benchmark-key"  # whose hash is in that file; its quota is 20 requests/s
_BINARY = ("Content-Type", "application/octet-stream")

Fire = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Attack:
    """One of them: its name, what it is for people, how it is prepared."""

    name: str
    title: str
    prepare: Callable[[Target], Fire]
    allowed: int = 0  # bytes that it may hold by a limit of its own, with which nothing is charged
    options: Sequence[str] = ()  # settings of the server besides the default ones
    write: Callable[[Path], None] = write_models  # into its repository


def _http(target: Target, model: str, body: bytes, times: int = 1, json_size: int = 0,
          headers: Sequence[tuple[str, str]] = ()) -> Fire:  # fmt: skip
    """Infer requests one after the other; `json_size` bytes of them are JSON, 0 for all."""
    if json_size:
        headers = [*headers, _BINARY, ("Inference-Header-Content-Length", str(json_size))]

    def fire() -> None:
        for _ in range(times):
            post(target.http, f"/v2/models/{model}/infer", body, headers)

    return fire


def _by_eight(ask: Callable[[], None]) -> None:
    """Do the same by eight clients at a time."""
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _binary(model: str, datatype: str, shape: Sequence[int], data: bytes) -> tuple[bytes, int]:
    """The body of a request with one binary tensor, and the size of its JSON."""
    head = (
        f'{{"inputs":[{{"name":"input","datatype":"{datatype}","shape":{list(shape)},'
        f'"parameters":{{"binary_data_size":{len(data)}}}}}],'
        '"parameters":{"binary_data_output":true}}'
    ).encode()
    return head + data, len(head)


def _message(model: str, datatype: str, shape: Sequence[int], raw: bytes | None) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="input", datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request.SerializeToString()


def _grpc(target: Target, message: bytes, times: int = 1) -> Fire:
    def fire() -> None:
        with Http2(target.grpc) as connection:
            for _ in range(times):
                connection.wait(connection.call(message))

    return fire


def _compressed(message: bytes) -> bytes:
    data = gzip.compress(message, 9)
    return b"\1" + len(data).to_bytes(4, "big") + data


def shape_with_text(target: Target) -> Fire:
    body = (
        b'{"inputs":[{"name":"input","datatype":"FP32","shape":["AAAAAAAA",250000000],"data":[1]}]}'
    )
    return _http(target, MLP, body, 3)


def slow_streams(target: Target) -> Fire:
    def fire() -> None:
        with ExitStack() as stack:
            for _ in range(10):
                connection = stack.enter_context(Http2(target.grpc))
                for _ in range(1_000):
                    connection.send(connection.open(), b"\0\0\0\0\x64", end=False)
            time.sleep(_HOLD_SECS)

    return fire


def unended_messages(target: Target) -> Fire:
    message = grpc_message(bytes(50 * MB))

    def fire() -> None:
        with Http2(target.grpc) as connection:
            for _ in range(20):
                connection.send(connection.open(), message, end=False)
            time.sleep(_HOLD_SECS)

    return fire


def http_unread(target: Target) -> Fire:
    body, size = _binary(ECHO, "FP32", (12 * MB,), bytes(48 * MB))
    head = post_head(
        f"/v2/models/{ECHO}/infer",
        len(body),
        [_BINARY, ("Inference-Header-Content-Length", str(size))],
    )

    def fire() -> None:
        with ExitStack() as stack:
            for _ in range(12):
                made = stack.enter_context(connect(target.http, receive_buffer=4096))
                with suppress(OSError):
                    made.sendall(head)
                    made.sendall(body)
            time.sleep(_HOLD_SECS)

    return fire


def grpc_unread(target: Target) -> Fire:
    message = grpc_message(_message(ECHO, "FP32", (15 * MB // 4,), bytes(15 * MB)))

    def fire() -> None:
        with ExitStack() as stack:
            for _ in range(3):
                connection = stack.enter_context(Http2(target.grpc, window=0))
                for _ in range(8):
                    connection.call(message)
            time.sleep(_HOLD_SECS)

    return fire


def gzip_bytes(target: Target) -> Fire:
    message = _message(MLP, "BYTES", (1, 4 * MB), bytes(16 * MB))
    return _grpc(target, _compressed(message), 5)


def gzip_json(target: Target) -> Fire:
    data = b",".join([b'""'] * 4_000_000)
    text = b'{"inputs":[{"name":"input","datatype":"BYTES","shape":[4000000],"data":[%s]}]}' % data
    encoding = [("Content-Encoding", "gzip")]
    return _http(target, MLP, gzip.compress(text, 9), 5, headers=encoding)


def classification(target: Target) -> Fire:
    head = (
        f'{{"inputs":[{{"name":"input","datatype":"FP32","shape":[{MB}],'
        f'"parameters":{{"binary_data_size":{4 * MB}}}}}],"outputs":[{{"name":"output",'
        f'"parameters":{{"classification":{MB}}}}}]}}'
    ).encode()
    return _http(target, ECHO, head + bytes(4 * MB), 3, json_size=len(head))


def parameters(target: Target) -> Fire:
    message = _message(MLP, "FP32", (1, 64), bytes(256)) + b"\x22\x00" * 5_000_000
    return _grpc(target, grpc_message(message), 2)


def map_entries(target: Target) -> Fire:
    head = pb.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=[1, 64])
    tensor = head.SerializeToString() + b"\x22\x00" * 2_500_000
    message = b"\x0a\x03mlp" + bytes_field(5, tensor) + bytes_field(7, bytes(256))
    return _grpc(target, grpc_message(message), 3)


def watchers(target: Target) -> Fire:
    def fire() -> None:
        with Http2(target.grpc, WATCH) as connection:
            for _ in range(1_000):
                connection.call(grpc_message(b""))
            time.sleep(2 * _HOLD_SECS)

    return fire


def _sessions(target: Target, connections: int, calls: int, long: bool) -> Fire:
    """Open streams without a message; with `long`, heads of 15 KB by index, each a bit different.

    Of each connection, all that it sends is made before.
    """
    encoder = Encoder()
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", STREAM), (":authority", "localhost"),
        ("te", "trailers"), ("content-type", "application/grpc"),
        *[("x", "x" * 3_000)] * (5 * long),
    ]  # fmt: skip
    blocks = [
        encoder.encode([*fields, NeverIndexedHeaderTuple("n", f"{number % 8 if long else 0}")])
        for number in range(calls)
    ]
    data = b"".join(
        frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number, block in enumerate(blocks)
    )

    def fire() -> None:
        with ExitStack() as stack:
            for _ in range(connections):
                with suppress(OSError):
                    stack.enter_context(Http2(target.grpc)).raw(data)
            time.sleep(2 * _HOLD_SECS)

    return fire


def long_heads(target: Target) -> Fire:
    return _sessions(target, 70, 1_023, long=True)


def idle_streams(target: Target) -> Fire:
    return _sessions(target, 200, 1_023, long=False)


def _stream(target: Target, path: str, messages: bytes, frame_size: int, times: int) -> Fire:
    """One stream with these messages in frames of a size, sent `times` times."""

    def fire() -> None:
        with Http2(target.grpc, path) as connection:
            stream = connection.open()
            for _ in range(times):
                connection.send(stream, messages, end=False, largest=frame_size)
            connection.send(stream, bytes(5))
            connection.wait(stream)

    return fire


def tiny_messages(target: Target) -> Fire:
    return _stream(target, STREAM, bytes(5 * 12_000), 16_384, 3)


def reflections(target: Target) -> Fire:
    message = grpc_message(b"\x22\x08" + b"headrace")
    return _stream(target, REFLECTION, message * 4_000, 16_384, 3)


def split_frames(target: Target) -> Fire:
    """DATA of one byte each, behind messages that are unpacked on the lanes."""
    message = _compressed(_message(MLP, "BYTES", (1, 4 * MB), bytes(16 * MB)))

    def fire() -> None:
        with ExitStack() as stack:
            made = [stack.enter_context(Http2(target.grpc, STREAM)) for _ in range(4)]
            for connection in made:
                stream = connection.open()
                connection.send(stream, message, end=False)
                connection.send(stream, bytes(200_000), end=False, largest=1)
            for connection in made:
                connection.wait(1, 2 * _HOLD_SECS)

    return fire


def empty_calls(target: Target) -> Fire:
    def fire() -> None:
        for _ in range(5):
            with Http2(target.grpc, LIVE) as connection:
                connection.raw(b"".join(connection.heads(8_800, END_STREAM)))
                connection.wait(2 * 8_800 - 1, _HOLD_SECS)

    return fire


def pipelining(target: Target) -> Fire:
    """Requests of 25 bytes that need no body: over several connections, and behind bodies."""
    request = b"GET /v2 HTTP/1.1\r\nHost:\r\n\r\n"
    path = f"/v2/models/{MLP}/infer"
    empty = post_head(path, 0)
    chunked = f"POST {path} HTTP/1.1\r\nHost:\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n"

    def fire() -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(connect(target.http)) for _ in range(64)]
            for client in clients:
                client.sendall(chunked.encode())
            for client in clients:
                with suppress(OSError):
                    client.sendall(b"0\r\n\r\n" + request * 600)
            time.sleep(_HOLD_SECS)
        for each in (request, empty):
            with ExitStack() as stack:
                for _ in range(3):
                    made = stack.enter_context(connect(target.http))
                    made.settimeout(2 * _HOLD_SECS)
                    with suppress(OSError):
                        made.sendall(each * (256 * 1024 // len(each)))
                time.sleep(_HOLD_SECS)

    return fire


def trickle(target: Target) -> Fire:
    head = post_head(f"/v2/models/{MLP}/infer", 60 * MB)
    body = bytes(60 * MB - 100)

    def fire() -> None:
        with ExitStack() as stack:
            made = [stack.enter_context(connect(target.http)) for _ in range(17)]
            for each in made:
                with suppress(OSError):
                    each.sendall(head + body)
            for _ in range(2):
                time.sleep(45)
                for each in made:
                    with suppress(OSError):
                        each.sendall(b" ")

    return fire


def load_bodies(target: Target) -> Fire:
    head = post_head("/v2/repository/models/any/load", 60 * MB)
    body = bytes(60 * MB - 100)

    def fire() -> None:
        with ExitStack() as stack:
            for _ in range(20):
                made = stack.enter_context(connect(target.http))
                with suppress(OSError):
                    made.sendall(head + body)
            time.sleep(_HOLD_SECS)

    return fire


def push_promise(target: Target) -> Fire:
    def fire() -> None:
        for _ in range(10):
            with Http2(target.grpc) as connection:
                stream = connection.open()
                connection.raw(frame(PUSH_PROMISE, 4, stream, bytes(1 << 20)))
                connection.wait(stream, 2.0)

    return fire


def idle_connections(target: Target) -> Fire:
    def fire() -> None:
        with ExitStack() as stack:
            for address in [target.http, target.grpc] * 1_000:
                with suppress(OSError):
                    stack.enter_context(connect(address))
            time.sleep(_HOLD_SECS)

    return fire


def bytes_to_python(target: Target) -> Fire:
    body, size = _binary(PYTHON, "BYTES", (_BODY // 4,), bytes(_BODY // 4 * 4))
    return _http(target, PYTHON, body, json_size=size)


def bytes_to_onnx(target: Target) -> Fire:
    body, size = _binary(TEXT, "BYTES", (_BODY // 4,), bytes(_BODY // 4 * 4))
    return _http(target, TEXT, body, json_size=size)


def variable_shapes(target: Target) -> Fire:
    """Light runs, by which a model comes to the loop, and heavy ones."""
    rows = 2_000
    light, heavy = (_binary(GRAM, "FP32", (n, n), b"\0\0\x80\x3f" * n * n) for n in (1, rows))
    runs = [_http(target, GRAM, body, times, size) for (body, size), times in (
        (heavy, 3), (light, 1_100), (heavy, 3))]  # fmt: skip

    def fire() -> None:
        for run in runs:
            run()

    return fire


def bytes_as_json(target: Target) -> Fire:
    count = _BODY // 3
    data = b'"",' * (count - 1) + b'""'
    text = b'{"inputs":[{"name":"input","datatype":"BYTES","shape":[%d],"data":[%s]}]}'
    return _http(target, TEXT, text % (count, data))


def bytes_contents(target: Target) -> Fire:
    count = _BODY // 2
    head = pb.ModelInferRequest.InferInputTensor(name="input", datatype="BYTES", shape=[count])
    tensor = head.SerializeToString() + bytes_field(5, b"\x42\x00" * count)
    message = bytes_field(1, TEXT.encode()) + bytes_field(5, tensor)
    return _grpc(target, grpc_message(message))


def floats_as_json(target: Target) -> Fire:
    count = _BODY // 4
    data = b"1.5," * (count - 1) + b"1.5"
    text = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[%d],"data":[%s]}]}'
    return _http(target, ECHO, text % (count, data))


def packed_varints(target: Target) -> Fire:
    head = pb.ModelInferRequest.InferInputTensor(name="input", datatype="INT64", shape=[_BODY])
    contents = bytes_field(3, b"\1" * _BODY)
    tensor = head.SerializeToString() + bytes_field(5, contents)
    message = bytes_field(1, WHOLE.encode()) + bytes_field(5, tensor)
    return _grpc(target, grpc_message(message))


def bytes_to_worker(target: Target) -> Fire:
    count = 2_000_000
    body, size = _binary(PYTHON, "BYTES", (count,), b"\4\0\0\0text" * count)
    return _http(target, PYTHON, body, 2, json_size=size)


def large_bodies(target: Target) -> Fire:
    body, size = _binary(ECHO, "FP32", (4 * MB,), bytes(16 * MB))
    request = post_head(
        f"/v2/models/{ECHO}/infer",
        len(body),
        [_BINARY, ("Inference-Header-Content-Length", str(size))],
    )

    def ask() -> None:
        with suppress(OSError), connect(target.http) as made:
            for _ in range(25):
                made.sendall(request)
                made.sendall(body)
                left = 16 * MB
                while left > 0 and (got := made.recv(1 << 20)):
                    left -= len(got)
                made.settimeout(0.05)
                with suppress(TimeoutError):  # the rest: the head was counted as data
                    made.recv(1 << 16)
                made.settimeout(60)

    return partial(_by_eight, ask)


def endless_upstream(target: Target) -> Fire:
    text = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1],"data":[1]}]}'
    return _http(target, ENDLESS, text)


def stalled_log(target: Target) -> Fire:
    def fire() -> None:
        for _ in range(300):
            made = connect(target.http)
            made.settimeout(2.0)
            with closing(made):
                try:
                    made.sendall(b"GET /v2/models/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
                    made.recv(4096)
                except OSError:  # it stands still
                    time.sleep(_HOLD_SECS)
                    return

    return fire


def beyond_links(target: Target) -> Fire:
    shape = b'"shape":[0,1152921504606846976],"data":[]}]}'
    text = b'{"inputs":[{"name":"input","datatype":"UINT8",' + shape
    message = grpc_message(_message(MLP, "FP32", (1, 64), bytes(256)))

    def fire() -> None:
        with Http2(target.grpc, headers=[("grpc-timeout", "99999999H")]) as connection:
            for _ in range(20):
                post(target.http, f"/v2/models/{MLP}/infer", text)
                connection.wait(connection.call(message))

    return fire


def _replayed(case: Case, target: Target) -> Fire:
    return lambda: replay(case, target.http, target.grpc)


def _procedure(target: Target, name: str, message: bytes, times: int = 10) -> Fire:
    def fire() -> None:
        for _ in range(times):
            with Http2(target.grpc, f"/inference.GRPCInferenceService/{name}") as connection:
                connection.wait(connection.call(message))

    return fire


def trace_settings(target: Target) -> Fire:
    settings = b"".join(
        bytes_field(1, bytes_field(1, str(number % 1_000).encode()) + b"\x12\x00")
        for number in range(4 * MB)
    )
    return _procedure(target, "TraceSetting", _compressed(settings))


def log_settings(target: Target) -> Fire:
    return _procedure(target, "LogSettings", _compressed(b"\x0a\x00" * (_BODY // 2)))


def load_messages(target: Target) -> Fire:
    entries = b"\x1a\x00" * (_BODY // 2)
    return _procedure(target, "RepositoryModelLoad", grpc_message(b"\x12\x03mlp" + entries), 3)


def _load(target: Target, body: bytes, times: int = 3) -> Fire:
    def fire() -> None:
        for _ in range(times):
            post(target.http, f"/v2/repository/models/{MLP}/load", body, ())

    return fire


def load_containers(target: Target) -> Fire:
    return _load(target, b'{"parameter":[' + b"[]," * (_BODY // 3) + b"[]]}")


def load_files(target: Target) -> Fire:
    data = b"A" * (_BODY // 4 * 4 - 400)
    return _load(target, b'{"parameters":{"config":"{}","file:1/model.onnx":"%b"}}' % data)


def load_escapes(target: Target) -> Fire:
    data = b"\\/" * (_BODY // 2 - 100)
    return _load(target, b'{"parameters":{"config":"{}","file:1/model.onnx":"%b"}}' % data)


def _grown(count: int) -> bytes:
    """A request for that many numbers, as JSON."""
    text = b'{"inputs":[{"name":"input","datatype":"INT64","shape":[1],"data":[%d]}]}'
    return text % count


def _ask_little(target: Target) -> None:
    """Ask for a few numbers: ONNX Runtime never gives back its first region of memory."""
    post(target.http, f"/v2/models/{GROW}/infer", _grown(1))


def huge_json(target: Target) -> Fire:
    _ask_little(target)
    return _http(target, GROW, _grown(50 * MB), 3)


def huge_message(target: Target) -> Fire:
    _ask_little(target)
    message = _message(GROW, "INT64", (1,), (150 * MB).to_bytes(8, "little"))
    return _grpc(target, grpc_message(message), 3)


def large_json(target: Target) -> Fire:
    _ask_little(target)
    ask = _http(target, GROW, _grown(10 * MB), 2)

    def fire() -> None:
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return fire


_EXPLICIT = ("--model-control-mode=explicit", "--load-model=*", "--load-overrides=files")


def many_connections(target: Target) -> Fire:
    addresses = (target.http, target.grpc, target.metrics)

    def fire() -> None:
        with ExitStack() as stack:
            for number in range(_CONNECTIONS):
                with suppress(OSError):
                    stack.enter_context(connect(addresses[number % len(addresses)]))
            time.sleep(_HOLD_SECS)

    return fire


def at_once(target: Target) -> Fire:
    """A request of each client in the same instant: first over HTTP, then over gRPC."""
    encoder = Encoder()
    encoder.header_table_size = 0
    block = encoder.encode([
        (":method", "POST"), (":scheme", "http"), (":path", METADATA), (":authority", "localhost"),
        ("te", "trailers"), ("content-type", "application/grpc"),
    ])  # fmt: skip
    asked = pb.ModelMetadataRequest(name=MLP).SerializeToString()
    message = b"\0" + len(asked).to_bytes(4, "big") + asked
    path = f"GET /v2/models/{MLP}/config HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

    def over_http(_number: int) -> bytes:
        return path

    def over_grpc(number: int) -> bytes:
        stream = 2 * number + 1
        head = frame(HEADERS, END_HEADERS, stream, block)
        return head + frame(DATA, END_STREAM, stream, message)

    def send(address: str, first: bytes, request: Callable[[int], bytes]) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(connect(address)) for _ in range(_AT_ONCE)]
            for client in clients:
                client.sendall(first)
            for number in range(3):
                time.sleep(1.0)
                with suppress(OSError):
                    for client in clients:
                        client.sendall(request(number))
            time.sleep(1.0)

    def fire() -> None:
        send(target.http, b"", over_http)
        send(target.grpc, PREFACE + frame(SETTINGS, 0, 0), over_grpc)

    return fire


def tls_connections(target: Target) -> Fire:
    """Most clients say nothing, and every tenth says hello at the same time."""
    client, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(client, sent, server_hostname="localhost").do_handshake()
    hello = sent.read()

    def fire() -> None:
        with ExitStack() as stack:
            opened = []
            for _ in range(_CONNECTIONS):
                with suppress(OSError):
                    opened.append(stack.enter_context(connect(target.grpc)))
            for each in opened[::10]:
                with suppress(OSError):
                    each.sendall(hello)
            time.sleep(_HOLD_SECS)

    return fire


def wrong_keys(target: Target) -> Fire:
    """Requests with keys that nobody has, a different one each time."""
    number = count()
    connections, batches, batch = 8, 20, 500

    def ask(_: int) -> None:
        with suppress(OSError), connect(target.http) as made:
            for _ in range(batches):
                asked = b"".join(
                    b"GET /v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer hrk_%08x\r\n\r\n"
                    % next(number)
                    for _ in range(batch)
                )
                made.sendall(asked)
                left = batch
                while left:
                    data = made.recv(MB)
                    if not data:
                        return
                    left -= data.count(b"HTTP/1.1 401")

    def fire() -> None:
        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(ask, range(connections)))

    return fire


class _Shaking:
    """A TLS client, with its hello and, once the server has answered, the end of its handshake."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._client = context.wrap_bio(self._received, self._sent, server_hostname="localhost")
        self.hello = self._next()

    def _next(self) -> bytes:
        with suppress(ssl.SSLWantReadError):
            self._client.do_handshake()
        return self._sent.read()

    def answer(self, received: bytes) -> bytes:
        """The answer to what the server has said; "" while that is not all."""
        self._received.write(received)
        return self._next()


def _tls_client() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=f"{_CERTIFICATES}/root.pem")
    context.load_cert_chain(f"{_CERTIFICATES}/client.pem", f"{_CERTIFICATES}/client.key")
    context.set_alpn_protocols(["h2"])
    return context


def tls_handshakes(target: Target) -> Fire:
    """All say hello at the same time, and finish their handshakes at the same time.

    With client certificates, the end of a handshake is what takes most of the server's time.
    """
    context = _tls_client()
    clients = [_Shaking(context) for _ in range(_SHAKING)]

    def fire() -> None:
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            opened = [(each, stack.enter_context(connect(target.grpc))) for each in clients]
            for each, made in opened:
                with suppress(OSError):
                    made.sendall(each.hello)
                    selector.register(made, selectors.EVENT_READ, (each, made))
            end = time.monotonic() + _HANDSHAKE_SECS
            while selector.get_map() and time.monotonic() < end:
                ends = list[tuple[socket.socket, bytes]]()
                while found := selector.select(_GATHER_SECS):
                    for key, _ in found:
                        each, made = key.data
                        with suppress(OSError):
                            if not (data := each.answer(made.recv(MB))):
                                continue
                            ends.append((made, data))
                        selector.unregister(made)
                for made, data in ends:
                    with suppress(OSError):
                        made.sendall(data)
            time.sleep(_HOLD_SECS)

    return fire


def slow_handshakes(target: Target) -> Fire:
    """A byte of each hello after the other."""
    hello = _Shaking(_tls_client()).hello

    def fire() -> None:
        with ExitStack() as stack:
            opened = [stack.enter_context(connect(target.grpc)) for _ in range(_SHAKING)]
            end = time.monotonic() + 2 * _HOLD_SECS
            for at in range(len(hello)):
                for made in opened:
                    with suppress(OSError):
                        made.sendall(hello[at : at + 1])
                if time.monotonic() > end:
                    break

    return fire


def log_flood(target: Target) -> Fire:
    text = b'{"inputs":[{"name":"input","datatype":"BYTES","shape":[1],"data":["%b"]}]}' % FLOOD
    return _http(target, PYTHON, text, 3)


def many_models(target: Target) -> Fire:
    """Documents about all models, each by eight clients at a time."""
    wanted = (
        (target.http, b"GET /v2/models/stats"), (target.http, b"POST /v2/repository/index"),
        (target.http, b"GET /"), (target.metrics, b"GET /metrics"),
    )  # fmt: skip

    def ask(address: str, line: bytes) -> None:
        with suppress(OSError), connect(address) as made:
            made.sendall(line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while made.recv(MB):
                pass

    def fire() -> None:
        threads = [threading.Thread(target=ask, args=given) for given in wanted * 8]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return fire


def over_quota(target: Target) -> Fire:
    """Requests of a client with a valid key, far more than a hundred times its quota."""
    body = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    headers = [("Authorization", f"Bearer {_GREEDY}")]
    some = (post_head(f"/v2/models/{MLP}/infer", len(body), headers) + body) * 50

    def ask() -> None:
        end = time.monotonic() + _HOLD_SECS
        with suppress(OSError), connect(target.http) as made:
            while time.monotonic() < end:
                made.sendall(some)
                answered = 0
                while answered < 50 and (data := made.recv(MB)):
                    answered += data.count(b"HTTP/1.1 ")

    return partial(_by_eight, ask)


def many_threads(target: Target) -> Fire:
    config = {
        "instance_group": [{"count": 3}],
        "parameters": {"intra_op_thread_count": {"string_value": "1500"}},
    }
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()

    def fire() -> None:
        post(target.http, f"/v2/repository/models/{ECHO}/load", body)

    return fire


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("shape-with-text", "a shape of text and a large number", shape_with_text),
        Attack("slow-streams", "10 000 gRPC calls of five bytes", slow_streams),
        Attack("unended-messages", "20 x 50 MB of gRPC without an end", unended_messages),
        Attack("http-unread", "12 x 48 MB of answers that nobody reads", http_unread),
        Attack("grpc-unread", "24 x 15 MB of answers, window 0", grpc_unread),
        Attack("gzip-bytes", "4 M empty elements in gzip over gRPC", gzip_bytes),
        Attack("gzip-json", "4 M empty strings as JSON in gzip", gzip_json),
        Attack("classification", "a million classes", classification),
        Attack("parameters", "5 M parameters", parameters),
        Attack("map-entries", "2.5 M parameters of an input", map_entries),
        Attack("watchers", "1 000 Health/Watch", watchers),
        Attack("trickle", "17 x 60 MB, then a byte at a time", trickle),
        Attack("load-bodies", "20 x 60 MB for a model's load", load_bodies),
        Attack("push-promise", "a PUSH_PROMISE of 1 MiB", push_promise),
        Attack("idle-connections", "2 000 idle connections", idle_connections),
        Attack("bytes-python", "16 M BYTES to a Python model", bytes_to_python),
        Attack("bytes-onnx", "16 M BYTES to an ONNX model", bytes_to_onnx),
        Attack("variable-shapes", "6 x 2 000 x 2 000 to a model of any shape", variable_shapes),
        Attack("bytes-json", "21 M BYTES as JSON", bytes_as_json),
        Attack("bytes-contents", "32 M BYTES in bytes_contents", bytes_contents),
        Attack("floats-json", "63 MB of FP32 as JSON", floats_as_json),
        Attack("varints", "63 MB of packed varints", packed_varints),
        Attack("bytes-worker", "2 M BYTES to a worker", bytes_to_worker),
        Attack("large-bodies", "200 x 16 MB", large_bodies),
        Attack(
            "endless-upstream", "an upstream whose answer does not end", endless_upstream, 64 * MB
        ),
        Attack("trace-settings", "4 M trace settings in gzip over gRPC", trace_settings),
        Attack("log-settings", "32 M log settings in gzip over gRPC", log_settings),
        Attack("load-messages", "32 M parameters of a load", load_messages, options=_EXPLICIT),
        Attack("load-containers", "21 M arrays for a load", load_containers, options=_EXPLICIT),
        Attack("load-files", "a file of 47 MB for a load", load_files, options=_EXPLICIT),
        Attack("load-escapes", "a file of escapes for a load", load_escapes, options=_EXPLICIT),
        Attack("huge-json", "an answer of 550 MB as JSON", huge_json),
        Attack("huge-message", "an answer of 600 MB over gRPC", huge_message, 600 * MB),
        Attack("large-json", "6 x 110 MB of answers as JSON", large_json),
        Attack("long-heads", "70 x 1 023 streams with heads of 15 KB", long_heads),
        Attack("idle-streams", "200 x 1 023 streams without a message", idle_streams),
        Attack("tiny-messages", "36 000 empty messages on a stream", tiny_messages),
        Attack("reflections", "12 000 reflection requests on a stream", reflections),
        Attack("split-frames", "4 x 200 000 DATA frames of a byte", split_frames),
        Attack("empty-calls", "8 800 gRPC calls without a message", empty_calls),
        Attack("pipelining", "thousands of tiny HTTP requests at once", pipelining),
        Attack("stalled-log", "nobody reads standard error", stalled_log),
        Attack("beyond-links", "numbers that front ends cannot pass on", beyond_links),
        Attack("many-connections", "10 000 connections that say nothing", many_connections),
        Attack("at-once", "2 000 clients with a request each in the same instant", at_once),
        Attack(
            "tls-connections",
            "10 000 TLS clients, of which 1 000 say hello",
            tls_connections,
            options=_TLS,
        ),
        Attack("tls-handshakes", "1 000 TLS handshakes at once", tls_handshakes, options=_TLS),
        Attack(
            "slow-handshakes",
            "1 000 TLS clients that say hello byte by byte",
            slow_handshakes,
            options=_TLS,
        ),
        Attack("many-models", "documents about 1 000 models", many_models, write=write_many_models),
        Attack("log-flood", "300 000 lines from a model", log_flood),
        Attack("wrong-keys", "80 000 requests with wrong keys", wrong_keys, options=LOW_ROLE),
        Attack("over-quota", "a valid key, 100 x its quota", over_quota, options=LOW_ROLE),
        Attack("many-threads", "a load request for 4 500 threads", many_threads, options=_EXPLICIT),
        *(
            Attack(
                name,
                case.title,
                partial(_replayed, case),
                options=_EXPLICIT[:2] if case.explicit else (),
            )
            for name, case in FOUND.items()
        ),
    )
}


class EndlessUpstream:
    """A V2 server over HTTP whose answers to inference have no end; for one model, `ENDLESS`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def write(self, repository: Path) -> None:
        """Put a model that runs here into a repository."""
        (repository / ENDLESS).mkdir(parents=True)
        (repository / ENDLESS / "config.pbtxt").write_text(
            f'backend: "triton"\nmax_batch_size: 0\nparameters {{ key: "endpoints" value '
            f'{{ string_value: "http://{self.address}" }} }}\n'
            'input { name: "input" data_type: TYPE_FP32 dims: [-1] }\n'
            'output { name: "output" data_type: TYPE_FP32 dims: [-1] }\n'
        )

    def close(self) -> None:
        """Answer no more."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                made, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(made,), daemon=True).start()

    def _serve(self, made: socket.socket) -> None:
        with suppress(OSError), made:
            while request := made.recv(65_536):
                if b"/infer" in request:
                    made.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
                    for _ in range(4_000):
                        made.sendall(chunk)
                    return
                made.sendall(self._document(request))

    def _document(self, request: bytes) -> bytes:
        path = request.split(b" ", 2)[1].rstrip(b"/")
        body, status = b"{}", b"200 OK"
        if path.endswith(b"/config"):
            status = b"404 Not Found"
        elif path == b"/v2":
            body = b'{"name":"endless","version":"1","extensions":[]}'
        elif path.endswith(ENDLESS.encode()):
            body = (
                b'{"name":"%s","versions":["1"],"platform":"none",'
                b'"inputs":[{"name":"input","datatype":"FP32","shape":[-1]}],'
                b'"outputs":[{"name":"output","datatype":"FP32","shape":[-1]}]}'
            ) % ENDLESS.encode()
        return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
