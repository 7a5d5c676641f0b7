"""The limit of open calls of a connection, as clients learn it from either transport."""

from pathlib import Path

import pytest

from tests.support.http2_socket import REQUEST, Http2Socket, prefixed
from tests.support.server_process import ServerProcess
from tests.support.transports import TRANSPORTS


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_clients_are_told_how_many_calls_they_may_make(tmp_path: Path, transport: str) -> None:
    options = [f"--grpc-transport={transport}", "--max-connection-streams=3"]
    live = [(n, v.replace("ModelInfer", "ServerLive")) for n, v in REQUEST]
    with ServerProcess(tmp_path, options=options) as server, Http2Socket(server.grpc) as client:
        assert client.call(live, prefixed(b"")).data
        assert client.most_streams == 3
