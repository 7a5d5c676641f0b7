"""Requests with tensors in shared memory, over either protocol."""

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.core.datatypes import BY_NUMPY, Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import error_by_http, from_raw, to_raw
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import from_json
from tests.support.http_socket import ask


@dataclass(frozen=True)
class Place:
    """The place of a tensor; datatype and shape matter for inputs."""

    region: str
    offset: int = 0
    byte_size: int = 64
    datatype: Datatype = Datatype.FP32
    shape: tuple[int, ...] = (1, 16)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of a request with this place."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.byte_size,
        }


Inputs = Mapping[str, Array | Place]
Outputs = Mapping[str, Place | None]
Result = dict[str, Array | None]  # None for an output without data


class MemoryClient(ABC):
    """Operations on shared memory; methods raise the server's `ServerError`."""

    @abstractmethod
    def register(self, name: str, key: str, offset: Any, byte_size: Any) -> None:
        """Register system shared memory."""

    @abstractmethod
    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Register GPU memory."""

    @abstractmethod
    def unregister(self, name: str = "", kind: str = "system") -> None:
        """Unregister one region, or all."""

    @abstractmethod
    def status(self, name: str = "", kind: str = "system") -> list[dict[str, Any]]:
        """Status of one region, or of all, sorted by name."""

    @abstractmethod
    def infer(self, model: str, inputs: Inputs, outputs: Outputs | None = None) -> Result:
        """Infer; outputs by name."""


class HttpMemory(MemoryClient):
    """HTTP, with other tensors in binary form."""

    def __init__(self, address: str) -> None:
        self._address = address

    def register(self, name: str, key: str, offset: Any, byte_size: Any) -> None:
        document = {"key": key, "offset": offset, "byte_size": byte_size}
        self._post(f"/v2/systemsharedmemory/region/{quote(name, safe='')}/register", document)

    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        raw = {"b64": base64.b64encode(handle).decode()}
        document = {"raw_handle": raw, "device_id": device_id, "byte_size": byte_size}
        self._post(f"/v2/cudasharedmemory/region/{name}/register", document)

    def unregister(self, name: str = "", kind: str = "system") -> None:
        self._post(f"/v2/{kind}sharedmemory{f'/region/{name}' if name else ''}/unregister", None)

    def status(self, name: str = "", kind: str = "system") -> list[dict[str, Any]]:
        path = f"/v2/{kind}sharedmemory{f'/region/{name}' if name else ''}/status"
        answer = ask(self._address, "GET", path)
        if answer.status != 200:
            raise error_by_http(answer.status, answer.error)
        found: list[dict[str, Any]] = json.loads(answer.body)
        return found

    def infer(self, model: str, inputs: Inputs, outputs: Outputs | None = None) -> Result:
        tensors, tail = [], b""
        for name, given in inputs.items():
            if isinstance(given, Place):
                datatype, shape, parameters = given.datatype, given.shape, given.parameters
            else:
                datatype, shape = BY_NUMPY[given.dtype], given.shape
                raw = to_raw(given, datatype)
                parameters = {"binary_data_size": len(raw)}
                tail += raw
            tensors.append(
                {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}
            )
        document: dict[str, Any] = {"inputs": tensors}
        if outputs is not None:
            document["outputs"] = [
                {"name": n, "parameters": p.parameters if p else {"binary_data": True}}
                for n, p in outputs.items()
            ]
        head = json.dumps(document).encode()
        size = {"Inference-Header-Content-Length": str(len(head))}
        answer = ask(self._address, "POST", f"/v2/models/{model}/infer", head + tail, **size)
        if answer.status != 200:
            raise error_by_http(answer.status, answer.error)
        json_size = int(answer.headers.get("Inference-Header-Content-Length", len(answer.body)))
        tail = answer.body[json_size:]
        result: Result = {}
        for item in json.loads(answer.body[:json_size])["outputs"]:
            if "parameters" in item:
                length = item["parameters"]["binary_data_size"]
                result[item["name"]] = from_raw(tail[:length], item["datatype"], item["shape"])
                tail = tail[length:]
            elif "data" in item:
                result[item["name"]] = from_json(item["data"], item["datatype"], item["shape"])
            else:
                assert set(item) == {"name", "datatype", "shape"}
                result[item["name"]] = None
        assert not tail
        return result

    def _post(self, path: str, document: object) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        answer = ask(self._address, "POST", path, body)
        if answer.status != 200:
            raise error_by_http(answer.status, answer.error)
        assert answer.body == b""


class GrpcMemory(MemoryClient):
    """ModelInfer over gRPC."""

    def __init__(self, client: GrpcClient) -> None:
        self.client = client

    def register(self, name: str, key: str, offset: Any, byte_size: Any) -> None:
        self.client.call(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(
                name=name, key=key, offset=offset, byte_size=byte_size
            ),
            pb.SystemSharedMemoryRegisterResponse,
        )

    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        self.client.call(
            "CudaSharedMemoryRegister",
            pb.CudaSharedMemoryRegisterRequest(
                name=name, raw_handle=handle, device_id=device_id, byte_size=byte_size
            ),
            pb.CudaSharedMemoryRegisterResponse,
        )

    def unregister(self, name: str = "", kind: str = "system") -> None:
        if kind == "system":
            self.client.call(
                "SystemSharedMemoryUnregister",
                pb.SystemSharedMemoryUnregisterRequest(name=name),
                pb.SystemSharedMemoryUnregisterResponse,
            )
            return
        self.client.call(
            "CudaSharedMemoryUnregister",
            pb.CudaSharedMemoryUnregisterRequest(name=name),
            pb.CudaSharedMemoryUnregisterResponse,
        )

    def status(self, name: str = "", kind: str = "system") -> list[dict[str, Any]]:
        if kind == "cuda":
            cuda = self.client.call(
                "CudaSharedMemoryStatus",
                pb.CudaSharedMemoryStatusRequest(name=name),
                pb.CudaSharedMemoryStatusResponse,
            )
            return [
                {"name": r.name, "device_id": r.device_id, "byte_size": r.byte_size}
                for _, r in sorted(cuda.regions.items())
            ]
        system = self.client.call(
            "SystemSharedMemoryStatus",
            pb.SystemSharedMemoryStatusRequest(name=name),
            pb.SystemSharedMemoryStatusResponse,
        )
        return [
            {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
            for _, r in sorted(system.regions.items())
        ]

    def infer(self, model: str, inputs: Inputs, outputs: Outputs | None = None) -> Result:
        message = memory_message(model, inputs, outputs)
        return read_outputs(self.client.call("ModelInfer", message, pb.ModelInferResponse))


class StreamMemory(GrpcMemory):
    """ModelStreamInfer over gRPC."""

    def infer(self, model: str, inputs: Inputs, outputs: Outputs | None = None) -> Result:
        [answer] = self.client.stream([memory_message(model, inputs, outputs)])
        if answer.error_message:
            raise ServerError(answer.error_message)
        return read_outputs(answer.infer_response)


def memory_message(
    model: str, inputs: Inputs, outputs: Outputs | None = None
) -> pb.ModelInferRequest:
    """A request message; inputs outside of regions are raw."""
    message = pb.ModelInferRequest(model_name=model)
    for name, given in inputs.items():
        if isinstance(given, Place):
            item = message.inputs.add(name=name, datatype=given.datatype, shape=given.shape)
            _put(item.parameters, given)
        else:
            datatype = BY_NUMPY[given.dtype]
            message.inputs.add(name=name, datatype=datatype, shape=given.shape)
            message.raw_input_contents.append(to_raw(given, datatype))
    for name, place in (outputs or {}).items():
        wanted = message.outputs.add(name=name)
        if place is not None:
            _put(wanted.parameters, place)
    return message


def read_outputs(response: pb.ModelInferResponse) -> Result:
    """Outputs of a response, which has a raw entry for each."""
    return {
        item.name: from_raw(raw, item.datatype, item.shape) if raw else None
        for item, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _put(parameters: Any, place: Place) -> None:
    for name, value in place.parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(parameters[name], kind, value)
