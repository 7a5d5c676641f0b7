"""HTTP infer bodies: tables of the protocol's rules, then properties of any body."""

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import MAX_TENSORS, Call, CallOptions, RegionSlice, SharedInput
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest, Overloaded, ServerError
from headrace.core.limits import uncharged
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor, elsewhere
from headrace.protocol.elements import MAX_DECODED
from headrace.protocol.v2_json import (
    ResponseForm,
    decode_infer,
    decode_raw,
    error_body,
    parse_json_size,
    takes_long,
)
from tests.protocol.strategies import (
    IN_JSON,
    PROPERTY,
    any_text,
    assert_same,
    fp32,
    memory_within,
    mutations,
    object_array,
    outcome,
    refused,
    response,
    tensors,
)

Json = dict[str, Any]
NAN = float("nan")
NO_JSON = "failed to parse the request JSON buffer"


def an_input(**changes: Any) -> Json:
    """A valid JSON input with members changed, or left out if None."""
    members = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]} | changes
    return {name: value for name, value in members.items() if value is not None}


def binary(size: Any, **changes: Any) -> Json:
    return an_input(data=None, parameters={"binary_data_size": size}, **changes)


def document(*inputs: Any, **members: Any) -> Json:
    return {"inputs": list(inputs) or [an_input()]} | members


def in_region(offset: Any = 0, size: Any = 8, region: Any = "r", **more: Any) -> Json:
    """Parameters of a tensor in shared memory."""
    place = {"shared_memory_offset": offset, "shared_memory_byte_size": size}
    return {"shared_memory_region": region} | place | more


def decode(request: Any, tail: bytes | None = None) -> tuple[Call, ResponseForm]:
    head = json.dumps(request).encode()  # not orjson: it would not write NaN
    if tail is None:
        return decode_infer("m", "3", head, None)
    return decode_infer("m", "3", head + tail, len(head))


# Requests in JSON


def test_the_smallest_request() -> None:
    request, form = decode({"inputs": []})
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "")
    assert (request.inputs, request.outputs, request.parameters) == ({}, (), {})
    assert request.options.classes is None
    assert form == ResponseForm(binary=False, named={})


def test_a_request_with_every_field() -> None:
    parameters = {
        "sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 2,
        "timeout": 1000, "binary_data_output": True, "temperature": 0.5, "mode": "fast",
    }  # fmt: skip
    given = document(
        an_input(parameters={"content_type": "np"}),
        an_input(name="s", datatype="BYTES", shape=[1, 1], data=[["é"]]),
        id="42",
        outputs=[{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}],
        parameters=parameters,
        unknown={"members": "are ignored"},
    )
    request, form = decode(given)
    assert request.id == "42"
    assert list(request.inputs) == ["x", "s"]
    assert request.inputs["x"].array.tolist() == [1.0, 2.0]
    assert request.inputs["s"].array.tolist() == [["é".encode()]]
    assert request.outputs == ("y", "z")
    assert request.options == CallOptions(2, 1000, 7, True, False)
    assert request.parameters == {"temperature": 0.5, "mode": "fast"}
    assert request.nbytes == len(json.dumps(given))
    # binary_data_output is only for outputs that are not named.
    assert form == ResponseForm(binary=True, named={"y": False, "z": True})


def test_named_outputs_beside_all_others() -> None:
    named = [{"name": "y", "parameters": in_region()}, {"name": "z"}]
    given = {"headrace_all_outputs": True, "binary_data_output": True, "mine": 1}
    request, form = decode(document(outputs=named, parameters=given))
    assert (request.outputs, request.parameters) == ((), {"mine": 1})
    assert request.options.shared is not None
    assert list(request.options.shared.outputs) == ["y"]
    assert form == ResponseForm(True, {"y": False, "z": False}, frozenset({"y"}))
    request, _ = decode(document(outputs=named, parameters={"headrace_all_outputs": False}))
    assert request.outputs == ("y", "z")


