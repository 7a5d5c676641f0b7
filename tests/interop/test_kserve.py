"""KServe's asynchronous REST and gRPC clients against the server."""

import json
import subprocess
import sys

import pytest

from tests.interop import kserve_session
from tests.interop.conftest import Served
from tests.support.transports import over_both_transports

# The clients take ten seconds to be imported.
pytestmark = [over_both_transports("served"), pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(served: Served) -> dict[str, str]:
    """Traceback of each check, empty where it passed."""
    command = [sys.executable, "-W", "ignore", kserve_session.__file__, served.http, served.grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", kserve_session.CHECKS)
def test_kserve_client(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""
