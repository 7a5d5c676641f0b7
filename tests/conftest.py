"""Settings of all tests: none may depend on how fast the machine is."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from inspect import signature

import pytest
from hypothesis import HealthCheck, settings

from headrace.options import ENV_PREFIX

# Otherwise the threads of OpenBLAS, which NumPy brings, spin for 70 ms in each process that imports
# it, and there are hundreds of these.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# Otherwise an example that takes a fifth of a second fails its test, and so does a slow start.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("unhurried"), derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Repeat the same generated cases in every `make test`; `make test-whole` looks for others."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # servers of tests inherit it
    searching = "hypothesis" in config.option.markexpr
    settings.load_profile("unhurried" if searching else "repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the collected tests, so that the garbage collector skips them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


# Long files of a process: begun last, they would leave the other cores idle.
LONG = (
    "tests/core/test_plugins_removed.py",  # with the contract's quick tests, in one process
    "tests/protocol/http2/test_connection_fuzz.py",
    "tests/soak/",
    "tests/models/test_example_models.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session", autouse=True)
def no_settings() -> Iterator[None]:
    """No setting of a server in the environment: servers of tests inherit it.

    Tests read variables of their own, such as HEADRACE_TRITON, when they are collected.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """A minute for each answer: in HTTPX's five seconds a busy machine may not load a model."""
    with suppress(ImportError):  # it is not among the packages for PyFlink
        import httpx

        default: httpx.Timeout = signature(httpx.Client).parameters["timeout"].default
        default.connect = default.read = default.write = default.pool = 60.0


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of asynchronous tests and fixtures."""
    return "asyncio"
