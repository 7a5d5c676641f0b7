"""Triton's Python API beyond a single answer per request."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, NotFound, Unsupported
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import EACH_PROXY
from tests.contract.proxied import behind
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import IDENTITY, STRICT, tensors, write_python_model
from tests.models.triton_models import (
    CALLER,
    CONFIG,
    COROUTINE,
    DECOUPLED,
    FICKLE,
    MANY,
    MANY_COROUTINE,
    ORDINARY,
)
from tests.support.client import Client, Input, strings
from tests.support.commanded import ask, stream_of, values
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.grpc_stream import Stream
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("triton")
    write_python_model(root, "ordinary", ORDINARY, CONFIG)
    write_python_model(root, "many", MANY, DECOUPLED + STRICT)
    write_python_model(root, "coroutine", COROUTINE, CONFIG)
    write_python_model(root, "many_coroutine", MANY_COROUTINE, DECOUPLED)
    write_python_model(root, "caller", CALLER, CONFIG + "instance_group { count: 2 }\n")
    file = f'parameters {{ key: "file" value {{ string_value: "{root}/it_is_ready" }} }}\n'
    write_python_model(root, "fickle", FICKLE, CONFIG + file)
    (root / "it_is_ready").touch()
    config = tensors("input", ("INPUT0", "FP32", "-1"))
    config += tensors("output", ("OUTPUT0", "FP32", "-1"))
    write_python_model(root, "identity", IDENTITY, "max_batch_size: 8\n" + config)
    write_model(root, "add_sub", add_sub(Datatype.INT32, 16), "max_batch_size: 8")
    return root


@pytest.fixture(scope="module", params=["default", *EACH_PROXY])
def server(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    front, options = tmp_path_factory.mktemp("front"), ["--exit-timeout-secs=5"]
    with ServerProcess(root, options=options) as process:
        with behind(request.param, process, root, front, options=options) as server:
            yield server
        assert process.stop() == 0
        assert "bug " not in process.log, process.log


@pytest.fixture(scope="module")
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


# --- response senders of an ordinary model


@pytest.mark.parametrize("how", ["send", "send without the flag", "send, then the flag"])
def test_a_sender_answers(caller: Client, how: str) -> None:
    assert ask(caller, "ordinary", how) == "sent"


def test_responses_and_errors_of_a_sender(caller: Client) -> None:
    assert ask(caller, "ordinary", "thread") == "from a thread"
    with pytest.raises(NotFound, match="later"):
        ask(caller, "ordinary", "error")
    with pytest.raises(ExecutionFailed, match="has dropped the request without completing it"):
        ask(caller, "ordinary", "drop")
    assert ask(caller, "ordinary", "again") == "the second time"
    assert ask(caller, "ordinary", "misuse") == [
        "Unable to send response. Unsupported flag provided.",
        "Inference Response object must be provided when the response flags is set to zero.",
        "Unable to send response. Non-decoupled model cannot send complete final before sending a"
        " response.",
        "response must be an InferenceResponse or None, got str",
    ]


def test_other_requests_run_while_one_is_open(
    caller: Client, background: ThreadPoolExecutor, server: ServerProcess
) -> None:
    kept = background.submit(ask, caller, "ordinary", "after the next")
    with Scraper(server.metrics) as scraper:
        scraper.until_running("ordinary")
        until(lambda: _released(caller, kept), "the kept request's answer")
    assert kept.result() == "released"


def _released(client: Client, kept: "Future[object]") -> bool:
    assert ask(client, "ordinary", "release") == "done"
    return kept.done()


def test_a_model_sees_a_cancellation(
    grpc_client: GrpcClient, tmp_path: Path, server: ServerProcess
) -> None:
    file = tmp_path / "started"
    command = json.dumps({"do": "wait until cancelled", "file": str(file)}).encode()
    message = infer_message("ordinary", [Input("COMMAND", strings([command], [1, 1]))])
    call = grpc_client.procedure("ModelInfer", pb.ModelInferResponse).future(message)
    until(file.exists, "the model to have begun")
    call.cancel()
    until((tmp_path / "started.cancelled").exists, "the model to see that nobody waits")


# --- decoupled models


@pytest.mark.parametrize("model", ["many", "many_coroutine"])
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_any_number_of_responses(
    grpc_client: GrpcClient, model: str, thread: bool, count: int
) -> None:
    messages = stream_of(grpc_client, model, {"count": count, "thread": thread})
    assert values(messages) == list(range(count))


def test_requests_are_answered_concurrently(grpc_client: GrpcClient) -> None:
    commands = [{"count": 50, "thread": True} for _ in range(4)]
    messages = stream_of(grpc_client, "many", *commands)
    for index in range(4):
        assert values(messages, str(index)) == list(range(50))


def test_the_last_response_may_be_the_end(grpc_client: GrpcClient) -> None:
    messages = stream_of(grpc_client, "many", {"do": "final with a response", "count": 2})
    assert values(messages) == [0, 1, "last"]
    final = [m.infer_response.parameters["triton_final_response"].bool_param for m in messages]
    assert final == [False, False, True]


@pytest.mark.parametrize(("command", "says"), [
    ({"do": "raise"}, "Failed to process the request(s) for model 'many_0', message: ValueError"),
    ({"do": "forget"}, "has dropped the request without completing it"),
    ({"do": "error"}, "broken off"),
    ({"do": "wrong"}, "gave output 'TOLD' as float32, its configuration says BYTES"),
    ({"return": "a list"},
     "Failed to process the request(s) for model 'many_0', message: Python model 'many_0' is"
     " using the decoupled mode and the execute function must return None."),
])  # fmt: skip
@pytest.mark.parametrize("count", [0, 2])
def test_errors_of_a_decoupled_model(
    grpc_client: GrpcClient, command: dict[str, object], says: str, count: int
) -> None:
    if command.get("do") == "raise" and count:
        command = {"do": "raise after"}
        says = "ValueError: no more answers"
    if "return" in command:
        count = 0  # its request is answered earlier
        command = {**command, "do": "forget"}
    found = values(stream_of(grpc_client, "many", {**command, "count": count}))
    assert found[:-1] == list(range(count))
    assert says in str(found[-1])


def test_responses_of_several_rows_large_and_after_a_released_request(
    grpc_client: GrpcClient,
) -> None:
    [message] = stream_of(grpc_client, "many", {"do": "rows"})
    assert read_answer(message.infer_response)["TOLD"].tolist() == [[b"a"], [b"b"], [b"c"]]
    [message] = stream_of(grpc_client, "many", {"do": "large", "bytes": 3_000_000})
    assert len(read_answer(message.infer_response)["TOLD"][0, 0]) == 3_000_000
    assert values(stream_of(grpc_client, "many", {"do": "again", "count": 1})) == [0]


def test_a_decoupled_model_sees_a_cancellation(grpc_client: GrpcClient, tmp_path: Path) -> None:
    file = tmp_path / "cancelled"
    command = {"do": "until cancelled", "file": str(file), "thread": True}
    array = strings([json.dumps(command).encode()], [1, 1])
    with Stream(grpc_client) as stream:
        stream.send(infer_message("many", [Input("COMMAND", array)]))
        stream.receive()
        stream.receive()
    until(file.exists, "the model to see that nobody reads")
    assert values(stream_of(grpc_client, "many", {"count": 1})) == [0]


def test_a_decoupled_model_needs_a_stream(caller: Client) -> None:
    with pytest.raises(Unsupported, match="doesn't support models with decoupled transaction"):
        ask(caller, "many", "count")


# --- coroutines


def test_coroutines_run_at_the_same_time(caller: Client, background: ThreadPoolExecutor) -> None:
    one, other = (background.submit(ask, caller, "coroutine", "meet", where="a") for _ in range(2))
    assert (one.result(), other.result()) == ("met", "met")


def test_coroutines_raise_and_call_other_models(caller: Client) -> None:
    with pytest.raises(ExecutionFailed, match="ValueError: no"):
        ask(caller, "coroutine", "raise")
    assert ask(caller, "coroutine", "give") == "given"
    assert ask(caller, "coroutine", "call", count=5) == [0, 2, 4, 6, 8]
    assert ask(caller, "coroutine", "stream", count=3) == [1, 1, 1, 0]


# --- calls to other models


def test_a_model_calls_another_and_itself(caller: Client) -> None:
    assert ask(caller, "caller", "add", value=21) == {"OUTPUT0": 42, "OUTPUT1": 0}
    # Another instance of itself.
    assert ask(caller, "caller", "itself") == {"OUTPUT0": 8, "OUTPUT1": 0}
    assert ask(caller, "caller", "threads", count=20) == [2 * number for number in range(20)]
    assert ask(caller, "caller", "large", size=500_000) is True


def test_a_model_calls_a_decoupled_one_and_cancels(caller: Client, tmp_path: Path) -> None:
    assert ask(caller, "caller", "stream", count=2) == [["0"], ["1"], []]
    file = tmp_path / "cancelled"
    assert ask(caller, "caller", "leave_stream", file=str(file)) == "left"
    until(file.exists, "the other model to see that nobody reads")
    other = tmp_path / "called_off"
    command = {"do": "until cancelled", "file": str(other)}
    found = ask(caller, "caller", "cancel_stream", other=command)
    assert found[:3] == ["0", "1", "2"]
    assert found[-1] is None  # the end, which the other model decides on
    until(other.exists, "the other model to see the cancellation")


def test_responses_after_a_cancellation(caller: Client) -> None:
    """Triton's behaviour: the called model decides on them."""
    found = ask(caller, "caller", "cancel_stream", other={"count": 40})
    assert found == [*map(str, range(40)), None]
    found = ask(caller, "caller", "cancel_stream", other={"do": "error when cancelled"})
    assert found[:3] == ["0", "1", "2"]
    assert found[-1] == [7, "request has been cancelled"]