FIELDS = "Input must set only one of the following fields"
SHAPE = "Unable to parse 'shape' of input 'x'"


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        ([], "the request must be a JSON object, got an array"),
        (None, "the request must be a JSON object, got null"),
        ({}, "Unable to parse 'inputs': the request has no member 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs': expected an array, got an object"),
        ({"inputs": None}, "Unable to parse 'inputs': expected an array, got null"),
        ({"inputs": [1]}, "Unable to parse 'inputs': expected an object, got an integer"),
        (document(id=1), "Unable to parse 'id': expected a string, got an integer"),
        (document(parameters=[]), "Unable to parse 'parameters': expected an object"),
        (document(parameters={"triton_x": 1}), "keys starting with 'triton_' are reserved"),
        (document(parameters={"triton_enable_empty_final_response": True}), "are reserved"),
        (document(parameters={"binary_data_output": 1}),
         "parameter 'binary_data_output' must be a boolean, got an integer"),
        (document(an_input(), an_input()), "input 'x' already exists in request"),
        (document(an_input(name=1)), "Unable to parse 'name': expected a string"),
        (document(an_input(shape=False)), "Unable to parse 'shape': expected an array"),
        (document(an_input(shape=[2.0])), SHAPE), (document(an_input(shape=["2"])), SHAPE),
        (document(an_input(shape=[True])), SHAPE), (document(an_input(shape=[-2])), SHAPE),
        (document(an_input(shape=[2**62, 4])), "causes total element count to exceed maximum"),
        (document(an_input(shape=[1] * 33)), "33 dimensions"),
        (document(an_input(datatype="fp32")), "unknown datatype 'fp32'"),
        (document(an_input(datatype=7)), "Unable to parse 'datatype': expected a string"),
        (document(an_input(parameters=[])), "Unable to parse 'parameters'"),
        (document(an_input(data=None)), FIELDS),
        (document(an_input(parameters={"binary_data_size": 8})), FIELDS),
        (document(an_input(parameters={"shared_memory_region": "r"})), FIELDS),
        (document(an_input(parameters=in_region())), FIELDS),
        (document(an_input(data=None, parameters=in_region(binary_data_size=8))), FIELDS),
        (document(an_input(data={})), "Unable to parse 'data': expected an array, got an object"),
        (document(an_input(data=1)), "Unable to parse 'data': expected an array, got an integer"),
        (document(an_input(data=[1])), "shape does not match true shape"),
        (document(an_input(data=[1, 2, 3])), "Shape does not match true shape of 'data' field"),
        (document(an_input(datatype="FP16")), "receiving FP16 data via JSON is not supported"),
        (document(outputs={}), "Unable to parse 'outputs': expected an array, got an object"),
        (document(outputs=["y"]), "Unable to parse 'outputs': expected an object, got a string"),
        (document(outputs=[{}]), "Unable to parse 'name'"),
        (document(outputs=[{"name": "y"}] * 2), "output 'y' already exists in request"),
        (document(outputs=[{"name": "y", "parameters": {"binary_data": 1}}]),
         "'binary_data' of output 'y' must be a boolean, got an integer"),
        (document(outputs=[{"name": "y", "parameters": {"classification": -1}}]),
         "'classification' of output 'y' must be a positive"),
        (document(outputs=[{"name": "y", "parameters": {"classification": None}}]),
         "'classification' of output 'y' must be a positive"),
        (document(outputs=[{"name": "y", "parameters": in_region(binary_data=True)}]),
         "output 'y': 'binary_data' can not be true with"),
        (document(outputs=[{"name": "y", "parameters": in_region(-1)}]),
         "Invalid offset for shared memory region: 'r'. Output 'y' asks for -1"),
        (document(*[an_input(name=str(n)) for n in range(MAX_TENSORS + 1)]),
         f"a request may have {MAX_TENSORS} inputs, got {MAX_TENSORS + 1}"),
        (document(outputs=[{"name": str(n)} for n in range(MAX_TENSORS + 1)]),
         f"a request may name {MAX_TENSORS} outputs, got {MAX_TENSORS + 1}"),
    ],
)  # fmt: skip
def test_requests_that_break_the_protocol(request_: Any, part: str) -> None:
    with refused(part):
        decode(request_)


def test_inputs_in_shared_memory() -> None:
    given = document(
        an_input(name="here"),
        an_input(data=None, parameters=in_region(16)),
        an_input(name="s", data=None, datatype="BYTES", shape=[1, 2], parameters=in_region(0, 99)),
        binary(8, name="raw"),
        parameters={"priority": 2},
    )
    request, form = decode(given, bytes(8))
    assert request.options.shared is not None
    assert (request.id, request.options.priority, request.options.classes) == ("", 2, {})
    assert list(request.inputs) == ["here", "raw"]
    assert request.options.shared.inputs == {
        "x": SharedInput(Datatype.FP32, (2,), RegionSlice("r", 16, 8)),
        "s": SharedInput(Datatype.BYTES, (1, 2), RegionSlice("r", 0, 99)),
    }
    assert request.options.shared.outputs == {}
    assert form == ResponseForm()
    shared = an_input(data=None, parameters=in_region())
    for pair in ((shared, shared), (shared, an_input()), (an_input(), shared)):
        with refused("input 'x' already exists in request"):
            decode(document(*pair))


