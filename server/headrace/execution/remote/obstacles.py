"""Why there is no connection to a server, in words that help whoever has configured it."""

import os
import ssl

PORT = "is this its port for {}, with TLS or without?"
CLOSED = f"the server has closed the connection without an answer; {PORT}"


def obstacle(error: Exception) -> str:
    """What an attempt to connect has ended with."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        what = (getattr(error, "reason", "") or "it was hung up").lower().replace("_", " ")
        return f"TLS fails ({what}); does the server speak TLS at this port?"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # the event loops have texts of their own
    return str(error) or type(error).__name__
