"""TLS of the doors: their certificates, keys, roots and revocation lists, and contexts of these.

A door's `DoorTls` has the context for new connections, made of one reading of all its files. A new
one replaces it as a whole: what a file no longer has is trusted no more, and files that do not fit
each other change nothing. Connections keep the context that they began with.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ssl import SSLContext, SSLObject, SSLSocket

log = logging.getLogger(__name__)

VERSIONS = ("1.2", "1.3")
_ALPN = {"http": "http/1.1", "metrics": "http/1.1", "grpc": "h2", "flight": "h2"}
TLS_DOORS = tuple(_ALPN)
_LARGEST_FILE = 16 << 20
_ALTERNATIVE_NAMES = b"\x55\x1d\x11"  # the object identifier 2.5.29.17
# Tags of DER.
_VERSION, _EXTENSIONS, _DNS_NAME, _LONG_TIME = 0xA0, 0xA3, 0x82, 0x18
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"


class TlsContents(NamedTuple):
    """The contents of all files of a door: certificates with their keys, roots, and revocations."""

    pairs: tuple[tuple[bytes, bytes], ...]
    roots: bytes
    revoked: bytes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files of a door, one of `TLS_DOORS`, as in the settings of its name.

    Each certificate has the key of its position. Clients that name a host get the first certificate
    for that name, others the first of all. `root` has the authorities whose client certificates are
    accepted, `revoked` their revocation lists; `mutual` requires a client certificate. `oldest` is
    a version of TLS, and `ciphers` is OpenSSL's list for TLS 1.2, "" for the usual ones.
    """

    door: str
    certificates: Sequence[str]
    keys: Sequence[str]
    root: str = ""
    mutual: bool = False
    revoked: str = ""
    oldest: str = VERSIONS[0]
    ciphers: str = ""

    def read(self) -> TlsContents:
        """Read all files. Blocks; raises `OSError` that names the setting."""
        for setting, given, needed in (
            ("server-cert", self.certificates, True),
            ("server-key", self.keys, True),
            ("root-cert", self.root, self.mutual or self.revoked),
        ):
            if needed and not given:
                why = "mutual TLS and revocation lists need" if setting == "root-cert" else (
                    f"--{self.door}-use-ssl needs"
                )  # fmt: skip
                raise OSError(f"{why} --{self.door}-{setting}")
        if len(self.certificates) != len(self.keys):
            raise OSError(
                f"--{self.door}-server-cert has {len(self.certificates)} files, and"
                f" --{self.door}-server-key {len(self.keys)}: expected a key for each certificate"
            )
        read = self._read
        certificates = [read("server-cert", path) for path in self.certificates]
        keys = [read("server-key", path) for path in self.keys]
        return TlsContents(
            tuple(zip(certificates, keys, strict=True)),
            read("root-cert", self.root),
            read("crl", self.revoked),
        )

    def signs(self) -> tuple[object, ...]:
        """Times, place and size of each file, which change with it or with a link to it. Blocks."""
        return tuple(map(_sign, (*self.certificates, *self.keys, self.root, self.revoked)))

    def _read(self, setting: str, path: str) -> bytes:
        if not path:
            return b""
        try:
            with Path(path).open("rb") as file:
                return file.read(_LARGEST_FILE)
        except FileNotFoundError:
            why = f"there is no file {path}"
        except OSError as error:
            why = f"{path} cannot be read: {error.strerror}"
        raise OSError(f"--{self.door}-{setting}: {why}")

    def context(self, contents: TlsContents) -> "SSLContext":
        """The context of new connections. Takes milliseconds; raises `OSError` for bad contents."""
        made = [self._context(number, contents) for number in range(len(contents.pairs))]
        first = made[0]
        if len(made) > 1:
            by_name: dict[str, SSLContext] = {}
            for number, (certificate, _) in enumerate(contents.pairs):
                names = dns_names(certificate)
                if number and not names:
                    raise OSError(
                        f"--{self.door}-server-cert {self.certificates[number]} has no DNS name,"
                        f" so that no client could get it"
                    )
                for name in names:
                    by_name.setdefault(name, made[number])

            def choose(
                connection: "SSLObject | SSLSocket", name: str | None, initial: object
            ) -> None:
                if name is not None and (found := _for_host(by_name, name.lower())) is not None:
                    connection.context = found

            first.sni_callback = choose
        return first

    def expiries(self, contents: TlsContents) -> dict[str, float]:
        """The first expiry in each file of certificates, since 1970, where that can be read."""
        found = {}
        for file, (certificate, _) in zip(self.certificates, contents.pairs, strict=True):
            try:
                found[file] = first_expiry(certificate)
            except OSError as error:
                log.warning("%s: %s; nobody can be told when it expires", file, error)
        return found

    def _context(self, number: int, contents: TlsContents) -> "SSLContext":
        import ssl  # imported late: commands that only parse options do not need it

        from headrace.connections.tls import (
            CIPHERS,
            load_pair,
            load_revoked,
            load_roots,
            openssl_reason,
        )

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        latest = self.oldest == VERSIONS[1]
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if latest else ssl.TLSVersion.TLSv1_2
        # RFC 9113, section 9.2: no compression, no renegotiation, no weak ciphers of TLS 1.2.
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols([_ALPN[self.door]])
        try:
            context.set_ciphers(self.ciphers or CIPHERS)
        except ssl.SSLError:
            raise OSError(f"--tls-ciphers {self.ciphers}: OpenSSL has no such cipher") from None
        try:
            what = f"--{self.door}-server-cert {self.certificates[number]} and its key"
            load_pair(context, *contents.pairs[number])
            if self.root:
                what = f"--{self.door}-root-cert {self.root}"
                load_roots(context, contents.roots)
                context.verify_mode = ssl.CERT_REQUIRED if self.mutual else ssl.CERT_OPTIONAL
                # Each connection is verified. And a ticket has the client's certificate in it: two
                # of them, as TLS 1.3 has, take a third of the time of a handshake's end.
                context.num_tickets = 0
                context.options |= ssl.OP_NO_TICKET
            if self.revoked:
                what = f"--{self.door}-crl {self.revoked}"
                load_revoked(context, contents.revoked)
        except (ssl.SSLError, ValueError) as error:
            raise OSError(f"{what} cannot be used: {openssl_reason(error)}") from None
        return context


