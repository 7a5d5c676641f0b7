"""A second server is asked when the first one takes long, and its answer is the client's."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.app import backends
from headrace.core.datatypes import Datatype
from headrace.core.errors import RepositoryError
from headrace.engine.loading import load_version
from headrace.engine.opening import LoadOptions, open_model
from headrace.repository.layout import read_model_directory
from tests.contract.conftest import CARRIERS, CLIENTS
from tests.models.onnx_graphs import add_sub, write_model
from tests.support.remote import write_remote
from tests.support.scrape import Scraper
from tests.support.sequence_server import SequenceServer
from tests.support.server_process import ServerProcess

FLOATS = np.ones((1, 3), np.float32)
DECOUPLED = "max_batch_size: 8 model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers with the models."""
    root = tmp_path_factory.mktemp("there")
    write_model(root, "simple", add_sub(Datatype.FP32, 3), "max_batch_size: 8")
    write_model(root, "decoupled", add_sub(Datatype.FP32, 3), DECOUPLED)
    with ServerProcess(root) as first, ServerProcess(root) as second:
        yield [first, second]


@pytest.mark.slow
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_halted_server_costs_no_more_than_the_wait(
    pair: list[ServerProcess], tmp_path: Path, carrier: str
) -> None:
    addresses = [server.grpc for server in pair]
    write_remote(tmp_path, "simple", *addresses, hedge_after="0.02", hedge_percent="100",
                 health_timeout_secs="60")  # fmt: skip
    with (
        ServerProcess(tmp_path, options=CARRIERS[carrier]) as front,
        CLIENTS["grpc"](front) as client,
        Scraper(front.metrics) as scraper,
    ):
        inputs = {"INPUT0": FLOATS, "INPUT1": FLOATS}
        scraper.until_reached("simple", len(pair))
        os.kill(pair[0].pid, signal.SIGSTOP)
        try:
            for _ in range(4):
                assert client.infer("simple", inputs)["OUTPUT0"].tolist() == [[2, 2, 2]]
        finally:
            os.kill(pair[0].pid, signal.SIGCONT)
        found = scraper.now()
        asked = {"model": "simple", "endpoint": f"grpc://{pair[1].grpc}"}
        wins = found.value("headrace_endpoint_hedge_wins_total", **asked)
        assert 1 <= wins <= found.value("headrace_endpoint_hedges_total", **asked) <= 4
        assert found.value("headrace_endpoint_outstanding", model="simple") == 0
        assert "bug " not in front.log


@pytest.mark.slow
def test_a_model_with_a_state_is_refused(pair: list[ServerProcess], tmp_path: Path) -> None:
    options = LoadOptions(1)
    with SequenceServer() as stateful:
        for name, address in (("adder", stateful.address), ("decoupled", pair[0].grpc)):
            write_remote(tmp_path, name, address, hedge_after="p95")
            opened = open_model(read_model_directory(tmp_path / name), backends(), options)
            text = re.escape("parameters['hedge_after']: is for models without sequences")
            with pytest.raises(RepositoryError, match=text):
                load_version(opened, 1, options)
