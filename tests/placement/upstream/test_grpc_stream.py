"""Streams of requests to a server over gRPC."""

from pathlib import Path

from headrace.core.errors import ServerError
from headrace.placement.upstream.grpc_client import GrpcMessages, GrpcStream
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.v2_protobuf import RemoteAnswer
from tests.protocol.http2.server_peer import HEAD


class Receiver:
    """Nothing comes."""

    def received(self, answer: RemoteAnswer | ServerError) -> None:
        raise AssertionError(answer)

    def failed(self, error: Exception) -> None:
        raise AssertionError(error)

    def ended(self) -> None:
        raise AssertionError("the end")


def test_a_stream_that_is_held_keeps_its_window() -> None:
    """What it does not take, the server has to keep."""
    options = RemoteOptions.of({"endpoints": "grpc://127.0.0.1"}, "m", 0, Path())
    stream = GrpcStream(GrpcMessages(options, "m"), [], Receiver(), HEAD, b"", 0, 0)
    seen = [stream.keeps_window]
    for held in (True, False):
        stream.hold(held)
        seen.append(stream.keeps_window)
    assert seen == [False, True, False]
