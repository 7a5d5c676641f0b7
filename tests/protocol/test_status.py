"""Statuses of our errors over HTTP and gRPC, and errors for the statuses of upstreams."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core import errors
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RemoteBroken,
    RemoteLost,
    RemoteTimeout,
    RemoteUnavailable,
    ServerError,
    Unavailable,
    Unsupported,
)
from headrace.protocol.grpc import percent_encoded
from headrace.protocol.status import (
    INTERNAL,
    INTERNAL_TEXT,
    STATUS,
    Fate,
    Status,
    failure_of,
    failure_of_text,
    http_failure_of,
)

# Numbers of gRPC status codes.
CANCELLED, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 1, 3, 5, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL_ERROR, UNAVAILABLE = 9, 12, 13, 14


def classes(base: type[ServerError]) -> Iterator[type[ServerError]]:
    for child in base.__subclasses__():
        if child.__module__.startswith("headrace."):
            yield child
            yield from classes(child)


def test_every_error_has_a_row() -> None:
    assert set(classes(ServerError)) == set(STATUS)


@pytest.mark.parametrize(("name", "http", "grpc"), [
    ("InvalidRequest", 400, INVALID_ARGUMENT), ("PayloadTooLarge", 413, RESOURCE_EXHAUSTED),
    ("NotFound", 404, NOT_FOUND), ("Unavailable", 503, UNAVAILABLE),
    ("ModelNotReady", 503, UNAVAILABLE), ("QueueFull", 503, UNAVAILABLE),
    ("QueueTimeout", 503, UNAVAILABLE), ("Overloaded", 503, UNAVAILABLE),
    ("ServerExiting", 503, UNAVAILABLE), ("Unsupported", 501, UNIMPLEMENTED),
    ("Cancelled", 499, CANCELLED), ("ExecutionFailed", 500, INTERNAL_ERROR),
    ("WorkerDied", 500, INTERNAL_ERROR), ("Quarantined", 422, FAILED_PRECONDITION),
])  # fmt: skip
def test_status(name: str, http: int, grpc: int) -> None:
    status = STATUS[vars(errors)[name]]
    assert (status.http, status.grpc) == (http, grpc)


def test_only_transient_errors_have_retry_after() -> None:
    for error, status in STATUS.items():
        if status.retry_after:
            assert issubclass(error, errors.Unavailable)
            expected = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}
            assert status.http in expected


def test_an_unknown_exception_is_internal_error() -> None:
    assert Status(500, INTERNAL_ERROR) == INTERNAL
    assert INTERNAL_TEXT == "internal error"


# --- upstreams


@pytest.mark.parametrize(("status", "text", "fate", "error"), [
    (14, "failed to connect to all addresses; last error: …", Fate.LATE, RemoteUnavailable),
    (14, "Socket closed", Fate.UNCERTAIN, RemoteLost),
    (14, "Stream removed (Socket closed)", Fate.UNCERTAIN, RemoteLost),
    (14, "upstream connect error", Fate.UNCERTAIN, RemoteLost),
    (14, "", Fate.UNCERTAIN, RemoteLost),
    (14, "the model has nothing to say today", Fate.LATE, RemoteUnavailable),
    (14, "Request for unknown model: 'a' version 1 is not at ready state", Fate.REFUSED,
     Unavailable),
    (14, "'a' version 1 is not at ready state", Fate.REFUSED, Unavailable),
    (14, "Exceeds maximum queue size", Fate.REFUSED, Unavailable),
    (14, "[request id: a b] Exceeds maximum queue size", Fate.REFUSED, Unavailable),
    (14, "[request id: 7] Exceeds maximum queue size of 3 for model 'm'", Fate.REFUSED,
     Unavailable),
    (14, "[request id: 7] Server is stopping, scheduler for model has stopped accepting new"
     " inference requests", Fate.REFUSED, Unavailable),
    (14, "Request timeout expired", Fate.REFUSED, Unavailable),
    (14, "Server not ready", Fate.REFUSED, Unavailable),
    (14, "GRPC server is shutting down and has stopped accepting new requests.", Fate.REFUSED,
     Unavailable),
    (14, "no healthy upstream", Fate.REFUSED, Unavailable),
    # An ensemble whose first model has run; a model that quotes a server.
    (14, "in ensemble 'e', [request id: 7] Exceeds maximum queue size", Fate.LATE,
     RemoteUnavailable),
    (14, "my database says: Request timeout expired", Fate.LATE, RemoteUnavailable),
    (14, "the table is not ready", Fate.LATE, RemoteUnavailable),
    (14, "Server exiting", Fate.LATE, RemoteUnavailable),
    (5, "my Request for unknown model: 'a' is not found", Fate.ANSWERED, NotFound),
    (3, "Request for unknown model: 'a' is not found", Fate.ANSWERED, InvalidRequest),
    (4, "Deadline Exceeded", Fate.LATE, RemoteTimeout),
    (3, "unexpected shape", Fate.ANSWERED, InvalidRequest),
    (5, "no such model", Fate.ANSWERED, NotFound),
    (5, "Request for unknown model: 'a' is not found", Fate.REFUSED, Unavailable),
    (8, "too large", Fate.ANSWERED, PayloadTooLarge), (12, "no", Fate.ANSWERED, Unsupported),
    (13, "raised", Fate.ANSWERED, ExecutionFailed),
    (16, "who are you", Fate.ANSWERED, ExecutionFailed),
])  # fmt: skip
def test_failures(status: int, text: str, fate: Fate, error: type[ServerError]) -> None:
    failure = failure_of("m", status, text)
    assert failure.fate is fate
    assert type(failure.error) is error


@given(st.integers(-1, 99), st.text())
def test_every_grpc_status_maps_to_a_client_error(status: int, text: str) -> None:
    assert type(failure_of("m", status, text).error) in STATUS


def test_upstream_credential_errors_are_hidden_from_clients() -> None:
    assert "secret" not in str(failure_of("m", 16, "token secret is wrong").error)


@pytest.mark.parametrize(("status", "said", "text", "fate", "error"), [
    (400, "unexpected shape", "", Fate.ANSWERED, InvalidRequest),
    (404, "Request for unknown model: 'a' is not found", "", Fate.REFUSED, Unavailable),
    (400, "", "<html>Bad Request</html>", Fate.ANSWERED, RemoteBroken),
    (401, "who are you", "", Fate.ANSWERED, ExecutionFailed),
    (404, "no such model", "", Fate.ANSWERED, NotFound),
    (413, "", "<html>too large</html>", Fate.ANSWERED, PayloadTooLarge),
    (422, "not a number", "", Fate.ANSWERED, InvalidRequest),
    (429, "", "slow down", Fate.REFUSED, Unavailable),
    (500, "raised", "", Fate.ANSWERED, ExecutionFailed),
    (501, "no", "", Fate.ANSWERED, Unsupported), (502, "", "Bad Gateway", Fate.LATE, RemoteLost),
    (503, "Exceeds maximum queue size", "", Fate.REFUSED, Unavailable),
    (503, "", "Exceeds maximum queue size", Fate.LATE, RemoteUnavailable),
    (503, "Model with name m is not ready.", "", Fate.REFUSED, Unavailable),
    (503, "the table is not ready", "", Fate.LATE, RemoteUnavailable),
    (503, "", "no healthy upstream", Fate.REFUSED, Unavailable),
    (503, "no healthy upstream", '{"error": "no healthy upstream"}', Fate.LATE, RemoteUnavailable),
    (503, "", "pending request queue full\n", Fate.REFUSED, Unavailable),
    (503, "", "upstream connect error or disconnect/reset before headers. reset reason: overflow",
     Fate.REFUSED, Unavailable),
    (503, "", "upstream connect error or disconnect/reset before headers. reset reason: remote"
     " connection failure, transport failure reason: delayed connect error: 111", Fate.REFUSED,
     Unavailable),
    (503, "", "upstream connect error or disconnect/reset before headers. reset reason: connection"
     " termination", Fate.LATE, RemoteUnavailable),
    (503, "", "upstream connect error or disconnect/reset before headers. retried and the latest"
     " reset reason: remote connection failure", Fate.LATE, RemoteUnavailable),
    (504, "", "", Fate.LATE, RemoteTimeout), (302, "", "", Fate.ANSWERED, ExecutionFailed),
])  # fmt: skip
def test_failures_over_http(
    status: int, said: str, text: str, fate: Fate, error: type[ServerError]
) -> None:
    failure = http_failure_of("m", status, said, text)
    assert failure.fate is fate
    assert type(failure.error) is error
    assert "html" not in str(failure.error)


@pytest.mark.parametrize("text", ["Exceeds maximum queue size", "the database is away", ""])
@pytest.mark.parametrize(("begun", "fate"), [(True, Fate.LATE), (False, Fate.REFUSED)])
def test_the_word_of_an_upstream_counts_instead_of_its_text(
    text: str, begun: bool, fate: Fate
) -> None:
    assert failure_of("m", UNAVAILABLE, text, begun).fate is fate
    assert http_failure_of("m", 503, text, text, begun).fate is fate
    stream = Fate.ANSWERED if begun else fate
    assert failure_of_text(text, begun).fate is stream


def test_a_model_may_say_that_another_model_is_unknown() -> None:
    text = "Request for unknown model: 'a' is not found"
    assert failure_of("m", NOT_FOUND, text, True).fate is Fate.ANSWERED
    assert http_failure_of("m", 404, text, text, True).fate is Fate.ANSWERED


@given(st.integers(100, 999), st.text(), st.text())
def test_every_http_status_maps_to_a_client_error(status: int, said: str, text: str) -> None:
    assert type(http_failure_of("m", status, said, text).error) in STATUS


@pytest.mark.parametrize("text", ["", "100 % ~ plain", "\u00fc\n\x7f", "\ud800", "\x00" * 2000])
def test_error_texts_are_percent_encoded_as_grpc_says(text: str) -> None:
    found = percent_encoded(text)
    assert re.fullmatch(rb"(?:[ -$&-~]|%[0-9A-F]{2})*", found)
    assert unquote_to_bytes(found) == text.encode(errors="replace")