def test_outputs_in_shared_memory() -> None:
    wanted = [
        {"name": "y", "parameters": in_region(None, 0)},
        {"name": "z", "parameters": {"classification": 3}},
        {"name": "b", "parameters": {"binary_data": True}},
    ]
    request, form = decode(document(outputs=wanted, parameters={"mine": 1}))
    assert request.options.shared is not None
    assert list(request.inputs) == ["x"]
    assert request.outputs == ("y", "z", "b")
    assert request.options.classes == {"z": 3}
    assert request.parameters == {"mine": 1}
    assert request.options.shared.outputs == {"y": RegionSlice("r", 0, 0)}
    assert form == ResponseForm(False, {"y": False, "z": False, "b": True}, frozenset("y"))


def test_inputs_and_outputs_in_shared_memory() -> None:
    given = an_input(data=None, parameters=in_region())
    request, _ = decode(document(given, outputs=[{"name": "y", "parameters": in_region(8)}]))
    assert request.options.shared is not None
    assert request.inputs == {}
    assert list(request.options.shared.inputs) == ["x"]
    assert list(request.options.shared.outputs) == ["y"]
    request, form = decode(document(given, outputs=[{"name": "y"}]))
    assert request.options.shared is not None
    assert (request.outputs, request.options.classes) == (("y",), {})
    assert type(form) is ResponseForm


def test_classification() -> None:
    off = {"name": "z", "parameters": {"classification": 0}}
    wanted = [{"name": "y", "parameters": {"classification": 3}}, off]
    request, _ = decode(document(outputs=wanted))
    assert request.outputs == ("y", "z")
    assert request.options.classes == {"y": 3}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"inputs": [}', b'{"inputs": []} {}', b"\xff", b"[" * 100_000,
        b'{"a":' * 100_000, b"[" * 100_000 + b"NaN" + b"]" * 100_000, b'{"inputs": [NaN}',
        b'{"inputs": [xInf]}', b'{"inputs": [], "NaN": -}', b'{"id": "NaN\xff", "inputs": []}',
        b'\xef\xbb\xbf{"inputs": [NaN',
        b'{"inputs": NaN "' + b'\\"' * 100_000,  # an unterminated string, full of quotes
        b'{"inputs": NaN, "a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:20],
)  # fmt: skip
def test_bodies_that_are_not_json(body: bytes) -> None:
    with refused(NO_JSON):
        decode_infer("m", "", body, None)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("NaN, 1", [NAN, 1.0]), ("Infinity, -Infinity", [float("inf"), -float("inf")]),
        ("Inf,-Inf", [float("inf"), -float("inf")]), ("[Inf], [2.5e0]", [float("inf"), 2.5]),
    ],
)  # fmt: skip
def test_nan_and_infinity(text: str, values: list[float]) -> None:
    for name in ("x", "NaN Inf", '\\"Inf', "\\\\"):
        item = f'{{"name": "{name}", "shape": [2], "datatype": "FP32", "data": [{text}]}}'
        body = f'{{"id": "Inf", "inputs": [{item}]}}'
        request, _ = decode_infer("m", "", body.encode(), None)
        assert request.id == "Inf"
        found = request.inputs[json.loads(f'"{name}"')].array
        assert np.array_equal(found, values, equal_nan=True)


def test_half_surrogates_are_not_json() -> None:
    """Also next to a NaN, which is not JSON either."""
    nan = an_input(data=[NAN, 1])
    for wrong in (
        document(an_input(name="\ud800")),
        document(an_input(datatype="BYTES", shape=[1], data=["\ud800"])),
        document(id="\udfff"),
        document(parameters={"\ud800": 1}),
        document(nan, id="\ud800"),
        document(nan, an_input(name="\ud800")),
        document(nan, parameters={"mine": "\ud800"}),
        document(nan, an_input(datatype="BYTES", data=["\ud800", ""])),
    ):
        with refused(NO_JSON):
            decode(wrong)


def test_huge_integers_are_doubles_with_and_without_a_nan() -> None:
    for data in ([0, 1], [NAN, 1]):
        given = document(an_input(data=data), parameters={"mine": 10**30})
        assert decode(given)[0].parameters == {"mine": 1e30}


# Requests with binary tensors


