"""gRPC clients that disconnect just before their answers are written."""

import socket
import struct

import numpy as np
from hpack import Encoder

from headrace.protocol.http2 import protocol as http2
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.grpc_client import GrpcClient
from tests.support.http2_socket import REQUEST, prefixed
from tests.support.server_process import ServerProcess

INTS = np.arange(16, dtype=np.int32).reshape(1, 16)


def calls(count: int) -> bytes:
    """First bytes of a connection with `count` requests."""
    request = pb.ModelInferRequest(model_name="simple")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=INTS.shape)
        request.raw_input_contents.append(INTS.tobytes())
    message, encoder = prefixed(request.SerializeToString()), Encoder()
    sent = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)
    for number in range(1, 2 * count, 2):
        sent += http2.frame(http2.HEADERS, http2.END_HEADERS, number, encoder.encode(REQUEST))
        sent += http2.frame(http2.DATA, http2.END_STREAM, number, message)
    return sent


def test_a_reset_does_not_drop_other_writes_of_the_same_turn(
    server: ServerProcess, grpc_client: GrpcClient
) -> None:
    host, _, port = server.grpc.rpartition(":")
    sent = calls(20)
    for _ in range(50):
        with socket.create_connection((host, int(port))) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            plain.sendall(sent)
        grpc_client.infer("simple", {"INPUT0": INTS, "INPUT1": INTS})
    assert "the handler is closed" not in server.log
