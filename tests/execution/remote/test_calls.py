"""Calls to a server over TLS and with credentials, on a thread and on an event loop."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.execution.remote.calls import CallFailed, Calls, LoadingCalls
from headrace.execution.remote.options import RemoteOptions

TLS = Path(__file__).parents[2] / "support" / "tls"


class Echo(grpc.GenericRpcHandler):
    """Answers with the caller's `authorization`; what is empty it refuses."""

    def service(self, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")

        def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            if not message:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is nothing")
            return str(given).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a server with a certificate for `localhost` listens."""
    pair = (TLS / "server.key").read_bytes(), (TLS / "server.pem").read_bytes()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [Echo()])
        found = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        server.start()
        yield found
        server.stop(None).wait()


@pytest.fixture
def options(port: int, tmp_path: Path) -> RemoteOptions:
    """The server by its name, and a token in a file."""
    (tmp_path / "token").write_text("Bearer abc\n")
    parameters = {
        "endpoints": f"grpcs://localhost:{port}",
        "tls_root_cert": str(TLS / "root.pem"),
        "authorization_file": "token",
    }
    return RemoteOptions.of(parameters, "m", 0, tmp_path)


def test_on_a_thread(options: RemoteOptions) -> None:
    endpoint = next(e for e in options.resolve() if "127.0.0.1" in e.target)
    with LoadingCalls(endpoint, options.credentials) as calls:
        assert calls.call("ModelMetadata", b"x", 10) == b"Bearer abc"
        with pytest.raises(CallFailed, match="there is nothing") as failed:
            calls.call("ModelMetadata", b"", 10)
    assert failed.value.status == 3


def test_on_a_loop(options: RemoteOptions) -> None:
    endpoint = next(e for e in options.resolve() if "127.0.0.1" in e.target)

    async def scenario() -> None:
        calls = Calls(endpoint, options.credentials)
        assert await calls.infer(b"x", 10) == b"Bearer abc"
        with pytest.raises(CallFailed, match="there is nothing"):
            await calls.ready(b"", 10)
        await calls.close()

    asyncio.run(scenario())


def test_a_server_that_is_not_trusted(options: RemoteOptions, port: int, tmp_path: Path) -> None:
    parameters = {"endpoints": f"grpcs://localhost:{port}"}
    stranger = RemoteOptions.of(parameters, "m", 0, tmp_path)
    endpoint = next(e for e in stranger.resolve() if "127.0.0.1" in e.target)
    with (
        LoadingCalls(endpoint, stranger.credentials) as calls,
        pytest.raises(CallFailed) as failed,
    ):
        calls.call("ModelMetadata", b"x", 10)
    assert failed.value.status == 14
