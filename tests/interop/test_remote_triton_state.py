"""Decoupled models and sequences of a real Triton: the same answers through this server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, ServerError
from tests.contract.conftest import CLIENTS
from tests.support.client import Client, Parameter
from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import ask
from tests.support.remote import write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

# Sums the inputs of a sequence. With `direct`, places of a batch without a sequence
# are requests as well, without one.
_ADDER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            id = request.correlation_id()
            if not id or request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[id] = 0
            self.sums[id] += int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy().item())
            total = np.array([[self.sums[id]]], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total)]))
        return responses
"""
# Answers with TEXT COUNT times, and with a final error if COUNT is negative.
_TELLER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().item()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item())
            for number in range(abs(count)):
                out = pb_utils.Tensor("OUT", np.array([[text + b"%d" % number]], object))
                sender.send(pb_utils.InferenceResponse([out]))
            if count < 0:
                error = pb_utils.TritonError("as asked")
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_STRATEGIES = {"direct": "direct { }", "oldest": "oldest { max_candidate_sequences: 4 }"}


def write(root: Path, name: str, code: str, config: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    more = 'backend: "python" max_batch_size: 4 instance_group { kind: KIND_CPU count: 1 }'
    (root / name / "config.pbtxt").write_text(f"{more} {config}")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Triton]]:
    """Starts a Triton with the models; without the program the tests are skipped."""
    program = real_program()
    root = tmp_path_factory.mktemp("triton")
    adder = (
        'input { name: "N" data_type: TYPE_INT32 dims: 1 }'
        ' output { name: "SUM" data_type: TYPE_INT32 dims: 1 }'
    )
    for name, strategy in _STRATEGIES.items():
        sequences = f"sequence_batching {{ {strategy} max_sequence_idle_microseconds: 20000000 }}"
        write(root / "models", name, _ADDER, f"{adder} {sequences}")
    teller = (
        'input [ { name: "TEXT" data_type: TYPE_STRING dims: 1 },'
        ' { name: "COUNT" data_type: TYPE_INT32 dims: 1 } ]'
        ' output { name: "OUT" data_type: TYPE_STRING dims: 1 }'
    )
    write(root / "models", "teller", _TELLER, f"{teller} {DECOUPLED}")
    with ExitStack() as stack:

        def started() -> Triton:
            server = Triton(program, root / "models", root / "log")
            stack.callback(server.stop)
            server.wait()
            return server

        yield started


DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def triton(start: Callable[[], Triton]) -> Triton:
    """A Triton for all tests."""
    return start()


