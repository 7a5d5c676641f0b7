"""`grpc.health.v1.Health`: the server's readiness, for any service name, as Triton answers it."""

import asyncio
from collections.abc import AsyncIterator

from headrace.engine.engine import Engine
from headrace.transports.grpc.call import Call, Stream, Unary
from headrace.wire.pb import health_pb2 as pb

SERVICE = "grpc.health.v1.Health"
_POLL_SECS = 0.25  # readiness is computed when asked for; nothing announces its changes


def check_handlers(engine: Engine) -> dict[str, Unary]:
    """Check."""

    async def check(data: bytes, call: Call) -> bytes:
        return _status(engine)

    return {f"/{SERVICE}/Check": check}


def watch_handlers(engine: Engine) -> dict[str, Stream]:
    """Watch: the status now, and each time it has changed."""

    async def watch(requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        last = b""
        while True:
            status = _status(engine)
            if status != last:
                last = status
                yield status
            if engine.exiting:
                return
            await asyncio.sleep(_POLL_SECS)

    return {f"/{SERVICE}/Watch": watch}


def _status(engine: Engine) -> bytes:
    serving = pb.HealthCheckResponse.SERVING
    return pb.HealthCheckResponse(
        status=serving if engine.ready else pb.HealthCheckResponse.NOT_SERVING
    ).SerializeToString()
