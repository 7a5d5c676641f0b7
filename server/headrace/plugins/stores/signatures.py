"""Signatures of manifests: Ed25519 over all paths and digests of a model.

    {"files": {…}, "signatures": {"<id of the key>": "<base64>"}}

They are part of the manifest, so that one write publishes both. Several keys may sign, one of those
that a server accepts suffices. The text that is signed does not depend on how the manifest is
written, and stands for nothing else.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.remote import needed
from headrace.repository.model_files import MANIFEST, parse_manifest

_SIGNED = b"headrace model manifest\n"
_PEM = "-----END PUBLIC KEY-----"
_MOST_KEYS = 100


def signed(manifest: bytes, key: Path) -> bytes:
    """The manifest with a signature by a private key in a PEM file, beside those of other keys.

    Raises `LoadFailed`.
    """
    ed25519, serialization = _library()
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except OSError as error:
        raise LoadFailed(f"{key}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise LoadFailed(f"{key}: expected a private key in PEM without a password") from error
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise LoadFailed(f"{key}: expected a key of Ed25519")
    files, found = parse_manifest(manifest), _signatures(manifest)
    public = private.public_key()
    if _verifies(public, found.get(_id_of(public), b""), files):
        return manifest
    found[_id_of(public)] = private.sign(_text(files))
    texts = {name: base64.b64encode(signature).decode() for name, signature in found.items()}
    return json.dumps({"files": files, "signatures": texts}, indent=2).encode() + b"\n"


def required(key_file: str) -> Callable[[Path], None]:
    """A check of directories: it raises `LoadFailed` unless one of the keys has signed all files.

    `key_file` has public keys in PEM, one after the other; raises `LoadFailed` for any other file.
    """
    ed25519, serialization = _library()
    keys: dict[str, Any] = {}
    try:
        texts = Path(key_file).read_text("ascii").split(_PEM)[:-1]
        for text in texts[:_MOST_KEYS]:
            key = serialization.load_pem_public_key(f"{text}{_PEM}\n".lstrip().encode())
            if not isinstance(key, ed25519.Ed25519PublicKey):
                raise LoadFailed(f"{key_file}: expected keys of Ed25519")
            keys[_id_of(key)] = key
    except OSError as error:
        raise LoadFailed(f"{key_file}: {error.strerror}") from error
    except ValueError as error:
        raise LoadFailed(f"{key_file}: expected public keys in PEM") from error
    if not keys:
        raise LoadFailed(f"{key_file}: expected public keys in PEM, found none")

    def check(directory: Path) -> None:
        try:
            manifest = (directory / MANIFEST).read_bytes()
        except OSError:
            raise LoadFailed(f"it is not signed: there is no {MANIFEST} in its directory") from None
        files = parse_manifest(manifest)
        found = _signatures(manifest)
        signers = keys.keys() & found.keys()
        if not signers:
            raise LoadFailed(f"{MANIFEST}: it is signed by none of the keys of {key_file}")
        if not any(_verifies(keys[name], found[name], files) for name in signers):
            raise LoadFailed(f"{MANIFEST}: its signature is of other files")
        for at, folders, names in os.walk(directory, followlinks=True):
            # Python writes there when the model runs.
            folders[:] = [folder for folder in folders if folder != "__pycache__"]
            for path in (str(Path(at, name).relative_to(directory)) for name in names):
                if path not in files and path != MANIFEST:
                    raise LoadFailed(f"{path} is not signed: it is not in {MANIFEST}")

    return check


def _verifies(key: Any, signature: bytes, files: Mapping[str, str]) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _text(files))
    except InvalidSignature:
        return False
    return True


def _text(files: Mapping[str, str]) -> bytes:
    """The text that is signed."""
    return _SIGNED + json.dumps(files, sort_keys=True, separators=(",", ":")).encode()


def _signatures(manifest: bytes) -> dict[str, bytes]:
    """The signatures in a manifest, by the id of the key; those without a form are left out."""
    found = json.loads(manifest).get("signatures")
    result: dict[str, bytes] = {}
    for name, text in found.items() if isinstance(found, dict) else ():
        try:
            result[name] = base64.b64decode(text, validate=True)
        except (ValueError, TypeError):
            continue
    return result


def _id_of(key: Any) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _library() -> Any:
    with needed("signatures", "cryptography: headrace[signatures]"):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return ed25519, serialization
