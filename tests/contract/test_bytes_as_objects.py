"""BYTES inputs of more elements than `--max-object-bytes` has room for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from tests.contract.conftest import CARRIERS, CLIENTS, EACH_CARRIER
from tests.models.onnx_graphs import identity, write_model
from tests.support.server_process import ServerProcess, clean_server

MOST = 20_000  # elements


@pytest.fixture(scope="module", params=EACH_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root: Path = tmp_path_factory.mktemp("objects")
    write_model(root, "text", identity(Datatype.BYTES, ["n"]), "max_batch_size: 0")
    options = (*CARRIERS[request.param], f"--max-object-bytes={80 * MOST}")
    with clean_server(root, options=options) as process:
        yield process


@pytest.mark.parametrize("name", CLIENTS)
def test_elements_beyond_the_limit(server: ServerProcess, name: str) -> None:
    with CLIENTS[name](server) as client:
        for count in (MOST, MOST + 1):
            given = {"INPUT0": np.full(count, b"words", object)}
            if count == MOST:
                assert len(client.infer("text", given)["OUTPUT0"]) == count
                continue
            with pytest.raises(InvalidRequest, match="--max-object-bytes"):
                client.infer("text", given)
