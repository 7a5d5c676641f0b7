"""TLS at every door, as other programs see it: OpenSSL's own client, curl, grpcio and httpx."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS
from tests.support.client import Input
from tests.support.command import run
from tests.support.grpc_client import SERVICE, infer_message, procedure
from tests.support.http_client import HttpClient
from tests.support.server_process import ServerProcess, clean_server
from tests.support.tls_files import FOLDER, ROOT, Authority, tls_options

pytestmark = pytest.mark.slow
OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
DOORS = ("http", "grpc", "metrics")
EVERY_DOOR = [option for door in DOORS for option in tls_options(door)]


@pytest.fixture(scope="module", params=["default", "frontends"])
def secure(request: pytest.FixtureRequest, small_repository: Path) -> Iterator[ServerProcess]:
    """A server with TLS at every door."""
    options = (*CARRIERS[request.param], *EVERY_DOOR)
    with clean_server(small_repository, options=options) as process:
        assert process.secure == set(DOORS)
        yield process


@pytest.fixture(scope="module")
def trust() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ROOT))


def s_client(address: str, *options: str, said: str = "Q\n") -> str:
    """The output of `openssl s_client`, which trusts the tests' root."""
    command = ["openssl", "s_client", "-connect", address, "-CAfile", str(ROOT), *options]
    ran = subprocess.run(command, input=said.encode(), capture_output=True, timeout=60)
    return (ran.stdout + ran.stderr).decode(errors="replace")


@OPENSSL
@pytest.mark.parametrize("door", DOORS)
def test_versions_of_tls(secure: ServerProcess, door: str) -> None:
    address = getattr(secure, door)
    for version, good in (("1_3", True), ("1_2", True), ("1_1", False), ("1", False)):
        said = s_client(address, f"-tls{version}", "-cipher", "ALL:@SECLEVEL=0")
        assert ("Verify return code: 0 (ok)" in said and "Cipher is (NONE)" not in said) is good


@OPENSSL
@pytest.mark.parametrize("door", DOORS)
def test_only_ciphers_with_forward_secrecy(secure: ServerProcess, door: str) -> None:
    address = getattr(secure, door)
    for ciphers in ("kRSA", "aNULL:eNULL:LOW", "CBC", "ECDHE+AES+SHA256:!AESGCM", "RC4", "3DES"):
        assert "Cipher is (NONE)" in s_client(address, "-tls1_2", "-cipher", ciphers) or (
            "no cipher match" in s_client(address, "-tls1_2", "-cipher", ciphers)
        )
    said = s_client(address, "-tls1_2")
    assert re.search(r"Cipher is ECDHE-\w+-(AES\d+-GCM|CHACHA20)", said)
    assert "Compression: NONE" in said


@OPENSSL
@pytest.mark.parametrize("door", DOORS)
def test_renegotiation_is_refused(secure: ServerProcess, door: str) -> None:
    address = getattr(secure, door)
    said = s_client(address, "-tls1_2", "-alpn", "h2,http/1.1", said="R\n")
    assert "RENEGOTIATING" in said
    assert "no renegotiation" in said
    assert "Secure Renegotiation IS supported" in said  # against injection, by RFC 5746


@OPENSSL
@pytest.mark.parametrize("carrier", ["default", "reference", "frontends"])
def test_chosen_ciphers(small_repository: Path, carrier: str) -> None:
    options = (*CARRIERS[carrier], *tls_options("grpc"), "--tls-ciphers=ECDHE+AES256+AESGCM")
    with clean_server(small_repository, options=options) as process:
        for cipher, good in (("AES256-GCM-SHA384", True), ("AES128-GCM-SHA256", False)):
            asked = f"ECDHE-RSA-{cipher}:ECDHE-ECDSA-{cipher}"
            said = s_client(process.grpc, "-tls1_2", "-alpn", "h2", "-cipher", asked)
            assert ("Cipher is (NONE)" not in said) is good


@OPENSSL
def test_protocols_offered_by_alpn(secure: ServerProcess) -> None:
    for door, chosen in (("http", "http/1.1"), ("grpc", "h2"), ("metrics", "http/1.1")):
        said = s_client(getattr(secure, door), "-alpn", "h2,http/1.1")
        assert f"ALPN protocol: {chosen}" in said
    assert "No ALPN negotiated" in s_client(secure.http, "-alpn", "h2")


