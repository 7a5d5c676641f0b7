"""Options of both transports: keep-alive, compression, patience, and TLS from PEM files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.api.operations import NAMED
from headrace.protocol.http2.keep_alive import KeepAlive

if TYPE_CHECKING:
    from ssl import SSLContext

# The effort of zlib for each compression level.
LEVELS = {"none": 0, "low": 1, "medium": 3, "high": 6}
# The procedures whose answers are compressed by level.
INFERENCE = frozenset(NAMED[name].procedure for name in ("ModelInfer", "ModelStreamInfer"))


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """`compression`, one of `LEVELS`, applies to inference answers for clients that accept it.

    A client may make no progress for `patience_secs` while sending a message or reading an answer.
    A connection without calls is closed after `idle_secs`, a stream without requests ends after
    `stream_idle_secs`; 0: never. A connection may have `streams` open calls, whose clients may be
    `window` bytes ahead of the server.
    """

    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    compression: str = "none"
    patience_secs: float = 60.0
    idle_secs: float = 0.0
    stream_idle_secs: float = 0.0
    streams: int = 1024
    window: int = (1 << 20) + (64 << 10)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the server's certificate and key, and of the CA for client certificates.

    `mutual` requires a certificate of clients.
    """

    certificate: str
    key: str
    root: str = ""
    mutual: bool = False

    def check(self) -> None:
        """Raise `OSError` that names the invalid setting."""
        for setting, path, needed in (
            ("--grpc-server-cert", self.certificate, True),
            ("--grpc-server-key", self.key, True),
            ("--grpc-root-cert", self.root, self.mutual),
        ):
            if needed and not path:
                raise OSError(f"gRPC with TLS needs {setting}")
            if path and not Path(path).is_file():
                raise OSError(f"{setting}: there is no file {path}")

    def context(self) -> "SSLContext":
        """The TLS context for the native server; raises `OSError`."""
        import ssl  # imported late: commands that only parse options do not need it

        self.check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # RFC 9113, section 9.2: no compression, no renegotiation, no weak ciphers of TLS 1.2.
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
        context.set_alpn_protocols(["h2"])
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.root:
                context.load_verify_locations(self.root)
        except ssl.SSLError as error:
            raise OSError(f"the TLS files for gRPC cannot be used: {error}") from None
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def renew(self, context: "SSLContext") -> None:
        """Read the files again for new connections; raises `OSError` and leaves it as it was.

        Further root certificates are added; earlier ones stay.
        """
        self.context()  # invalid files would leave half of them in place
        context.load_cert_chain(self.certificate, self.key)
        if self.root:
            context.load_verify_locations(self.root)
