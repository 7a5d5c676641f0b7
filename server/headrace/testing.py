"""Models in tests: a server that runs as long as a `with` block or a fixture, and a client of it.

`pytest_plugins = ["headrace.testing"]` in a `conftest.py` gives the fixtures; nothing is installed
for those who do not ask.

- `serve_model(...)` is what `headrace.serve` is, as a fixture whose servers end with the test.
- `headrace_server` is one server for all tests of a module, which has in `HEADRACE_MODELS` what
  `headrace.serve` takes, or a list of that.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from headrace.client.blocking import Client
from headrace.serving.server import Server, serve

__all__ = ["headrace_client", "headrace_server", "serve", "serve_model"]


@pytest.fixture
def serve_model() -> Iterator[Callable[..., Server]]:
    """`headrace.serve`, whose servers end with the test."""
    with ExitStack() as stack:
        yield lambda *models, **options: stack.enter_context(serve(*models, **options))


@pytest.fixture(scope="module")
def headrace_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the models that a test module names in `HEADRACE_MODELS`."""
    models = request.module.HEADRACE_MODELS
    with serve(*(models if isinstance(models, list | tuple) else [models])) as server:
        yield server


@pytest.fixture
def headrace_client(headrace_server: Server) -> Client:
    """A client of the module's server."""
    return headrace_server.client