def test_large_tensors(secure: ServerProcess, trust: ssl.SSLContext) -> None:
    """Bodies that are received in place, and answers in many pieces."""
    with HttpClient(secure.url, binary=True) as client:
        for size in (1, 100_000, 5_000_000):
            row = np.arange(size, dtype=np.float32).reshape(1, -1)
            answer = client.infer("identity", [Input("INPUT0", row)])
            assert np.array_equal(answer["OUTPUT0"], row)
    with httpx.Client(verify=trust, base_url=secure.url) as plain:
        # Pipelined requests, and a body in chunks.
        host, _, port = secure.http.rpartition(":")
        with (
            socket.create_connection((host, int(port))) as raw,
            trust.wrap_socket(raw, server_hostname="localhost") as made,
        ):
            made.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
            received = b""
            while received.count(b"HTTP/1.1 200") < 20:
                received += made.recv(65536)
        body = json.dumps({"inputs": [
            {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]},
        ]}).encode()  # fmt: skip
        response = plain.post(
            "https://localhost:" + port + "/v2/models/identity/infer",
            content=iter([body[:10], body[10:]]),
        )
        assert response.json()["outputs"][0]["data"] == [1]


def test_a_slow_reader_gets_the_whole_answer(secure: ServerProcess, trust: ssl.SSLContext) -> None:
    """Also if the server has closed the connection, and the client does not end TLS."""
    row = np.arange(1_000_000, dtype=np.float32)
    head = json.dumps({
        "inputs": [{"name": "INPUT0", "shape": [1, row.size], "datatype": "FP32",
                    "parameters": {"binary_data_size": row.nbytes}}],
        "parameters": {"binary_data_output": True},
    }).encode()  # fmt: skip
    request = (
        b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n"
        % (len(head) + row.nbytes, len(head))
    )
    host, _, port = secure.http.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as raw,
        trust.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False) as made,
    ):
        made.sendall(request + head + row.tobytes())
        received = b""
        while part := made.recv(200_000):
            received += part
            time.sleep(0.01)  # a client that takes seconds
    assert received.endswith(row.tobytes())


def test_plain_text_at_a_port_with_tls(secure: ServerProcess) -> None:
    for door in DOORS:
        host, _, port = getattr(secure, door).rpartition(":")
        with socket.create_connection((host, int(port)), 30) as raw:
            raw.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            with suppress(ConnectionError):  # it may end in either way
                while raw.recv(100):
                    pass
    with HttpClient(secure.url, binary=False) as client:
        assert client.live()


def test_metrics(secure: ServerProcess, trust: ssl.SSLContext) -> None:
    with httpx.Client(verify=trust) as client:
        port = secure.metrics.rpartition(":")[2]
        text = client.get(f"https://localhost:{port}/metrics").text
        assert "headrace_ready 1" in text
        document = client.get(f"https://localhost:{secure.http.rpartition(':')[2]}/v2").json()
    found = document["headrace"]["metrics"]
    assert (found["scheme"], found["port"]) == ("https", int(port))


def test_commands_and_clients(secure: ServerProcess) -> None:
    url = secure.url.replace("127.0.0.1", "localhost")
    listed = run("models", "list", "--url", url, "--tls-root-cert", str(ROOT))
    assert (listed.returncode, "identity" in listed.stdout) == (0, True)
    refused = run("models", "list", "--url", url)
    assert refused.returncode == 1
    assert "its certificate is not accepted: unable to get local issuer" in refused.stderr
    shown = run("top", "--once", "--json", "--url", url, "--tls-root-cert", str(ROOT))
    assert json.loads(shown.stdout)["server"]["ready"]
    missing = run("models", "list", "--url", url, "--tls-root-cert", "/nothing")
    assert "tls_root_cert: /nothing cannot be read: No such file" in missing.stderr
    plain = run("models", "list", "--url", "http://localhost", "--tls-root-cert", str(ROOT))
    assert (plain.returncode, "--tls-... are for https://" in plain.stderr) == (2, True)


# --- clients with certificates, and several certificates


@pytest.mark.parametrize("carrier", ["default", "frontends"])
def test_mutual_tls(small_repository: Path, carrier: str) -> None:
    options = [option for door in DOORS for option in tls_options(door, mutual=True)]
    known = ssl.create_default_context(cafile=str(ROOT))
    known.load_cert_chain(FOLDER / "client.pem", FOLDER / "client.key")
    stranger = ssl.create_default_context(cafile=str(ROOT))
    with clean_server(small_repository, options=[*CARRIERS[carrier], *options]) as process:
        for door, path in (("http", "/v2"), ("metrics", "/metrics")):
            url = f"https://localhost:{getattr(process, door).rpartition(':')[2]}{path}"
            assert httpx.get(url, verify=known).status_code == 200
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=stranger)
        url = process.url.replace("127.0.0.1", "localhost")
        files = ("--tls-cert", f"{FOLDER}/client.pem", "--tls-key", f"{FOLDER}/client.key")
        given = ("models", "list", "--url", url, "--tls-root-cert", str(ROOT))
        assert run(*given, *files).returncode == 0
        assert run(*given).returncode == 1


