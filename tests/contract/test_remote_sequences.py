"""Models with sequences on upstreams: a sequence stays with its state."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, ServerError
from tests.contract.conftest import BEHIND_DOORS, CARRIERS, CLIENTS
from tests.support.client import Client, Input, Parameter
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.grpc_stream import Stream
from tests.support.remote import write_remote
from tests.support.scrape import Scraper, until
from tests.support.sequence_server import HELD, REFUSED, SequenceServer
from tests.support.server_process import ServerProcess

Id = int | str
_GAUGE = "headrace_endpoint_sequences"

# Before `client`, so that the tests of one server run together, and each is started once.
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[SequenceServer, SequenceServer]]:
    with SequenceServer() as first, SequenceServer() as second:
        yield first, second


@pytest.fixture(scope="module", params=BEHIND_DOORS)
def server(
    request: pytest.FixtureRequest,
    servers: tuple[SequenceServer, SequenceServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("front")
    write_remote(root, "adder", *(server.address for server in servers))
    with ServerProcess(root, options=CARRIERS[request.param]) as process:
        with Scraper(process.metrics) as scraper:
            scraper.until_reached("adder", len(servers))
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log
        assert "Traceback" not in process.log


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[list[SequenceServer], ServerProcess, Client]]]:
    """Starts servers that a test may end, and one before them, with a gRPC client."""
    with ExitStack() as stack:

        def start(
            root: Path, count: int = 1, idle_us: int = 30_000_000
        ) -> tuple[list[SequenceServer], ServerProcess, Client]:
            there = [stack.enter_context(SequenceServer(idle_us)) for _ in range(count)]
            write_remote(root, "adder", *(server.address for server in there))
            before = stack.enter_context(ServerProcess(root))
            with Scraper(before.metrics) as scraper:
                scraper.until_reached("adder", count)
            return there, before, stack.enter_context(CLIENTS["grpc"](before))

        yield start


def add(client: Client, number: int, id: Id = 0, start: bool = False, end: bool = False) -> int:
    """Send a number; the sum of the sequence so far."""
    parameters: dict[str, Parameter] = {
        "sequence_id": id, "sequence_start": start, "sequence_end": end,
    }  # fmt: skip
    inputs = {"NUMBER": np.array([[number]], np.int32)}
    return int(client.infer("adder", inputs, parameters=parameters)["SUM"].item())


def pinned(front: ServerProcess) -> float:
    with Scraper(front.metrics) as scraper:
        return scraper.now().value(_GAUGE, model="adder")


def test_sequences_keep_their_states(
    caller: Client, servers: tuple[SequenceServer, SequenceServer]
) -> None:
    """Sequences alternate and go to both upstreams, each of which knows only its own."""
    before = [len(server.told) for server in servers]
    # Enough for both to get some, whichever has had fewer calls before.
    ids: list[Id] = [7, 2**62, "a", "7", *range(100, 180)]
    for step in range(1, 5):
        for position, id in enumerate(ids):
            found = add(caller, step + position, id, start=step == 1, end=step == 4)
            assert found == sum(range(1, step + 1)) + position * step
    told = [
        {id for id, *_ in server.told[count:]}
        for server, count in zip(servers, before, strict=True)
    ]
    assert all(told)
    assert not told[0] & told[1]
    assert told[0] | told[1] == set(ids)


def test_an_id_of_64_bits(caller: Client, servers: tuple[SequenceServer, SequenceServer]) -> None:
    if isinstance(caller, GrpcClient):
        pytest.skip("its integers have a sign")
    assert add(caller, 3, 2**64 - 2, start=True) == 3
    assert add(caller, 4, 2**64 - 2, end=True) == 7
    assert any(id == -2 for server in servers for id, *_ in server.told)


def test_a_restarted_sequence_stays_on_its_upstream(caller: Client) -> None:
    for _ in range(3):
        assert add(caller, 3, "again", start=True) == 3
        assert add(caller, 4, "again") == 7
    assert add(caller, 1, "again", end=True) == 8


def test_counts_of_sequences(
    tmp_path: Path, started: Callable[..., tuple[list[SequenceServer], ServerProcess, Client]]
) -> None:
    there, front, client = started(tmp_path)
    for id, start, end in ((1, True, False), (2, True, True), (3, True, False), (3, True, False),
                           (1, False, True)):  # fmt: skip
        add(client, 1, id, start=start, end=end)
    with Scraper(front.metrics) as scraper:

        def counted(reason: str) -> float:
            return scraper.now().value("headrace_sequences_ended_total", reason=reason)

        metrics = scraper.now()
        assert metrics.value("headrace_sequences", model="adder") == 1
        assert metrics.value("headrace_sequences_backlog", model="adder") == 0
        assert metrics.value("headrace_sequences_restarted_total", model="adder") == 1
        assert (counted("end"), counted("idle"), counted("lost")) == (2, 0, 0)
        there[0].stop()
        with pytest.raises(ServerError, match="sequence 3 of model 'adder' is lost"):
            add(client, 1, 3)
        assert (counted("end"), counted("idle"), counted("lost")) == (2, 0, 1)
        assert scraper.now().value("headrace_sequences", model="adder") == 0


def test_invalid_sequence_requests(caller: Client) -> None:
    with pytest.raises(InvalidRequest) as raised:
        add(caller, 1)
    assert str(raised.value) == (
        "inference request to model 'adder' must specify a non-zero or non-empty correlation ID"
    )
    for id in (99, "ninety-nine"):
        with pytest.raises(InvalidRequest) as raised:
            add(caller, 1, id)
        assert str(raised.value) == (
            f"inference request for sequence {id} to model 'adder' must specify the START flag on"
            " the first request of the sequence"
        )
    rows = {"NUMBER": np.ones((2, 1), np.int32)}
    with pytest.raises(InvalidRequest, match="must specify batch-size 1 due to requirements of"):
        caller.infer("adder", rows, parameters={"sequence_id": 1, "sequence_start": True})


def test_an_error_of_the_model_ends_no_sequence(caller: Client) -> None:
    add(caller, 1, 6, start=True)
    with pytest.raises(InvalidRequest, match="not this one"):
        add(caller, REFUSED, 6)
    assert add(caller, 2, 6, end=True) == 3


def test_requests_of_a_sequence_go_one_by_one(
    server: ServerProcess, servers: tuple[SequenceServer, SequenceServer]
) -> None:
    """All are sent at once, those of several sequences interleaved."""
    with GrpcClient(server.grpc) as client, Stream(client) as stream:
        sums: dict[str, int] = {}
        expected = []
        for step, id in zip(range(120), cycle("xyz"), strict=False):
            sums[id] = sums.get(id, 0) + step
            expected.append(sums[id])
            stream.send(
                infer_message(
                    "adder", [Input("NUMBER", np.array([[step]], np.int32))],
                    parameters={
                        "sequence_id": id, "sequence_start": step < 3, "sequence_end": step >= 117,
                    },
                )
            )  # fmt: skip
        stream.half_close()
        answers = [read_answer(message.infer_response) for message in stream.rest()]
    assert [answer["SUM"].item() for answer in answers] == expected
    assert max(server.together for server in servers) == 1


def test_the_configuration_is_the_servers(caller: Client) -> None:
    config = caller.model_config("adder")
    assert config.WhichOneof("scheduling_choice") == "sequence_batching"
    assert config.sequence_batching.max_sequence_idle_microseconds == 30_000_000
    assert config.sequence_batching.oldest.max_candidate_sequences == 4
    assert config.sequence_batching.control_input[0].name == "START"
    assert config.max_batch_size == 4


@pytest.mark.slow
def test_a_sequence_is_lost_with_its_server(
    tmp_path: Path, started: Callable[..., tuple[list[SequenceServer], ServerProcess, Client]]
) -> None:
    there, front, client = started(tmp_path, count=2)
    ids = ["a", "b"]
    for id in ids:
        assert add(client, 1, id, start=True) == 1
    assert pinned(front) == 2
    gone, kept = ids if there[0].told[0][0] == "a" else reversed(ids)
    there[0].stop()
    for _ in range(2):
        with pytest.raises(ServerError, match=f"sequence {gone} of model 'adder' is lost"):
            add(client, 2, gone)
        assert add(client, 2, kept) > 1
    assert pinned(front) == 1
    assert add(client, 5, gone, start=True) == 5
    assert add(client, 6, gone, end=True) == 11


@pytest.mark.slow
def test_an_idle_sequence_is_forgotten(
    tmp_path: Path, started: Callable[..., tuple[list[SequenceServer], ServerProcess, Client]]
) -> None:
    there, front, client = started(tmp_path, idle_us=100_000)
    assert add(client, 1, 3, start=True) == 1
    until(lambda: pinned(front) == 0, "the sequence to be forgotten")
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        add(client, 1, 3)
    assert len(there[0].told) == 1


def test_a_disconnected_client_loses_its_sequence(
    tmp_path: Path, started: Callable[..., tuple[list[SequenceServer], ServerProcess, Client]]
) -> None:
    there, front, client = started(tmp_path)
    assert add(client, 1, "a", start=True) == 1
    with GrpcClient(front.grpc) as other, Stream(other) as stream:
        for number in (HELD, 5):  # the second waits for the first
            inputs = [Input("NUMBER", np.array([[number]], np.int32))]
            stream.send(infer_message("adder", inputs, parameters={"sequence_id": "a"}))
        until(lambda: len(there[0].told) == 2, "the request to be there")
        with Scraper(front.metrics) as scraper:
            scraper.until_queued("adder", 1)
    with pytest.raises(ServerError, match="sequence a of model 'adder' is lost"):
        add(client, 2, "a")  # the cancelled value may or may not have been added
    there[0].go_on.set()
    assert add(client, 2, "a", start=True) == 2
    assert [number for *_, number in there[0].told] == [1, HELD, 2]
