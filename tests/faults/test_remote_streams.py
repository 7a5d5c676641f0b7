"""Upstreams of decoupled models lost while they answer, and clients that disconnect."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.python_models import write_python_model
from tests.models.streaming_models import FLOOD, FLOOD_CONFIG
from tests.support.client import Input, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.remote import write_remote
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

LOST = "the connection to the server of model 'flood' was lost during the request"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two upstreams with the model, and the server before them."""
    write_python_model(tmp_path / "there", "flood", FLOOD, FLOOD_CONFIG)
    with ExitStack() as stack:
        there = [stack.enter_context(ServerProcess(tmp_path / "there")) for _ in range(2)]
        write_remote(tmp_path / "here", "flood", *(server.grpc for server in there))
        front = stack.enter_context(ServerProcess(tmp_path / "here"))
        yield [*there, front]
        assert front.stop() == 0
        assert "bug " not in front.log
        assert "Traceback" not in front.log


def flood(file: Path) -> pb.ModelInferRequest:
    """A request that is answered until its client disconnects."""
    inputs = [
        Input("FILE", strings([str(file).encode()], [1, 1])),
        Input("SIZE", np.array([[100]], np.int32)),
    ]
    return infer_message("flood", inputs)


def test_a_killed_upstream_fails_its_streams(servers: list[ServerProcess], tmp_path: Path) -> None:
    *there, front = servers
    with GrpcClient(front.grpc) as client, Scraper(front.metrics) as scraper:
        with Stream(client) as stream:
            stream.send(flood(tmp_path / "first"))
            for _ in range(3):
                assert stream.receive().infer_response.outputs
            found = scraper.now().samples("headrace_endpoint_outstanding")
            [busy] = [labels["endpoint"] for labels, value in found if value]
            next(server for server in there if busy.endswith(server.grpc)).stop(signal.SIGKILL)
            # Responses in flight arrive first.
            while not (message := stream.receive()).error_message:
                assert message.infer_response.outputs
            assert message.error_message == LOST
            assert message.infer_response.parameters["triton_final_response"].bool_param
            # The request is not sent again. The next one goes to the other upstream.
            stream.send(flood(tmp_path / "second"))
            assert stream.receive().infer_response.outputs
            assert scraper.now().value("headrace_endpoint_healthy", endpoint=busy) == 0
        scraper.until_idle()
    until((tmp_path / "second.cancelled").exists, "the model to see that nobody waits")