@pytest.mark.parametrize("carrier", ["default", "frontends"])
def test_identities_by_certificate(small_repository: Path, tmp_path: Path, carrier: str) -> None:
    """A client with a certificate has the role of its rule, and one without has none."""
    access = tmp_path / "access.toml"
    access.write_text(
        '[roles.all]\nmay = "*"\n[anonymous]\nroles = []\n'
        '[[certificates]]\nsubject = { CN = "localhost" }\nroles = ["all"]\n'
    )
    options = [f"--access={access}", "--control-address=127.0.0.1:0", *CARRIERS[carrier]]
    for door in DOORS:
        options += [*tls_options(door), f"--{door}-root-cert={ROOT}"]
    known = ssl.create_default_context(cafile=str(ROOT))
    known.load_cert_chain(FOLDER / "client.pem", FOLDER / "client.key")
    stranger = ssl.create_default_context(cafile=str(ROOT))
    with clean_server(small_repository, options=options) as process:
        url = process.url.replace("127.0.0.1", "localhost")
        control = process.door("control").replace("127.0.0.1", "localhost")
        for base, path in ((url, "/v2/models/identity"), (control, "/v2/models/stats")):
            assert httpx.get(base + path, verify=known).status_code == 200
            assert httpx.get(base + path, verify=stranger).status_code in (401, 403)
        pair = ((FOLDER / f"client.{kind}").read_bytes() for kind in ("key", "pem"))
        request = pb.ModelMetadataRequest(name="identity")
        for credentials, code in (
            (grpc.ssl_channel_credentials(ROOT.read_bytes(), *pair), None),
            (grpc.ssl_channel_credentials(ROOT.read_bytes()), "refused"),
        ):
            with grpc.secure_channel(process.grpc, credentials) as channel:
                ask = procedure(channel, f"{SERVICE}/ModelMetadata", pb.ModelMetadataResponse)
                if code is None:
                    assert ask(request, timeout=60).name == "identity"
                else:
                    with pytest.raises(grpc.RpcError):
                        ask(request, timeout=60)


@OPENSSL
@pytest.mark.parametrize("carrier", ["default", "frontends", "reference"])
def test_several_certificates(small_repository: Path, tmp_path: Path, carrier: str) -> None:
    authority = Authority("several")
    (tmp_path / "root.pem").write_bytes(authority.root)
    options = list(CARRIERS[carrier])
    for number, name in enumerate(("a.example", "b.example")):
        certificate, key = authority.sign(name, [name])
        (tmp_path / f"{number}.pem").write_bytes(certificate)
        (tmp_path / f"{number}.key").write_bytes(key)
        for door in ("http", "grpc"):
            options += [
                f"--{door}-server-cert={tmp_path}/{number}.pem",
                f"--{door}-server-key={tmp_path}/{number}.key",
            ]
    options += ["--http-use-ssl", "--grpc-use-ssl"]
    with clean_server(small_repository, options=options) as process:
        for address, alpn in ((process.http, "http/1.1"), (process.grpc, "h2")):
            for asked in ("a.example", "b.example"):
                said = s_client(address, "-servername", asked, "-alpn", alpn)
                assert f"subject=CN = {asked}" in said or f"subject=CN={asked}" in said
            assert re.search(r"subject=CN ?= ?a\.example", s_client(address, "-noservername"))
        root = grpc.ssl_channel_credentials(authority.root)
        named = (("grpc.ssl_target_name_override", "b.example"),)
        with grpc.secure_channel(process.grpc, root, named) as channel:
            infer = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
            row = np.ones((1, 1), np.float32)
            infer(infer_message("identity", [Input("INPUT0", row)]), timeout=60)


@pytest.mark.parametrize(("options", "text"), [
    (("--http-use-ssl",), "--http-use-ssl needs --http-server-cert"),
    (("--metrics-use-ssl", f"--metrics-server-cert={FOLDER}/server.pem",
      f"--metrics-server-key={FOLDER}/nothing"), "--metrics-server-key: there is no file"),
    ((*tls_options("http"), "--tls-ciphers=NONE-SUCH"), "OpenSSL has no such cipher"),
    ((*tls_options("http"), "--tls-ciphers=NONE-SUCH", "--frontends=1"), "has no such cipher"),
    ((*tls_options("grpc"), "--grpc-transport=grpcio", "--tls-min-version=1.3"),
     "--tls-min-version is not for --grpc-transport=grpcio"),
    ((*tls_options("grpc", mutual=True), "--grpc-transport=grpcio", f"--grpc-crl={ROOT}"),
     "--grpc-crl is not for --grpc-transport=grpcio"),
    (("--tls-min-version=1.1",), "must be one of 1.2, 1.3"),
])  # fmt: skip
def test_settings_that_do_not_fit(
    small_repository: Path, options: tuple[str, ...], text: str
) -> None:
    done = run(
        "serve", "--model-repository", str(small_repository), "--http-port=0", "--metrics-port=0",
        "--grpc-port=0", *options,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert text in done.stderr
