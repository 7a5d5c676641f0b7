"""Sequences of models of this server: each request finds the state of the one before."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from shutil import copytree
from threading import Thread

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, SequenceLost, ServerError, Unavailable
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import BEHIND_DOORS, CARRIERS, CLIENTS
from tests.models.sequence_models import (
    DIES,
    RAISES,
    REFUSED,
    write_adder,
    write_countdown,
    write_lingering,
    write_running_sum,
    write_stateless,
)
from tests.support.client import Answer, Client, Input, Parameter
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.grpc_stream import Stream
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

Id = int | str
OLDEST = "oldest { max_candidate_sequences: 4 }"
GAUGE = "headrace_sequences"
MODELS = ("direct", "oldest", "named", "kept", "stateless")

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def lingering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lingering")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, lingering: Path) -> Path:
    root = tmp_path_factory.mktemp("sequences")
    write_lingering(root, "lingering", lingering)
    write_adder(root, "direct", "direct { }", instances=2)
    write_adder(root, "oldest", OLDEST, instances=2)
    write_adder(root, "named", OLDEST, id="STRING")
    write_adder(root, "single", "direct { }", rows=1)
    write_adder(root, "alone", "", rows=0)
    write_adder(root, "brief", OLDEST, idle_us=100_000)
    write_running_sum(root, "kept", "direct { }", outputs='"SUM" "BEGAN"')
    buffers = "use_same_buffer_for_input_output: true use_growable_memory: true"
    write_running_sum(root, "shown", OLDEST, outputs='"SUM" "STATE_OUT"', more=buffers)
    write_stateless(root, "stateless", "direct { }")
    write_countdown(root, "countdown", "direct { }")
    write_countdown(root, "oldest_countdown", OLDEST)
    folder = write_running_sum(
        root, "from_file", OLDEST, initial='data_file: "ten" dims: [ 2 ]', width=2
    )
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "ten").write_bytes(np.array([10, 20], np.float32).tobytes())
    return root


@pytest.fixture(scope="module", params=BEHIND_DOORS)
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[ServerProcess]:
    with ServerProcess(models, options=CARRIERS[request.param]) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log


def inputs(model: str, number: int) -> dict[str, np.ndarray]:
    if model in ("kept", "shown"):
        return {"X": np.array([[number]], np.float32)}
    if model == "alone":
        return {"NUMBER": np.array([number], np.int32)}
    return {"NUMBER": np.array([[number]], np.int32)}


def send(
    client: Client, model: str, number: int, id: Id = 0, flags: str = "", **more: Parameter
) -> Answer:
    """Send a number; `flags` has "s" for a start and "e" for an end."""
    parameters: dict[str, Parameter] = {
        "sequence_id": id, "sequence_start": "s" in flags, "sequence_end": "e" in flags, **more,
    }  # fmt: skip
    return client.infer(model, inputs(model, number), parameters=parameters)


def add(client: Client, model: str, number: int, id: Id = 0, flags: str = "") -> int:
    """Send a number; the sum of the sequence so far."""
    return int(send(client, model, number, id, flags)["SUM"].item())


def ids_of(model: str) -> list[Id]:
    return ["a", "7", "b" * 128, "ä"] if model == "named" else [1, 7, 2**33, 2**62]


@pytest.mark.parametrize("model", MODELS)
def test_sequences_keep_their_states(caller: Client, model: str) -> None:
    """Sequences alternate on all instances."""
    ids = ids_of(model)
    for step in range(1, 5):
        for position, id in enumerate(ids):
            flags = "s" * (step == 1) + "e" * (step == 4)
            expected = sum(range(1, step + 1)) + position * step
            assert add(caller, model, step + position, id, flags) == expected


def test_a_model_that_does_not_batch(caller: Client) -> None:
    assert add(caller, "alone", 3, 5, "s") == 3
    answer = send(caller, "alone", 4, 5, "e")
    assert answer["SUM"].tolist() == [[7]]


@pytest.mark.parametrize("model", MODELS)
def test_a_start_begins_a_sequence_anew(caller: Client, model: str) -> None:
    id = ids_of(model)[0]
    for _ in range(3):
        assert add(caller, model, 3, id, "s") == 3
        assert add(caller, model, 4, id) == 7
    assert add(caller, model, 1, id, "e") == 8


def test_a_sequence_keeps_its_place(caller: Client) -> None:
    """With `direct`, by slot, then by instance; empty slots below it are in the batch."""
    places = [send(caller, "direct", 1, id, "s")["PLACE"].item() for id in range(1, 8)]
    assert [place % 100 for place in places] == [0, 0, 1, 1, 2, 2, 3]
    assert [place // 100 for place in places] == [1, 1, 2, 2, 3, 3, 4]
    for id in (5, 4, 1, 7):
        assert send(caller, "direct", 1, id, "e")["PLACE"].item() % 100 == (id - 1) // 2
    for id in (2, 3, 6):
        assert add(caller, "direct", 1, id, "e") == 2


def test_invalid_requests(caller: Client) -> None:
    for id, model in ((99, "oldest"), ("ninety-nine", "named")):
        with pytest.raises(InvalidRequest) as raised:
            add(caller, model, 1, id)
        assert str(raised.value) == (
            f"inference request for sequence {id} to model '{model}' must specify the START flag"
            " on the first request of the sequence"
        )
    with pytest.raises(InvalidRequest) as raised:
        add(caller, "oldest", 1)
    assert str(raised.value) == (
        "inference request to model 'oldest' must specify a non-zero or non-empty correlation ID"
    )
    rows = {"NUMBER": np.ones((2, 1), np.int32)}
    with pytest.raises(InvalidRequest) as raised:
        caller.infer("oldest", rows, parameters={"sequence_id": 1, "sequence_start": True})
    assert str(raised.value) == (
        "inference request to model 'oldest' must specify batch-size 1 due to requirements of"
        " sequence batcher"
    )
    with pytest.raises(InvalidRequest, match="cannot be longer than 128 characters in length"):
        add(caller, "named", 1, "x" * 129, "s")
    for model, id in (("oldest", "one"), ("named", 1)):
        with pytest.raises(InvalidRequest, match="sequence batching control 'ID' data-type is"):
            add(caller, model, 1, id, "s")
    given = inputs("oldest", 1) | {"START": np.array([[1]], np.float32)}
    with pytest.raises(InvalidRequest, match="expected 1 inputs but got 2 inputs"):
        caller.infer("oldest", given, parameters={"sequence_id": 1, "sequence_start": True})


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_an_error_of_the_model_ends_no_sequence(caller: Client, model: str) -> None:
    add(caller, model, 1, 6, "s")
    for number, text in ((REFUSED, "not this one"), (RAISES, "cannot add this")):
        with pytest.raises(ServerError, match=text):
            add(caller, model, number, 6)
    assert add(caller, model, 2, 6, "e") == 3


@pytest.mark.parametrize("model", MODELS)
def test_requests_of_a_stream(server: ServerProcess, model: str) -> None:
    """All are sent at once, those of several sequences interleaved."""
    ids = ids_of(model)[:3]
    with GrpcClient(server.grpc) as client, Stream(client) as stream:
        sums: dict[Id, int] = {}
        expected: dict[str, int] = {}
        for step, id in zip(range(120), cycle(ids), strict=False):
            sums[id] = sums.get(id, 0) + step
            expected[str(step)] = sums[id]
            stream.send(
                infer_message(
                    model, [Input(name, array) for name, array in inputs(model, step).items()],
                    id=str(step), parameters={
                        "sequence_id": id, "sequence_start": step < 3, "sequence_end": step >= 117,
                    },
                )
            )  # fmt: skip
        stream.half_close()
        answers = [message.infer_response for message in stream.rest()]
    assert {each.id: int(read_answer(each)["SUM"].item()) for each in answers} == expected


def test_a_full_instance_has_a_backlog(server: ServerProcess, caller: Client) -> None:
    """A sequence waits for a seat, with all of its requests, and no longer than it says."""
    assert add(caller, "single", 1, 1, "s") == 1
    with pytest.raises(Unavailable) as raised:
        send(caller, "single", 2, 2, "s", timeout=1_000)
    assert str(raised.value).endswith("timeout of the corresponding sequence has been expired")
    with Scraper(server.metrics) as scraper, CLIENTS["http"](server) as client:
        found: list[int] = []
        thread = Thread(target=lambda: found.append(add(client, "single", 5, 3, "s")))
        thread.start()
        until(
            lambda: scraper.now().value("headrace_sequences_backlog", model="single") == 1,
            "the sequence to wait",
        )
        assert add(caller, "single", 2, 1, "e") == 3
        thread.join()
    assert found == [5]
    assert add(caller, "single", 1, 3, "e") == 6


def test_an_idle_sequence_is_forgotten(server: ServerProcess, caller: Client) -> None:
    assert add(caller, "brief", 1, 3, "s") == 1
    with Scraper(server.metrics) as scraper:
        until(
            lambda: scraper.now().value("headrace_sequences", model="brief") == 0,
            "the sequence to be forgotten",
        )
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        add(caller, "brief", 1, 3)


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_a_sequence_is_lost_with_its_worker(
    server: ServerProcess, caller: Client, model: str
) -> None:
    """Sequences on the other worker notice nothing."""
    for id in (1, 2, 3):
        assert add(caller, model, id, id, "s") == id
    with pytest.raises(SequenceLost, match="its sequence has to be begun again"):
        add(caller, model, DIES, 1)
    with pytest.raises(SequenceLost) as raised:
        add(caller, model, 1, 1)
    assert str(raised.value) == (
        f"sequence 1 of model '{model}' is lost, since its worker process has ended: it has to be"
        " begun again"
    )
    with pytest.raises(SequenceLost):
        add(caller, model, 1, 3)
    assert add(caller, model, 5, 2) == 7
    assert add(caller, model, 9, 1, "s") == 9
    assert add(caller, model, 1, 1, "e") == 10
    assert add(caller, model, 3, 2, "e") == 10
    running = "headrace_workers_running"
    with Scraper(server.metrics) as scraper:  # other tests need both
        until(lambda: scraper.now().value(running, model=model) == 2, "the worker to be back")


def test_tensors_that_clients_see(caller: Client) -> None:
    """Neither control inputs nor states, but for those that the configuration shows."""
    metadata = caller.model_metadata("direct")
    assert [tensor.name for tensor in metadata.inputs] == ["NUMBER"]
    config = caller.model_config("direct")
    assert [each.name for each in config.sequence_batching.control_input] == [
        "START", "READY", "END", "ID",
    ]  # fmt: skip
    assert [each.name for each in config.input] == ["NUMBER"]
    assert set(send(caller, "kept", 1, 9, "s").outputs) == {"SUM", "BEGAN"}
    assert send(caller, "kept", 1, 9, "e")["BEGAN"].tolist() == [[0]]
    answer = send(caller, "shown", 4, 9, "s")
    assert (answer["SUM"].item(), answer["STATE_OUT"].item()) == (4, 4)
    parameters: dict[str, Parameter] = {"sequence_id": 9}
    answer = caller.infer("shown", inputs("shown", 4), outputs=["SUM"], parameters=parameters)
    assert set(answer.outputs) == {"SUM"}
    assert answer["SUM"].item() == 8
    parameters = {"sequence_id": 9, "sequence_end": True}
    answer = caller.infer("shown", inputs("shown", 1), outputs=["STATE_OUT"], parameters=parameters)
    assert answer["STATE_OUT"].item() == 9


def test_an_initial_state_from_a_file(caller: Client) -> None:
    for begin in ({"sequence_start": True}, {}, {"sequence_start": True}, {"sequence_end": True}):
        parameters: dict[str, Parameter] = {"sequence_id": 9, **begin}
        given = {"X": np.array([[1, 2]], np.float32)}
        answer = caller.infer("from_file", given, parameters=parameters)
        times = 1 if "sequence_start" in begin else 2
        assert answer["SUM"].tolist() == [[10 + times, 20 + 2 * times]]


def test_texts_as_states(caller: Client) -> None:
    for number, flags in ((1, "s"), (22, ""), (333, "e")):
        answer = send(caller, "stateless", number, 4, flags)
    assert set(answer.outputs) == {"SUM", "LOG_OUT"}
    assert answer["LOG_OUT"].item() == b"1;22;333;"


@pytest.mark.parametrize("model", ["countdown", "oldest_countdown"])
def test_a_model_that_runs_its_requests_again(server: ServerProcess, model: str) -> None:
    """Several at once, with an id and without one: each is a sequence of its own then."""
    with GrpcClient(server.grpc) as client, Stream(client) as stream:
        for number in range(1, 13):
            given = [Input("NUMBER", np.array([[number]], np.int32))]
            parameters: dict[str, Parameter] = {}
            if number % 2:
                parameters = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
            stream.send(infer_message(model, given, id=str(number), parameters=parameters))
        stream.half_close()
        found: dict[str, list[int]] = {}
        for message in stream.rest():
            answer = read_answer(message.infer_response)
            found.setdefault(answer.id, []).append(answer["LEFT"].item())
    assert found == {str(number): list(range(number, 0, -1)) for number in range(1, 13)}


def test_a_cancelled_request_is_not_overtaken_while_its_model_answers_it(
    server: ServerProcess, lingering: Path
) -> None:
    def message(**parameters: Parameter) -> pb.ModelInferRequest:
        given = [Input("NUMBER", np.array([[1]], np.int32))]
        return infer_message("lingering", given, parameters={"sequence_id": 1, **parameters})

    for file in lingering.iterdir():  # of another server
        file.unlink()
    with GrpcClient(server.grpc) as client, Scraper(server.metrics) as scraper:
        with Stream(client) as stream:
            stream.send(message(sequence_start=True))
            until((lingering / "begun").exists, "the model to have the request")
            stream.call.cancel()
        until((lingering / "cancelled").exists, "the model to see the cancellation")
        with Stream(client) as stream:
            stream.send(message(sequence_end=True))
            scraper.until_queued("lingering", 1)
            (lingering / "end").touch()
            stream.half_close()
            [found] = stream.rest()
    assert read_answer(found.infer_response)["LEFT"].item() == 0


def test_counts_of_requests(server: ServerProcess, caller: Client) -> None:
    """Rows that no client asked for are counted nowhere."""
    with Scraper(server.metrics) as scraper:
        counted = "nv_inference_count"
        before = scraper.now().value(counted, model="direct")
        for id in (1, 2, 3):
            add(caller, "direct", 1, id, "s")
        for id in (3, 2, 1):
            add(caller, "direct", 1, id, "e")
        until(
            lambda: scraper.now().value("nv_inference_count", model="direct") == before + 6,
            "six requests",
        )
        assert scraper.now().value("headrace_sequences", model="direct") == 0


@pytest.mark.parametrize("exits", [False, True], ids=["unload", "exit"])
def test_nothing_waits_for_idle_sequences_at_the_end(exits: bool, tmp_path: Path) -> None:
    write_adder(tmp_path, "adder", "direct { }", rows=1, idle_us=3_600_000_000)
    options = ("--model-control-mode=explicit", "--load-model=*")
    with (
        ServerProcess(tmp_path, options=options) as server,
        HttpClient(server.url, binary=False) as client,
        ThreadPoolExecutor() as threads,
    ):
        assert add(client, "adder", 1, 1, "s") == 1
        waiting = threads.submit(add, client, "adder", 2, 2, "s")
        with Scraper(server.metrics) as scraper:
            scraper.until_queued("adder", 1)
        if exits:
            assert server.stop() == 0
        else:
            client.unload("adder")
        assert waiting.result(60) == 2


def test_versions_share_sequences_and_a_shadow_gets_copies_of_them(tmp_path: Path) -> None:
    rules = '{"split": {"1": 50, "2": 50}, "shadow": {"version": "3"}}'
    more = f"""version_policy {{ all {{ }} }}
        parameters {{ key: "traffic" value {{ string_value: '{rules}' }} }}
    """
    write_adder(tmp_path, "adder", "direct { }", more=more)
    for version in "23":
        copytree(tmp_path / "adder" / "1", tmp_path / "adder" / version)
    with (
        ServerProcess(tmp_path) as server, Scraper(server.metrics) as scraper,
        HttpClient(server.url, binary=False) as client,
    ):  # fmt: skip
        for id in range(1, 9):
            assert [add(client, "adder", 1, id, flags) for flags in ("s", "", "e")] == [1, 2, 3]
        copied = {"model": "adder", "version": "3", "outcome": "success"}
        until(
            lambda: scraper.now().value("headrace_shadow_requests_total", **copied) == 24,
            "copies of all requests",
        )
