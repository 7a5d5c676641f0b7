"""Random and mutated credentials: each is refused, by nothing but `Unauthenticated`."""

import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import Unauthenticated
from headrace.core.identity import Access, PeerFacts
from headrace.plugins.access.file import open_access
from headrace.plugins.access.keys import new_key
from tests.support.issuer import AUDIENCE, TokenIssuer, claims

KEY, ISSUER = new_key(), TokenIssuer(one="ES256", two="RS256", three="EdDSA")
TOKENS = [ISSUER.token(name) for name in ISSUER.keys]
TEXT = f"""
[roles.r]
may = "*"
[keys.k]
hash = "{KEY.hash}"
roles = "r"
[issuers.corp]
issuer = "{ISSUER.name}"
audience = "{AUDIENCE}"
keys = "keys.json"
algorithms = ["ES256", "RS256", "EdDSA"]
roles_claim = "a.b"
claim_roles.c = "r"
[[certificates]]
uri = "spiffe://*/**"
roles = "r"
[[certificates]]
dns = "*.x"
roles = "r"
[[certificates]]
subject = {{ CN = "web", O = "*" }}
roles = "r"
"""
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 10**400, 1.5, float("inf"), float("nan"), "", "none", "HS256",
    "ES256", "one", "\x00", "é" * 300, "\ud800", [], [[]], {}, {"a": {"b": "c"}}, ["ES256"],
    [None] * 3, {"ES256": 1}, ISSUER.name, AUDIENCE,
)  # fmt: skip


async def opened(folder: Path) -> Access:
    (folder / "keys.json").write_text(json.dumps(ISSUER.document))
    (folder / "access.toml").write_text(TEXT)
    return open_access(str(folder / "access.toml"))


def mutated(value: bytes, source: random.Random) -> bytes:
    """A copy with some bytes changed, removed, repeated or put in."""
    text = bytearray(value)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(text) + 1)
        match source.randrange(5):
            case 0:
                text[at : at + 1] = bytes([source.randrange(256)])
            case 1:
                text[at : at + 1] = source.choice([b".", b"=", b"-", b"A", b" "])
            case 2:
                del text[at : at + source.randint(1, 30)]
            case 3:
                text[at:at] = source.randbytes(source.randint(1, 8))
            case _:
                text[at:at] = text[at : at + source.randint(1, 30)]
    return bytes(text)


def part(value: object) -> bytes:
    text = json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def odd_token(source: random.Random) -> bytes:
    """A token with some odd members of its header and claims, and a signature of another one."""
    header: dict[str, Any] = {"alg": source.choice(["ES256", "RS256", "EdDSA"]), "kid": "one"}
    body = claims()
    for document, names in (
        (header, ("alg", "kid", "typ", "crit", "b64", "jwk", "zip")),
        (body, ("iss", "aud", "sub", "exp", "nbf", "iat", "jti", "a")),
    ):
        for name in source.sample(names, source.randint(0, 3)):
            document[name] = source.choice(ODD)
    signature = source.choice(TOKENS).rpartition(b".")[2]
    return b".".join([part(header), part(body), signature])


def credentials(count: int, source: random.Random) -> Iterator[bytes]:
    makers: list[Callable[[], bytes]] = [
        lambda: source.randbytes(source.randrange(100)),
        lambda: mutated(KEY.key.encode(), source),
        lambda: mutated(source.choice(TOKENS), source),
        lambda: odd_token(source),
        lambda: b".".join(part(source.choice(ODD)) for _ in range(3)),
    ]
    for number in range(count):
        yield makers[number % len(makers)]()


def refused(access: Access, values: list[bytes], peer: PeerFacts) -> bool:
    """True if the client is unknown; passes on every error but the one for that."""
    try:
        access.identify(values, peer)
    except Unauthenticated as error:
        problem = str(error)
    else:
        return False
    secrets = [one.decode("latin1") for one in b" ".join(values).split()]
    assert not [one for one in secrets if len(one) > 20 and one in problem]
    return True


def odd_certificate(source: random.Random) -> Any:
    def value(depth: int = 0) -> Any:
        if depth < 4 and source.random() < 0.6:
            return tuple(value(depth + 1) for _ in range(source.randrange(4)))
        return source.choice((*ODD, "DNS", "URI", "commonName", "a.x", "spiffe://a/b", b"x"))

    fields = ("subject", "subjectAltName", "notAfter", "issuer", "version")
    return {name: value() for name in source.sample(fields, source.randint(1, 5))}


COUNTS = [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]


@pytest.mark.parametrize("count", COUNTS)
async def test_credentials(count: int, tmp_path: Path) -> None:
    access, source = await opened(tmp_path), random.Random(count)
    try:
        for token in TOKENS:
            assert not refused(access, [b"Bearer " + token], PeerFacts())
        known = {KEY.key.encode(), *TOKENS}
        for credential in credentials(count, source):
            if credential.strip() not in known:
                assert refused(access, [b"Bearer " + credential], PeerFacts()), credential
    finally:
        await access.close()


@pytest.mark.parametrize("count", COUNTS)
async def test_headers(count: int, tmp_path: Path) -> None:
    access, source = await opened(tmp_path), random.Random(count)
    whole = [b"Bearer " + KEY.key.encode(), *(b"Bearer " + token for token in TOKENS)]
    try:
        for _ in range(count):
            value = mutated(source.choice(whole), source)
            scheme, _, credential = value.partition(b" ")
            if scheme.lower() != b"bearer" or b"Bearer " + credential.strip() not in whole:
                assert refused(access, [value], PeerFacts()), value
    finally:
        await access.close()


@pytest.mark.parametrize("count", COUNTS)
async def test_certificates(count: int, tmp_path: Path) -> None:
    access, source = await opened(tmp_path), random.Random(count)
    try:
        for _ in range(count):
            certificate = odd_certificate(source)
            if not refused(access, [], PeerFacts("", certificate)):
                texts = repr(certificate)
                assert "a.x" in texts or "spiffe://a/b" in texts
    finally:
        await access.close()
