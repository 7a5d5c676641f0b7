"""Running tests against each of the transports that can carry gRPC."""

from collections.abc import Sequence

import pytest

TRANSPORTS = ("native", "grpcio")
# With the library, only among the slow tests.
EACH_TRANSPORT = [TRANSPORTS[0], *(pytest.param(t, marks=pytest.mark.slow) for t in TRANSPORTS[1:])]


def over_both_transports(fixture: str) -> pytest.MarkDecorator:
    """Let a test, or a module, run with a server fixture for each transport.

    The usual one has no parameter: pytest would take it for another server than that of the tests
    that say nothing of transports.
    """
    usual = pytest.param(None, id=TRANSPORTS[0])
    each = [usual, *EACH_TRANSPORT[1:]]
    return pytest.mark.parametrize(fixture, each, indirect=True, scope="session")


def grpc_transport(request: pytest.FixtureRequest) -> Sequence[str]:
    """The options for the server of a fixture; native unless the test says otherwise."""
    return (f"--grpc-transport={getattr(request, 'param', None) or TRANSPORTS[0]}",)
