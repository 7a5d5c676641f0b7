"""A real OCI registry on 127.0.0.1 (Debian's docker-registry), and a server that sells tokens."""

import base64
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.brokers import BrokerProcess
from tests.support.scrape import until
from tests.support.stub_server import StubRequest, StubResponse, StubServer

USER, SECRET = "somebody", "a-registry-secret"
# bcrypt of the secret, the only hash that the registry reads
_HASHED = "$2b$04$abcdefghijklmnopqrstuuaPd8IWYk.a2.Fi5Cr3TYfXlyWSepYm2"
_SERVICE = "registry.test"


class RegistryProcess(BrokerProcess):
    """The registry; `auth` is that part of its configuration."""

    program, package = "docker-registry", "docker-registry"

    def __init__(self, folder: Path, auth: dict[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.host = f"127.0.0.1:{self.port}"
        self._auth = auth

    def __enter__(self) -> Self:
        configuration = {
            "version": "0.1",
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(self.folder / "registry")}},
            "http": {"addr": self.host},
        } | ({"auth": self._auth} if self._auth else {})  # fmt: skip
        (self.folder / "config.yml").write_text(json.dumps(configuration))  # JSON is YAML
        self.launch("serve", str(self.folder / "config.yml"))

        def answers() -> bool:
            try:
                return httpx.get(f"http://{self.host}/v2/", trust_env=False).status_code in (
                    200,
                    401,
                )
            except httpx.TransportError:
                return False

        until(answers, "the registry")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def blob_file(self, digest: str) -> Path:
        """The file that holds a blob."""
        name = digest.removeprefix("sha256:")
        blobs = self.folder / "registry" / "docker" / "registry" / "v2" / "blobs" / "sha256"
        return blobs / name[:2] / name / "data"

    def put_manifest(self, repository: str, tag: str, document: Any, kind: str) -> None:
        """Write a manifest as it is."""
        url = f"http://{self.host}/v2/{repository}/manifests/{tag}"
        httpx.put(
            url, content=json.dumps(document), headers={"Content-Type": kind}, trust_env=False
        ).raise_for_status()


def passwords(folder: Path) -> dict[str, Any]:
    """The `auth` of a registry that wants the password of `USER`."""
    (folder / "htpasswd").write_text(f"{USER}:{_HASHED}\n")
    return {"htpasswd": {"realm": "here", "path": str(folder / "htpasswd")}}


class TokenServer(StubServer):
    """Sells tokens for a registry to `USER`. `asked` are the scopes and kinds of requests so far.

    The refresh token of the user is the password, too.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(self._respond)
        self.asked: list[tuple[str, str]] = []
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tokens")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder().subject_name(name).issuer_name(name)
            .public_key(self._key.public_key()).serial_number(1)
            .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
            .sign(self._key, hashes.SHA256())
        )  # fmt: skip
        (folder / "tokens.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        der = certificate.public_bytes(serialization.Encoding.DER)
        self._chain = [base64.b64encode(der).decode()]
        self.auth = {
            "token": {
                "realm": f"{self.url}/token", "service": _SERVICE, "issuer": "tokens",
                "rootcertbundle": str(folder / "tokens.pem"),
            }
        }  # fmt: skip

    def _respond(self, request: StubRequest) -> StubResponse:
        if request.method == "POST":
            given = parse_qs(request.body.decode())
            known, kind = given["refresh_token"] == [SECRET], given["grant_type"][0]
        else:
            given, kind = parse_qs(urlsplit(request.path).query), "password"
            basic = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()
            known = request.headers.get("Authorization") == f"Basic {basic}"
        scope = given["scope"][0]
        where, _, actions = scope.rpartition(":")  # which the registry names in any order
        self.asked.append((kind, f"{where}:{','.join(sorted(actions.split(',')))}"))
        body = json.dumps({"token": self._token(scope)} if known else {}).encode()
        return 200 if known else 401, {}, body

    def _token(self, scope: str) -> str:
        kind, name, actions = scope.split(":")
        now = int(time.time())
        claims = {
            "iss": "tokens", "sub": USER, "aud": _SERVICE, "exp": now + 300, "nbf": now - 10,
            "iat": now, "jti": "1",
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }  # fmt: skip
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"x5c": self._chain})
