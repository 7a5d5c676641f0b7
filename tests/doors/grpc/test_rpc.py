"""One call of the native transport."""

import pytest
import uvloop

from headrace.doors.grpc.native.connection import GrpcConnection, Rpc, RpcHead, ServerContext
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
from headrace.protocol.http2.protocol import Limits


@pytest.mark.parametrize(
    ("timeout", "least", "most"),
    [(None, 0, 0), (60.0, 1, 60), (1e-5, 1e-6, 2e-5), (0.0, 1e-6, 1e-6)],
)
def test_how_long_its_client_waits(timeout: float | None, least: float, most: float) -> None:
    """Also one that hardly does: a timer of uvloop's is another thing then."""

    async def scenario() -> float:
        admission = Admission(0, 0)
        context = ServerContext({}, {}, admission, 1, False, GrpcOptions(), Limits())
        fields = [(b":path", b"/any.Service/Any"), (b":method", b"POST")]
        head = RpcHead(fields, context, GrpcConnection(context))
        head.timeout = timeout
        call = Rpc(head, 1)
        call.finished = True  # which its timer is to see
        return call.remaining()

    assert least <= uvloop.run(scenario()) <= most
