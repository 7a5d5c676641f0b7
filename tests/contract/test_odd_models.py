"""Models with odd but harmless behaviour."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import ExecutionFailed
from tests.contract.conftest import EACH_PROXY
from tests.contract.proxied import behind
from tests.models.python_models import write_python_model
from tests.models.triton_models import CONFIG, DECOUPLED, MANY, ODD, ODD_COROUTINE, ORDINARY
from tests.support.client import Input, strings
from tests.support.commanded import ask, stream_of, values
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.scrape import until
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module", params=["default", *EACH_PROXY])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root, front = tmp_path_factory.mktemp("odd"), tmp_path_factory.mktemp("front")
    write_python_model(root, "odd", ODD, CONFIG)
    write_python_model(root, "odd_coroutine", ODD_COROUTINE, DECOUPLED)
    write_python_model(root, "ordinary", ORDINARY, CONFIG)
    write_python_model(root, "many", MANY, DECOUPLED)
    options = ["--exit-timeout-secs=5"]
    with ServerProcess(root, options=options) as process:
        with behind(request.param, process, root, front, options=options) as server:
            yield server
        assert process.stop() == 0
        assert "bug " not in process.log, process.log
        assert "was ended by" not in process.log


def test_odd_requests_that_are_answered(grpc_client: GrpcClient, server: ServerProcess) -> None:
    with pytest.raises(ExecutionFailed, match=r"gave output 'TODL', .* and no output 'TOLD'"):
        ask(grpc_client, "odd", "misspelt")
    # A model that calls itself.
    code, text = ask(grpc_client, "odd", "ask_itself")
    assert code == 5
    assert "would wait for itself: it needs a second instance" in text
    # An event loop of an ordinary model.
    assert ask(grpc_client, "odd", "run_a_loop") == [1, 1, 1]
    # Responses cancelled while they are awaited.
    assert ask(grpc_client, "odd", "call_off") is True
    # Responses read late.
    assert ask(grpc_client, "odd", "keep_up", count=2000, seconds=0.2) == 2001


def test_long_texts(grpc_client: GrpcClient, server: ServerProcess) -> None:
    before = ask(grpc_client, "odd", "pid")
    assert ask(grpc_client, "odd", "log_much") == before
    with pytest.raises(ExecutionFailed, match="z" * 1000):
        ask(grpc_client, "odd", "say_much")
    with pytest.raises(ExecutionFailed, match="takes more than 4 MiB"):
        ask(grpc_client, "odd", "tell_much")
    assert ask(grpc_client, "odd", "pid") == before
    server.await_logged("y" * 1000)


def test_processes_that_a_model_starts(grpc_client: GrpcClient, server: ServerProcess) -> None:
    before = ask(grpc_client, "odd", "pid")
    assert ask(grpc_client, "odd", "fork") == before
    assert ask(grpc_client, "odd", "spawn") == [1, 4, 9]
    assert ask(grpc_client, "odd", "pid") == before
    until(lambda: server.log.count("from the child") == 2, "what the children have logged")


def test_forked_processes_call_other_models(
    grpc_client: GrpcClient, server: ServerProcess, tmp_path: Path
) -> None:
    before = ask(grpc_client, "odd", "pid")
    values = [1, "x" * 300_000, *range(5)]
    *found, [child, grandchild] = ask(grpc_client, "odd", "ask_in_children", values=values)
    assert found == [[value, 3, 2, True] for value in values]
    assert child == grandchild == [7, 3, 2, True]
    file = tmp_path / "cancelled"
    assert ask(grpc_client, "odd", "leave_in_a_child", file=str(file)) is True
    until(file.exists, "the other model to see that the child has gone")
    refused = ask(grpc_client, "odd", "ask_in_a_spawned_child")
    assert "only possible inside a server's worker" in refused
    assert ask(grpc_client, "odd", "pid") == before
    assert "Exception ignored" not in server.log


def test_a_coroutine_that_cancels_itself(grpc_client: GrpcClient) -> None:
    [error] = values(stream_of(grpc_client, "odd_coroutine", {"do": "cancel"}))
    assert "CancelledError" in str(error)
    assert values(stream_of(grpc_client, "odd_coroutine", {"do": ""})) == ["here"]


def test_a_cancellation_outlives_the_batch(grpc_client: GrpcClient, tmp_path: Path) -> None:
    file = tmp_path / "cancelled"
    command = json.dumps({"do": "outlive", "file": str(file)}).encode()
    with Stream(grpc_client) as stream:
        message = infer_message("odd_coroutine", [Input("COMMAND", strings([command], [1, 1]))])
        stream.send(message)
        stream.receive()
    until(lambda: file.exists() and file.read_text() == "True", "the model to know of it")