def test_binary_and_json_inputs_mix() -> None:
    given = document(
        binary(8),
        an_input(name="j"),
        binary(7, name="s", datatype="BYTES", shape=[1]),
        binary(0, name="e", datatype="INT64", shape=[0, 3]),
        binary(2, name="h", datatype="FP16", shape=[]),
    )
    tail = np.array([3, 4], "<f4").tobytes() + b"\x03\0\0\0abc" + np.array(0.5, "<f2").tobytes()
    request, form = decode(given, tail)
    values = {name: tensor.array.tolist() for name, tensor in request.inputs.items()}
    assert values == {"x": [3.0, 4.0], "j": [1.0, 2.0], "s": [b"abc"], "e": [], "h": 0.5}
    assert form == ResponseForm()


def test_binary_tensors_are_views_into_the_body() -> None:
    head = orjson.dumps(document(binary(8)))
    body = head + np.array([3, 4], "<f4").tobytes()
    array = decode_infer("m", "", body, len(head))[0].inputs["x"].array
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))
    assert not np.asarray(array).flags.writeable


SIZE = "'binary_data_size' of input 'x' must be a non-negative"


@pytest.mark.parametrize(
    ("item", "size", "part"),
    [
        (binary(8), 7, "unexpected size for input 'x', expecting 1 additional"),
        (binary(8), 9, "unexpected additional input data for model 'm'"),
        (an_input(), 1, "unexpected additional input data for model 'm'"),
        (binary(7), 7, "Expected 8, got 7"),
        (binary(8, shape=[3]), 8, "[request id: seven] input byte size mismatch for input 'x' for"
         " model 'm'. Expected 12, got 8"),
        (binary(8, shape=[2**40]), 8, "Expected 4398046511104, got 8"),
        (binary(8, shape=[2**32, 2**32]), 8, "exceed maximum size of"),
        (binary(2**70), 8, SIZE), (binary(-8), 8, SIZE), (binary("8"), 8, SIZE),
        (binary(8.0), 8, SIZE), (binary(True), 1, SIZE),
        (binary(2**63), 8, "unexpected size for input 'x'"),
        (binary(8, datatype="BYTES", shape=[3]), 8, "[request id: seven] expected 3 string"
         " elements for inference input 'x' for model 'm', got 2"),
        (binary(8, datatype="BYTES", shape=[1]), 8, "unexpected number of string elements 2"),
    ],
)  # fmt: skip
def test_binary_data_that_does_not_fit(item: Json, size: int, part: str) -> None:
    with memory_within(200_000), refused(part):
        decode(document(item, id="seven"), bytes(size))


def test_binary_data_without_the_header() -> None:
    with refused("expecting 8 additional bytes"):
        decode(document(binary(8)))


def test_json_size() -> None:
    for header, size in ((None, None), ("0", 0), ("7", 7), ("10", 10), ("007", 7)):
        assert parse_json_size(header, 10) == size
    for header in ("11", "-1"):
        with refused(f"inference header size should be in range (0, 10), got: {header}"):
            parse_json_size(header, 10)
    for header in ("", "ten", "1.0", "0x7", "1_0", "+7", "7, 7", "\u0667", "9" * 5000):
        with refused("Unable to parse Inference-Header-Content-Length") as caught:
            parse_json_size(header, 10)
        assert len(str(caught.value)) < 200


# Raw requests: the body is the only input


def model(*specs: TensorSpec, rows: int = 0) -> Signature:
    return Signature("m", rows, specs, ())


def spec(*dims: int, datatype: Datatype = Datatype.FP32) -> TensorSpec:
    return TensorSpec("x", datatype, dims)


BF16, BYTES = Datatype.BF16, Datatype.BYTES


@pytest.mark.parametrize(
    ("signature", "body", "shape"),
    [
        (model(spec(2)), bytes(8), (2,)), (model(spec()), bytes(4), ()),
        (model(spec(2), rows=8), bytes(8), (1, 2)),  # one row
        (model(spec(-1)), bytes(12), (3,)),  # found from the number of bytes
        (model(spec(-1)), b"", (0,)), (model(spec(2, -1, 3), rows=8), bytes(48), (1, 2, 2, 3)),
        (model(spec(-1, datatype=BF16)), bytes(6), (3,)),
        (model(spec(1, datatype=BYTES)), b"\0any", (1,)),
        (model(spec(1, datatype=BYTES), rows=8), b"", (1, 1)),
        (model(spec(datatype=BYTES)), b"any", ()),
    ],
)  # fmt: skip
def test_raw(signature: Signature, body: bytes, shape: tuple[int, ...]) -> None:
    request, form = decode_raw(signature, "m", "3", body)
    tensor = request.inputs["x"]
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "")
    assert request.nbytes == len(body)
    assert tensor.datatype is signature.inputs[0].datatype
    assert tensor.array.shape == shape
    if tensor.datatype is Datatype.BYTES:
        assert tensor.array.ravel().tolist() == [body]  # its length is added by the server
    else:
        assert tensor.array.tobytes() == body
    assert form == ResponseForm(binary=True)
    assert signature.check(request) == 1