def test_errors_of_other_models_are_responses(caller: Client) -> None:
    nobody, version, wrong, decoupled = ask(caller, "caller", "errors")
    told = "Model {0} - Error when running inference: "
    unready = f"{told}Failed for execute the inference request. Model '{{0}}' is not ready: "
    unknown = "Request for unknown model: '{}' {}is not found"
    assert nobody == [2, unready.format("nobody") + unknown.format("nobody", "")]
    assert version == [2, unready.format("add_sub") + unknown.format("add_sub", "version 7 ")]
    assert wrong[0] == 3
    assert wrong[1].startswith(told.format("add_sub"))
    assert "expected 2 inputs but got 0" in wrong[1]
    assert decoupled[0] == 5
    assert decoupled[1].startswith(f"{told.format('many')}Model many is using the decoupled.")
    assert "Please use 'decoupled=True' argument" in decoupled[1]


def test_invalid_calls_and_control_of_models(caller: Client) -> None:
    said = ask(caller, "caller", "start")
    assert str(said).startswith("BLS is only supported during the 'execute' function.")
    name, inputs, sender = ask(caller, "caller", "misuse")
    assert "needs the name of a model" in name
    assert "inputs must be of Tensor, got int" in inputs
    assert "has no sender" in sender
    found = ask(caller, "caller", "control")
    assert found["ready"] == [True, False, True]
    assert "not allowed" in found["load"]
    assert "not allowed" in found["unload"]


