"""API keys: 256 random bits after a public prefix, of which the file has a SHA-256 hash.

ADR 40 (`docs/adr/0040-hash-of-api-keys.md`) says why the hash is a quick one.
"""

import hashlib
import re
import secrets
from typing import NamedTuple

_MARK = "hrk"  # by which scanners for secrets can know keys
_SECRET_BYTES = 32
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class NewKey(NamedTuple):
    """A key for a client, and what the file has of it: a public prefix and a hash."""

    key: str
    prefix: str
    hash: str


def new_key() -> NewKey:
    """A key that nobody can guess."""
    prefix = f"{_MARK}_{secrets.token_hex(4)}"
    key = f"{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(key, prefix, f"sha256:{digest(key.encode()).hex()}")


def digest(key: bytes) -> bytes:
    """The hash of a key."""
    return hashlib.sha256(key).digest()


def read_hash(text: str) -> bytes | None:
    """The digest in a hash as the file has it; None if the text is none."""
    found = _HASH.fullmatch(text)
    return bytes.fromhex(found[1]) if found else None