ONE_INPUT = "Raw request must only have 1 input (found 1) to be deduced but got "


@pytest.mark.parametrize(
    ("signature", "size", "part"),
    [
        (model(spec(1), TensorSpec("b", Datatype.FP32, (1,))), 8,
         ONE_INPUT + "2 inputs in 'm' model configuration"),
        (model(), 0, ONE_INPUT + "0"),
        (model(spec(-1, -1)), 8, "deduced because there are more than one variable-sized dim"),
        (model(spec(-1, datatype=BYTES)), 3,
         "For BYTE datatype raw input 'x', the model must have input shape [1], not [-1]"),
        (model(spec(2, datatype=BYTES)), 3, "the model must have input shape [1]"),
        (model(spec(2)), 7, "Expected 8, got 7"), (model(spec(-1, 3)), 13, "Expected 12, got 13"),
        (model(spec(2**40, 2**40)), 7, "exceed maximum size of"),
        (model(spec(2**40, -1)), 7, "Expected 0, got 7"),
    ],
)  # fmt: skip
def test_raw_bodies_that_do_not_fit(signature: Signature, size: int, part: str) -> None:
    with refused(part):
        decode_raw(signature, "m", "", bytes(size))


# Responses


def written(form: ResponseForm, *outputs: Tensor, **members: Any) -> bytes:
    """The complete body of an answer."""
    return b"".join(form.encode(response(*outputs, **members))[0])


def test_a_json_response() -> None:
    outputs = fp32(1, 0.5), Tensor("b", Datatype.BOOL, np.array([[True], [False]]))
    parameters = {"final": True, "score": 0.5, "n": 2**63, "s": "é"}
    assert written(ResponseForm(), *outputs, id="42", parameters=parameters).decode() == (
        '{"id":"42","model_name":"m","model_version":"1",'
        '"parameters":{"final":true,"score":0.5,"n":9223372036854775808,"s":"é"},'
        '"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[1.0,0.5]},'
        '{"name":"b","datatype":"BOOL","shape":[2,1],"data":[true,false]}]}'
    )
    assert written(ResponseForm()) == b'{"model_name":"m","model_version":"1","outputs":[]}'
    assert written(ResponseForm(), fp32(NAN, 1)).endswith(b'"data":[NaN,1.0]}]}')
    assert ResponseForm().encode(response(*outputs))[1] is None


def test_a_binary_response() -> None:
    text = Tensor("s", Datatype.BYTES, object_array([b"\xff", b""], [2]))
    outputs = [fp32(1, 2), fp32(name="empty"), fp32(3, name="json"), text]
    form = ResponseForm(binary=True, named={"json": False})
    buffers, json_size = form.encode(response(*outputs))
    assert json_size == len(buffers[0])
    assert buffers[1:] == [np.array([1, 2], "<f4").tobytes(), b"\1\0\0\0\xff\0\0\0\0"]

    def sized(name: str, datatype: str, shape: list[int], nbytes: int) -> Json:
        parameters = {"binary_data_size": nbytes}
        return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}

    assert orjson.loads(bytes(buffers[0]))["outputs"] == [
        sized("y", "FP32", [2], 8),
        sized("empty", "FP32", [0], 0),
        {"name": "json", "datatype": "FP32", "shape": [1], "data": [3.0]},
        sized("s", "BYTES", [2], 9),
    ]


def test_binary_and_json_outputs() -> None:
    for form, is_binary in (
        (ResponseForm(), False),
        (ResponseForm(binary=True), True),
        (ResponseForm(named={"y": True}), True),
        (ResponseForm(binary=True, named={"y": False}), False),  # as the output itself asked
    ):
        assert (form.encode(response(fp32(1)))[1] is not None) is is_binary
    # Empty outputs alone need no header.
    buffers, json_size = ResponseForm(binary=True).encode(response(fp32()))
    assert json_size is None
    assert b'"binary_data_size":0' in b"".join(buffers)


