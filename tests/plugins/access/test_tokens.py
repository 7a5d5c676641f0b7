"""Verification of tokens, with real keys."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from math import inf
from typing import Any

import jwt
import pytest

from headrace.core.errors import Unauthenticated
from headrace.core.identity import EVERYTHING, Identity, Role
from headrace.plugins.access.issuers import ALGORITHMS, KeySet, KeySource
from headrace.plugins.access.tokens import IssuerRule, verify
from tests.support.issuer import AUDIENCE, NAME, TokenIssuer, claims

SCORER, OPS = Role("scorer", EVERYTHING), Role("ops", EVERYTHING)
NOW = int(time.time())  # when tests are collected: they may run many minutes later


def rule(issuer: TokenIssuer, **changes: Any) -> IssuerRule:
    algorithms = tuple(dict.fromkeys(issuer.algorithms.values()))
    values: dict[str, Any] = {
        "name": "corp", "line": 1, "source": KeySource(issuer.name, algorithms),
        "audience": (AUDIENCE, "other"), "name_claim": "sub", "roles": (), "roles_claim": "",
        "by_value": {}, "leeway_secs": 60, "keys": KeySet(issuer.document, algorithms),
    }  # fmt: skip
    return IssuerRule(**(values | changes))


def check(token: bytes, by: IssuerRule, until: float = inf) -> Identity:
    keys = by.keys
    assert keys is not None
    issuers: Mapping[str, IssuerRule] = {by.source.issuer: by}
    return verify(token, issuers, lambda _, name, algorithm: (keys.find(name, algorithm), until))


def encoded(*parts: object) -> bytes:
    """A token of these parts, whose last may be a signature in bytes."""
    texts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in parts]
    return b".".join(base64.urlsafe_b64encode(text).rstrip(b"=") for text in texts)


ISSUER = TokenIssuer()
RULE = rule(ISSUER)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_algorithm(algorithm: str) -> None:
    issuer = TokenIssuer(one=algorithm)
    found = check(issuer.token(), rule(issuer))
    assert (found.name, found.kind, found.roles) == ("corp:ann", "token", ())


def test_a_token_expires_with_its_leeway_or_with_the_keys() -> None:
    later = NOW + 100_000
    token = ISSUER.token(exp=later)
    assert check(token, RULE).expires == later + 60
    assert check(token, RULE, NOW + 50).expires == NOW + 50
    assert check(ISSUER.token(exp=10**400), RULE).expires == inf
    assert check(ISSUER.token(exp=later + 0.5), RULE).expires == later + 60


def test_names_of_a_configured_claim() -> None:
    named = rule(ISSUER, name_claim="email")
    assert check(ISSUER.token(email="ann@example.com"), named).name == "corp:ann@example.com"
    with pytest.raises(Unauthenticated, match="the token has no claim 'email'"):
        check(ISSUER.token(), named)


@pytest.mark.parametrize(("claim", "value", "roles"), [
    ("groups", ["ml", "unknown", 5, None], [SCORER, OPS]),
    ("groups", ["admins", "ml"], [SCORER, OPS]),
    ("groups", ["unknown"], [SCORER]),
    ("groups", None, [SCORER]),
    ("groups", {"ml": 1}, [SCORER]),
    ("scope", "openid ml", [SCORER, OPS]),
    ("https://example.com/roles", "ml", [SCORER, OPS]),
    ("realm_access.roles", None, [SCORER]),
])  # fmt: skip
def test_roles_by_claim(claim: str, value: object, roles: list[Role]) -> None:
    """Values without a role give none, so that such a client is known but not permitted."""
    by_value = {"ml": (OPS,), "admins": (OPS, SCORER)}
    given = rule(ISSUER, roles=(SCORER,), roles_claim=claim, by_value=by_value)
    assert check(ISSUER.token("", None, **{claim: value}), given).roles == tuple(roles)


@pytest.mark.parametrize("value", [{"roles": ["ml"]}, {"roles": "ml"}, {"roles": 1}, ["ml"], "ml"])
def test_roles_of_nested_claims(value: object) -> None:
    given = rule(ISSUER, roles_claim="realm_access.roles", by_value={"ml": (OPS,)})
    nested = isinstance(value, dict) and value["roles"] != 1
    found = check(ISSUER.token(realm_access=value), given)
    assert found.roles == ((OPS,) if nested else ())


@pytest.mark.parametrize(("changes", "problem"), [
    ({"exp": None}, "the token has no claim 'exp'"),
    ({"exp": NOW - 61}, "the token has expired"),
    ({"exp": str(NOW + 100_000)}, "the token's claim 'exp' must be a number"),
    ({"exp": True}, "the token has expired"),
    ({"exp": float("nan")}, "the token is malformed"),
    ({"exp": [NOW + 100_000]}, "the token is malformed"),
    ({"nbf": NOW + 100_000}, "the token is not valid yet"),
    ({"iat": NOW + 100_000}, "the token is not valid yet"),
    ({"aud": None}, "the token has no claim 'aud'"),
    ({"aud": "headrace2"}, "the token is for another audience"),
    ({"aud": []}, "the token has no claim 'aud'"),
    ({"aud": [5]}, "the token is for another audience"),
    ({"aud": {"headrace": 1}}, "the token is for another audience"),
    ({"iss": None}, "the token is of an unknown issuer"),
    ({"iss": NAME + "/"}, "the token is of an unknown issuer"),
    ({"iss": "https://other.example"}, "the token is of an unknown issuer"),
    ({"sub": None}, "the token has no claim 'sub'"),
    ({"sub": "a" * 257}, "must be a printable text of at most 256 characters"),
    ({"sub": "a\nb"}, "must be a printable text"),
])  # fmt: skip
def test_wrong_claims(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Unauthenticated, match=problem):
        check(ISSUER.token(**changes), RULE)


@pytest.mark.parametrize("changes", [
    {"exp": NOW - 600}, {"nbf": NOW + 1800}, {"iat": NOW + 1800},
])  # fmt: skip
def test_clocks_may_differ(changes: dict[str, Any]) -> None:
    assert check(ISSUER.token(**changes), rule(ISSUER, leeway_secs=3600)).name == "corp:ann"


def test_one_of_several_audiences() -> None:
    assert check(ISSUER.token(aud=["x", "other"]), RULE).name == "corp:ann"


def test_keys_of_others_are_refused() -> None:
    with pytest.raises(Unauthenticated, match="the token's signature is wrong"):
        check(TokenIssuer().token(), RULE)
    with pytest.raises(Unauthenticated, match="a key that its issuer does not offer"):
        check(TokenIssuer(two="ES256").token(), RULE)


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "nOnE", "", None, 5, ["ES256"]])
@pytest.mark.parametrize("signature", [b"", b"x"])
def test_tokens_without_an_algorithm(algorithm: object, signature: bytes) -> None:
    header = {"alg": algorithm, "kid": "one"}
    with pytest.raises(Unauthenticated, match=r"an algorithm other than ES256|malformed"):
        check(encoded(header, claims(), signature), RULE)
    del header["alg"]
    with pytest.raises(Unauthenticated, match="an algorithm other than ES256"):
        check(encoded(header, claims(), signature), RULE)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_a_public_key_is_no_secret(algorithm: str) -> None:
    """Algorithm confusion: an HMAC by the public key, in its usual forms, is no signature."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    issuer = TokenIssuer(one=algorithm)
    key = issuer.keys["one"].public_key()
    texts = [
        key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(issuer.document["keys"][0]).encode(),
    ]
    for text in texts:
        unsigned = encoded({"alg": "HS256", "kid": "one"}, claims())
        signature = hmac.new(text, unsigned, hashlib.sha256).digest()
        with pytest.raises(Unauthenticated, match=f"an algorithm other than {algorithm}"):
            check(unsigned + b"." + encoded(signature), rule(issuer))


