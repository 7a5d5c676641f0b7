"""Entries of requests for changes: what each asked for, and its outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from headrace.api.audited import AuditedRequest, is_change, is_changing
from headrace.api.messages import request_class
from headrace.api.operations import NAMED, OPERATIONS
from headrace.core.errors import Forbidden, InvalidRequest
from headrace.core.identity import Identity
from headrace.core.model_spec import LoadParameters
from headrace.observability.audit import AuditEntry, AuditOutcome
from headrace.protocol.pb import grpc_service_pb2 as pb

WHO = Identity("ann", "token", ())
LONG = b"z" * 100_000


@dataclass
class ListedEntries:
    """An audit that keeps its entries."""

    infer: int = 0
    found: list[AuditEntry] = field(default_factory=list)
    lost: Mapping[str, int] = field(default_factory=dict)

    def record(self, entry: AuditEntry) -> None:
        self.found.append(entry)

    def close(self) -> None: ...


def message(operation: str, **members: object) -> Message:
    return ParseDict(members, request_class(NAMED[operation])())


async def entry(
    operation: str,
    asked: object,
    parts: Mapping[str, str] | None = None,
    error: BaseException | None = None,
    door: str = "http",
) -> AuditEntry:
    """The entry of a request, which has been recorded once."""
    audit = ListedEntries()
    request = AuditedRequest(audit, NAMED[operation], door, "10.0.0.1", "r")
    request.identity = WHO
    if parts is not None:
        request.names(parts)
    await request.asks(asked)
    request.end(error)
    [found] = audit.found
    assert found[4:6] == (door, "10.0.0.1")
    assert (found.identity, found.request_id) == (WHO, "r")
    return found


def test_operations_that_change_something() -> None:
    assert {each.name for each in OPERATIONS if is_changing(each)} == {
        "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "LogSettings",
        "PromoteModelVersion", "RepositoryModelLoad", "RepositoryModelUnload",
        "ResetModelTraffic", "RollBackModelVersion", "SetModelTraffic",
        "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "TraceSetting",
    }  # fmt: skip


@pytest.mark.parametrize(("operation", "members", "changes"), [
    ("LogSettings", {}, False), ("TraceSetting", {"model_name": "m"}, False),
    ("LogSettings", {"settings": {"log_info": {"bool_param": False}}}, True),
    ("TraceSetting", {"settings": {"trace_level": {}}}, True),
    ("ModelTraffic", {"name": "m"}, False), ("ResetModelTraffic", {"name": "m"}, True),
    ("RepositoryIndex", {}, False),
])  # fmt: skip
def test_messages_that_change_something(
    operation: str, members: dict[str, Any], changes: bool
) -> None:
    assert is_change(NAMED[operation], message(operation, **members)) == changes


LEVELS = {"trace_level": ["TENSORS"]}
CHANGES: list[tuple[str, object, Mapping[str, str] | None, str, str, Mapping[str, object]]] = [
    ("LogSettings", {"log_info": False, "log_format": "json"}, {}, "", "",
     {"log_info": False, "log_format": "json"}),
    ("LogSettings", {"settings": {"log_info": {"bool_param": False}}}, None, "", "",
     {"log_info": False}),
    ("TraceSetting", LEVELS, {"name": "m"}, "m", "", LEVELS),
    ("TraceSetting", {"model_name": "m", "settings": {"trace_level": {"value": ["TENSORS"]}}},
     None, "m", "", LEVELS),
    ("SetModelTraffic", {"split": {"1": 1.0}}, {"name": "m"}, "m", "", {"split": {"1": 1.0}}),
    ("SetModelTraffic", {"name": "m", "rules": {"split": {"1": 1.0}}}, None, "m", "",
     {"rules": {"split": {"1": 1.0}}}),
    ("PromoteModelVersion", {"name": "m", "version": "3", "reason": "good"}, None, "m", "3",
     {"reason": "good"}),
    ("PromoteModelVersion", {"version": "3", "reason": "good"}, {"name": "m"}, "m", "3",
     {"reason": "good"}),
    ("SystemSharedMemoryRegister", {"key": "/x", "byte_size": 8}, {"region": "r"}, "", "",
     {"region": "r", "key": "/x", "byte_size": 8}),
    ("SystemSharedMemoryRegister", {"name": "r", "key": "/x", "byte_size": "8"}, None, "", "",
     {"region": "r", "key": "/x", "byte_size": 8}),
    ("CudaSharedMemoryRegister", {"raw_handle": {"b64": "c2VjcmV0"}, "device_id": 1},
     {"region": "r"}, "", "", {"region": "r", "device_id": 1}),
    ("CudaSharedMemoryRegister", {"name": "r", "raw_handle": "c2VjcmV0", "byte_size": "8"}, None,
     "", "", {"region": "r", "byte_size": 8}),
    ("SystemSharedMemoryUnregister", {}, {}, "", "", {}),
    ("RepositoryModelUnload", {"parameters": {"unload_dependents": True}}, {"name": "m"}, "m", "",
     {"parameters": {"unload_dependents": True}}),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "asked", "parts", "model", "version", "detail"), CHANGES)
async def test_changes_with_their_values(
    operation: str, asked: Any, parts: Mapping[str, str] | None, model: str, version: str,
    detail: Mapping[str, object],
) -> None:  # fmt: skip
    given = message(operation, **asked) if parts is None else asked
    found = await entry(operation, given, parts)
    assert (found.model, found.version, found.detail) == (model, version, detail)
    assert found.outcome is AuditOutcome.OK


@pytest.mark.parametrize("data", [b"secret", LONG])
async def test_files_of_a_load_by_their_digests(data: bytes) -> None:
    asked = pb.RepositoryModelLoadRequest(model_name="m")
    asked.parameters["config"].string_param = "{}"
    asked.parameters["file:1/model.onnx"].bytes_param = data
    detail = {
        "config": {"bytes": 2, "sha256": sha256(b"{}").hexdigest()},
        "files": {"1/model.onnx": {"bytes": len(data), "sha256": sha256(data).hexdigest()}},
    }
    found = await entry("RepositoryModelLoad", asked, door="grpc")
    assert (found.model, found.status, found.detail) == ("m", "OK", detail)
    parameters = LoadParameters("{}", {"1/model.onnx": data})
    found = await entry("RepositoryModelLoad", parameters, {"name": "m"})
    assert (found.model, found.status, found.detail) == ("m", "200", detail)
    found = await entry("RepositoryModelLoad", parameters, {"name": "m"}, InvalidRequest("bad"))
    assert (found.status, found.detail) == ("400", detail)


async def test_a_failed_change_has_the_names_only() -> None:
    asked = {"log_info": "secret", "password": "secret"}
    found = await entry("LogSettings", asked, {}, InvalidRequest("bad"))
    assert found.outcome is AuditOutcome.FAILED
    assert found.detail == {"members": ["log_info", "password"]}
    found = await entry("LogSettings", {}, {}, Forbidden("not you"))
    assert (found.outcome, found.status, found.detail) == (AuditOutcome.REFUSED, "403", {})
    unknown = message("RepositoryModelLoad", model_name="m", parameters={"password": {}})
    found = await entry("RepositoryModelLoad", unknown, error=InvalidRequest("bad"), door="grpc")
    assert (found.model, found.status, found.detail) == ("m", "INVALID_ARGUMENT", {})