@pytest.mark.parametrize("binary", [False, True])
def test_empty_outputs(binary: bool) -> None:
    shared = frozenset(("there", "s"))
    form = ResponseForm(named={"y": binary, "there": False, "s": False}, shared=shared)
    there = elsewhere("there", Datatype.FP16, (2, 3))
    outputs = [there, fp32(1, 2), elsewhere("s", Datatype.BYTES, (1,))]
    buffers, json_size = form.encode(response(*outputs))
    assert json_size == (len(buffers[0]) if binary else None)
    assert len(buffers) == 1 + binary
    first, *others = orjson.loads(bytes(buffers[0]))["outputs"]
    assert first["name"] == "y"
    assert others == [
        {"name": "there", "datatype": "FP16", "shape": [2, 3]},
        {"name": "s", "datatype": "BYTES", "shape": [1]},
    ]
    buffers, json_size = form.encode(response(there))
    assert json_size is None
    assert orjson.loads(bytes(buffers[0]))["outputs"] == others[:1]
    assert orjson.loads(written(form))["outputs"] == []


def test_outputs_without_a_json_form() -> None:
    for tensor in (
        Tensor("y", Datatype.FP16, np.zeros(1, np.float16)),
        Tensor("y", Datatype.BF16, np.zeros(1, NUMPY[Datatype.BF16])),
        Tensor("y", Datatype.BYTES, object_array([b"\xff"], [1])),
    ):
        with refused("use the binary data format for"):
            ResponseForm().encode(response(tensor))
        assert ResponseForm(binary=True).encode(response(tensor))[1] is not None


def test_error_body() -> None:
    assert error_body("no model 'é'") == '{"error":"no model \'é\'"}'.encode()
    assert error_body('"\n') == b'{"error":"\\"\\n"}'
    assert error_body("\ud800") == b'{"error":"?"}'  # as in names of files that are not UTF-8


# Properties of any body


def as_request(buffers: Sequence[bytes | memoryview]) -> tuple[bytes, int]:
    """A request whose inputs are the response's outputs."""
    head = json.dumps({"inputs": json.loads(bytes(buffers[0]))["outputs"]}).encode()
    return b"".join([head, *buffers[1:]]), len(head)


@PROPERTY
@given(tensors(IN_JSON, utf8=True), tensors(IN_JSON, utf8=True, name="y"))
def test_json_round_trip(one: Tensor, other: Tensor) -> None:
    buffers, json_size = ResponseForm().encode(response(one, other))
    assert json_size is None
    request, _ = decode_infer("m", "", as_request(buffers)[0], None)
    assert list(request.inputs) == ["x", "y"]
    assert_same(request.inputs["x"], one, bits=False)
    assert_same(request.inputs["y"], other, bits=False)


@PROPERTY
@given(tensors(), tensors(name="y"))
def test_binary_round_trip(one: Tensor, other: Tensor) -> None:
    buffers, _ = ResponseForm(binary=True).encode(response(one, other))
    request, _ = decode_infer("m", "", *as_request(buffers))
    assert list(request.inputs) == ["x", "y"]
    assert_same(request.inputs["x"], one)
    assert_same(request.inputs["y"], other)


def assert_served_or_refused(body: bytes, json_size: int | None) -> None:
    """Assert a client error, or a request whose inputs can be encoded as a response."""
    result = outcome(decode_infer, "m", "", body, json_size)
    if isinstance(result, ServerError):
        assert error_body(str(result))
        return
    request, _ = result
    echo = response(*request.inputs.values(), id=request.id, parameters=request.parameters)
    assert ResponseForm(binary=True).encode(echo)
    assert isinstance(outcome(ResponseForm().encode, echo), tuple | InvalidRequest)


@PROPERTY
@given(tensors(IN_JSON, utf8=True), st.data())
def test_a_damaged_json_body(tensor: Tensor, data: st.DataObject) -> None:
    body, _ = as_request(ResponseForm().encode(response(tensor))[0])
    assert_served_or_refused(data.draw(mutations(body)), None)


@PROPERTY
@given(tensors(), st.data())
def test_a_damaged_binary_body(tensor: Tensor, data: st.DataObject) -> None:
    buffers, _ = ResponseForm(binary=True).encode(response(tensor))
    body = data.draw(mutations(as_request(buffers)[0]))
    assert_served_or_refused(body, data.draw(st.integers(0, len(body))))
    assert_served_or_refused(body, min(len(body), as_request(buffers)[1]))


@pytest.mark.parametrize("tensor", [fp32(1, 2), fp32(NAN), fp32()])
@pytest.mark.parametrize("form", [ResponseForm(), ResponseForm(binary=True)])
def test_a_body_is_refused_wherever_it_was_cut(tensor: Tensor, form: ResponseForm) -> None:
    body, json_size = as_request(form.encode(response(tensor))[0])
    for size in range(len(body)):
        with pytest.raises(InvalidRequest):
            decode_infer("m", "", body[:size], min(size, json_size))


