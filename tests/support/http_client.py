"""The client over HTTP, with tensors as JSON or in binary form."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from tests.support.client import (
    Answer,
    Client,
    Input,
    Output,
    Parameter,
    error_by_http,
    from_raw,
    spent_by,
    strings,
    to_raw,
)

M = TypeVar("M", bound=Message)
JSON_SIZE = "Inference-Header-Content-Length"


class HttpClient(Client):
    """An HTTP client; with `binary` tensors travel in binary form, both ways."""

    def __init__(self, url: str, binary: bool, key: str = "") -> None:
        self._binary = binary
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=60,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            verify=False,  # to read certificates takes 20 ms
        )

    def close(self) -> None:
        self._http.close()

    def carries(self, datatype: Datatype) -> bool:
        return self._binary or datatype not in (Datatype.FP16, Datatype.BF16)

    def live(self) -> bool:
        return bool(self._http.get("/v2/health/live").json()["live"])

    def ready(self) -> bool:
        return _is_ready(self._http.get("/v2/health/ready"))

    def model_ready(self, name: str, version: str = "") -> bool:
        return _is_ready(self._http.get(f"{_path(name, version)}/ready"))

    def server_metadata(self) -> pb.ServerMetadataResponse:
        document = _json(self._http.get("/v2"))
        del document["headrace"]  # which has no place in the message
        return ParseDict(document, pb.ServerMetadataResponse())

    def model_metadata(self, name: str, version: str = "") -> pb.ModelMetadataResponse:
        return self._document(_path(name, version), pb.ModelMetadataResponse())

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self._document(f"{_path(name, version)}/config", ModelConfig())

    def statistics(self, name: str = "", version: str = "") -> list[pb.ModelStatistics]:
        path = f"{_path(name, version)}/stats" if name else "/v2/models/stats"
        return list(self._document(path, pb.ModelStatisticsResponse()).model_stats)

    def index(self, ready: bool = False) -> pb.RepositoryIndexResponse:
        body = {"ready": True} if ready else {}
        models = _json(self._http.post("/v2/repository/index", json=body))
        return ParseDict({"models": models}, pb.RepositoryIndexResponse())

    def load(
        self,
        name: str,
        repository: str = "",
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        parameters: dict[str, Parameter] = {} if config is None else {"config": config}
        for path, content in (files or {}).items():
            parameters[f"file:{path}"] = b64encode(content).decode()
        self._control(name, "load", repository, parameters)

    def unload(self, name: str, repository: str = "", dependents: bool = False) -> None:
        parameters: dict[str, Parameter] = {"unload_dependents": True} if dependents else {}
        self._control(name, "unload", repository, parameters)

    def send_infer(
        self,
        model: str,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        version: str,
        id: str,
        parameters: dict[str, Parameter],
    ) -> Answer:
        document: dict[str, Any] = {"inputs": [self._tensor(item) for item in inputs]}
        if id:
            document["id"] = id
        if outputs:
            document["outputs"] = [self._wanted(item) for item in outputs]
        elif self._binary:
            parameters = {"binary_data_output": True} | parameters
        if parameters:
            document["parameters"] = parameters
        body, headers = json.dumps(document).encode(), {}
        if self._binary:
            headers = {JSON_SIZE: str(len(body)), "Content-Type": "application/octet-stream"}
            body += b"".join(to_raw(item.array, item.sent_datatype) for item in inputs)
        response = self._http.post(f"{_path(model, version)}/infer", content=body, headers=headers)
        return read_answer(response)

    def _tensor(self, item: Input) -> dict[str, Any]:
        tensor = {"name": item.name, "shape": item.sent_shape, "datatype": item.sent_datatype}
        if self._binary:
            size = len(to_raw(item.array, item.sent_datatype))
            return tensor | {"parameters": {"binary_data_size": size}}
        elements = item.array.ravel().tolist()
        if item.array.dtype == object:
            elements = [element.decode() for element in elements]
        return tensor | {"data": elements}

    def _wanted(self, item: Output) -> dict[str, Any]:
        parameters: dict[str, Parameter] = {"binary_data": True} if self._binary else {}
        if item.classes:
            parameters["classification"] = item.classes
        return {"name": item.name, "parameters": parameters}

    def _document(self, path: str, message: M) -> M:
        return ParseDict(_json(self._http.get(path)), message)

    def _control(
        self, name: str, action: str, repository: str, parameters: Mapping[str, Parameter]
    ) -> None:
        prefix = f"/v2/repository/{quote(repository)}" if repository else "/v2/repository"
        body = {"json": {"parameters": parameters}} if parameters else {}
        quoted = quote(name, safe="").replace(".", "%2E")  # httpx would go one up for two of them
        path = f"{prefix}/models/{quoted}/{action}"
        response = self._http.post(path, **body, timeout=120)  # type: ignore[arg-type]
        if response.status_code != 200:
            _json(response)
        assert response.content == b""


def read_answer(response: httpx.Response) -> Answer:
    """Decode an inference response in any form; raises the `ServerError` of a failed one."""
    if response.status_code != 200:
        raise error_of(response)
    size = int(response.headers.get(JSON_SIZE, len(response.content)))
    document, tail = json.loads(response.content[:size]), response.content[size:]
    arrays: dict[str, Array] = {}
    for item in document["outputs"]:
        binary_size = item.get("parameters", {}).get("binary_data_size")
        if binary_size is None:
            arrays[item["name"]] = from_json(item["data"], item["datatype"], item["shape"])
        else:
            raw, tail = tail[:binary_size], tail[binary_size:]
            arrays[item["name"]] = from_raw(raw, item["datatype"], item["shape"])
    assert not tail, "more bytes than the outputs have"
    return Answer(
        document["model_name"],
        document["model_version"],
        document.get("id", ""),
        document.get("parameters", {}),
        arrays,
        {item["name"]: item["datatype"] for item in document["outputs"]},
        response.headers.get("Server-Timing", ""),
    )


def error_of(response: httpx.Response) -> ServerError:
    """The `ServerError` of an answer."""
    found = error_by_http(response.status_code, response.json()["error"])
    found.retry_after = int(response.headers.get("retry-after", 0))
    found.spent = spent_by(response.headers.get("server-timing", ""))
    return found


def from_json(data: list[Any], datatype: str, shape: Sequence[int]) -> Array:
    """A tensor's `data` as an array."""
    if datatype == "BYTES":
        return strings([element.encode() for element in data], shape)
    return np.array(data, NUMPY[Datatype(datatype)]).reshape(shape)


def _path(model: str, version: str) -> str:
    return f"/v2/models/{model}/versions/{version}" if version else f"/v2/models/{model}"


def _json(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise error_of(response)
    return response.json() if response.content else None


def _is_ready(response: httpx.Response) -> bool:
    """Readiness of an answer, whose body and status must agree."""
    ready: bool = response.json().get("ready", False)
    assert ready == (response.status_code == 200)
    if response.status_code not in (200, 503):
        raise error_of(response)
    return ready
