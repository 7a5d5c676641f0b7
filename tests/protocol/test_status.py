"""Every error that can reach a client has a status on both transports."""

from collections.abc import Iterator
from http import HTTPStatus

import pytest

from headrace.core import errors
from headrace.core.errors import ServerError
from headrace.protocol.status import INTERNAL, INTERNAL_TEXT, STATUS, Status

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


def test_only_what_may_succeed_later_asks_to_come_again() -> None:
    for error, status in STATUS.items():
        if status.retry_after:
            assert issubclass(error, errors.Unavailable)
            assert status.http == HTTPStatus.SERVICE_UNAVAILABLE


def test_a_bug_is_an_internal_error_that_says_nothing_else() -> None:
    assert Status(500, INTERNAL_ERROR) == INTERNAL
    assert INTERNAL_TEXT == "internal error"