@PROPERTY
@given(st.binary(), st.none() | st.integers(0, 10))
def test_random_bodies(body: bytes, json_size: int | None) -> None:
    assert_served_or_refused(body, json_size)


# Almost valid documents: every member may be of a wrong type or missing.
scalars = st.none() | st.booleans() | st.integers() | st.floats() | any_text
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=2),
    max_leaves=4,
)
sizes = st.integers(-1, 8) | st.sampled_from([2**31, 2**63, 2**64, 10**40]) | scalars
parameters = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("binary_data_size", "shared_memory_offset", "shared_memory_byte_size"), sizes
    )
    | dict.fromkeys(("binary_data", "binary_data_output"), st.booleans() | scalars)
    | dict.fromkeys(("sequence_id", "priority"), st.integers() | anything)
    | {"classification": st.integers(0, 1) | anything, "mine": anything}
    | {"shared_memory_region": st.just("r") | anything},
)
inputs = st.fixed_dictionaries(
    {"name": st.sampled_from("ab") | anything, "shape": st.lists(sizes, max_size=3) | anything},
    optional={
        "datatype": st.sampled_from(Datatype) | anything,
        "parameters": parameters | anything,
        "data": st.lists(scalars, max_size=4) | anything,
    },
)
outputs = st.fixed_dictionaries(
    {"name": st.sampled_from("ab") | anything}, optional={"parameters": parameters | anything}
)
documents = st.fixed_dictionaries(
    {"inputs": st.lists(inputs | anything, max_size=3)},
    optional={
        "id": any_text | anything,
        "parameters": parameters | anything,
        "outputs": st.lists(outputs | anything, max_size=3),
    },
)


@PROPERTY
@given(documents | anything, st.binary(max_size=16))
def test_almost_valid_documents(document: Any, tail: bytes) -> None:
    head = json.dumps(document).encode()
    assert_served_or_refused(head + tail, len(head))
    assert_served_or_refused(head, None)


@PROPERTY
@given(
    st.builds(
        TensorSpec, st.just("x"), st.sampled_from(Datatype), st.lists(st.integers(-1, 3)).map(tuple)
    ),
    st.integers(0, 2),
    st.binary(),
)
def test_raw_bodies(spec: TensorSpec, rows: int, body: bytes) -> None:
    result = outcome(decode_raw, model(spec, rows=rows), "m", "", body)
    assert isinstance(result, tuple | InvalidRequest)


# Invalid shapes


@pytest.mark.parametrize("place", ["data", "binary", "raw", "shared"])
@pytest.mark.parametrize(
    "shape",
    [
        ["AAAAAAAA", 250_000_000], [250_000_000, "AAAAAAAA"], [[0], 250_000_000],
        [[[1, 2]], 100_000, 1_000], [{}, 1], [None], [True], [1.0], [-1], [2, -1], [10**19],
        [2**62, 0], [1] * 33, ["A" * 64] * 10_000,
    ],
    ids=lambda shape: str(shape)[:20],
)  # fmt: skip
def test_a_shape_is_validated_before_it_is_multiplied(shape: Any, place: str) -> None:
    """Multiplying by a string or an array would allocate any amount of memory."""
    for data, long in product(([1], []), (False, True)):
        parameters: Json | None = None
        if place == "binary":
            parameters = {"binary_data_size": 4 * len(data)}
        elif place == "shared":
            parameters = in_region(size=4 * len(data))
        given = None if parameters else data
        request = document(an_input(shape=shape, data=given, parameters=parameters))
        if long:
            request["parameters"] = {"flag": True}  # the quick check is for texts without booleans
        tail = bytes(4 * len(data)) if place == "binary" else b"" if place == "raw" else None
        with memory_within(16 << 20), pytest.raises(InvalidRequest) as caught:
            decode(request, tail)
        assert len(str(caught.value)) < 1000


# Long data


def long_body(datatype: str, data: str, count: int) -> bytes:
    """A request whose JSON is too long to be parsed at once."""
    filling = json.dumps("f" * (1 << 20))
    text = json.dumps(an_input(datatype=datatype, shape=[count], data=None))[:-1]
    return f'{{"filling":{filling},"inputs":[{text},"data":[{data}]}}]}}'.encode()


def decode_long(body: bytes, charge: Any = uncharged) -> Tensor:
    request, _ = decode_infer("m", "", body, None, None, charge)
    return request.inputs["x"]


