"""Requests with more rows than a batch: divided if this server chose the batch size."""

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest
from tests.contract import graphs
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.models.onnx_graphs import ROWS, identity, lookup, write_model
from tests.support.client import Client
from tests.support.server_process import ServerProcess, clean_server

_ON = 'parameters { key: "split_requests" value { string_value: "on" } }'
_OFF = 'parameters { key: "split_requests" value { string_value: "off" } }'
_POLICY = "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of models with batches of 8 rows, for each carrier."""
    root = tmp_path_factory.mktemp("large")
    write_model(root, "bare", graphs.row_sum())
    write_model(root, "texts", identity(Datatype.BYTES, [ROWS, 2]))
    write_model(root, "lookup", lookup())
    write_model(root, "short_queue", graphs.row_sum(), _POLICY)
    write_model(root, "set", graphs.row_sum(), "max_batch_size: 4")
    write_model(root, "set_on", graphs.row_sum(), f"max_batch_size: 4\n{_ON}")
    write_model(root, "off", graphs.row_sum(), _OFF)
    options = ("--default-max-batch-size=8", *CARRIERS[request.param])
    with clean_server(root, options=options) as process:
        yield process


def rows_of(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


@pytest.mark.parametrize("model", ["bare", "set_on", "short_queue"])
@pytest.mark.parametrize("rows", [9, 16, 203])
def test_large_requests_get_one_answer(client: Client, model: str, rows: int) -> None:
    x = rows_of(rows)
    given = {"headrace_timing": True}
    answer = client.infer(model, {"INPUT0": x}, id="large", parameters=given)
    assert answer["OUTPUT0"].tolist() == x.sum(1, keepdims=True).tolist()
    assert (answer.id, answer.model_version) == ("large", "1")
    assert answer.parameters["batch_rows"] == (4 if model == "set_on" else 8)


def test_classes_and_one_row_that_fails(client: Client) -> None:
    answer = client.infer("bare", {"INPUT0": rows_of(20)}, classes={"OUTPUT0": 1})
    assert answer["OUTPUT0"].tolist() == [[f"{4 * n + 1:f}:0".encode()] for n in range(20)]
    x = np.zeros((40, 1), np.int64)
    x[21] = 99
    with pytest.raises(ExecutionFailed, match="model 'lookup' failed to execute the request"):
        client.infer("lookup", {"INPUT0": x})
    x[21] = 3
    assert client.infer("lookup", {"INPUT0": x})["OUTPUT0"].tolist() == (10 * x).tolist()


@pytest.mark.parametrize(("model", "rows", "text"), [
    ("set", 5, r"<= 4 for 'set', got 5 \(its limit is the max_batch_size of its conf"),
    ("set_on", 4_097, r"<= 4096 .* 1024 batches, whose size is the max_batch_size of its conf"),
    ("off", 9, r"<= 8 for 'off', got 9 \(its limit is --default-max-batch-size, since its"),
    ("bare", 8_193, r"<= 8192 .* 1024 batches, whose size is --default-max-batch-size, since"),
])  # fmt: skip
def test_limits_of_large_requests(client: Client, model: str, rows: int, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        client.infer(model, {"INPUT0": rows_of(rows)})
