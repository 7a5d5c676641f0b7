"""Whatever clients ask of the control of models: a good answer or a good refusal, and nothing else.

Nothing is written beside the directory that is there for it, and what serves goes on serving.
"""

import json
import random
import string
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.core.errors import ServerError
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from tests.contract import graphs
from tests.models.onnx_graphs import write_model
from tests.support.grpc_client import GrpcClient
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow
ROUNDS = 1_500
ZERO = {"INPUT0": np.zeros((1, 1), np.float32)}
GOOD = graphs.add_constant(1)
CONFIGS = [
    "{}", "", "[]", "null", "{", '{"max_batch_size": 2}', '{"backend": "python"}',
    '{"backend": "onnxruntime"}', '{"name": "other"}', '{"platform": 5}',
    '{"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp"}}}',
    '{"default_model_filename": "../../../etc/passwd"}', '{"version_policy": {"all": {}}}',
    '{"instance_group": [{"count": 1000}]}', '{"ensemble_scheduling": {}}',
    '{"sequence_batching": {}}', '{"max_batch_size": -5}', '{"a":' * 500,
    '{"output": [{"name": "OUTPUT0", "label_filename": "/etc/passwd"}]}',
]  # fmt: skip
PARTS = ["1", "2", "model.onnx", "model.py", "..", ".", "", "~", "etc", "passwd", "config.pbtxt",
         "a" * 300, "\0", "\\", "%2e%2e", "ü", "requirements.txt", "labels.txt", " "]  # fmt: skip
NAMES = ["target", "new", "..", "../target", "/etc", "", " ", "\0", "a/b", "neighbour/../target",
         "%2e%2e", "ü", "x" * 300, "target\n", ".", "*", "con"]  # fmt: skip


class Guesser:
    """Makes up requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def name(self) -> str:
        if self._random.random() < 0.5:
            return "target"
        if self._random.random() < 0.2:
            return "".join(self._random.choices(string.printable, k=self._random.randrange(9)))
        return self._random.choice(NAMES)

    def config(self) -> str:
        if self._random.random() < 0.3:
            field = self._random.choice(list(ModelConfig.DESCRIPTOR.fields)).name
            return json.dumps({field: self.value()})
        return self._random.choice(CONFIGS)

    def path(self) -> str:
        if self._random.random() < 0.5:
            return "1/model.onnx"
        return "/".join(self._random.choices(PARTS, k=self._random.randrange(1, 5)))

    def content(self) -> bytes:
        return self._random.choice([GOOD, GOOD, b"", self._random.randbytes(50)])

    def files(self) -> dict[str, bytes]:
        return {self.path(): self.content() for _ in range(self._random.randrange(3))}

    def value(self, depth: int = 0) -> Any:
        kinds: list[Any] = [None, True, -1, 1.5, "x", "", 1 << 70]
        if depth < 3:
            kinds += [[self.value(depth + 1)], {"x": self.value(depth + 1)}, {}, []]
        return self._random.choice(kinds)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def body(self) -> bytes:
        """What a load or unload request over HTTP has for a body."""
        if self.chance(0.1):
            return self._random.choice([b"", b"{", b"[]", b"\xff", b'{"parameters": []}', b"1"])
        parameters: dict[str, Any] = {}
        if self.chance(0.7):
            parameters["config"] = self.value() if self.chance(0.1) else self.config()
        for path, content in self.files().items():
            encoded = b64encode(content).decode()
            parameters[f"file:{path}"] = self.value() if self.chance(0.1) else encoded
        if self.chance(0.1):
            parameters[self.path()] = self.value()
        if self.chance(0.2):
            parameters["unload_dependents"] = self.value()
        return json.dumps({"parameters": parameters}).encode()

    def message(self) -> pb.RepositoryModelLoadRequest:
        message = pb.RepositoryModelLoadRequest(model_name=self.name())
        if self.chance(0.7):
            message.parameters["config"].string_param = self.config()
        for path, content in self.files().items():
            message.parameters[f"file:{path}"].bytes_param = content
        if self.chance(0.1):
            message.parameters[self.path()].int64_param = 5
        return message


@pytest.fixture(scope="module", params=["files", "code"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    world = tmp_path_factory.mktemp("world")
    for folder in ("tmp", "models"):
        (world / folder).mkdir()
    for name in ("neighbour", "target"):
        write_model(world / "models", name, GOOD, "max_batch_size: 4")
    before = listing(world)
    options = (
        "--model-control-mode=explicit", "--load-model=neighbour",
        f"--load-overrides={request.param}", "--max-override-bytes=1000000",
    )  # fmt: skip
    environment = {"TMPDIR": str(world / "tmp")}
    with ServerProcess(world / "models", options=options, environment=environment) as process:
        yield process
        after = {path for path in listing(world) if "headrace-models-" not in path}
        assert {path for path in after if "/tmp/" not in path} == before
        assert process.stop() == 0
        assert "bug " not in process.log
        assert "Traceback" not in process.log
    assert not list((world / "tmp").glob("headrace-*"))


def listing(root: Path) -> set[str]:
    """All files below a directory, without what Python itself writes beside modules."""
    return {str(path.relative_to(root.parent)) for path in root.rglob("*")
            if "__pycache__" not in path.parts}  # fmt: skip


def test_requests_over_http(server: ServerProcess) -> None:
    guesser = Guesser(1)
    with (
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
        GrpcClient(server.grpc) as neighbour,
    ):
        for turn in range(ROUNDS):
            name = "".join(f"%{byte:02X}" for byte in guesser.name().encode())
            action = "unload" if guesser.chance(0.3) else "load"
            path = f"/v2/repository/models/{name}/{action}"
            response = client.post(path, content=guesser.body())
            assert response.status_code in (200, 400, 404, 503), response.text
            if response.status_code != 200:
                text = response.json()["error"]
                assert "internal error" not in text
                assert "/tmp/" not in text
                assert "\n" not in text
            if turn % 10 == 0:
                assert neighbour.infer("neighbour", ZERO)["OUTPUT0"][0, 0] == 1
                assert client.post("/v2/repository/index").status_code == 200


def test_requests_over_grpc(server: ServerProcess) -> None:
    guesser = Guesser(2)
    with GrpcClient(server.grpc) as client:
        for turn in range(ROUNDS):
            message = guesser.message()
            text = ""
            try:
                if guesser.chance(0.3):
                    client.unload(message.model_name, dependents=guesser.chance(0.5))
                else:
                    client.call("RepositoryModelLoad", message, pb.RepositoryModelLoadResponse)
            except ServerError as error:
                text = str(error)
            assert "internal error" not in text
            assert "/tmp/" not in text
            if turn % 10 == 0:
                assert client.infer("neighbour", ZERO)["OUTPUT0"][0, 0] == 1
                client.index()
