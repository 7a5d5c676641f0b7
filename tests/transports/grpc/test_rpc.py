"""One call of the native transport."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from headrace.engine.admission import Admission
from headrace.transports.grpc.native.head import CallHead
from headrace.transports.grpc.native.rpc import Rpc


@pytest.mark.parametrize(
    ("timeout", "least", "most"),
    [(None, 0, 0), (60.0, 1, 60), (1e-5, 1e-6, 2e-5), (0.0, 1e-6, 1e-6)],
)
def test_how_long_its_client_waits(timeout: float | None, least: float, most: float) -> None:
    """Also one that hardly does: a timer of uvloop's is another thing then."""

    async def scenario() -> float:
        host = SimpleNamespace(loop=asyncio.get_running_loop(), access_log=False)
        link: Any = SimpleNamespace(host=host, account=Admission(0, 0))
        head = CallHead("/any.Service/Any")
        head.timeout = timeout
        head.link = link
        call = Rpc(head, 1)
        call.finished = True  # which its timer is to see
        return call.remaining()

    assert least <= uvloop.run(scenario()) <= most
