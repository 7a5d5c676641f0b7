"""Liveness and readiness of the server and of models, over every transport."""

from http.client import HTTPConnection

import pytest

from headrace.core.errors import InvalidRequest, NotFound
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.server_process import ServerProcess


def test_servers_and_models_that_are_ready(caller: Client) -> None:
    assert caller.live()
    assert caller.ready()
    for model, version, ready in (
        ("simple", "", True),
        ("simple", "2", False),
        ("versions_latest", "3", True),
        ("versions_latest", "1", False),  # there, but the policy does not serve it
        ("no_such_model", "", False),  # an answer, not an error
    ):
        assert caller.model_ready(model, version) is ready, model
    error = InvalidRequest if isinstance(caller, GrpcClient) else NotFound
    with pytest.raises(error):
        caller.model_ready("simple", "abc")
    with pytest.raises(InvalidRequest, match="failed to get model version from specified version"):
        caller.model_ready("simple", str(2**63))


@pytest.mark.parametrize(("path", "status"), [
    ("/v2/health/ready", 200), ("/v2/models/simple/versions/2/ready", 503),
    ("/v2/models/simple", 405),
])  # fmt: skip
def test_head_requests(server: ServerProcess, path: str, status: int) -> None:
    """Some load balancers probe by HEAD; the connection goes on."""
    connection = HTTPConnection(server.http.split("//")[-1], timeout=30)
    connection.request("HEAD", path)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (status, b"")
    connection.request("GET", path)
    assert connection.getresponse().read()
    connection.close()
