"""Models loaded and unloaded by request (`--model-control-mode explicit`)."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from headrace.core.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from headrace.protocol.documents import to_json
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract import graphs
from tests.contract.conftest import CARRIERS, CLIENTS
from tests.models.onnx_graphs import write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

CONFIG = "max_batch_size: 4"


class World:
    """A server under explicit control, its repositories, and a client."""

    def __init__(self, root: Path, server: ServerProcess, client: Client, transport: str) -> None:
        self.root = root
        self.server = server
        self.client = client
        self.transport = transport

    def write(self, name: str, number: float, version: int = 1, config: str = CONFIG) -> None:
        """Write a model that adds a number to the first repository."""
        write_model(self.root / "one", name, graphs.add_constant(number), config, version=version)

    def ask(self, name: str, version: str = "") -> float:
        answer = self.client.infer(name, {"INPUT0": np.zeros((1, 1), np.float32)}, version=version)
        return float(answer["OUTPUT0"][0, 0])

    def index(self, name: str) -> list[tuple[str, str, str]]:
        return [
            (m.version, m.state, m.reason) for m in self.client.index().models if m.name == name
        ]


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "frontends")]


@pytest.fixture(scope="module", params=["default", *SLOWLY])
def explicit(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, ServerProcess]]:
    root = tmp_path_factory.mktemp("explicit")
    for name in ("first", "second"):
        write_model(root / "one", name, graphs.add_constant(1), CONFIG)
    for repository in ("one", "two"):
        write_model(root / repository, "twice", graphs.add_constant(1), CONFIG)
    options = (
        *CARRIERS[request.param], "--model-control-mode=explicit", "--load-model=first",
        "--load-overrides=files", "--max-request-bytes=4000000",
    )  # fmt: skip
    with clean_server(root / "one", root / "two", options=options) as server:
        yield root, server


@pytest.fixture(params=["http", "grpc"])
def world(request: pytest.FixtureRequest, explicit: tuple[Path, ServerProcess]) -> Iterator[World]:
    root, server = explicit
    with CLIENTS[request.param](server) as client:
        yield World(root, server, client, request.param)


def test_only_requested_models_are_loaded(world: World) -> None:
    assert world.index("first") == [("1", "READY", "")]
    assert world.index("twice") == [
        ("", "UNAVAILABLE", "model appears in two or more repositories")
    ]
    assert world.client.ready()
    name = f"untouched_{world.transport}"
    world.write(name, 1)
    assert world.index(name) == [("", "", "")]
    assert name not in [m.name for m in world.client.index(ready=True).models]
    with pytest.raises(NotFound, match="is not found"):
        world.ask(name)


def test_load_and_unload(world: World) -> None:
    name = f"come_and_go_{world.transport}"
    world.write(name, 5)
    world.client.load(name)
    assert world.ask(name) == 5
    assert world.index(name) == [("1", "READY", "")]
    world.client.load(name)  # nothing has changed
    world.client.unload(name, dependents=True)
    assert not world.client.model_ready(name)
    with pytest.raises(NotFound, match="has no available versions"):
        world.ask(name)
    with pytest.raises(Unavailable, match="is not at ready state"):
        world.ask(name, "1")
    assert world.client.ready()
    world.client.load(name)
    assert world.ask(name) == 5
    world.client.unload(name)
    world.client.unload("nobody knows it")


@pytest.mark.slow
def test_a_load_that_meets_an_unload(
    world: World, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    name = f"called_off_{world.transport}"
    path = tmp_path / "go"
    write_python_model(world.root / "one", name, WAITS.format(str(path)), FLOATS)
    loading = pool.submit(world.client.load, name)
    until(lambda: world.index(name) == [("1", "LOADING", "")], "the begin of the load")
    world.client.unload(name)
    path.touch()
    text = f"failed to load '{name}', no version is available"
    with pytest.raises(InvalidRequest, match=text):
        loading.result()


@pytest.mark.slow
def test_a_load_returns_after_removed_instances_are_finalized(world: World, tmp_path: Path) -> None:
    name, log = f"shrinks_{world.transport}", tmp_path / "finalized"
    source, folder = FINALIZES.format(str(log)), world.root / "one"
    write_python_model(folder, name, source, FLOATS + "instance_group { count: 3 }")
    world.client.load(name)
    assert not log.exists()
    config = folder / name / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 3", "count: 1"))
    world.client.load(name)
    assert log.read_text() == "xx"
    world.client.unload(name)


def test_a_changed_model_is_loaded_again_by_request_only(world: World) -> None:
    name = f"changes_{world.transport}"
    world.write(name, 1)
    world.client.load(name)
    world.write(name, 2)
    assert world.ask(name) == 1
    world.client.load(name)
    assert world.ask(name) == 2
    world.write(name, 3, version=2)
    world.client.load(name)
    assert world.ask(name) == 3
    world.write(name, 4, config="max_batch_size: -1")
    with pytest.raises(InvalidRequest, match=r"failed to poll from model repository: .*max_batch"):
        world.client.load(name)
    assert world.ask(name) == 3
    ((version, state, reason),) = world.index(name)
    assert (version, state) == ("2", "READY")
    assert reason.startswith("a change could not be loaded: ")
    world.client.unload(name)


def test_a_model_that_cannot_be_loaded(world: World) -> None:
    name = f"broken_{world.transport}"
    write_model(world.root / "one", name, b"no model at all", CONFIG)
    with pytest.raises(
        InvalidRequest, match=f"load failed for model '{name}': version 1 is at UNAVAILABLE state: "
    ):
        world.client.load(name)
    ((version, state, _),) = world.index(name)
    assert (version, state) == ("1", "UNAVAILABLE")
    assert not world.client.model_ready(name)
    assert world.client.ready()  # a client's bad model must not take the server out of service
    world.client.unload(name)
    assert world.client.ready()


def test_unknown_model_names(world: World) -> None:
    for name, error, text in (
        ("nowhere", NotFound, "failed to load 'nowhere', failed to poll from model repository"),
        ("twice", InvalidRequest, "model appears in two or more repositories"),
        (" ", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        ("", InvalidRequest, "Model name cannot be empty"),
        ("model..1", InvalidRequest, "failed to load 'model..1', model name must not contain path"),
        ("../one/first", InvalidRequest, "must not contain path traversal characters"),
        ("a\0b", InvalidRequest, "must not contain path traversal characters"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            world.client.load(name)
    for name, text in (("../etc", "failed to load '../etc', model name"), ("", "cannot be empty")):
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            world.client.unload(name)
    # Nor can a repository be named.
    for ask in (world.client.load, world.client.unload):
        with pytest.raises(Unsupported, match="'repository_name' specification is not supported"):
            ask("first", "one")


@pytest.mark.parametrize(
    ("action", "body", "text"),
    [
        ("load", b"{", "failed to parse the request JSON buffer"),
        ("load", b'{"parameters": 1}', "Invalid value for 'parameters': expected an object"),
        ("load", b'{"parameters": {"color": "red"}}', "unrecognized load parameter 'color'"),
        ("load", b'{"parameters": {"config": {}}}', "'config', expected a string"),
        ("load", b'{"parameters": {"file:1/x": "%"}}', "'file:1/x', expected base64"),
        ("unload", b'{"parameters": {"unload_dependents": 1}}',
         "Invalid value for 'unload_dependents': expected a boolean"),
    ],
)  # fmt: skip
def test_invalid_bodies(
    explicit: tuple[Path, ServerProcess], action: str, body: bytes, text: str
) -> None:
    url = f"{explicit[1].url}/v2/repository/models/first/{action}"
    response = httpx.post(url, content=body, verify=False)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert text in json.loads(response.content)["error"]


def test_unknown_members_and_other_parameters_of_unload_are_ignored(
    explicit: tuple[Path, ServerProcess],
) -> None:
    url = f"{explicit[1].url}/v2/repository/models/nobody/unload"
    body = {"color": "red", "parameters": {"color": 1, "unload_dependents": True}}
    assert httpx.post(url, json=body, verify=False).status_code == 200


def test_parameters_of_the_wrong_type_over_grpc(explicit: tuple[Path, ServerProcess]) -> None:
    with GrpcClient(explicit[1].grpc) as client:
        for name, kind, text in (
            ("config", "bytes_param", "'config' parameter, expected string_param"),
            ("file:1/x", "string_param", "'file:1/x' parameter, expected bytes_param"),
            ("color", "string_param", "unrecognized load parameter 'color'"),
        ):
            request = pb.RepositoryModelLoadRequest(model_name="first")
            value = b"x" if kind == "bytes_param" else "x"
            setattr(request.parameters[name], kind, value)
            with pytest.raises(InvalidRequest, match=text):
                client.call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)
        unload = pb.RepositoryModelUnloadRequest(model_name="first")
        unload.parameters["unload_dependents"].string_param = "true"
        with pytest.raises(InvalidRequest, match="expected bool_param"):
            client.call("RepositoryModelUnload", unload, pb.RepositoryModelUnloadResponse)


def test_explicit_mode_with_nothing_loaded_is_ready(tmp_path: Path) -> None:
    write_model(tmp_path, "first", graphs.add_constant(1), CONFIG)
    options = ("--model-control-mode=explicit", "--load-overrides=none")
    with ServerProcess(tmp_path, options=options) as server:
        assert "no model is loaded" in server.output
        assert httpx.get(f"{server.url}/v2/health/ready", verify=False).status_code == 200
        assert httpx.post(f"{server.url}/v2/repository/index", verify=False).json() == [
            {"name": "first"}
        ]
        url = f"{server.url}/v2/repository/models/first/load"
        response = httpx.post(url, json={"parameters": {"config": "{}"}}, verify=False)
        assert response.status_code == 400
        assert "--load-overrides=config takes them" in response.json()["error"]


def test_models_of_one_name_in_namespaces(tmp_path: Path) -> None:
    for number, repository in enumerate(("one", "two", "sub/two"), start=1):
        write_model(tmp_path / repository, "same", graphs.add_constant(number), 'name: "same"')
    write_model(tmp_path / "two", "other", graphs.add_constant(9), CONFIG)
    repositories = [tmp_path / "one", tmp_path / "two", tmp_path / "sub/two"]
    options = ("--model-control-mode=explicit", "--load-model=*", "--model-namespacing=true")
    with ServerProcess(*repositories, options=options) as server, CLIENTS["http"](server) as client:
        world = World(tmp_path, server, client, "http")
        names = ["same@one", "same@two", "same@two-2"]
        assert [m.name for m in client.index().models] == ["other", *names]
        assert [world.ask(name) for name in [*names, "other"]] == [1, 2, 3, 9]
        client.unload("same@two")
        client.load("same@two")
        with Scraper(server.metrics) as scraper:
            found = scraper.now().samples("nv_inference_count")
        folders = {labels["model"]: labels["namespace"] for labels, _ in found}
        assert folders == dict(zip(names, map(str, repositories), strict=True)) | {
            "other": str(tmp_path / "two")
        }
        ambiguous = "There are 3 identifiers of model 'same' in global map, model namespace must be"
        with pytest.raises(NotFound, match=ambiguous):
            world.ask("same")
        with pytest.raises(InvalidRequest, match=ambiguous):
            client.load("same")


SERVED = [("1", "READY", "")]


def test_a_configuration_is_overridden_and_restored(world: World) -> None:
    name = f"configured_{world.transport}"
    world.write(name, 7)
    world.client.load(name, config='{"max_batch_size": 2}')
    assert world.client.model_config(name).max_batch_size == 2
    assert world.ask(name) == 7
    told = json.dumps(to_json(world.client.model_config(name)) | {"max_batch_size": 3})
    told = told.replace('"preferred_batch_size": [2]', '"preferred_batch_size": [3]')
    world.client.load(name, config=told)
    assert world.client.model_config(name).max_batch_size == 3
    world.client.load(name)  # what is in the directory has not changed
    assert world.client.model_config(name).max_batch_size == 3
    world.client.unload(name)
    world.client.load(name)
    assert world.client.model_config(name).max_batch_size == 4
    assert world.index(name) == SERVED
    world.client.load(name, config='{"max_batch_size": 2}')
    world.write(name, 8)
    world.client.load(name)
    assert (world.client.model_config(name).max_batch_size, world.ask(name)) == (4, 8)
    world.client.unload(name)


@pytest.mark.parametrize(("config", "text"), [
    ("max_batch_size: 1", "is not JSON"),
    ('{"max_batch_size": -1}', "max_batch_size: must not be negative"),
    ('{"name": "other"}', "directory name must equal model name"),
    ('{"backend": "python"}', "backend: a request cannot change this"),
    ('{"parameters": {"python": {"string_value": "sh"}}}', "parameters['python']: a request"),
])  # fmt: skip
def test_configurations_that_are_refused(world: World, config: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        world.client.load("first", config=config)
    assert "failed to load 'first', failed to poll from model repository: " in str(caught.value)
    assert text in str(caught.value)
    assert world.ask("first") == 1
    world.client.load("first")
    assert world.index("first") == SERVED


def test_a_model_of_files_is_loaded_and_restored(world: World) -> None:
    name = f"uploaded_{world.transport}"
    world.write(name, 1)
    world.client.load(name)
    files = {f"{n}/model.onnx": graphs.add_constant(10 * n) for n in (1, 2)}
    world.client.load(name, config='{"version_policy": {"all": {}}}', files=files)
    assert [world.ask(name, "1"), world.ask(name)] == [10, 20]
    world.client.load(name)
    assert world.ask(name) == 1
    assert world.index(name) == SERVED
    world.client.unload(name)
    # A model outside of every repository.
    name = f"new_{world.transport}"
    model = {"/1/model.onnx": graphs.add_constant(3)}  # a slash before it means nothing
    world.client.load(name, config="{}", files=model)
    assert world.ask(name) == 3
    assert world.index(name) == SERVED
    world.client.unload(name)
    with pytest.raises(NotFound, match="no model of this name lies in a model repository"):
        world.client.load(name)
    with pytest.raises(InvalidRequest, match="a new model is called by 1 to 128 letters"):
        world.client.load("new one", config="{}", files=model)


@pytest.mark.parametrize(("files", "text"), [
    (("../first/1/model.onnx",), "without '.', '..' and empty ones"),
    (("/../evil",), "without '.', '..' and empty ones"),
    (("1/model.onnx", "/1/model.onnx"), "a file is given twice, with and without a slash"),
    (("1", "1/model.onnx"), "'1' is a file and a directory"),
    (("1/model.py",), "the files of a python model can run code"),
    (("weights.bin",), "no version directory"),
])  # fmt: skip
def test_files_that_are_refused(world: World, files: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        world.client.load("first", config="{}", files=dict.fromkeys(files, b"x"))
    assert "failed to load 'first', failed to poll from model repository: " in str(caught.value)
    assert text in str(caught.value)
    assert world.ask("first") == 1
    world.client.load("first")


def test_larger_files_than_control_requests_have(world: World) -> None:
    files = {"1/model.onnx": graphs.add_constant(4), "1/ballast": bytes(2 << 20)}
    world.client.load("ballast", config="{}", files=files)
    assert world.ask("ballast") == 4
    world.client.unload("ballast")
    with pytest.raises(InvalidRequest, match="--max-request-bytes"):
        world.client.load("ballast", config="{}", files={"1/ballast": bytes(5 << 20)})


@pytest.mark.slow
def test_files_are_removed_with_their_version(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    write_model(tmp_path / "models", "first", graphs.add_constant(1), CONFIG)
    options = ("--model-control-mode=explicit", "--load-overrides=code")
    environment = {"TMPDIR": str(folder)}

    def kept() -> int:
        return sum(len(list(root.iterdir())) for root in folder.glob("headrace-models-*"))

    with (
        ServerProcess(tmp_path / "models", options=options, environment=environment) as server,
        CLIENTS["grpc"](server) as client,
    ):
        world = World(tmp_path, server, client, "grpc")
        onnx = {"1/model.onnx": graphs.add_constant(5)}
        client.load("first", config="{}", files=onnx)
        assert kept() == 1
        (root,) = folder.glob("headrace-*")
        assert root.stat().st_mode & 0o777 == 0o700
        client.load("first")
        until(lambda: not kept(), "the removal of files")
        client.load("first", config="{}", files=onnx)
        client.unload("first")
        until(lambda: not kept(), "the removal of files")
        with pytest.raises(InvalidRequest, match="is at UNAVAILABLE state"):
            client.load("broken", config="{}", files={"1/model.onnx": b"x"})
        until(lambda: not kept(), "the removal of files")
        client.load("code", config=PYTHON_CONFIG, files={"1/model.py": PYTHON.encode()})
        assert world.ask("code") == 42
        assert kept() == 1
        config = json.dumps(json.loads(PYTHON_CONFIG) | {"name": "controller"})
        client.load("controller", config=config, files={"1/model.py": CONTROLLER.encode()})
        (root / "model.onnx").write_bytes(graphs.add_constant(8))
        told = client.infer("controller", {"INPUT0": np.zeros((1, 1), np.float32)})
        assert told["OUTPUT0"][0, 0] == 1, server.log
        assert world.ask("first") == 1
        assert server.stop() == 0
        assert not list(folder.glob("headrace-*"))


def test_a_model_that_hangs_in_its_load(tmp_path: Path) -> None:
    write_model(tmp_path, "first", graphs.add_constant(1), CONFIG)
    write_python(tmp_path, "hangs", "import time\n" + PYTHON + HANG)
    options = ("--model-control-mode=explicit", "--model-load-timeout-secs=4")
    with ServerProcess(tmp_path, options=options) as server, CLIENTS["http"](server) as client:
        with pytest.raises(
            InvalidRequest,
            match="version 1 is at UNAVAILABLE state: loading has taken longer than 4 s",
        ):
            client.load("hangs")
        until(lambda: not psutil.Process(server.pid).children(), "the end of the worker")
        client.load("first")
        assert World(tmp_path, server, client, "http").ask("first") == 1
        assert server.stop() == 0


def write_python(root: Path, name: str, program: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(program)
    tensors = "data_type: TYPE_FP32 dims: 1 }"
    (root / name / "config.pbtxt").write_text(
        f'max_batch_size: 4 input {{ name: "INPUT0" {tensors} output {{ name: "OUTPUT0" {tensors}'
    )


HANG = """
    def initialize(self, args):
        while True:
            time.sleep(1)
