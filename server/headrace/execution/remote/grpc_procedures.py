"""The heads of the calls that are made of a server of gRPC, as its connections send them."""

from collections.abc import Sequence

from headrace.execution.remote.options import Credentials, Endpoint
from headrace.wire.http2.request_blocks import RequestHead
from headrace.wire.http2.response_headers import literal

_SERVICE = b"/inference.GRPCInferenceService/"
INFER = _SERVICE + b"ModelInfer"
READY = _SERVICE + b"ModelReady"
METADATA = _SERVICE + b"ModelMetadata"
CONFIG = _SERVICE + b"ModelConfig"
REGISTER = _SERVICE + b"SystemSharedMemoryRegister"
UNREGISTER = _SERVICE + b"SystemSharedMemoryUnregister"
REGISTERED = _SERVICE + b"SystemSharedMemoryStatus"
_AGENT = b"headrace"
_ACCEPTED = b"identity,deflate,gzip"
_AUTHORIZATION = "authorization"
_MOST_DIGITS = 99_999_999  # of a time-out


class Procedures:
    """Those of one endpoint. Requests are compressed by `packing`, if that is not empty.

    `infer` is the path of a run, where it is not that of the V2 protocol.
    """

    def __init__(
        self, endpoint: Endpoint, credentials: Credentials, packing: str, infer: bytes = INFER
    ) -> None:
        common = [
            (b":method", b"POST"),
            (b":scheme", b"https" if endpoint.secure else b"http"),
            (b":authority", endpoint.authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", _AGENT),
            (b"grpc-accept-encoding", _ACCEPTED),
        ]
        common += [(name.encode(), value.encode()) for name, value in credentials.metadata]
        shown = credentials.authorization.encode()
        own = [*common, (_AUTHORIZATION.encode(), shown)] if shown else common
        self._own = own
        self.live = _head(own, b"ServerLive")
        self.load = _head(own, b"RepositoryModelLoad")
        self.unload = _head(own, b"RepositoryModelUnload")
        coded = [(b"grpc-encoding", packing.encode())] if packing else []
        self._infer = _head_of(own + coded, infer)
        self._stream = _head(own + coded, b"ModelStreamInfer")
        self._infer_as = _head_of(common + coded, infer)
        self._stream_as = _head(common + coded, b"ModelStreamInfer")
        self._seconds = 0.0
        self._timeout = b""

    def head(self, path: bytes) -> RequestHead:
        """The head of a call of any procedure."""
        return _head_of(self._own, path)

    def infer(self, headers: Sequence[tuple[str, str]]) -> RequestHead:
        """The head of a run that has these further headers, which go before our own."""
        return self._infer_as if _shown(headers) else self._infer

    def stream(self, headers: Sequence[tuple[str, str]]) -> RequestHead:
        """The head of a stream."""
        return self._stream_as if _shown(headers) else self._stream

    def own(self, headers: Sequence[tuple[str, str]], seconds: float) -> bytes:
        """The fields of one call: its headers, and how long it may take, 0 for any time."""
        if seconds != self._seconds:
            self._seconds, self._timeout = seconds, timeout_field(seconds)
        if not headers:
            return self._timeout
        fields = [literal(n.encode("latin-1"), v.encode("latin-1", "replace")) for n, v in headers]
        return self._timeout + b"".join(fields)


def timeout_field(seconds: float) -> bytes:
    """`grpc-timeout` as a literal; nothing for 0."""
    if not seconds:
        return b""
    for unit, number in ((b"u", seconds * 1e6), (b"m", seconds * 1e3), (b"S", seconds)):
        whole = max(round(number), 1)
        if whole <= _MOST_DIGITS:
            return literal(b"grpc-timeout", b"%d%s" % (whole, unit))
    return b""


def _head(fields: Sequence[tuple[bytes, bytes]], name: bytes) -> RequestHead:
    return _head_of(fields, _SERVICE + name)


def _head_of(fields: Sequence[tuple[bytes, bytes]], path: bytes) -> RequestHead:
    return RequestHead([*fields[:2], (b":path", path), *fields[2:]])


def _shown(headers: Sequence[tuple[str, str]]) -> bool:
    return any(name == _AUTHORIZATION for name, _ in headers) if headers else False
