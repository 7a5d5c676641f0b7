"""Trace settings over both protocols; trace files, read by the rules of Triton's own summary."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import error_by_http
from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess

# The two times of each span; those of a door are both present or both absent.
_SPANS = {
    "request": ("REQUEST_START", "REQUEST_END"),
    "queue": ("QUEUE_START", "COMPUTE_START"),
    "compute": ("COMPUTE_START", "COMPUTE_END"),
    "compute input": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "compute infer": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "compute output": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}
_DOORS = {
    "HTTP": {
        "receive": ("HTTP_RECV_START", "HTTP_RECV_END"),
        "send": ("HTTP_SEND_START", "HTTP_SEND_END"),
        "exchange": ("HTTP_RECV_START", "HTTP_SEND_END"),
    },
    "GRPC": {
        "receive": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
        "send": ("GRPC_SEND_START", "GRPC_SEND_END"),
        "exchange": ("GRPC_WAITREAD_START", "GRPC_SEND_END"),
    },
}


@dataclass
class Traced:
    """One trace; of times with the same name the last one counts."""

    number: int
    head: dict[str, Any] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    tensors: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def door(self) -> str:
        """HTTP, GRPC, or "" for a model's call."""
        return next((d for d in _DOORS if any(name.startswith(d) for name in self.times)), "")

    def spans(self) -> dict[str, int]:
        """The total duration in nanoseconds; no step may end before it begins."""
        result: dict[str, int] = {}
        for name, (start, end) in (_SPANS | _DOORS.get(self.door, {})).items():
            result[name] = self.times[end] - self.times[start]
            assert result[name] >= 0, f"{end} is before {start}"
        return result


def read_traces(path: Path) -> list[Traced]:
    """The traces of a file by number."""
    traces: dict[int, Traced] = {}
    for entry in json.loads(path.read_text()):
        trace = traces.setdefault(entry["id"], Traced(entry["id"]))
        if "timestamps" in entry:
            for time in entry["timestamps"]:
                trace.times[time["name"]] = time["ns"]
                trace.names.append(time["name"])
        elif "activity" in entry:
            trace.tensors.append((entry["activity"], entry["tensor"]))
        else:
            trace.head = entry
    return [traces[number] for number in sorted(traces)]


def http_settings(server: ServerProcess, model: str = "", **changes: Any) -> dict[str, Any]:
    path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
    body = json.dumps(changes).encode() if changes else b""
    answer = ask(server.http, "POST" if changes else "GET", path, body)
    if answer.status != 200:
        raise error_by_http(answer.status, answer.error)
    return answer.document


def grpc_settings(server: ServerProcess, model: str = "", **changes: Any) -> dict[str, Any]:
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in changes.items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        request.settings[name].value.extend(values)
    with GrpcClient(server.grpc) as client:
        response = client.call("TraceSetting", request, pb.TraceSettingResponse)
    return {
        name: list(setting.value) if name == "trace_level" else ",".join(setting.value)
        for name, setting in response.settings.items()
    }
