"""Answers of random requests that share batches: each equal to what complete codecs give alone."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
import pytest

from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array, Tensor, raw_bytes
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.v2_json import ResponseForm
from headrace.protocol.v2_protobuf import InferWriter, set_parameter
from tests.contract.conftest import BEHIND_DOORS, CARRIERS
from tests.models.onnx_graphs import ROWS, casts, write_model
from tests.models.python_models import execution
from tests.protocol.strategies import object_array
from tests.support.http2_socket import REQUEST, Http2Socket, prefixed
from tests.support.http_socket import HttpSocket
from tests.support.http_socket import request as http_request
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

D = Datatype
_NUMBERS = (D.FP32, D.FP64, D.INT32, D.INT64, D.UINT8, D.INT16, D.BOOL)
# HTTP by the fast path, HTTP by the application, and gRPC, with their shares of requests.
DOORS = {"http": 2, "chunked": 1, "grpc": 3}
_OF_BATCH = 6  # rows
_KINDS = 6  # of requests for one model; few, so that each is soon known to the fast paths
_BURST = 16  # requests sent at once


@dataclass(frozen=True)
class Model:
    """A model whose outputs are its inputs in other datatypes."""

    name: str
    inputs: dict[str, tuple[Datatype, int]]  # with the width of a row
    outputs: dict[str, tuple[str, Datatype]]  # with the name of the input

    def write(self, root: Path, placed: str) -> None:
        inputs = {name: (kind, (ROWS, width)) for name, (kind, width) in self.inputs.items()}
        config = f"max_batch_size: {_OF_BATCH}\n{placed}"
        write_model(root, self.name, casts(inputs, self.outputs), config)


@dataclass(frozen=True)
class Kind:
    """A request but for its id and data."""

    door: str
    model: Model
    wanted: tuple[str, ...]
    parameters: dict[str, Any]
    rows: int
    binary: bool


def a_model(random: Random, name: str) -> Model:
    inputs: dict[str, tuple[Datatype, int]] = {}
    for n in range(random.randint(1, 2)):
        datatype = D.BYTES if random.random() < 0.1 else random.choice(_NUMBERS)
        inputs[f"in{n}"] = datatype, random.randint(1, 3)
    outputs: dict[str, tuple[str, Datatype]] = {}
    for n in range(random.randint(1, 4)):
        source = random.choice(list(inputs))
        given, _ = inputs[source]
        outputs[f"out{n}"] = source, given if given is D.BYTES else random.choice(_NUMBERS)
    return Model(name, inputs, outputs)


def a_kind(random: Random, model: Model) -> Kind:
    names = list(model.outputs)
    wanted = random.sample(names, random.randint(0, len(names))) if random.random() < 0.6 else []
    parameters: dict[str, Any] = {}
    if random.random() < 0.2:
        parameters["own"] = random.choice([7, "text", True, 0.5])
    if random.random() < 0.1:
        parameters["timeout"] = 10_000_000
    return Kind(
        random.choices([*DOORS], [*DOORS.values()])[0], model, tuple(wanted),
        parameters, random.choice([1, 1, 1, 2, 3]), random.random() < 0.3,
    )  # fmt: skip


def an_array(random: Random, datatype: Datatype, rows: int, width: int) -> Array:
    count = rows * width
    if datatype is D.BYTES:
        return object_array([b"x" * random.randint(0, 5) for _ in range(count)], [rows, width])
    values = [random.randint(0, 1 if datatype is D.BOOL else 100) for _ in range(count)]
    return np.array(values).astype(NUMPY[datatype]).reshape(rows, width)


@dataclass
class Case:
    """One request: its bytes, and those of its answer."""

    kind: Kind
    id: str
    arrays: dict[str, Array]

    def answer(self) -> InferResponse:
        """The model's answer to this request alone."""
        model, wanted = self.kind.model, self.kind.wanted
        outputs = [
            Tensor(name, datatype, self.arrays[source].astype(NUMPY[datatype]))
            for name, (source, datatype) in model.outputs.items()
            if not wanted or name in wanted
        ]
        return InferResponse(model.name, "1", self.id, outputs, Timing(0, 0, 1))

    @property
    def expected(self) -> bytes:
        """The answer's message, or body, by a codec that has encoded nothing before."""
        if self.kind.door == "grpc":
            return b"".join(InferWriter().pieces(self.answer()))
        form = ResponseForm(named=dict.fromkeys(self.kind.wanted, self.kind.binary))
        return b"".join(form.encode(self.answer())[0])

    @property
    def request(self) -> bytes:
        """The request over HTTP, in chunks if its door is the application."""
        kind = self.kind
        document: dict[str, Any] = {"id": self.id} if self.id else {}
        if kind.parameters:
            document["parameters"] = kind.parameters
        if kind.wanted:
            form = {"parameters": {"binary_data": True}} if kind.binary else {}
            document["outputs"] = [{"name": name, **form} for name in kind.wanted]
        document["inputs"] = [
            {
                "name": name, "datatype": datatype, "shape": self.arrays[name].shape,
                "data": _data(self.arrays[name]),
            }
            for name, (datatype, _) in kind.model.inputs.items()
        ]  # fmt: skip
        body = json.dumps(document, separators=(",", ":")).encode()
        path = f"/v2/models/{kind.model.name}/infer"
        if kind.door == "http":
            return http_request("POST", path, body)
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    @property
    def message(self) -> bytes:
        """The request over gRPC."""
        kind = self.kind
        message = pb.ModelInferRequest(model_name=kind.model.name, id=self.id)
        for name, (datatype, _) in kind.model.inputs.items():
            array = self.arrays[name]
            message.inputs.add(name=name, datatype=datatype.value, shape=array.shape)
            message.raw_input_contents.append(bytes(raw_bytes(array)))
        for name in kind.wanted:
            message.outputs.add(name=name)
        for name, value in kind.parameters.items():
            set_parameter(message, name, value)
        return prefixed(message.SerializeToString())


