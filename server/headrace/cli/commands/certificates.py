"""`headrace certificates`: an authority of one's own, and certificates that it signs.

For development and tests: its key lies beside the certificates, without a password.
"""

import argparse
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.command import EXIT_FAILURE, Command, option
from headrace.cli.remote import complain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder

_DAYS = 365
_ROOT_DAYS = 3650
_ROOT = "headrace development root"
_HERE = ("localhost", "127.0.0.1", "::1")
_PRIVATE, _PUBLIC = 0o600, 0o644


def _run(options: argparse.Namespace) -> int:
    try:
        import cryptography  # noqa: F401  # only whether it is there
    except ImportError:
        needs = "pip install 'headrace[certificates]'"
        complain(options, f"needs cryptography: {needs}")
        return EXIT_FAILURE
    folder = Path(options.folder or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority = _Authority(folder, _lifetime(options.days))
        authority.write("server", "server", [*_HERE, *options.name])
        for client in options.client:
            authority.write(client, client, [])
    except (OSError, ValueError) as error:
        complain(options, str(error))
        return EXIT_FAILURE
    print(
        f"wrote {', '.join(authority.written)} in {folder}, valid for {options.days} days\n\n"
        f"headrace serve --http-use-ssl --http-server-cert={folder / 'server.pem'}"
        f" --http-server-key={folder / 'server.key'} ...\n"
        f"headrace models list --url=https://localhost:8000 --tls-root-cert={folder / 'root.pem'}"
    )
    return 0


def _lifetime(days: int) -> tuple[datetime, datetime]:
    # An hour ago: the clock of another machine may be behind.
    now = datetime.now(UTC)
    return now - timedelta(hours=1), now + timedelta(days=days)


class _Authority:
    """The root in a folder, made unless it is there, and what it has `written`."""

    def __init__(self, folder: Path, lifetime: tuple[datetime, datetime]) -> None:
        """`lifetime` is that of certificates. Raises `OSError`, and `ValueError` for bad files."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificate

        self.written: list[str] = []
        self._folder = folder
        self._lifetime = lifetime
        kept, key = folder / "root.pem", folder / "root.key"
        if kept.exists() != key.exists():
            there, missing = (kept, key) if kept.exists() else (key, kept)
            raise ValueError(f"{there} is there, and {missing.name} is not: remove it, or add that")
        if kept.exists():
            try:
                self._root: Certificate = load_pem_x509_certificate(kept.read_bytes())
                found: Any = load_pem_private_key(key.read_bytes(), None)
            except (TypeError, ValueError) as error:  # the former with a password
                raise ValueError(f"{kept} and {key} cannot be read: {error}") from None
            self._key: EllipticCurvePrivateKey = found
        else:
            self._key = _new_key()
            begin, end = _lifetime(_ROOT_DAYS)
            self._root = _signed(_builder(_ROOT, _ROOT, self._key, (begin, end), True), self._key)
            self._save("root", self._root, self._key)

    def write(self, file: str, subject: str, names: Sequence[str]) -> None:
        """Write a new certificate and its key: for a server with these names, else for a client."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        if not file or "/" in file or file == "root":
            raise ValueError(f"expected a name that can be a file's, got {file!r}")
        key = _new_key()
        [issuer] = self._root.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        builder = _builder(subject, str(issuer.value), key, self._lifetime, False)
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        shown = [_alternative(name) for name in dict.fromkeys(names or [subject])]
        builder = builder.add_extension(x509.SubjectAlternativeName(shown), critical=False)
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issued_by, critical=False)
        self._save(file, _signed(builder, self._key), key)

    def _save(self, name: str, certificate: "Certificate", key: "EllipticCurvePrivateKey") -> None:
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        for file, content, mode in (
            (f"{name}.key", secret, _PRIVATE),
            (f"{name}.pem", certificate.public_bytes(Encoding.PEM), _PUBLIC),
        ):
            # Replaced as a whole: a server may be following them.
            made = self._folder / f".{file}.new"
            made.unlink(missing_ok=True)
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as to:
                to.write(content)
            made.replace(self._folder / file)
            self.written.append(file)


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(
    subject: str, issuer: str, key: "EllipticCurvePrivateKey", lifetime: tuple[datetime, datetime],
    authority: bool,
) -> "CertificateBuilder":  # fmt: skip
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    begin, end = lifetime
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=authority, crl_sign=authority,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(builder: "CertificateBuilder", key: "EllipticCurvePrivateKey") -> "Certificate":
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _alternative(name: str) -> Any:
    """A host's name, an address, or a URI such as a SPIFFE id, as an alternative name."""
    from cryptography import x509

    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _days(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _ROOT_DAYS):
        raise argparse.ArgumentTypeError(f"expected days from 1 to {_ROOT_DAYS}, got {text!r}")
    return int(text)


CERTIFICATES = Command(
    name="certificates",
    run=_run,
    options=(
        option("folder [PATH]", "directory to write to (default: the current one)"),
        option(
            "--name HOST", "a further name or address of the server; may be repeated", many=True
        ),
        option(
            "--client NAME", "a client to write a certificate for, too; may be repeated", many=True
        ),
        option(
            "--days N", f"how long they are valid (default: {_DAYS})", type=_days, default=_DAYS
        ),
    ),
    help="write a root and certificates for development",
    description="Write a root of one's own unless it is there (root.pem, root.key), and new"
    " certificates that it signs, for a server at localhost (server.pem, server.key) and for"
    " clients. Servers read replaced files by themselves.",
    epilog="""\
  headrace certificates tls --name models.internal --client web
""",
)  # fmt: skip
