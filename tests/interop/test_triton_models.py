"""Python models as Triton's users write them, unchanged, asked by tritonclient over each protocol.

They lie in `triton_models`. What they need from outside is in `OPTIONS`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from tests.interop.triton import Client
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parent / "triton_models"
ENVIRONMENT = {
    "SHOP_REGION": "north", "SHOP_ZONE": "7", "SHOP_TOKEN": "sesame", "OTHER": "kept",
    "HEADRACE_LOAD_WAIT_SECS": "30",
}  # fmt: skip
OPTIONS = [
    "--model-control-mode=explicit",
    "--load-model=*",
    "--worker-env=SHOP_[RZ]*",
    "--worker-env=HEADRACE*",
]


@pytest.fixture(scope="module", params=["alone", "front ends"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of all of them."""
    frontends = ["--frontends=2"] if request.param == "front ends" else []
    with clean_server(
        MODELS, options=[*OPTIONS, *frontends], environment=ENVIRONMENT, tracebacks=False
    ) as process:
        yield process


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """A client over each protocol."""
    with Client(request.param, server.http if request.param == "http" else server.grpc) as client:
        yield client


def ask(client: Client, model: str, output: str, **inputs: NDArray[Any]) -> NDArray[Any]:
    """One output of a model."""
    given = [client.input(name, array) for name, array in inputs.items()]
    found: NDArray[Any] = client.call("infer", model, given).as_numpy(output)
    return found


def texts(*given: str) -> NDArray[Any]:
    """Text as tensors have it."""
    return np.array([text.encode() for text in given], object)


def test_relative_imports(client: Client) -> None:
    greeting = ask(client, "relative_imports", "GREETING", NAME=texts("Ada"))
    assert greeting.tolist() == [b"Good day, Ada!"]


def test_environment_variables(client: Client) -> None:
    names = texts("SHOP_REGION", "SHOP_ZONE", "SHOP_TOKEN", "OTHER", "HEADRACE_LOAD_WAIT_SECS")
    values = ask(client, "environment", "VALUES", NAMES=names)
    assert values.tolist() == [b"north", b"7", b"sesame", b"-", b"-"]


def test_no_inputs(client: Client) -> None:
    first, second = (int(ask(client, "no_inputs", "COUNT")[0]) for _ in range(2))
    assert second == first + 1
    assert client.call("get_model_metadata", "no_inputs", **as_json(client)).get("inputs", []) == []


def test_no_outputs(client: Client, server: ServerProcess) -> None:
    line = f"a line over {client.family}"
    answer = client.call("infer", "no_outputs", [client.input("LINE", texts(line)[None])])
    assert client.document(answer).get("outputs", []) == []
    until(lambda: f"took {line}" in server.log, line)  # a thread writes it


def test_a_model_completes_itself_without_inputs(client: Client) -> None:
    dice = ask(client, "completed_without_inputs", "DICE")
    assert dice.shape == (2,)
    assert dice.dtype == np.int32
    assert ((dice >= 1) & (dice <= 6)).all()


def test_outputs_differ_from_the_configuration(client: Client, server: ServerProcess) -> None:
    given = texts("one", "three").reshape(2, 1)
    answer = client.call("infer", "other_outputs", [client.input("TEXT", given)])
    assert answer.as_numpy("LENGTHS").tolist() == [[3, 3], [5, 5]]
    assert answer.as_numpy("LENGTHS").dtype == np.int64
    assert answer.as_numpy("LETTERS").tolist() == [[b"o", b"e"], [b"t", b"e"]]
    warnings = [f"model 'other_outputs' gave output '{name}'" for name in ("LENGTHS", "LETTERS")]
    until(lambda: all(warning in server.log for warning in warnings), "the warnings")
    assert [server.log.count(warning) for warning in warnings] == [1, 1]


def test_models_loaded_while_initializing(client: Client) -> None:
    x = np.array([1, 2.5], np.float32)
    assert ask(client, "parent", "Y", X=x).tolist() == [2, 5]
    for name in ("parent", "child"):
        client.call("unload_model", name)
    client.call("load_model", "parent")
    assert client.call("is_model_ready", "child") is True
    assert ask(client, "parent", "Y", X=x).tolist() == [2, 5]


def test_decoupled_fan_out_from_coroutines(client: Client) -> None:
    together = ask(client, "fan_out", "TOGETHER", COUNT=np.array([4], np.int32))
    assert together.tolist() == [4, 4, 4, 4]


def test_responses_after_execute_has_returned_none(client: Client) -> None:
    assert ask(client, "answers_later", "Y", X=np.array([[1], [2]], np.int32)).tolist() == [
        [2],
        [3],
    ]


def test_a_wrong_input_of_a_model_without_any(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="'X'"):
        ask(client, "no_inputs", "COUNT", X=np.zeros(1, np.float32))


def as_json(client: Client) -> dict[str, Any]:
    """What has a gRPC client give dictionaries, as an HTTP client does."""
    return {} if client.over_http else {"as_json": True}
