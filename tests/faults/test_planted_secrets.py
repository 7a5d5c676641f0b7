"""Secrets planted wherever a server takes some are nowhere in what it writes and answers."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest

from headrace.api.operations import OPERATIONS, Category, Operation, by_procedure
from headrace.plugins.access.keys import new_key
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.python_models import tensors, write_python_model
from tests.support.access_file import known_client
from tests.support.command import run
from tests.support.grpc_client import OPTIONS
from tests.support.http_socket import HttpSocket
from tests.support.issuer import TokenIssuer
from tests.support.remote import write_remote
from tests.support.server_process import EXAMPLES, ServerProcess, onnx_examples

pytestmark = pytest.mark.slow

TLS = Path(__file__).parents[1] / "support" / "tls"
_LEAST = 12  # characters of a secret, so that it is nowhere by chance
ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
JSON = {
    "inputs": [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": ROW.ravel().tolist()}
        for name in ("INPUT0", "INPUT1")
    ]
}
FAR = "far"  # a model on the upstream
ACCESS = """
[issuers.corp]
issuer = "{}"
audience = "headrace"
keys = "keys.json"
roles = ["all"]
"""
RAISING = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            print("a line of a model")
            raise ValueError("an error of a model")
"""


@dataclass
class Secrets:
    """The planted values by what they are, and texts in which none of them may occur."""

    values: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def plant(self, name: str) -> str:
        """A new secret."""
        value = self.values[name] = f"PLANTED-{name}-{os.urandom(8).hex()}"
        return value

    def see(self, place: str, text: str) -> str:
        """Note a text, and where it was; returns it."""
        self.seen.append((place, text))
        return text

    def found(self) -> list[str]:
        """The places where a secret is."""
        assert all(len(value) >= _LEAST for value in self.values.values())
        return [
            f"{name} in {place}"
            for place, text in self.seen
            for name, value in self.values.items()
            if value in text
        ]


def credentials(secrets: Secrets) -> list[dict[str, str]]:
    """Headers with the right keys, with wrong ones, and with those of other kinds."""
    key, token = f"Bearer {secrets.values['API key']}", f"Bearer {secrets.values['token']}"
    right = {"x-admin": secrets.values["admin"], "x-infer": secrets.values["infer"]}
    wrong = {name: secrets.plant(f"wrong {name}") for name in right}
    forged = secrets.values["token"][:-16]  # without part of its signature
    return [
        right | {"authorization": key}, right | {"authorization": token},
        wrong | {"authorization": key}, right, {"authorization": key},
        right | {"authorization": f"Bearer {secrets.plant('bearer')}"},
        right | {"authorization": f"Basic {secrets.plant('basic')}"},
        right | {"authorization": f"Bearer {forged}"}, right | {"authorization": key[:-1]},
        {"cookie": secrets.plant("cookie"), "x-api-key": secrets.plant("API key of others")},
    ]  # fmt: skip


def requests(operation: Operation) -> Iterator[tuple[str, str, object]]:
    """Method, path and body of requests for an operation, right and wrong ones."""
    infers = operation.category is Category.INFERENCE
    models = ("simple", "raising", FAR, "nothing") if infers else ("digits", "nothing")
    bodies: tuple[object, ...] = (
        (JSON, {}) if infers else ({"key": "/x", "byte_size": 1, "log_level": 1}, {})
    )
    for route in operation.routes:
        for form in route.forms:
            for name in models if "{name" in form else ("",):
                path = form.replace(":path", "").format(name=name, version="1", region="r")
                for body in bodies if route.method == "POST" else (None,):
                    yield route.method, path, body


