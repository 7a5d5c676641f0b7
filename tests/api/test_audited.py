"""Entries of requests for changes: what each asked for, and its outcome."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from headrace.api.audited import AuditedRequest, is_changing, recording
from headrace.api.gate import Gate
from headrace.api.header_rules import HeaderRules
from headrace.api.messages import request_class
from headrace.api.operations import NAMED, OPERATIONS
from headrace.core.errors import Forbidden, InvalidRequest, NotFound, ServerError, Unauthenticated
from headrace.core.identity import NOBODY, Identity, PeerFacts
from headrace.core.model_spec import LoadParameters
from headrace.observability.audit import AuditEntry, AuditOutcome
from headrace.protocol.pb import grpc_service_pb2 as pb

WHO = Identity("ann", "token", ())
LONG = b"z" * 100_000


class OneClient:
    """An `Access` that knows one client, who may do nothing."""

    quotas = None
    challenge = "Bearer"

    def identify(self, authorization: Sequence[bytes], peer: PeerFacts) -> Identity:
        if list(authorization) != [b"ann"]:
            raise Unauthenticated("who?")
        return WHO

    def watch(self, changed: Callable[[], object]) -> None: ...

    async def close(self) -> None: ...


def message(operation: str, **members: object) -> Message:
    return ParseDict(members, request_class(NAMED[operation])())


async def entry(
    operation: str,
    asked: object,
    parts: Mapping[str, str] | None = None,
    error: BaseException | None = None,
    door: str = "http",
) -> AuditEntry:
    """The entry of a request, which is recorded once."""
    entries: list[AuditEntry] = []
    request = AuditedRequest(entries.append, NAMED[operation], door, "10.0.0.1", "r", WHO)
    with suppress(ServerError), request:
        if parts is not None:
            request.names(parts)
        await request.asks(asked)
        if error is not None:
            raise error
    [found] = entries
    assert (found.door, found.address, found.identity, found.request_id) == (
        door, "10.0.0.1", WHO, "r",
    )  # fmt: skip
    return found


async def test_requests_that_change_nothing_are_not_recorded() -> None:
    entries: list[AuditEntry] = []
    with AuditedRequest(entries.append, NAMED["LogSettings"], "grpc", "", "", WHO) as request:
        await request.asks(message("LogSettings"), False)
    assert entries == []


def test_operations_that_change_something() -> None:
    assert {each.name for each in OPERATIONS if is_changing(each)} == {
        "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "LogSettings",
        "PromoteModelVersion", "RepositoryModelLoad", "RepositoryModelUnload",
        "ResetModelTraffic", "RollBackModelVersion", "SetModelTraffic",
        "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "TraceSetting",
    }  # fmt: skip


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


def test_requests_that_a_gate_refuses() -> None:
    entries: list[AuditEntry] = []
    gate = Gate(HeaderRules(restricted=["health:x-key=secret"]), OneClient())
    gate.refused = recording(entries.append, "http", gate)
    headers = {"x-key": [b"secret"], "authorization": [b"ann"], "x-request-id": [b"r"]}
    peer = PeerFacts("10.0.0.1")

    def refused(operation: str, **changes: list[bytes]) -> None:
        given = headers | {name.replace("_", "-"): value for name, value in changes.items()}
        with suppress(ServerError):
            gate.enter(NAMED[operation], lambda name: given.get(name, []), peer)

    refused("ServerReady")  # which is not
    refused("ServerReady", x_key=[b"wrong"])
    refused("ModelMetadata", authorization=[b"wrong"])
    refused("LogSettings", x_request_id=[])
    gate.refuse(NAMED["ModelInfer"], NotFound("hidden"), lambda n: headers.get(n, []), peer, "m")
    common = AuditOutcome.REFUSED, "10.0.0.1"
    assert [(each.outcome, each.address) for each in entries] == [common] * 4
    assert [(e.operation, e.status, e.identity, e.request_id) for e in entries] == [
        ("ServerReady", "403", WHO, "r"), ("ModelMetadata", "401", NOBODY, "r"),
        ("LogSettings", "403", WHO, ""), ("ModelInfer", "404", WHO, "r"),
    ]  # fmt: skip
