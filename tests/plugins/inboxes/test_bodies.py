"""Forms of messages, and what goes through to answers."""

import numpy as np
import pytest

from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor
from headrace.plugins.inboxes.bodies import answer, failure, form_of
from headrace.plugins.inboxes.broker import Record
from headrace.plugins.inboxes.ledger import GivenUp, Message

SIZE = "inference-header-content-length"


def message(body: bytes, **headers: bytes) -> Message:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Message("s", 1, b"key", named, body)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (message(b'{"inputs": []}'), "v2"),
        (message(b' \n{"x": [1]}'), "flat"),
        (message(b'{"x": "\\"inputs\\""}'), "flat"),
        (message(b"\x00\x01"), "raw"),
        (message(b""), "raw"),
        (message(b"{}", content_type=b"application/octet-stream"), "raw"),
        (message(b"{}", content_type=b"application/json"), "flat"),
        (message(b"{}", inference_header_content_length=b"2"), "v2"),
        (message(b"{}", content_type=b"Application/vnd.apache.arrow.stream; x=y"), "arrow"),
    ],
)
def test_forms_are_told_apart(given: Message, form: str) -> None:
    assert form_of(given, "auto") == form
    assert form_of(given, "raw") == "raw"


def test_headers_go_through_but_those_of_the_body() -> None:
    asked = message(
        b"", traceparent=b"00-1", content_type=b"a", inference_header_content_length=b"0"
    )
    response = InferResponse(
        "m", "1", "", [Tensor("y", Datatype.INT32, np.zeros(1, np.int32))], Timing(0, 0, 0)
    )
    record = answer(asked, response, lambda _: (b"new", {"content-type": b"b"}))
    assert record == Record(b"key", {"traceparent": b"00-1", "content-type": b"b"}, b"new")


def test_a_failure_is_the_message_with_the_reason() -> None:
    asked = message(b"body", traceparent=b"00-1")
    record = failure(asked, GivenUp("InvalidRequest", "grün", 2))
    assert (record.key, record.body) == (b"key", b"body")
    assert record.headers == {
        "traceparent": b"00-1",
        "headrace-error": b"InvalidRequest",
        "headrace-error-reason": "grün".encode(),
        "headrace-tries": b"2",
    }


def test_a_bare_failure_has_the_key_and_the_reason_alone() -> None:
    record = failure(message(b"body", mine=b"1"), GivenUp("AnswerRefused", "large", 1, bare=True))
    assert record == Record(
        b"key",
        {
            "headrace-error": b"AnswerRefused",
            "headrace-error-reason": b"large",
            "headrace-tries": b"1",
        },
        b"",
    )