def ask_over_http(server: ServerProcess, secrets: Secrets) -> None:
    """Ask for every route with each of the keys, and send what cannot be parsed."""
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        for headers in credentials(secrets):
            for method, path, body in (each for found in OPERATIONS for each in requests(found)):
                answer = client.request(method, path, headers=headers, json=body)
                secrets.see(f"{method} {path}", f"{answer.headers} {answer.text}")
            for page in ("/docs", "/openapi.json", "/metrics", "/v3/x"):
                secrets.see(page, client.get(page, headers=headers).text)
            name, value = list(headers.items())[-1]
            for head in (
                f"{name}: {value}\0", f"{name}: {value}\r\nhost: y", f"{name} {value}",
                f"{name}: {value}\r\ncontent-length: x", f"expect: {value}\r\n{name}: {value}",
            ):  # fmt: skip
                request = f"POST /v2/logging HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode()
                with HttpSocket(server.http) as connection:
                    connection.send(request)
                    answered = connection.receive()
                secrets.see(f"an answer to {head[:20]!r}", f"{answered.headers} {answered.body!r}")


def ask_over_grpc(server: ServerProcess, secrets: Secrets) -> None:
    """Ask for every procedure with each of the keys, by right messages and broken ones."""
    trusted = grpc.ssl_channel_credentials((TLS / "root.pem").read_bytes())
    messages = (b"", b"\xff", *map(infer_message, ("simple", "raising", FAR)))
    with grpc.secure_channel(server.grpc, trusted, OPTIONS) as channel:
        for headers, path, message in product(credentials(secrets), by_procedure(), messages):
            if path.endswith("/Watch"):
                continue
            metadata = tuple(headers.items())
            answer: object
            try:
                if path.endswith(("StreamInfer", "ReflectionInfo")):
                    stream = channel.stream_stream(path, bytes, bytes)
                    answer = list(stream(iter([message]), 30, metadata))
                else:
                    answer = channel.unary_unary(path, bytes, bytes)(message, 30, metadata)
            except grpc.RpcError as error:
                answer = error
            secrets.see(path, repr(answer))


def infer_message(model: str) -> bytes:
    """A request for a model with the inputs of `simple`."""
    message = pb.ModelInferRequest(model_name=model)
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        message.raw_input_contents.append(ROW.tobytes())
    return message.SerializeToString()


@pytest.fixture
def secrets() -> Secrets:
    return Secrets()


@pytest.fixture
def upstream(tmp_path: Path, secrets: Secrets) -> Iterator[ServerProcess]:
    """A server that accepts another authorization than it is sent."""
    models = tmp_path / "upstream"
    shutil.copytree(EXAMPLES / "simple", models / FAR)
    config = models / FAR / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "simple"', f'name: "{FAR}"'))
    key = secrets.plant("upstream's key")
    environment = {"HEADRACE_RESTRICTED_API": f"inference:authorization={key}"}
    with ServerProcess(models, environment=environment) as server:
        yield server