# --- metrics, readiness


def test_metrics_of_models(grpc_client: GrpcClient, server: ServerProcess) -> None:
    calls, level = ask(grpc_client, "caller", "metrics")
    assert (calls, level) == (2, 3.5)
    with Scraper(server.metrics) as scraper:
        metrics = scraper.now()
    assert metrics.value("calls", who="caller") == 2
    assert metrics.value("level") == 3.5
    assert metrics.value("sizes_count", who="caller") == 2
    assert metrics.value("sizes_bucket", who="caller", le="10") == 1
    assert metrics.value("sizes_bucket", who="caller", le="2.5") == 1
    assert metrics.value("sizes_bucket", who="caller", le="1") == 1
    assert "# TYPE sizes histogram" in metrics.text


def test_refused_metrics(caller: Client) -> None:
    said = ask(caller, "caller", "metric_misuse")
    for text, expected in zip(
        said,
        ["cannot be lowered", "set is not for", "observe is not for", "value is not for",
         "'nv_x' cannot be the name", "COUNTER, GAUGE or HISTOGRAM",
         "metric calls is a counter already, and cannot be a GAUGE",
         "a histogram needs buckets", "buckets must be a list", "finite, ascending",
         "finite, ascending", "finite, ascending", "buckets must be a number, got str",
         "nothing else has any", "labels must be a dict", "'le' cannot be the name of a label"],
        strict=True,
    ):  # fmt: skip
        assert expected in text


def test_metrics_of_a_family_that_is_deleted(caller: Client, server: ServerProcess) -> None:
    *said, kept, last = ask(caller, "caller", "delete_a_family")
    for text in (*said, last):
        assert "as the corresponding 'MetricFamily' has been deleted" in text
    assert kept == 7
    with Scraper(server.metrics) as scraper:
        assert "brief" not in scraper.now().text


@pytest.mark.parametrize("server", ["default"], indirect=True)
def test_a_model_says_whether_it_is_ready(caller: Client, root: Path) -> None:
    def ready(expected: bool) -> Callable[[], bool]:
        return lambda: (caller.model_ready("fickle"), caller.ready()) == (expected, True)

    until(ready(True), "the model to be ready")
    (root / "it_is_ready").unlink()
    until(ready(False), "the model not to be ready")
    (root / "it_is_ready").touch()
    until(ready(True), "the model to be ready again")
    (root / "it_is_ready.odd").touch()
    until(ready(False), "an answer that is none to count as no")
    (root / "it_is_ready.odd").unlink()
    until(ready(True), "the model to be ready again")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["default"], indirect=True)
def test_a_late_readiness_answer_counts_as_not_ready(grpc_client: GrpcClient, root: Path) -> None:
    """Even after it has arrived: such a model is not ready now and then."""
    answers = root / "it_is_ready.answers"
    late = root / "it_is_ready.late"
    late.touch()
    try:
        until(lambda: not grpc_client.model_ready("fickle"), "silence to count as no")
        seen: list[bool] = []

        def twice() -> bool:
            seen.append(grpc_client.model_ready("fickle"))
            return answers.exists() and len(answers.read_bytes()) > 1

        until(twice, "two answers")
        assert not any(seen)
    finally:
        late.unlink()
        answers.unlink(missing_ok=True)
    until(lambda: grpc_client.model_ready("fickle"), "the model to be ready again")
