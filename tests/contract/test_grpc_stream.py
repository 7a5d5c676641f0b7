"""ModelStreamInfer: many requests for any models on one stream."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import Rounds
from tests.support.client import Input, Parameter
from tests.support.grpc_client import GrpcClient, infer_message, parameter, procedure, read_answer
from tests.support.grpc_stream import Stream
from tests.support.held import Gates
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess
from tests.support.transports import over_both_transports

BOTH = over_both_transports("busy_server")


@pytest.fixture(scope="module")
def client(busy_server: ServerProcess) -> Iterator[GrpcClient]:
    with GrpcClient(busy_server.grpc) as client:
        yield client


def _sum(values: list[float], id: str = "", **parameters: Parameter) -> pb.ModelInferRequest:
    row = np.array([values], np.float32)
    return infer_message("row_sum", [Input("INPUT0", row)], id=id, parameters=parameters)


def _spin(rounds: Any, id: str = "") -> pb.ModelInferRequest:
    return infer_message("spin_two", [Input("ROUNDS", np.array(rounds))], id=id)


def _held(number: int, id: str = "", model: str = "held") -> pb.ModelInferRequest:
    return infer_message(model, [Input("VALUE", np.array([[number]]))], id=id)


def _lookup(index: int, id: str = "") -> pb.ModelInferRequest:
    return infer_message("lookup", [Input("INPUT0", np.array([[index]]))], id=id)


def _parameters(message: pb.ModelStreamInferResponse) -> dict[str, Any]:
    return {name: parameter(value) for name, value in message.infer_response.parameters.items()}


@BOTH
def test_requests_for_several_models(client: GrpcClient) -> None:
    with Stream(client) as stream:
        stream.send(_sum([1, 2], id="a"), _lookup(3, id="b"), _sum([5], id="c"))
        stream.half_close()
        messages = stream.rest()
    assert [message.error_message for message in messages] == ["", "", ""]
    answers = [read_answer(message.infer_response) for message in messages]
    assert [(answer.id, answer.model_name) for answer in answers] == [
        ("a", "row_sum"), ("b", "lookup"), ("c", "row_sum"),
    ]  # fmt: skip
    assert [answer["OUTPUT0"].tolist() for answer in answers] == [[[3]], [[30]], [[5]]]
    assert all(answer.parameters == {"triton_final_response": True} for answer in answers)


@BOTH
def test_answers_come_in_the_order_of_requests(client: GrpcClient, rounds: Rounds) -> None:
    """Requests are executed concurrently, but early results wait for those of earlier requests."""
    with Stream(client) as stream:
        stream.send(_spin(rounds(0.3), id="slow"), _sum([1], id="quick"))
        stream.half_close()
        assert [message.infer_response.id for message in stream.rest()] == ["slow", "quick"]


@BOTH
def test_many_requests_under_way(client: GrpcClient) -> None:
    count = 3000  # more than the server runs concurrently
    with Stream(client) as stream:
        stream.send(*(_sum([n, 1], id=str(n)) for n in range(count)))
        stream.half_close()
        messages = stream.rest()
    answers = [read_answer(message.infer_response) for message in messages]
    assert [answer.id for answer in answers] == [str(n) for n in range(count)]
    assert [answer["OUTPUT0"].item() for answer in answers] == [n + 1 for n in range(count)]


@BOTH
def test_errors_before_and_of_execution(client: GrpcClient) -> None:
    """A message with the request's id; the stream goes on."""
    with Stream(client) as stream:
        stream.send(infer_message("nope", id="lost"))
        refused = stream.receive()
        assert refused.error_message == "Request for unknown model: 'nope' is not found"
        assert refused.infer_response == pb.ModelInferResponse(id="lost")
        stream.send(infer_message("row_sum", id="empty"))
        refused = stream.receive()
        assert "expected 1 inputs but got 0 inputs for model 'row_sum'" in refused.error_message
        assert refused.infer_response == pb.ModelInferResponse(id="empty")
        stream.send(_sum([1], id="good"))
        assert stream.receive().infer_response.id == "good"
    # An execution error names the model and ends the request.
    with Stream(client) as stream:
        stream.send(_lookup(99, id="bad"), _lookup(1, id="good"))
        failed, good = stream.receive(), stream.receive()
    assert failed.error_message == "model 'lookup' failed to execute the request"
    response = failed.infer_response
    assert (response.id, response.model_name, response.model_version) == ("bad", "lookup", "1")
    assert not response.outputs
    assert _parameters(failed) == {"triton_final_response": True}
    assert good.infer_response.id == "good"


