"""Requests for changes, and refused ones, in the audit log: over both protocols, once each."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.message import Message

from headrace.plugins.access.keys import new_key
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.support.grpc_client import OPTIONS, SERVICE, GrpcClient
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server, onnx_examples

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
INPUTS = {"INPUT0": ROW, "INPUT1": ROW}
DOCUMENT = {
    "inputs": [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": row.ravel().tolist()}
        for name, row in INPUTS.items()
    ]
}
ID = ("x-request-id", "r-1")


class Audited:
    """A server that requires a key for shared memory, and its audit log."""

    def __init__(self, server: ServerProcess, log: Path) -> None:
        self.server = server
        self._log = log
        self._read = 0

    def http(self, method: str, path: str, body: object = None, **headers: str) -> int:
        """Send a request with an id; returns the status."""
        given = dict([ID]) | {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.server.url}{path}"
        return httpx.request(method, url, json=body, headers=given, verify=False).status_code

    def grpc(self, procedure: str, message: Message, *metadata: tuple[str, str]) -> str:
        """Call a procedure with an id; returns the name of the status."""
        with grpc.insecure_channel(self.server.grpc, OPTIONS) as channel:
            call = channel.unary_unary(f"{SERVICE}/{procedure}", bytes, bytes)
            try:
                call(message.SerializeToString(), 30, (ID, *metadata))
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

    def entries(self, count: int) -> list[dict[str, Any]]:
        """The entries since the last call, which are so many, without their times."""
        until(lambda: len(self._lines()) >= self._read + count, f"{count} entries")
        found = self._lines()[self._read :]
        self._read += len(found)
        assert len(found) == count, found
        for entry in found:
            assert entry.pop("time").endswith("Z")
        return found

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture(params=FIRST_CARRIER)
def audited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Audited]:
    (models := tmp_path / "models").mkdir()
    log = tmp_path / "audit.log"
    options = (
        *CARRIERS[request.param], f"--audit-log={log}", "--model-control-mode=explicit",
        "--load-model=*", "--restricted-api=shared-memory:x-key=secret", "--audit-infer=1",
    )  # fmt: skip
    with clean_server(onnx_examples(models), options=options) as server:
        yield Audited(server, log)


def anyone(door: str, operation: str, outcome: str, status: str, **more: object) -> dict[str, Any]:
    """The entry of a client without an identity."""
    return {
        "operation": operation, "outcome": outcome, "status": status, "identity": "anonymous",
        "kind": "anonymous", "roles": ["anyone"], "door": door, "address": "127.0.0.1",
        "request_id": "r-1", **more,
    }  # fmt: skip


def test_changes_over_http(audited: Audited) -> None:
    assert audited.http("GET", "/v2/logging") == 200
    assert audited.http("POST", "/v2/repository/index", {}) == 200
    assert audited.http("POST", "/v2/logging", {"log_verbose_level": 1}) == 200
    assert audited.http("POST", "/v2/logging", {"log_format": "secret"}) == 503
    assert audited.http("POST", "/v2/repository/models/simple/load", {}) == 200
    assert audited.http("POST", "/v2/repository/models/nothing/load", {}) == 404
    assert audited.http("POST", "/v2/models/simple/traffic", {"split": {"1": 1}}) == 200
    assert audited.http("DELETE", "/v2/models/simple/traffic") == 200
    assert audited.entries(6) == [
        anyone("http", "LogSettings", "ok", "200", detail={"log_verbose_level": 1}),
        anyone("http", "LogSettings", "failed", "503", detail={"members": ["log_format"]}),
        anyone("http", "RepositoryModelLoad", "ok", "200", model="simple"),
        anyone("http", "RepositoryModelLoad", "failed", "404", model="nothing"),
        anyone("http", "SetModelTraffic", "ok", "200", model="simple", detail={"split": {"1": 1}}),
        anyone("http", "ResetModelTraffic", "ok", "200", model="simple"),
    ]


def test_changes_over_grpc(audited: Audited) -> None:
    assert audited.grpc("LogSettings", pb.LogSettingsRequest()) == "OK"
    settings = pb.LogSettingsRequest()
    settings.settings["log_verbose_level"].uint32_param = 1
    assert audited.grpc("LogSettings", settings) == "OK"
    assert audited.grpc("RepositoryModelUnload",
                        pb.RepositoryModelUnloadRequest(model_name="simple")) == "OK"  # fmt: skip
    nothing = pb.RepositoryModelLoadRequest(model_name="nothing")
    assert audited.grpc("RepositoryModelLoad", nothing) == "NOT_FOUND"
    assert audited.entries(3) == [
        anyone("grpc", "LogSettings", "ok", "OK", detail={"log_verbose_level": 1}),
        anyone("grpc", "RepositoryModelUnload", "ok", "OK", model="simple"),
        anyone("grpc", "RepositoryModelLoad", "failed", "NOT_FOUND", model="nothing"),
    ]


def test_refused_requests(audited: Audited) -> None:
    path, name = "/v2/systemsharedmemory/region/r/register", "SystemSharedMemoryRegister"
    message = pb.SystemSharedMemoryRegisterRequest(name="r", key="/x", byte_size=8)
    assert audited.http("POST", path, {"key": "/x", "byte_size": 8}, x_key="wrong") == 403
    assert audited.grpc(name, message, ("x-key", "wrong")) == "UNAVAILABLE"
    assert audited.http("POST", "/v2/logging", {}, origin="http://example.org") == 403
    unknown = [
        anyone("http", name, "refused", "403"),
        anyone("grpc", name, "refused", "UNAVAILABLE"),
    ]
    for entry in unknown:
        del entry["identity"], entry["roles"]
    assert audited.entries(3) == [*unknown, anyone("http", "LogSettings", "refused", "403")]


def test_inference_requests(audited: Audited) -> None:
    with HttpClient(audited.server.url, binary=False) as client:
        client.infer("simple", INPUTS, id="r-1")
    with GrpcClient(audited.server.grpc) as other:
        other.infer("simple", INPUTS, id="r-1")
    more = {"model": "simple", "version": "1"}
    assert audited.entries(2) == [
        anyone("http", "ModelInfer", "ok", "200", **more),
        anyone("grpc", "ModelInfer", "ok", "OK", **more),
    ]


ACCESS = """
[roles.scorer]
may = ["infer", "read"]
models = ["simple"]
[roles.operator]
may = "*"
[keys.web]
hash = "{web}"
roles = ["scorer"]
[keys.ann]
hash = "{ann}"
roles = ["operator", "scorer"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("carrier", FIRST_CARRIER)
def test_known_clients(tmp_path: Path, carrier: str) -> None:
    (models := tmp_path / "models").mkdir()
    log, access, (web, ann) = tmp_path / "log", tmp_path / "access.toml", (new_key(), new_key())
    access.write_text(ACCESS.format(web=web.hash, ann=ann.hash))
    options = (
        *CARRIERS[carrier], f"--audit-log={log}", f"--access={access}", "--audit-infer=1",
        "--model-control-mode=explicit", "--load-model=*",
    )  # fmt: skip
    load, path = pb.RepositoryModelLoadRequest(model_name="simple"), "/v2/repository/models/simple"
    with clean_server(onnx_examples(models), options=options) as server:
        audited, keys = Audited(server, log), [f"Bearer {key.key}" for key in (web, ann)]
        for key in (keys[1], keys[0], "Bearer wrong"):
            audited.http("POST", f"{path}/load", {}, authorization=key)
        for key in (keys[1], keys[0], "Bearer wrong"):
            audited.grpc("RepositoryModelLoad", load, ("authorization", key))
        infer = httpx.post(
            f"{server.url}/v2/models/simple/infer", json=DOCUMENT, verify=False,
            headers={"authorization": keys[0]},
        )  # fmt: skip
        assert infer.status_code == 200
        found = audited.entries(7)
        who = [(each.get("identity"), each.get("kind"), each.get("roles")) for each in found]
        known = [("ann", "key", ["operator", "scorer"]), ("web", "key", ["scorer"])]
        unknown = (None, "anonymous", None)
        assert who == [*known, unknown, *known, unknown, known[1]]
        assert {each["address"] for each in found} == {"127.0.0.1"}
        refused = ["ok", "refused", "refused"]
        assert [each["outcome"] for each in found] == [*refused, *refused, "ok"]
        assert [each["status"] for each in found] == [
            "200", "403", "401", "OK", "PERMISSION_DENIED", "UNAUTHENTICATED", "200",
        ]  # fmt: skip
        hidden, given = pb.ModelInferRequest(model_name="digits"), ("authorization", keys[0])
        path = "/v2/models/digits/infer"
        assert audited.http("POST", path, DOCUMENT, authorization=keys[0]) == 404
        assert audited.grpc("ModelInfer", hidden, given) == "NOT_FOUND"
        for path in ("/v2/models/digits", "/v2/models/digits/ready"):
            assert audited.http("GET", path, authorization=keys[0]) == 404
        for name, message in (
            ("ModelMetadata", pb.ModelMetadataRequest(name="digits")),
            ("ModelReady", pb.ModelReadyRequest(name="digits")),
        ):
            assert audited.grpc(name, message, given) == "NOT_FOUND"
        for entry in audited.entries(6):
            told = [entry[name] for name in ("outcome", "identity", "model", "roles")]
            assert told == ["refused", "web", "digits", ["scorer"]]
        access.write_text("[rolls]")
        [failed] = audited.entries(1)
        assert (failed["operation"], failed["outcome"]) == ("Access", "failed")
        assert (failed["identity"], failed["kind"]) == ("operator", "file")
        access.write_text(ACCESS.format(web=web.hash, ann=new_key().hash))
        [changed] = audited.entries(1)
        assert (changed["operation"], changed["outcome"]) == ("Access", "ok")
        assert changed["detail"] == {"file": str(access)}


@pytest.mark.slow
def test_files_and_settings_of_the_operator(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    log, file = tmp_path / "audit.log", tmp_path / "settings.toml"
    file.write_text("log-verbose = 0\n")
    options = (f"--audit-log={log}", "--audit-max-bytes=2000", "--audit-files=2")
    environment = {"HEADRACE_CONFIG_FILE": str(file)}
    with clean_server(onnx_examples(models), options=options, environment=environment) as server:
        audited = Audited(server, log)
        file.write_text("log-verbose = 1\nrestricted-api = ['trace:x-key=secret']\n")
        server.send(signal.SIGHUP)
        assert audited.entries(1) == [
            {
                "operation": "SIGHUP", "outcome": "ok", "identity": "operator", "kind": "signal",
                "detail": {"settings": ["log_verbose", "restricted_api"]},
            }
        ]  # fmt: skip
        log.rename(tmp_path / "moved")
        assert audited.http("POST", "/v2/logging", {"log_info": True}) == 200
        until(log.exists, "a new file")
        assert "secret" not in (tmp_path / "moved").read_text()
        for _ in range(30):
            assert audited.http("POST", "/v2/logging", {"log_info": True}) == 200
        until((tmp_path / "audit.log.2").exists, "a second rotation")
        with Scraper(server.metrics) as scraper:
            lost = scraper.now()
        for reason in ("unwritten", "refusals"):
            assert lost.value("headrace_audit_entries_lost_total", reason=reason) == 0
        assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_standard_output(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    with clean_server(onnx_examples(models), options=["--audit-log=-"]) as server:
        audited = Audited(server, tmp_path)
        assert audited.http("POST", "/v2/logging", {"log_info": True}) == 200
        until(lambda: '"operation":"LogSettings"' in server.output, "a line of standard output")