def test_a_key_is_for_one_algorithm() -> None:
    issuer = TokenIssuer(one="RS256", two="PS256")
    both = rule(issuer)
    token = jwt.encode(claims(), issuer.keys["two"], "RS256", {"kid": "two"}).encode()
    with pytest.raises(Unauthenticated, match="a key that its issuer does not offer"):
        check(token, both)


def test_a_token_need_not_name_the_only_key() -> None:
    key = ISSUER.keys["one"]
    token = jwt.encode(claims(), key, "ES256").encode()
    assert check(token, RULE).name == "corp:ann"
    issuer = TokenIssuer(one="ES256", two="ES256")
    token = jwt.encode(claims(), issuer.keys["one"], "ES256").encode()
    with pytest.raises(Unauthenticated, match="a key that its issuer does not offer"):
        check(token, rule(issuer))


@pytest.mark.parametrize("header", [{"crit": ["x"]}, {"crit": []}, {"kid": 5}, {"kid": ["one"]}])
def test_headers_of_unknown_meaning(header: dict[str, Any]) -> None:
    parts = encoded({"alg": "ES256", "kid": "one", **header}, claims(), b"x")
    with pytest.raises(Unauthenticated, match=r"members of unknown meaning|malformed"):
        check(parts, RULE)


def test_keys_in_headers_are_ignored() -> None:
    other = TokenIssuer()
    header = {"jwk": other.document["keys"][0], "jku": "http://127.0.0.1/", "x5u": "http://x"}
    with pytest.raises(Unauthenticated, match="the token's signature is wrong"):
        check(other.token(header=header), RULE)


@pytest.mark.parametrize("token", [
    b"..", b"a.b.c", b"\xff.\x00.\xff", encoded([], {}, b""), encoded({}, [], b""),
    encoded({"alg": "ES256"}, "text", b""), encoded({"alg": "ES256"}, None, b""),
    encoded(b"[" * 9000, b"[" * 9000, b""), encoded({"alg": "ES256"}, b"[" * 5000, b""),
    encoded({"alg": "ES256", "b64": False, "crit": ["b64"]}, claims(), b""),
    encoded({"alg": "ES256"}, b'{"iss": ' + b"9" * 5000 + b"}", b""),
])  # fmt: skip
def test_malformed_tokens(token: bytes) -> None:
    with pytest.raises(Unauthenticated, match=r"malformed|of an unknown issuer"):
        check(token, RULE)


def test_a_changed_token_is_refused() -> None:
    header, body, signature = ISSUER.token().split(b".")
    other = encoded(claims(sub="bob"))
    for token in (
        b".".join([header, other, signature]), b".".join([header, body, signature[:-2]]),
        b".".join([header, body, b""]), b".".join([header, body, signature[::-1]]),
    ):  # fmt: skip
        with pytest.raises(Unauthenticated, match=r"signature is wrong|malformed"):
            check(token, RULE)