def _sign(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino, found.st_size


class DoorTls:
    """The current TLS context of one door. Any thread may renew it.

    `_signs` are those of the files at the last look. Files that have the same signs in two looks,
    and are in effect (`_quiet`), are not read until a sign changes: the second look comes later
    than a change that the file system's clock could not tell from the one before.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Blocks while reading; raises `OSError`."""
        self.files = files
        self.contents = files.read()
        self._context = files.context(self.contents)
        self.expiries = files.expiries(self.contents)
        self._last = self.contents  # as read last
        self._signs: tuple[object, ...] = ()
        self._quiet = False
        self._lock = Lock()

    def current(self) -> "SSLContext":
        """The context for a new connection."""
        return self._context

    def renew(self, settled: bool = False) -> bool:
        """Read the files again, for new connections; True if another context is in effect now.

        With `settled` files have to be the same in two calls, so that one that is being written
        does not count, and are not read while nothing about them changes. Blocks; raises `OSError`,
        and leaves the context as it was.
        """
        with self._lock:
            signs = self.files.signs()
            same, self._signs = signs == self._signs, signs
            if settled and same and self._quiet:
                return False
            self._quiet = False
            contents = self.files.read()
            moving, self._last = settled and contents != self._last, contents
            if moving or contents == self.contents:
                self._quiet = same and not moving
                return False
            self._context = self.files.context(contents)
            self.expiries = self.files.expiries(contents)
            self.contents = contents
            return True


def _for_host(by_name: "dict[str, SSLContext]", host: str) -> "SSLContext | None":
    """The context for a host's name, else for the wildcard that matches it."""
    return by_name.get(host) or by_name.get(f"*.{host.partition('.')[2]}")


def dns_names(pem: bytes) -> list[str]:
    """The DNS names for which the first certificate of a PEM text is, in lower case.

    Python's own reading is for certificates of peers. Raises `OSError` for anything else.
    """
    try:
        signed = next(_signed_parts(pem))
        extensions = next(part for tag, part in _elements(signed) if tag == _EXTENSIONS)
        [(_, listed)] = _elements(extensions)
        for _, extension in _elements(listed):
            (_, kind), *_, (_, value) = _elements(extension)
            if kind == _ALTERNATIVE_NAMES:
                [(_, names)] = _elements(value)
                return [
                    name.decode("ascii").lower()
                    for tag, name in _elements(names)
                    if tag == _DNS_NAME
                ]
    except StopIteration:  # no extensions
        return []
    except (ValueError, IndexError) as error:
        raise OSError(f"a server's certificate cannot be read: {error}") from None
    return []


def first_expiry(pem: bytes) -> float:
    """The first expiry of the certificates in a PEM text, in seconds since 1970.

    Raises `OSError` for anything else.
    """
    found = []
    try:
        for signed in _signed_parts(pem):
            # Without the version: serial number, algorithm, issuer, and then the validity.
            parts = [part for tag, part in _elements(signed) if tag != _VERSION]
            _, (tag, moment) = _elements(parts[3])
            text = moment.decode("ascii")
            century = "" if tag == _LONG_TIME else "20" if text < "5" else "19"
            time = datetime.strptime(century + text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
            found.append(time.timestamp())
        return min(found)
    except (ValueError, IndexError) as error:
        raise OSError(f"a server's certificate cannot be read: {error}") from None


def _signed_parts(pem: bytes) -> Iterator[bytes]:
    """The signed part of each certificate in a PEM text; raises `ValueError` and `IndexError`."""
    import ssl  # imported late, as above

    if not (texts := pem.split(_BEGIN)[1:]):
        raise ValueError("it has none")
    for text in texts:
        der = ssl.PEM_cert_to_DER_cert((_BEGIN + text.partition(_END)[0] + _END).decode("ascii"))
        [(_, certificate)] = _elements(der)
        (_, signed), *_ = _elements(certificate)
        yield signed


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tag and content of each element; raises `ValueError` and `IndexError` for no DER."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size], "big"), at + size
        if at + length > len(der):
            raise ValueError("an element is cut off")
        yield tag, der[at : at + length]
        at += length
