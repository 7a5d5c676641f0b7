"""Every public method of tritonclient's four clients, called at least once.

One server with every option, one scenario for each client; at the end every public method of the
client must have been called.
"""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, shared_memory

from tests.interop.triton import FAMILIES, Client
from tests.support.server_process import EXAMPLES, ServerProcess, onnx_examples
from tests.support.transports import grpc_transport

_RAW_HANDLE = base64.b64encode(bytes(64))
_REGION_BYTES = 64


class _Counted(Client):
    """A client that records its called methods."""

    def __init__(self, family: str, address: str) -> None:
        super().__init__(family, address)
        self.called: set[str] = set()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.called.add(method)
        return super().call(method, *arguments, **options)

    def stream(self, requests: list[dict[str, Any]], **options: Any) -> list[tuple[Any, Any]]:
        self.called.add("stream_infer")
        return super().stream(requests, **options)

    @property
    def public(self) -> set[str]:
        """Names of all public methods of a client."""
        return {name for name in dir(self.kind) if not name.startswith("_")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_examples(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    traces = tmp_path_factory.mktemp("traces") / "trace.json"
    options = [
        "--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true",
        "--load-overrides=files", f"--trace-config=triton,file={traces}", *grpc_transport(request),
    ]  # fmt: skip
    with ServerProcess(repository, options=options) as server:
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_public_method(family: str, server: ServerProcess) -> None:
    address = server.http if family.startswith("http") else server.grpc
    with _Counted(family, address) as client:
        _health_and_documents(client)
        _control(client)
        _settings(client)
        _system_shared_memory(client)
        _cuda_shared_memory(client)
        _plugins(client)
        _infer(client)
        _other_ways_to_infer(client)
        client.called.add("close")  # called on leaving the client
        assert client.public - client.called == set()


def _json(client: Client) -> dict[str, Any]:
    return {} if client.over_http else {"as_json": True}


def _fails(text: str, call: Callable[[], object]) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert text in str(caught.value)


def _health_and_documents(client: Client) -> None:
    assert client.call("is_server_live")
    assert client.call("is_server_ready")
    assert client.call("is_model_ready", "simple")
    assert client.call("get_server_metadata", **_json(client))["name"] == "headrace"
    assert client.call("get_model_metadata", "simple", **_json(client))["name"] == "simple"
    config = client.call("get_model_config", "simple", **_json(client))
    assert config.get("config", config)["name"] == "simple"
    client.call("infer", "simple", client.sum_and_difference())
    stats = client.call("get_inference_statistics", "simple", **_json(client))["model_stats"][0]
    assert int(stats["inference_count"]) >= 1


def _control(client: Client) -> None:
    def state() -> str:
        index = client.call("get_model_repository_index", **_json(client))
        models = index if isinstance(index, list) else index["models"]
        return str(next(one for one in models if one["name"] == "simple_string").get("state"))

    assert state() == "READY"
    client.call("unload_model", "simple_string", unload_dependents=True)
    assert not client.call("is_model_ready", "simple_string")
    assert state() == "UNAVAILABLE"
    client.call("load_model", "simple_string", config=json.dumps({"max_batch_size": 3}))
    config = client.call("get_model_config", "simple_string", **_json(client))
    assert int(config.get("config", config)["max_batch_size"]) == 3
    files = {"file:1/model.onnx": (EXAMPLES / "simple_string" / "1" / "model.onnx").read_bytes()}
    _fails("files have to come", lambda: client.call("load_model", "simple_string", files=files))
    client.call("load_model", "simple_string", config='{"max_batch_size": 2}', files=files)
    client.call("load_model", "simple_string")  # to undo the overrides
    config = client.call("get_model_config", "simple_string", **_json(client))
    assert int(config.get("config", config)["max_batch_size"]) != 3
    _fails("failed to poll", lambda: client.call("load_model", "nobody"))


def _settings(client: Client) -> None:
    def levels(settings: Any) -> list[str]:
        level = settings.get("settings", settings)["trace_level"]
        return list(level["value"] if isinstance(level, dict) else level)

    updated = client.call(
        "update_trace_settings", model_name="simple", settings={"trace_level": ["TIMESTAMPS"]},
        **_json(client),
    )  # fmt: skip
    assert levels(updated) == ["TIMESTAMPS"]
    assert levels(client.call("get_trace_settings", **_json(client))) == ["OFF"]
    client.call("update_trace_settings", model_name="simple", settings={"trace_level": None})
    of_model = client.call("get_trace_settings", model_name="simple", **_json(client))
    assert levels(of_model) == ["OFF"]

    def verbose(settings: Any) -> int:
        level = settings.get("settings", settings)["log_verbose_level"]
        return int(level["uint32_param"] if isinstance(level, dict) else level)

    assert verbose(client.call("get_log_settings", **_json(client))) == 0
    changed = client.call("update_log_settings", {"log_verbose_level": 1}, **_json(client))
    assert verbose(changed) == 1
    client.call("update_log_settings", {"log_verbose_level": 0})


def _system_shared_memory(client: Client) -> None:
    def regions() -> list[str]:
        status = client.call("get_system_shared_memory_status", **_json(client))
        if isinstance(status, list):
            return [one["name"] for one in status]
        return list(status.get("regions", {}))

    key = f"/headrace_every_method_{client.family.replace('.', '_')}"
    handle = shared_memory.create_shared_memory_region("given", key, 3 * _REGION_BYTES)
    try:
        counted = np.arange(16, dtype=np.int32).reshape(1, 16)
        shared_memory.set_shared_memory_region(handle, [counted, np.ones_like(counted)])
        client.call("register_system_shared_memory", "given", key, 3 * _REGION_BYTES)
        assert regions() == ["given"]
        inputs = client.sum_and_difference()
        for place, tensor in enumerate(inputs):
            tensor.set_shared_memory("given", _REGION_BYTES, offset=place * _REGION_BYTES)
        output = client.output("OUTPUT0")
        output.set_shared_memory("given", _REGION_BYTES, offset=2 * _REGION_BYTES)
        client.call("infer", "simple", inputs, outputs=[output])
        found = shared_memory.get_contents_as_numpy(
            handle, np.int32, [1, 16], offset=2 * _REGION_BYTES
        )
        assert (found == counted + 1).all()
        client.call("unregister_system_shared_memory", "given")
        assert regions() == []
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def _cuda_shared_memory(client: Client) -> None:
    status = client.call("get_cuda_shared_memory_status", **_json(client))
    assert not (status if isinstance(status, list) else status.get("regions"))
    _fails(
        "failed to register CUDA shared memory region: 'there', GPUs not supported",
        lambda: client.call("register_cuda_shared_memory", "there", _RAW_HANDLE, 0, 64),
    )
    client.call("unregister_cuda_shared_memory")


def _plugins(client: Client) -> None:
    from tritonclient._auth import BasicAuth

    client.call("register_plugin", BasicAuth("somebody", "secret"))
    assert client.call("plugin") is not None
    assert client.call("is_server_live")
    client.call("unregister_plugin")
    assert client.call("plugin") is None


def _infer(client: Client) -> None:
    answer = client.call("infer", "simple", client.sum_and_difference(), request_id="one")
    assert answer.as_numpy("OUTPUT0").tolist() == [list(range(1, 17))]


def _other_ways_to_infer(client: _Counted) -> None:
    inputs = client.sum_and_difference()
    if client.over_http:
        body, json_size = client.call("generate_request_body", inputs)
        assert json_size
        answer = {"model_name": "simple", "outputs": []}
        parsed = client.call("parse_response_body", json.dumps(answer).encode())
        assert parsed.get_response()["model_name"] == "simple"
        assert len(body) > json_size
    if client.family == "http":
        waiting = client.call("async_infer", "simple", inputs)
        assert waiting.get_result().as_numpy("OUTPUT0") is not None
    if client.family == "grpc":
        answers: Queue[tuple[Any, Any]] = Queue()
        client.call(
            "async_infer", "simple", inputs, lambda result, error: answers.put((result, error))
        )
        assert answers.get(timeout=30)[1] is None
        client.call("start_stream", lambda result, error: answers.put((result, error)))
        client.call("async_stream_infer", "simple", inputs)
        assert answers.get(timeout=30)[1] is None
        client.call("stop_stream")
    if client.family == "grpc.aio":
        pairs = client.stream([{"model_name": "simple", "inputs": inputs}])
        assert [error for _, error in pairs] == [None]
