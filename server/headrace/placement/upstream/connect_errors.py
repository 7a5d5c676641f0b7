"""Why there is no connection to an upstream, and the TLS that one is made with."""

import os
import ssl

from headrace.core.errors import InvalidOption
from headrace.placement.upstream.options import Credentials

PORT = "is this its port for {}, with TLS or without?"
CLOSED = f"the server has closed the connection without an answer; {PORT}"


def connect_error(error: Exception) -> str:
    """The reason why an attempt to connect has failed, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        what = (getattr(error, "reason", "") or "it was hung up").lower().replace("_", " ")
        return f"TLS fails ({what}); does the server speak TLS at this port?"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # the event loops have texts of their own
    return str(error) or type(error).__name__


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """The TLS context of connections; the system's roots if none are given.

    Takes a while, as files are read. Raises `InvalidOption`.
    """
    roots = credentials.root
    try:
        context = ssl.create_default_context(cadata=roots.decode("ascii") if roots else None)
    except (ssl.SSLError, UnicodeDecodeError, ValueError):
        raise _wrong("tls_root_cert", "no certificates in the form of PEM") from None
    if credentials.certificate:
        # The standard library takes names of files only. This one has no name elsewhere.
        descriptor = os.memfd_create("certificate")
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(credentials.certificate + b"\n" + credentials.key)
            # Without a password it would ask for one, where there is a terminal.
            context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
        except ssl.SSLError:
            raise _wrong("tls_cert", "no certificate and key in the form of PEM") from None
        finally:
            os.close(descriptor)
    return context


def _wrong(name: str, text: str) -> InvalidOption:
    return InvalidOption(f"parameters['{name}']", text)
