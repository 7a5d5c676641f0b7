"""Is the server alive and ready, is a model, over every transport."""

from http.client import HTTPConnection

import pytest

from headrace.core.errors import InvalidRequest, NotFound
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.server_process import ServerProcess


def test_server_is_live_and_ready(caller: Client) -> None:
    assert caller.live()
    assert caller.ready()


@pytest.mark.parametrize(
    ("model", "version", "ready"),
    [
        ("simple", "", True),
        ("simple", "1", True),
        ("simple", "2", False),
        ("versions_latest", "", True),
        ("versions_latest", "3", True),
        ("versions_latest", "1", False),  # there, but the policy does not serve it
        ("no_such_model", "", False),  # an answer, not an error
        ("no_such_model", "1", False),
    ],
)
def test_model_ready(caller: Client, model: str, version: str, ready: bool) -> None:
    assert caller.model_ready(model, version) is ready


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/health/live", 200),
        ("/v2/health/ready", 200),
        ("/v2/models/simple/ready", 200),
        ("/v2/models/simple/versions/1/ready", 200),
        ("/v2/models/simple/versions/2/ready", 503),
        ("/v2/models/simple", 405),
    ],
)
def test_heads_alone(server: ServerProcess, path: str, status: int) -> None:
    """As some load balancers ask; the connection goes on."""
    connection = HTTPConnection(server.http.split("//")[-1], timeout=30)
    connection.request("HEAD", path)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (status, b"")
    connection.request("GET", path)
    assert connection.getresponse().read()
    connection.close()


def test_ready_for_a_bad_version_string(caller: Client) -> None:
    # Over HTTP the version is part of the path, and no route has anything but digits there.
    error = InvalidRequest if isinstance(caller, GrpcClient) else NotFound
    with pytest.raises(error):
        caller.model_ready("simple", "abc")


def test_ready_for_a_version_beyond_64_bits(caller: Client) -> None:
    with pytest.raises(InvalidRequest, match="failed to get model version from specified version"):
        caller.model_ready("simple", str(2**63))
