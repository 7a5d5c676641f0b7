"""Files of TLS for tests: lasting ones of this folder, and an authority that makes others."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

FOLDER = Path(__file__).parent / "tls"
ROOT = FOLDER / "root.pem"
_SIGNS = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
    encipher_only=False, decipher_only=False,
)  # fmt: skip


def tls_options(door: str, folder: Path = FOLDER, mutual: bool = False) -> tuple[str, ...]:
    """Options of a server for TLS at `http`, `grpc` or `metrics`."""
    known = (f"--{door}-use-ssl-mutual", f"--{door}-root-cert={folder}/root.pem") if mutual else ()
    return (
        f"--{door}-use-ssl", f"--{door}-server-cert={folder}/server.pem",
        f"--{door}-server-key={folder}/server.key", *known,
    )  # fmt: skip


class Authority:
    """An authority that signs certificates, and lists those that it has revoked."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name, own = _named(name), self._key.public_key()
        self._certificates: dict[str, x509.Certificate] = {}
        self._root = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(True, None), critical=True)
            .add_extension(_SIGNS, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
            .sign(self._key, SHA256())
        )

    @property
    def root(self) -> bytes:
        """The certificate of the authority."""
        return self._root.public_bytes(Encoding.PEM)

    def sign(self, subject: str, names: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """A new certificate, for DNS names or none, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = self._builder(_named(subject), key).add_extension(signer, critical=False)
        if names:
            others = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(others, critical=False)
        made = self._certificates[subject] = builder.sign(self._key, SHA256())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return made.public_bytes(Encoding.PEM), secret

    def revoked(self, *subjects: str) -> bytes:
        """A list with the certificates of these subjects."""
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._name)
            .last_update(now - timedelta(hours=1))
            .next_update(now + timedelta(days=1))
        )
        for subject in subjects:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(self._certificates[subject].serial_number)
                .revocation_date(now - timedelta(minutes=1))
                .build()
            )
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