"""
PYTHON_CONFIG = json.dumps(
    {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
    }
)
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        output = pb_utils.Tensor("OUTPUT0", np.full((1, 1), 42, np.float32))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""


FLOATS = tensors("input", ("INPUT0", "FP32", "1")) + tensors("output", ("OUTPUT0", "FP32", "1"))
WAITS = """
    import os, time

    class TritonPythonModel:
        def initialize(self, args):
            while not os.path.exists({!r}):
                time.sleep(0.01)

        def execute(self, requests):
            return []
"""
FINALIZES = """
    import time

    class TritonPythonModel:
        def execute(self, requests):
            return []

        def finalize(self):
            time.sleep(0.3)
            with open({!r}, "a") as log:
                log.write("x")
"""
CONTROLLER = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        # Files of requests are stored beside one another.
        self.file = os.path.join(os.path.dirname(args["model_repository"]), "model.onnx")

    def execute(self, requests):
        assert not pb_utils.is_model_ready("first")
        pb_utils.load_model("first")
        assert pb_utils.is_model_ready("first")
        pb_utils.unload_model("first", unload_dependents=True)
        assert not pb_utils.is_model_ready("first")
        files = {"file:1/model.onnx": open(self.file, "rb").read()}
        pb_utils.load_model(model_name="first", config='{"max_batch_size": 2}', files=files)
        assert pb_utils.is_model_ready("first")
        pb_utils.load_model("first")
        try:
            pb_utils.load_model("nobody")
        except pb_utils.TritonModelException as error:
            assert "failed to load 'nobody'" in str(error)
        else:
            raise AssertionError
        output = pb_utils.Tensor("OUTPUT0", np.ones((1, 1), np.float32))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
