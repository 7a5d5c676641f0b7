"""Models in tests: fixtures that run a server, and clients of it.

`pytest_plugins = ["headrace.testing"]` in a `conftest.py` enables the fixtures; they are not
installed as a pytest plugin.

- `serve_model(...)` is `headrace.serve` as a fixture; its servers end with the test.
- `headrace_server` is one server for all tests of a module, of the models in its variable
  `HEADRACE_MODELS`: an argument of `headrace.serve`, or a list of them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from headrace.client.blocking import Client
from headrace.serving.server import Server, serve

__all__ = ["headrace_client", "headrace_server", "serve", "serve_model"]


@pytest.fixture
def serve_model() -> Iterator[Callable[..., Server]]:
    """`headrace.serve` whose servers end with the test."""
    with ExitStack() as stack:
        yield lambda *models, **options: stack.enter_context(serve(*models, **options))


@pytest.fixture(scope="module")
def headrace_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the models in a test module's `HEADRACE_MODELS`."""
    models = request.module.HEADRACE_MODELS
    with serve(*(models if isinstance(models, list | tuple) else [models])) as server:
        yield server


@pytest.fixture
def headrace_client(headrace_server: Server) -> Client:
    """A client of the module's server."""
    return headrace_server.client
