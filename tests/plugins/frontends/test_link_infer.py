"""Requests, responses and errors through frames: round trip."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import (
    ASKED,
    NO_OPTIONS,
    Call,
    CallOptions,
    InferResponse,
    Raw,
    RegionSlice,
    Shared,
    SharedInput,
    Timing,
)
from headrace.core.datatypes import Datatype
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelNotReady,
    NotFound,
)
from headrace.core.tensors import Tensor, elsewhere
from headrace.ipc.frames import BrokenFrame
from headrace.plugins.frontends.link_infer import (
    LinkResponseReader,
    RequestReader,
    RequestWriter,
    ResponseWriter,
    error_parts,
    numbers_rest,
    read_error,
    read_numbers,
)
from headrace.protocol.status import STATUS
from headrace.protocol.v2_json import body_of, decode_infer, pass_raw
from headrace.protocol.v2_protobuf import InferReader
from tests.protocol.strategies import PROPERTY, assert_same, mutations, tensors
from tests.support.odd_requests import infer_bodies, infer_messages

texts = st.text(max_size=8)
unsigned = st.integers(0, 2**64 - 1)
parameters = st.dictionaries(
    texts,
    st.one_of(texts, st.booleans(), st.floats(), st.integers(-(2**63), 2**64 - 1)),
    max_size=3,
)
named = st.lists(tensors(), max_size=3).map(
    lambda found: {f"x{n}": tensor._replace(name=f"x{n}") for n, tensor in enumerate(found)}
)
classes = st.none() | st.dictionaries(texts, st.integers(1, 9), min_size=1, max_size=2)
options = st.builds(
    CallOptions, unsigned, unsigned, unsigned | texts, st.booleans(), st.booleans(), classes,
    st.none(), st.none(), st.just(False),
)  # fmt: skip
requests = st.builds(
    Call, texts, texts, texts, named, st.lists(texts, max_size=2).map(tuple), parameters,
    st.just(NO_OPTIONS) | options, unsigned,
)  # fmt: skip
# A joined array has its origin in the engine.
timings = st.builds(Timing, unsigned, unsigned, st.integers(0, 2**32 - 1), st.just(0))
responses = st.builds(
    InferResponse, texts, texts, texts, named.map(lambda found: list(found.values())), timings,
    parameters,
)  # fmt: skip


def without_tensors(value: Any, field: str) -> str:
    """Every part of a request or response except tensors; NaN equals NaN by its text."""
    if isinstance(value, Call):
        return repr([getattr(value, name) for name in ASKED if name != field])
    return repr(replace(value, **{field: {}}))


class Linked(Call):
    """A request that was read, with its headers."""

    def __init__(self, headers: Mapping[str, str], *asked: Any) -> None:
        super().__init__(*asked)
        self.headers = headers


def check_request(
    writer: RequestWriter,
    reader: RequestReader,
    request: Call,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Assert that a request is read as it was written."""
    meta, pieces = writer.parts(request, headers or {})
    found = reader.read(meta, b"".join(pieces), None, Linked)
    assert found.headers == (headers or {})
    assert without_tensors(found, "inputs") == without_tensors(request, "inputs")
    assert list(found.inputs) == list(request.inputs)
    for name, tensor in request.inputs.items():
        assert_same(found.inputs[name], tensor)


@PROPERTY
@given(
    st.lists(st.tuples(requests, st.dictionaries(texts, texts, max_size=2)), min_size=1, max_size=3)
)
def test_requests(given: list[tuple[Call, dict[str, str]]]) -> None:
    """Each twice: both sides remember repeated parts."""
    writer, reader = RequestWriter(), RequestReader()
    for request, headers in given * 2:
        check_request(writer, reader, request, headers)


@PROPERTY
@given(st.lists(responses, min_size=1, max_size=3))
def test_responses(given: list[InferResponse]) -> None:
    writer, reader = ResponseWriter(), LinkResponseReader()
    for response in given * 2:
        meta, pieces = writer.parts(response)
        found = reader.read(meta, b"".join(pieces))
        assert without_tensors(found, "outputs") == without_tensors(response, "outputs")
        for one, other in zip(found.outputs, response.outputs, strict=True):
            assert_same(one, other)


