"""A watch of the server's health over gRPC."""

from typing import Self

import grpc

from headrace.protocol.pb import health_pb2
from tests.support.grpc_client import GrpcClient, procedure

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def check_health(client: GrpcClient) -> int:
    """The status now, of no service in particular."""
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
        """Wait for the next status."""
        status: int = next(self._updates).status
        return status

    def changed(self) -> bool:
        """Wait for a further status; False if it was cancelled before there was one."""
        try:
            return next(self._updates, None) is not None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                return False
            raise

    def cancel(self) -> None:
        """Watch no more."""
        self._updates.cancel()

    def ended(self) -> bool:
        """Wait for the next status, or the end of the stream; whether it is the end."""
        return next(self._updates, None) is None
