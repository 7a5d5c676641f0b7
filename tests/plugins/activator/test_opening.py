"""The beginning of a request in the first bytes of a connection."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from headrace.plugins.activator.opening import PREFACE, SETTINGS, Opening


def fed(*pieces: bytes) -> Opening:
    opening = Opening()
    for piece in pieces:
        opening.take(piece)
    return opening


@pytest.mark.parametrize(("data", "begun", "http1"), [
    (b"", False, False),
    (b"G", True, False),
    (b"GET / HTTP/1.1\r\n", True, True),
    (b"P", False, False),
    (b"PO", True, False),
    (b"POST /v2", True, True),
    (b"PRI * HTTP/2.0\r\n", False, False),
    (b"\x16\x03\x01\x02\x00", True, False),  # TLS
    (PREFACE, False, False),
])  # fmt: skip
def test_begin_of_a_request(data: bytes, begun: bool, http1: bool) -> None:
    opening = fed(data)
    assert (opening.begun, opening.http1) == (begun, http1)
    assert fed(*(bytes([byte]) for byte in data)).begun == begun
    assert opening.for_server() == data


def test_a_client_of_http2_sends_its_request_once_it_is_greeted() -> None:
    client, opening = H2Connection(H2Configuration()), Opening()
    client.initiate_connection()
    client.ping(b"\0" * 8)
    greeting = opening.take(client.data_to_send())
    assert greeting == SETTINGS
    begun: list[bool] = [opening.begun]
    client.receive_data(greeting)  # is answered, although no server has asked
    client.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"),
                           (":authority", "a")])  # fmt: skip
    whole = client.data_to_send()
    for byte in whole:
        assert opening.take(bytes([byte])) == b""
    begun.append(opening.begun)
    assert begun == [False, True]
    server = H2Connection(H2Configuration(client_side=False, validate_inbound_headers=False))
    server.initiate_connection()
    names = [type(event).__name__ for event in server.receive_data(opening.for_server())]
    assert "RequestReceived" in names
    assert "SettingsAcknowledged" not in names


def test_frames_without_end_are_passed_on() -> None:
    settings = b"\0\0\0\x04\0\0\0\0\0"
    assert not fed(PREFACE, settings * 7000).begun
    assert fed(PREFACE, settings * 7300).begun
