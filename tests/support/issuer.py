"""An issuer of tokens: its keys, tokens signed with them, and an HTTP server for the keys."""

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from tests.support.stub_server import StubRequest, StubResponse, StubServer

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
NAME = "https://issuer.example"
AUDIENCE = "headrace"
_CURVES: dict[str, Callable[[], ec.EllipticCurve]] = {
    "ES256": ec.SECP256R1,
    "ES384": ec.SECP384R1,
    "ES512": ec.SECP521R1,
}


def private_key(algorithm: str, bits: int = 2048) -> PrivateKey:
    """A new key for an algorithm."""
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm]())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65_537, bits)


def public(key: PrivateKey, name: str, algorithm: str) -> dict[str, Any]:
    """A key's public part as a JSON web key."""
    document = get_default_algorithms()[algorithm].to_jwk(key.public_key(), as_dict=True)
    return {**document, "kid": name, "use": "sig", "alg": algorithm}


def claims(**changes: Any) -> dict[str, Any]:
    """Claims of a valid token; None leaves one out."""
    now = int(time.time())
    whole = {"iss": NAME, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 3600} | changes
    return {name: value for name, value in whole.items() if value is not None}


class TokenIssuer:
    """Keys by their names, and the tokens that they sign."""

    def __init__(self, **algorithms: str) -> None:
        """A key for each name; by default `one` for ES256."""
        self.name = NAME
        self.algorithms = algorithms or {"one": "ES256"}
        self.keys = {name: private_key(one) for name, one in self.algorithms.items()}
        self.status = 200
        self.asked: list[str] = []  # paths
        self.answer: bytes | None = None  # instead of its documents

    @property
    def document(self) -> dict[str, Any]:
        """The JSON web key set."""
        return {
            "keys": [public(key, name, self.algorithms[name]) for name, key in self.keys.items()]
        }

    def rotate(self, name: str) -> None:
        """Replace all keys by one for ES256."""
        self.algorithms = {name: "ES256"}
        self.keys = {name: private_key("ES256")}

    def token(self, key: str = "", header: dict[str, Any] | None = None, **changes: Any) -> bytes:
        """A token, whose claims are those of `claims`, signed with a key."""
        key = key or next(iter(self.keys))
        return jwt.encode(
            claims(**{"iss": self.name, **changes}), self.keys[key], self.algorithms[key],
            {"kid": key, **(header or {})},
        ).encode()  # fmt: skip


@contextmanager
def served(issuer: TokenIssuer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve an issuer's documents, under its new name, which is the URL."""

    def respond(request: StubRequest) -> StubResponse:
        issuer.asked.append(request.path)
        found: Any = issuer.document
        if request.path.endswith("/openid-configuration"):
            found = {"issuer": issuer.name, "jwks_uri": f"{issuer.name}/keys"}
        text = json.dumps(found).encode() if issuer.answer is None else issuer.answer
        moved = {"location": f"{issuer.name}/moved"} if issuer.status in (301, 302) else {}
        return issuer.status, moved, text

    with StubServer(respond, tls) as server:
        issuer.name = server.url
        yield server.url
