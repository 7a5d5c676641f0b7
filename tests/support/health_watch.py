"""A health watch over gRPC."""

from typing import Self

import grpc

from headrace.protocol.pb import health_pb2
from tests.support.grpc_client import GrpcClient, procedure

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def check_health(client: GrpcClient) -> int:
    """Current status of the server as a whole."""
    path = "/grpc.health.v1.Health/Check"
    check = procedure(client.channel, path, health_pb2.HealthCheckResponse)
    status: int = check(b"", timeout=60).status
    return status


class HealthWatch:
    """One stream of statuses."""

    def __init__(self, client: GrpcClient) -> None:
        path = "/grpc.health.v1.Health/Watch"
        watch = procedure(client.channel, path, health_pb2.HealthCheckResponse, "unary_stream")
        self._updates = watch(b"", timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._updates.cancel()

    def next(self) -> int:
        """The next status."""
        status: int = next(self._updates).status
        return status

    def changed(self) -> bool:
        """Wait for a further status; False if the watch was cancelled before."""
        try:
            return next(self._updates, None) is not None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                return False
            raise

    def cancel(self) -> None:
        """Cancel the watch."""
        self._updates.cancel()

    def ended(self) -> bool:
        """Wait for the next status or the end of the stream; true at the end."""
        return next(self._updates, None) is None
