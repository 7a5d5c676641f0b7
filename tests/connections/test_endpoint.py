"""Reasons for a missing connection, in words for the operator."""

import errno
import socket
import ssl

import pytest

from headrace.connections.endpoint import connect_error


def _certificate() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed (_ssl.c:1)")
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (OSError(errno.EHOSTUNREACH, "of a library"), "No route to host"),
        (OSError("no number"), "no number"),
        (ConnectionError(), "ConnectionError"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "not known"),
        (_certificate(), "its certificate is not accepted: self-signed certificate"),
        (ssl.SSLError(1, "[SSL] odd"), "does the server speak TLS at this port?"),
    ],
)
def test_texts_of_connection_errors(error: Exception, said: str) -> None:
    assert said in connect_error(error)
    assert "Errno 1" not in connect_error(error)
