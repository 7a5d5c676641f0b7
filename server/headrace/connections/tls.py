"""Contexts of TLS from the contents of PEM files, for both ends of a connection.

Python's `ssl` reads most of them from files with names only. A file is read once here, and then
handed over under a name in memory, so that two readings never differ.
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Forward secrecy and authenticated encryption; TLS 1.3 has nothing else.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
_LARGEST_FILE = 16 << 20


class TlsFileError(OSError):
    """A TLS file that is missing or cannot be used; `part` is `root_cert`, `cert` or `key`."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(reason)
        self.part = part


def openssl_reason(error: Exception) -> str:
    """The reason why PEM cannot be used, in words."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    # OpenSSL has none for what is neither, or needs a password.
    reason = error.reason or "no certificate and key in the form of PEM"
    return reason.lower().replace("_", " ") if reason.isupper() else reason


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate with its chain, and its key, without a password; raises `SSLError`."""
    with _named(certificate + b"\n" + key) as path:
        # Without a callback the library would ask for a password on the terminal.
        context.load_cert_chain(path, password="")


def load_roots(context: ssl.SSLContext, roots: bytes) -> None:
    """Trust these authorities only; raises `SSLError` and `ValueError`."""
    with _named(roots) as path:
        context.load_verify_locations(path)
    if not context.cert_store_stats()["x509"]:
        raise ValueError("no certificates in the form of PEM")


def load_revoked(context: ssl.SSLContext, lists: bytes) -> None:
    """Check certificates of peers against revocation lists; raises `SSLError` and `ValueError`."""
    with _named(lists) as path:
        context.load_verify_locations(path)
    if not context.cert_store_stats()["crl"]:
        raise ValueError("no revocation lists in the form of PEM")
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def client_context(root: bytes = b"", certificate: bytes = b"", key: bytes = b"") -> ssl.SSLContext:
    """The context of a client; without `root`, with the system's authorities.

    Blocks while reading those. Raises `TlsFileError`.
    """
    if not root:
        context = ssl.create_default_context()
    else:
        try:
            with _named(root) as path:
                context = ssl.create_default_context(cafile=path)
        except ssl.SSLError:
            raise TlsFileError("root_cert", "no certificates in the form of PEM") from None
    if certificate:
        try:
            load_pair(context, certificate, key)
        except ssl.SSLError as error:
            raise TlsFileError("cert", openssl_reason(error)) from None
    return context


def client_context_of(root: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Make the context of a client from paths of files. Blocks; raises `TlsFileError`.

    A client's certificate and its key may be in one file, which `certificate` names.
    """
    if key and not certificate:
        raise TlsFileError("key", "a key is of use with its certificate only")
    given = (("root_cert", root), ("cert", certificate), ("key", key))
    contents = [_content(part, path) for part, path in given]
    try:
        return client_context(*contents)
    except TlsFileError as error:
        path = dict(given)[error.part]
        raise TlsFileError(error.part, f"{path} cannot be used: {error}") from None


def _content(part: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        with Path(path).open("rb") as file:
            found = file.read(_LARGEST_FILE)
    except OSError as error:
        raise TlsFileError(part, f"{path} cannot be read: {error.strerror}") from None
    if not found:
        raise TlsFileError(part, f"{path} is empty")
    return found


@contextmanager
def _named(content: bytes) -> Iterator[str]:
    """The path of a file in memory."""
    descriptor = os.memfd_create("tls")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