@pytest.mark.parametrize("front_ends", [0, 1])
def test_secrets_are_nowhere(
    tmp_path: Path, secrets: Secrets, upstream: ServerProcess, front_ends: int
) -> None:
    (models := tmp_path / "models").mkdir()
    onnx_examples(models)
    config = "max_batch_size: 1\n" + "".join(
        tensors("input", (name, "INT32", "16")) for name in ("INPUT0", "INPUT1")
    )
    write_python_model(models, "raising", RAISING, config + tensors("output", ("Y", "INT32", "16")))
    write_remote(models, FAR, f"http://{upstream.http}", authorization_file="token")
    (models / FAR / "token").write_text(f"Bearer {secrets.plant('upstream')}\n")
    key = tmp_path / "server.key"
    shutil.copy(TLS / "server.key", key)
    secrets.values["tls"] = key.read_text().splitlines()[1]
    secrets.plant("database")
    rules = (
        f"model-repository,trace,logging,shared-memory:x-admin={secrets.plant('admin')}",
        f"inference:x-infer={secrets.plant('infer')}",
    )
    key_of_web, issuer = new_key(), TokenIssuer()
    secrets.values |= {"API key": key_of_web.key, "token": issuer.token().decode()}
    (tmp_path / "keys.json").write_text(json.dumps(issuer.document))
    (access := tmp_path / "access.toml").write_text(
        known_client("web", key_of_web, role="all") + ACCESS.format(issuer.name)
    )
    files = {name: tmp_path / name for name in ("audit", "traces")}
    options = (
        "--access-log", "--log-verbose=2", "--exit-on-error=false", f"--frontends={front_ends}",
        f"--access={access}", f"--audit-log={files['audit']}", "--audit-infer=1",
        "--model-control-mode=explicit", "--load-model=*", "--trace-rate=1",
        "--trace-level=TIMESTAMPS", "--trace-level=TENSORS",
        f"--trace-file={files['traces']}", "--grpc-use-ssl", f"--grpc-server-key={key}",
        f"--grpc-server-cert={TLS / 'server.pem'}", "--allow-client-shm",
    )  # fmt: skip
    environment = {
        "HEADRACE_RESTRICTED_API": "\n".join(rules), "DATABASE_PASSWORD": secrets.values["database"]
    }  # fmt: skip
    with ServerProcess(models, options=options, environment=environment) as server:
        ask_over_http(server, secrets)
        ask_over_grpc(server, secrets)
        server.send(signal.SIGHUP)
        server.await_logged("SIGHUP: settings and repositories were read again")
        for headers in credentials(secrets):
            scraped = httpx.get(f"http://{server.metrics}/metrics", headers=headers, verify=False)
            secrets.see("metrics", scraped.text)
        access.write_text(f"{access.read_text()}[keys.other]\nhash = '{secrets.plant('hash')}'\n")
        server.await_logged("access stays as it was")
        process = psutil.Process(server.pid)
        secrets.see("command line", " ".join(process.cmdline()))
        for child in process.children(recursive=True):
            secrets.see(f"command line of {child.pid}", " ".join(child.cmdline()))
            secrets.see(f"environment of {child.pid}", _environment(child))
        assert server.stop() == 0
        secrets.see("standard output", server.output)
        log = secrets.see("log", server.log)
        assert "bug " not in log
        assert "an error of a model" in log
        assert "POST /v2/logging 200" in log
        assert any("does not accept this server" in text for _, text in secrets.seen)
        audit = secrets.see("audit log", files["audit"].read_text())
        assert '"ModelInfer"' in audit
        assert '"LogSettings"' in audit
        assert '"identity":"web"' in audit
        assert '"identity":"corp:ann"' in audit
        assert "REQUEST_START" in secrets.see("traces", files["traces"].read_text())
    assert secrets.found() == []


def _environment(process: psutil.Process) -> str:
    """Only root sees the environment of what is private."""
    try:
        return str(process.environ())
    except psutil.AccessDenied:
        return ""


@pytest.mark.parametrize(("name", "text"), [
    ("restricted_api", "inference:x-key"), ("restricted_api", "nothing:x-key="),
    ("http_restricted_api", "inference;x-key="), ("grpc_restricted_protocol", "health:bad key="),
    ("restricted_api", "inference:grpc-key="), ("frontends", ""),
])  # fmt: skip
@pytest.mark.parametrize("where", ["environment", "file"])
def test_wrong_settings_are_named_without_their_values(
    tmp_path: Path, secrets: Secrets, name: str, text: str, where: str
) -> None:
    (models := tmp_path / "models").mkdir()
    onnx_examples(models)
    value = text + secrets.plant("setting")
    environment = {f"HEADRACE_{name.upper()}": value}
    if where == "file":
        file = tmp_path / "settings.toml"
        file.write_text(f'{name.replace("_", "-")} = "{value}"\n')
        environment = {"HEADRACE_CONFIG_FILE": str(file)}
    ran = run("serve", f"--model-repository={models}", environment=environment)
    assert ran.returncode == 2
    assert name.replace("_", "-") in (ran.stdout + ran.stderr).lower().replace("_", "-")
    if name != "frontends":  # which is none
        secrets.see("errors", ran.stdout + ran.stderr)
    assert secrets.found() == []