def _data(array: Array) -> list[Any]:
    flat = array.ravel().tolist()
    return [item.decode() if type(item) is bytes else item for item in flat]


def a_case(random: Random, kind: Kind) -> Case:
    given = kind.model.inputs
    arrays = {name: an_array(random, d, kind.rows, width) for name, (d, width) in given.items()}
    return Case(kind, random.choice(["", "", "7", "8", "id 10", "\u00e4"]), arrays)


MODELS = [a_model(Random(n), f"model{n}") for n in range(8)]


@pytest.fixture(scope="module", params=BEHIND_DOORS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of random models, inline and on threads, for each carrier."""
    root = tmp_path_factory.mktemp("random")
    for number, model in enumerate(MODELS):
        model.write(root, execution(("inline", "thread")[number % 2]) + "dynamic_batching { }")
    with clean_server(root, options=CARRIERS[request.param]) as process:
        yield process


class Doors:
    """Connections that requests are sent over."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = server.http
        self._fast = HttpSocket(server.http)
        self._grpc = Http2Socket(server.grpc)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._fast.__exit__()
        self._grpc.__exit__()

    def ask(self, cases: Sequence[Case]) -> None:
        """Send all requests at once, and compare their answers."""
        by_door = {door: [c for c in cases if c.kind.door == door] for door in DOORS}
        with ExitStack() as stack:
            apart = [
                (case, stack.enter_context(HttpSocket(self._http))) for case in by_door["chunked"]
            ]
            calls = [
                (case, self._grpc.begin(REQUEST, case.message, whole=True))
                for case in by_door["grpc"]
            ]
            self._fast.send(b"".join(case.request for case in by_door["http"]))
            for case, connection in apart:
                connection.send(case.request)
            self._grpc.flush()
            for case, number in calls:
                answer = self._grpc.answer(number)
                assert (answer.headers | answer.trailers)["grpc-status"] == "0", (case, answer)
                assert answer.data == prefixed(case.expected), case
            for case, connection in [*((case, self._fast) for case in by_door["http"]), *apart]:
                found = connection.receive()
                assert (found.status, found.body) == (200, case.expected), case


@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 13))]
)
def test_answers_of_a_batch_equal_those_of_each_request_alone(
    server: ServerProcess, seed: int
) -> None:
    random = Random(seed)
    model = MODELS[seed % len(MODELS)]
    with Doors(server) as doors, Scraper(server.metrics) as metrics:
        before = metrics.now()
        for _ in range(4):
            kinds = [a_kind(random, model) for _ in range(_KINDS)]
            for _ in range(8):
                doors.ask([a_case(random, random.choice(kinds)) for _ in range(_BURST)])
        after = metrics.now()
    requests, runs = (
        after.value(name, model=model.name) - before.value(name, model=model.name)
        for name in ("nv_inference_request_success", "nv_inference_exec_count")
    )
    assert requests == 4 * 8 * _BURST
    assert runs < requests  # some have shared a batch
