"""`grpc.health.v1.Health`: the server's readiness, for any service name, as Triton answers it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from headrace.core.tensors import Buffer
from headrace.engine.admission import Admission
from headrace.transports.grpc.call import Call, Stream, Unary
from headrace.transports.grpc.procedures import CHECK, HEALTH
from headrace.wire.pb import health_pb2 as pb

_POLL_SECS = 0.25  # readiness is computed when asked for; nothing announces its changes


class Serving(Protocol):
    """Who is asked."""

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""


def check_handlers(engine: Serving) -> dict[str, Unary]:
    """Check."""

    async def check(data: Buffer, call: Call) -> bytes:
        return _status(engine)

    return {CHECK: check}


def watch_handlers(check: Unary, admission: Admission) -> dict[str, Stream]:
    """Watch: what `check` says now, and each time it has changed."""

    async def watch(requests: AsyncIterator[Buffer], call: Call) -> AsyncIterator[bytes]:
        last = b""
        exiting = asyncio.Event()
        admission.watch_close(exiting.set)
        try:
            while True:
                status = await check(b"", call)
                if status != last:
                    last = status
                    yield status
                if admission.exiting:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(exiting.wait(), _POLL_SECS)
        finally:
            admission.unwatch_close(exiting.set)

    return {f"/{HEALTH}/Watch": watch}


def _status(engine: Serving) -> bytes:
    serving = pb.HealthCheckResponse.SERVING
    return pb.HealthCheckResponse(
        status=serving if engine.ready else pb.HealthCheckResponse.NOT_SERVING
    ).SerializeToString()