slices = st.builds(RegionSlice, texts, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
shared_inputs = st.builds(
    SharedInput, st.sampled_from(Datatype), st.lists(st.integers(0, 9), max_size=3).map(tuple),
    slices,
)  # fmt: skip
shared = st.builds(
    Shared, st.dictionaries(texts, shared_inputs, max_size=3),
    st.dictionaries(texts, slices, max_size=3),
)  # fmt: skip


@PROPERTY
@given(requests, st.dictionaries(texts, st.integers(1, 9), max_size=2), shared)
def test_requests_with_shared_memory(given: Call, classes: dict[str, int], shared: Shared) -> None:
    writer, reader = RequestWriter(), RequestReader()
    asked = given.options._replace(classes=classes, shared=shared)
    request = given.like(options=asked)
    for _ in range(2):
        check_request(writer, reader, request)
    plain, pieces = writer.parts(given.like(options=asked._replace(classes=None, shared=None)))
    assert reader.read(plain, b"".join(pieces), None, Linked).options.shared is None


@PROPERTY
@given(
    st.lists(st.sampled_from(Datatype), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
)
def test_responses_without_data(datatypes: list[Datatype], shape: tuple[int, ...]) -> None:
    outputs = [elsewhere(f"y{n}", datatype, shape) for n, datatype in enumerate(datatypes)]
    outputs.append(Tensor("z", Datatype.INT8, np.ones(1, np.int8)))
    writer, reader = ResponseWriter(), LinkResponseReader()
    for _ in range(2):
        meta, pieces = writer.parts(InferResponse("m", "1", "", outputs, Timing(1, 2, 3)))
        found = reader.read(meta, b"".join(pieces))
        for one, other in zip(found.outputs, outputs, strict=True):
            assert (one.name, one.datatype) == (other.name, other.datatype)
            assert one.array.shape == other.array.shape
            assert one.array.tobytes() == other.array.tobytes()


def test_values_at_limits_that_codecs_accept() -> None:
    """The values at and beyond limits that the codecs let through are read as they were."""
    writer, reader, codec = RequestWriter(), RequestReader(), InferReader()
    accepted = 0
    decoders: list[Callable[[], Call]] = [
        *(partial(decode_body, body) for body in infer_bodies()),
        *(partial(decode_message, codec, data) for data in infer_messages()),
    ]
    for decode in decoders:
        try:
            request = decode()
        except InvalidRequest:
            continue
        check_request(writer, reader, request)
        accepted += 1
    assert accepted > 100


def decode_body(body: bytes) -> Call:
    request, _ = decode_infer("UINT8", "", body, None)
    return request


def decode_message(codec: InferReader, data: bytes) -> Call:
    return codec.read(data).request(len(data))


def test_decoded_requests_can_be_modified() -> None:
    """A request's parameters are its own, though the next is read from the same memory."""
    meta, pieces = RequestWriter().parts(Call("m", "", "", {}, (), {"a": 1}))
    rest = b"".join(pieces)
    reader = RequestReader()
    reader.read(meta, rest, None, Linked).parameters.clear()
    assert reader.read(meta, rest, None, Linked).parameters == {"a": 1}


def test_raw_bodies() -> None:
    meta, pieces = RequestWriter().parts(pass_raw("m", "2", b"\x01\x02\x03"))
    found = RequestReader().read(meta, b"".join(pieces), Raw.GENERATE, Linked)
    assert found.options.raw is Raw.GENERATE
    assert bytes(body_of(found)) == b"\x01\x02\x03"


@PROPERTY
@given(requests, st.data())
def test_damaged_requests(request: Call, data: st.DataObject) -> None:
    """Another request, or one of the two errors."""
    meta, pieces = RequestWriter().parts(request)
    meta = data.draw(mutations(meta))
    rest = data.draw(mutations(b"".join(pieces)))
    with suppress(BrokenFrame, InvalidRequest):
        RequestReader().read(meta, rest, None, Linked)


@PROPERTY
@given(responses, st.data())
def test_damaged_responses(response: InferResponse, data: st.DataObject) -> None:
    meta, pieces = ResponseWriter().parts(response)
    meta = data.draw(mutations(meta))
    rest = data.draw(mutations(b"".join(pieces)))
    with suppress(BrokenFrame, InvalidRequest):
        LinkResponseReader().read(meta, rest)


@PROPERTY
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes(meta: bytes, rest: bytes) -> None:
    for read in (
        lambda: RequestReader().read(meta, rest, None, Linked),
        lambda: LinkResponseReader().read(meta, rest),
    ):
        with pytest.raises(BrokenFrame):
            read()
    read_error(meta, rest)


def test_errors_keep_their_attributes() -> None:
    for kind in STATUS:
        found, version = read_error(*error_parts(kind("what was wrong: é"), "3"))
        assert (type(found), str(found), version) == (kind, "what was wrong: é", "3")
    executed = NotFound("never").of_request(7, 8, 9)
    for error in (ModelNotReady("later", retry_after=27), executed):
        found, _ = read_error(*error_parts(error, "3"))
        assert found is not None
        assert (found.retry_after, found.spent) == (error.retry_after, error.spent)
    for meta in (b"NotFound", b"NotFound 3 x", b"NotFound 3 1 2"):
        with pytest.raises(BrokenFrame):
            read_error(meta, b"what was wrong")


def test_other_exceptions_have_no_class() -> None:
    class Inner(ExecutionFailed):
        """A class unknown to the other side."""

    assert read_error(b" ", b"")[0] is None
    assert read_error(*error_parts(Inner("x"), ""))[0] is None


def test_a_truncated_request() -> None:
    tensor = Tensor("x", Datatype.FP32, np.zeros((2, 3), np.float32))
    meta, pieces = RequestWriter().parts(Call("m", "", "id", {"x": tensor}))
    rest = b"".join(pieces)
    for size in range(len(rest)):
        with pytest.raises(BrokenFrame):
            RequestReader().read(meta, rest[:size], None, Linked)


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_numbers(numbers: list[int]) -> None:
    rest = numbers_rest(*numbers)
    assert read_numbers(rest, len(numbers)) == tuple(numbers)
    with pytest.raises(BrokenFrame):
        read_numbers(rest, len(numbers) + 1)
