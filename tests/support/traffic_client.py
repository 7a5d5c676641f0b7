"""Traffic control over each transport."""

from abc import ABC, abstractmethod
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from headrace.protocol.pb import traffic_pb2 as pb
from tests.support.client import error_by_http
from tests.support.grpc_client import OPTIONS, error_of, procedure
from tests.support.server_process import ServerProcess

_SERVICE = "/headrace.v1.TrafficService"


class TrafficClient(ABC):
    """Client of traffic control; methods raise the server's `ServerError`."""

    @abstractmethod
    def get(self, model: str) -> pb.ModelTrafficResponse:
        """The rules and their effect."""

    @abstractmethod
    def set(self, model: str, rules: dict[str, Any]) -> pb.ModelTrafficResponse:
        """Replace the rules."""

    @abstractmethod
    def reset(self, model: str) -> pb.ModelTrafficResponse:
        """Restore the configured rules."""

    @abstractmethod
    def promote(self, model: str, version: str = "") -> pb.ModelTrafficResponse:
        """Send all requests to a version."""

    @abstractmethod
    def roll_back(self, model: str, version: str = "") -> pb.ModelTrafficResponse:
        """Send its requests to the baseline again."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


class HttpTraffic(TrafficClient):
    """Over HTTP."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False)

    def get(self, model: str) -> pb.ModelTrafficResponse:
        return self._send("GET", model)

    def set(self, model: str, rules: dict[str, Any]) -> pb.ModelTrafficResponse:
        return self._send("POST", model, json=rules)

    def reset(self, model: str) -> pb.ModelTrafficResponse:
        return self._send("DELETE", model)

    def promote(self, model: str, version: str = "") -> pb.ModelTrafficResponse:
        return self._send("POST", f"{model}/traffic/promote", json={"version": version})

    def roll_back(self, model: str, version: str = "") -> pb.ModelTrafficResponse:
        return self._send("POST", f"{model}/traffic/rollback", json={"version": version})

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, **given: Any) -> pb.ModelTrafficResponse:
        path = path if "/" in path else f"{path}/traffic"
        response = self._http.request(method, f"/v2/models/{path}", **given)
        if response.status_code != 200:
            raise error_by_http(response.status_code, response.json()["error"])
        return ParseDict(response.json(), pb.ModelTrafficResponse())


class GrpcTraffic(TrafficClient):
    """Over gRPC."""

    def __init__(self, server: ServerProcess) -> None:
        self._channel = grpc.insecure_channel(server.grpc, OPTIONS)

    def get(self, model: str) -> pb.ModelTrafficResponse:
        return self._call("ModelTraffic", pb.ModelTrafficRequest(name=model))

    def set(self, model: str, rules: dict[str, Any]) -> pb.ModelTrafficResponse:
        request = pb.SetModelTrafficRequest(name=model)
        ParseDict(rules, request.rules)
        return self._call("SetModelTraffic", request)

    def reset(self, model: str) -> pb.ModelTrafficResponse:
        return self._call("ResetModelTraffic", pb.ModelTrafficRequest(name=model))

    def promote(self, model: str, version: str = "") -> pb.ModelTrafficResponse:
        request = pb.ModelVersionRequest(name=model, version=version)
        return self._call("PromoteModelVersion", request)

    def roll_back(self, model: str, version: str = "") -> pb.ModelTrafficResponse:
        request = pb.ModelVersionRequest(name=model, version=version)
        return self._call("RollBackModelVersion", request)

    def close(self) -> None:
        self._channel.close()

    def _call(self, name: str, request: Message) -> pb.ModelTrafficResponse:
        try:
            call = procedure(self._channel, f"{_SERVICE}/{name}", pb.ModelTrafficResponse)
            response: pb.ModelTrafficResponse = call(request, timeout=60)
        except grpc.RpcError as error:
            raise error_of(error) from None
        return response