def test_messages_over_the_limit_do_not_end_the_stream(narrow: ServerProcess) -> None:
    large, small = (
        infer_message("identity", [Input("INPUT0", np.zeros((1, count), np.float32))], id=name)
        for name, count in (("large", 1 << 20), ("small", 4))
    )
    with GrpcClient(narrow.grpc) as client, Stream(client) as stream:
        for _ in range(2):
            stream.send(large, small)
            assert "--max-request-bytes" in stream.receive().error_message
            assert stream.receive().infer_response.id == "small"
        stream.half_close()
        assert stream.rest() == []


@BOTH
def test_a_real_status_cancels_running_requests(
    client: GrpcClient, number: int, gates: Gates, busy_metrics: Scraper
) -> None:
    with Stream(client) as other, Stream(client, ("triton_grpc_error", "true")) as stream:
        other.send(_held(number))
        busy_metrics.until_running("held")
        stream.send(_lookup(99), _held(1))
        with pytest.raises(grpc.RpcError):
            stream.receive()
        assert stream.call.code() is grpc.StatusCode.INTERNAL
        assert stream.call.details() == "model 'lookup' failed to execute the request"
        busy_metrics.until_queued("held", 0)
        gates.open()
        other.half_close()
        assert len(other.rest()) == 1


def test_a_decoupled_model_answers_once_on_a_stream(grpc_client: GrpcClient) -> None:
    ones = Input("INPUT0", np.ones((1, 1), np.float32))
    with Stream(grpc_client) as stream:
        stream.send(infer_message("decoupled", [ones]))
        stream.half_close()
        [message] = stream.rest()
    assert _parameters(message) == {"triton_final_response": True}
    assert read_answer(message.infer_response)["OUTPUT0"].tolist() == [[2]]
    classified = infer_message("ranked", [Input("INPUT0", np.array([[1, 5, 2, 0]], np.float32))])
    classified.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    with Stream(grpc_client) as stream:
        stream.send(classified)
        answer = read_answer(stream.receive().infer_response)
    assert answer["OUTPUT0"].tolist() == [[b"5.000000:1:one"]]


@BOTH
def test_timing_and_an_unreadable_message(client: GrpcClient) -> None:
    with Stream(client) as stream:
        stream.send(_sum([1], headrace_timing=True))
        names = set(_parameters(stream.receive()))
    assert names == {"triton_final_response", "queue_us", "compute_us", "batch_rows"}
    # An unreadable message is an error of its own; the next one is answered.
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    streaming = procedure(client.channel, path, pb.ModelStreamInferResponse, "stream_stream")
    messages = list(streaming(iter([b"\xff\xff", _sum([1], id="good")]), timeout=60))
    assert messages[0].error_message.startswith("not a valid ModelInferRequest message")
    assert messages[1].infer_response.id == "good"


@BOTH
def test_cancelling_a_stream_drops_queued_requests(
    client: GrpcClient, number: int, gates: Gates, busy_metrics: Scraper
) -> None:
    name, labels = "nv_inference_request_failure", {"model": "held_limited", "reason": "CANCELED"}
    before = busy_metrics.now().value(name, **labels)
    with Stream(client) as stream:
        stream.send(_held(number, model="held_limited"))
        busy_metrics.until_running("held_limited")
        stream.send(_held(1, model="held_limited"), _held(2, model="held_limited"))
        busy_metrics.until_queued("held_limited", 2)
        stream.call.cancel()
        busy_metrics.until_queued("held_limited", 0)
    gates.open()
    busy_metrics.until_idle()
    assert busy_metrics.now().value(name, **labels) - before == 3