@pytest.mark.parametrize(
    ("datatype", "element", "value"),
    [
        ("FP32", "0.5", 0.5), ("FP64", "1e3", 1000.0), ("FP32", "[1]", 1.0), ("INT64", "-7", -7),
        ("UINT64", str(2**64 - 1), 2**64 - 1), ("BOOL", "true", True),
        ("BYTES", r'"a,\"]\u00e9"', 'a,"]é'.encode()), ("FP32", " 2 ", 2.0),
        ("FP32", "-Infinity", -np.inf),
    ],
)  # fmt: skip
def test_long_data(datatype: str, element: str, value: object) -> None:
    count = 100_000
    found = decode_long(long_body(datatype, ",".join([element] * count), count))
    assert found.array.dtype == NUMPY[Datatype(datatype)]
    assert found.array.shape == (count,)
    assert set(found.array.tolist()) == {value}


@pytest.mark.parametrize(
    ("datatype", "last", "count", "text"),
    [
        ("FP32", "null", 0, "takes numbers, but its data holds null"),
        ("FP32", "true", 0, "takes numbers, but its data holds a boolean"),
        ("INT32", "1.5", 0, "takes integers, but its data holds a number with a fraction"),
        ("INT8", "128", 0, "out of the range of INT8"),
        ("FP32", "[1]", 0, "elements and arrays are mixed at depth 1"),
        ("FP32", "1,", 0, NO_JSON), ("FP32", ",1", 0, NO_JSON), ("FP32", "1x", 0, NO_JSON),
        ("FP32", "1", 1, "Failed to parse 'data' field: .* got 100000"),
        ("FP32", "1", -1, "Unable to parse 'data': .* got at least 100000"),
        ("FP32", "1", 2**40, "Failed to parse 'data' field: .* got 100000"),
        ("FP16", "1", 0, "receiving FP16 data via JSON is not supported"),
    ],
)  # fmt: skip
def test_wrong_long_data(datatype: str, last: str, count: int, text: str) -> None:
    """The error is at the end, after valid pieces."""
    data = ",".join(["1"] * 99_999 + [last])
    with pytest.raises(InvalidRequest, match=text):
        decode_long(long_body(datatype, data, 100_000 + count))


def test_long_data_is_charged_before_it_is_decoded() -> None:
    charged: list[int] = []
    count = 1_000_000
    body = long_body("FP64", ",".join(["0"] * count), count)
    with memory_within(len(body) + 8 * count + (8 << 20)):
        decode_long(body, charged.append)
    assert 1 << 20 < charged[0] < 2 << 20  # what is beside the array
    assert charged[1] == 8 * count
    assert not any(charged[2:])

    def refuse(nbytes: int) -> None:
        raise Overloaded("as asked")

    with pytest.raises(Overloaded):
        decode_long(body, refuse)


def test_long_data_is_limited() -> None:
    count = MAX_DECODED // 8 + 1
    with refused(f"at most {MAX_DECODED} are allowed"):
        decode_long(long_body("FP64", ",".join(["0"] * count), count))


def test_long_data_is_checked_against_the_signature_first() -> None:
    body = long_body("FP32", ",".join(["nonsense"] * 1000), 1000)
    with refused("data-type is 'FP32'"):
        decode_infer("m", "", body, None, model(spec(-1, datatype=BYTES)))


def test_bodies_that_take_long_to_decode() -> None:
    for json_size, head, long in (
        (None, b"", True),
        ("70000", b"", True),
        ("40", b'{"inputs":[{"datatype":"FP32"}]}        ', False),
        ("40", b'{"inputs":[{"datatype":"BYTES"}]}       ', True),
        ("40", b'{"inputs":[{"datatype":"BYTE\\u0053"}]}', True),
        ("0", b"", False),
    ):
        assert takes_long(head + bytes(100_000), json_size, None) is long
    for datatype, long in ((Datatype.BYTES, True), (Datatype.FP32, False)):
        assert takes_long(bytes(100_000), "0", model(spec(-1, datatype=datatype))) is long


@pytest.mark.parametrize("datatype", [d for d in IN_JSON if d is not Datatype.BOOL])
def test_long_answers(datatype: Datatype) -> None:
    """Long answers are written in pieces, each with a start and an end."""
    count = 200_001
    if datatype is Datatype.BYTES:
        given = object_array([b"a,]"] * count, (count,))
    else:
        given = np.arange(count).astype(NUMPY[datatype])
    data = orjson.loads(written(ResponseForm(), Tensor("y", datatype, given)))["outputs"][0]["data"]
    assert data == [v.decode() if isinstance(v, bytes) else v for v in given.tolist()]
