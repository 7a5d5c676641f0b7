"""Tests with each of the transports that can carry gRPC."""

from collections.abc import Sequence

import pytest

TRANSPORTS = ("native", "grpcio")
# The library's only among the slow tests.
EACH_TRANSPORT = [TRANSPORTS[0], *(pytest.param(t, marks=pytest.mark.slow) for t in TRANSPORTS[1:])]


def over_both_transports(fixture: str) -> pytest.MarkDecorator:
    """Run a test, or a module, with a server fixture for each transport.

    The default has no parameter: pytest would distinguish its server from that of other tests.
    """
    usual = pytest.param(None, id=TRANSPORTS[0])
    each = [usual, *EACH_TRANSPORT[1:]]
    return pytest.mark.parametrize(fixture, each, indirect=True, scope="session")


def grpc_transport(request: pytest.FixtureRequest) -> Sequence[str]:
    """gRPC options for the server of a fixture; native by default."""
    return (f"--grpc-transport={getattr(request, 'param', None) or TRANSPORTS[0]}",)
