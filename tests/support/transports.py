"""Running tests against each of the transports that can carry gRPC."""

from collections.abc import Sequence

import pytest

TRANSPORTS = ("native", "grpcio")


def over_both_transports(fixture: str) -> pytest.MarkDecorator:
    """Let a test, or a module, run with a server fixture for each transport.

    With the library, only among the slow tests.
    """
    first, *others = TRANSPORTS
    each = [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]
    return pytest.mark.parametrize(fixture, each, indirect=True, scope="session")


def grpc_transport(request: pytest.FixtureRequest) -> Sequence[str]:
    """The options for the server of a fixture; native unless the test says otherwise."""
    return (f"--grpc-transport={getattr(request, 'param', TRANSPORTS[0])}",)
