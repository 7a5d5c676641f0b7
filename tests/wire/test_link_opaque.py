"""Requests and answers that nobody here reads, between a front end and the engine."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.requests import OpaqueRequest, OpaqueResponse, Timing
from headrace.wire.link_infer import (
    RequestReader,
    RequestWriter,
    ResponseReader,
    ResponseWriter,
)
from headrace.wire.link_opaque import opened_response, shut, shut_response

HEADERS = st.lists(st.tuples(st.text(), st.text()))


@given(body=st.binary(), path=st.sampled_from(["", "/infer"]), headers=HEADERS, id=st.text())
def test_requests(body: bytes, path: str, headers: list[tuple[str, str]], id: str) -> None:
    request = OpaqueRequest(
        "m", "3", id.encode(errors="replace").decode(), {}, nbytes=7, body=body, path=path,
        headers=headers, parameters={"headrace_forward:x": "1"},
    )  # fmt: skip
    request.inputs[""] = shut(body)
    meta, pieces = RequestWriter().parts(request)
    rest = b"".join(pieces)
    found = RequestReader().read(meta, rest, 0, len(rest), False)
    assert isinstance(found, OpaqueRequest)
    assert bytes(found.body) == body
    assert found.inputs == {}
    request.body, request.inputs, found.body = b"", {}, b""
    assert found == request


@given(body=st.binary(), status=st.sampled_from([0, 3, 200, 400]), headers=HEADERS)
def test_responses(body: bytes, status: int, headers: list[tuple[str, str]]) -> None:
    response = OpaqueResponse(
        "m", "3", "id", [], Timing(1, 2, 3), body=body, status=status, headers=headers
    )
    meta, pieces = ResponseWriter().parts(shut_response(response))
    rest = b"".join(pieces)
    found = opened_response(ResponseReader().read(meta, rest, 0, len(rest)))
    assert bytes(found.body) == body
    response.body = found.body = b""
    assert found == response