@pytest.fixture(scope="module")
def front(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """This server, in front of it; over HTTP as well."""
    root = tmp_path_factory.mktemp("front")
    for name in (*_STRATEGIES, "teller"):
        write_remote(root, name, triton.grpc)
    there = f"http://{triton.http}"
    write_remote(root, "over_http", triton.grpc, endpoints=there, remote_model="oldest")
    with clean_server(root, tracebacks=False) as process:
        yield process


@pytest.fixture(scope="module", params=["http-binary", "grpc"])
def pair(
    request: pytest.FixtureRequest, triton: Triton, front: ServerProcess
) -> Iterator[tuple[Client, Client]]:
    make = CLIENTS[request.param]
    with make(triton) as direct, make(front) as through:
        yield direct, through


def add(client: Client, model: str, number: int, id: int | str, kind: str = "") -> int:
    """Send a number; the sum of the sequence. `kind` has "s" for its start, "e" for its end."""
    parameters: dict[str, Parameter] = {
        "sequence_id": id, "sequence_start": "s" in kind, "sequence_end": "e" in kind,
    }  # fmt: skip
    inputs = {"N": np.array([[number]], np.int32)}
    return int(client.infer(model, inputs, parameters=parameters)["SUM"].item())


@pytest.mark.parametrize("model", [*_STRATEGIES, "over_http"])
def test_sequences(pair: tuple[Client, Client], model: str) -> None:
    through = pair[1]
    for step, kind in ((1, "s"), (2, ""), (3, ""), (4, "e")):
        for id in (5, 2**62):
            assert add(through, model, step, id, kind) == sum(range(step + 1))
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        add(through, model, 1, 5)


def test_invalid_sequence_requests_have_tritons_text(
    pair: tuple[Client, Client],
) -> None:
    inputs = {"N": np.ones((2, 1), np.int32)}
    told = []
    for client in pair:
        found = []
        for rows, parameters in (
            (1, {}), (1, {"sequence_id": 77}), (2, {"sequence_id": 77, "sequence_start": True}),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest) as raised:
                client.infer("oldest", {"N": inputs["N"][:rows]}, parameters=parameters)
            found.append(str(raised.value))
        told.append(found)
    assert told[0] == told[1]


def test_an_unended_sequence_makes_room_in_time(pair: tuple[Client, Client]) -> None:
    """With more sequences than Triton has room for, the rest waits, and none is mixed up."""
    through = pair[1]
    ids = range(100, 104)  # fills every place
    for id in ids:
        assert add(through, "oldest", id, id, "s") == id
    for id in ids:
        assert add(through, "oldest", 1, id, "e") == id + 1


def stream(client: Any, triton: Any, text: str, count: int, **more: Any) -> list[object]:
    """tritonclient's messages for a request to the decoupled model, up to its end."""
    got: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    given = {"TEXT": np.array([[text]], object), "COUNT": np.array([[count]], np.int32)}
    inputs = []
    for (name, array), datatype in zip(given.items(), ("BYTES", "INT32"), strict=True):
        inputs.append(triton.InferInput(name, [1, 1], datatype))
        inputs[-1].set_data_from_numpy(array)
    client.start_stream(lambda result, error: got.put((result, error)))
    client.async_stream_infer("teller", inputs, enable_empty_final_response=True, **more)
    found: list[object] = []
    while True:
        result, error = got.get(timeout=30)
        if error is not None:
            found.append(error.message())
            break
        response = result.get_response()
        out = result.as_numpy("OUT")
        final = response.parameters["triton_final_response"].bool_param
        found.append((response.id, None if out is None else out.item(), final))
        if final:
            break
    client.stop_stream()
    return found


@pytest.mark.parametrize("count", [0, 1, 4, -2])
def test_a_decoupled_model_by_tritonclient(
    triton: Triton, front: ServerProcess, count: int
) -> None:
    library = pytest.importorskip("tritonclient.grpc")
    found = []
    for server in (triton, front):
        with library.InferenceServerClient(server.grpc) as client:
            found.append(stream(client, library, "a", count, request_id="7"))
    assert found[0] == found[1]
    assert len(found[0]) == abs(count) + 1


@pytest.mark.parametrize("count", [0, 3])
def test_a_decoupled_model_by_generate(triton: Triton, front: ServerProcess, count: int) -> None:
    body = b'{"TEXT": "a", "COUNT": %d}' % count
    answers = [
        ask(server.http, "POST", "/v2/models/teller/generate_stream", body).body
        for server in (triton, front)
    ]
    assert answers[0] == answers[1]


def test_sequences_are_lost_with_their_server(
    start: Callable[[], Triton], triton: Triton, tmp_path: Path
) -> None:
    second = start()
    write_remote(tmp_path, "direct", triton.grpc, second.grpc)
    with ServerProcess(tmp_path) as process, GrpcClient(process.grpc) as client:
        for id in range(1, 5):  # two on each
            assert add(client, "direct", id, id, "s") == id
        with Scraper(process.metrics) as scraper:
            found = scraper.now().samples("headrace_endpoint_sequences")
            assert [value for _, value in found] == [2, 2]
        second.stop()
        lost = []
        for id in range(1, 5):
            try:
                assert add(client, "direct", 10, id) == id + 10
            except ServerError as error:
                lost.append((id, str(error)))
        assert len(lost) == 2
        for id, text in lost:
            # The first one may have found that out.
            assert f"sequence {id} of model 'direct' is lost" in text or "during the" in text
            with pytest.raises(ServerError, match=f"sequence {id} of model 'direct' is lost"):
                add(client, "direct", 1, id)
            assert add(client, "direct", 7, id, "s") == 7
        for id in range(1, 5):
            add(client, "direct", 1, id, "e")
        assert process.stop() == 0
        assert "Traceback" not in process.log
