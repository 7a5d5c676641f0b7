"""`grpc.health.v1.Health`: the server's readiness, for any service name, as Triton answers it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headrace.core.tensors import Buffer
from headrace.engine.admission import Admission
from headrace.transports.grpc.call import RpcContext, Stream, Unary
from headrace.transports.grpc.procedures import CHECK, HEALTH
from headrace.wire.pb import health_pb2 as pb


class Serving(Protocol):
    """Who is asked."""

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""


class Watched(Serving, Protocol):
    """Who tells when it has changed."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `ready` has changed, until `unwatch`."""

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Do not call `callback`."""


def check_handlers(engine: Serving) -> dict[str, Unary]:
    """Check."""

    async def check(data: Buffer, call: RpcContext) -> bytes:
        return _status(engine.ready)

    return {CHECK: check}


def watch_handlers(server: Watched, admission: Admission) -> dict[str, Stream]:
    """Watch: whether `server` is ready now, and each time that has changed, until it exits."""

    async def watch(requests: AsyncIterator[Buffer], call: RpcContext) -> AsyncIterator[bytes]:
        last: bool | None = None
        changed = asyncio.Event()
        server.watch(changed.set)
        admission.watch_close(changed.set)
        try:
            while True:
                changed.clear()
                exiting = admission.exiting
                ready = server.ready and not exiting
                if ready is not last:
                    last = ready
                    yield _status(ready)
                if exiting:
                    return
                await changed.wait()
        finally:
            server.unwatch(changed.set)
            admission.unwatch_close(changed.set)

    return {f"/{HEALTH}/Watch": watch}


def _status(ready: bool) -> bytes:
    serving = pb.HealthCheckResponse.SERVING
    return pb.HealthCheckResponse(
        status=serving if ready else pb.HealthCheckResponse.NOT_SERVING
    ).SerializeToString()
