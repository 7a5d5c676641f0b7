"""Verification of JSON web tokens: signature, issuer, audience, times, and the roles of claims.

The issuer decides which algorithms count, and a key is only for the type of its algorithm, so that
no token can choose how it is verified. Every failure is an `Unauthenticated`, whose text has no
part of the token.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import jwt

from headrace.core.errors import Unauthenticated
from headrace.core.identity import Identity, Role
from headrace.plugins.access.issuers import KeySet, KeySource

_LONGEST_NAME = 256  # characters
_FAILURES: Mapping[type[jwt.PyJWTError], str] = {
    jwt.ExpiredSignatureError: "the token has expired",
    jwt.ImmatureSignatureError: "the token is not valid yet",
    jwt.InvalidAudienceError: "the token is for another audience",
    jwt.InvalidSignatureError: "the token's signature is wrong",
}
_JWS = jwt.PyJWS()


@dataclass(frozen=True, slots=True)
class IssuerRule:
    """The verification of an issuer's tokens, and the roles that they give.

    `roles` are those of all its tokens, `by_value` those of the values of `roles_claim`. `keys` are
    those of a file, None if they are fetched.
    """

    name: str
    line: int
    source: KeySource
    audience: tuple[str, ...]
    name_claim: str
    roles: tuple[Role, ...]
    roles_claim: str
    by_value: Mapping[str, tuple[Role, ...]]
    leeway_secs: int
    keys: KeySet | None


# Finds a key by issuer, name and algorithm, and says until when it counts, in seconds since the
# epoch.
FindKey = Callable[[IssuerRule, str, str], tuple[jwt.PyJWK | None, float]]


def verify(token: bytes, issuers: Mapping[str, IssuerRule], find: FindKey) -> Identity:
    """The identity that a token proves; raises `Unauthenticated`."""
    try:
        unverified = _JWS.decode_complete(token, options={"verify_signature": False})
        header, claims = unverified["header"], json.loads(unverified["payload"])
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise Unauthenticated("the token is malformed") from None
    named = claims.get("iss") if isinstance(claims, dict) else None
    rule = issuers.get(named) if isinstance(named, str) else None
    if rule is None:
        raise Unauthenticated("the token is of an unknown issuer")
    algorithm, key_name = header.get("alg"), header.get("kid", "")
    if algorithm not in rule.source.algorithms:
        raise Unauthenticated(
            f"the token has an algorithm other than {', '.join(rule.source.algorithms)}"
        )
    if "crit" in header or not isinstance(key_name, str):
        raise Unauthenticated("the token's header has members of unknown meaning")
    key, until = find(rule, key_name, algorithm)
    if key is None:
        raise Unauthenticated("the token is signed with a key that its issuer does not offer")
    return _identity(rule, _verified(token, key, rule), until)


def _verified(token: bytes, key: jwt.PyJWK, rule: IssuerRule) -> dict[str, Any]:
    """The claims of a token, whose signature and times are right; raises `Unauthenticated`."""
    try:
        return jwt.decode(
            token, key, [key.algorithm_name], audience=rule.audience, issuer=rule.source.issuer,
            leeway=rule.leeway_secs, options={"require": ["exp", "iss", "aud", rule.name_claim]},
        )  # fmt: skip
    except jwt.MissingRequiredClaimError as error:
        raise Unauthenticated(f"the token has no claim '{error.claim}'") from None
    except jwt.PyJWTError as error:
        raise Unauthenticated(_FAILURES.get(type(error), "the token is malformed")) from None
    except (ValueError, TypeError, RecursionError):
        raise Unauthenticated("the token is malformed") from None


def _identity(rule: IssuerRule, claims: dict[str, Any], until: float) -> Identity:
    name, expires = claims[rule.name_claim], claims["exp"]
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise Unauthenticated(
            f"the token's claim '{rule.name_claim}' must be a printable text of at most"
            f" {_LONGEST_NAME} characters"
        )
    if type(expires) not in (int, float):
        raise Unauthenticated("the token's claim 'exp' must be a number")
    try:
        ends = float(int(expires)) + rule.leeway_secs
    except OverflowError:  # beyond every date
        ends = inf
    roles = [*rule.roles]
    for value in _values(claims, rule.roles_claim):
        roles += rule.by_value.get(value, ())
    return Identity(f"{rule.name}:{name}", "token", tuple(dict.fromkeys(roles)), min(ends, until))


def _values(claims: dict[str, Any], path: str) -> list[str]:
    """The texts in a claim: a list, or one text with spaces between.

    `path` is the claim's name, or names with dots between of objects in each other.
    """
    found: Any = claims.get(path)
    if found is None and path:
        found = claims
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, str):
        return found.split()
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
