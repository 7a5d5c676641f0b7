"""Inference over HTTP as JSON: what a request may say, and an answer to the letter."""

import json
from typing import Any

import pytest

from tests.support.http_socket import RawAnswer, ask
from tests.support.server_process import ServerProcess


def _post(server: ServerProcess, model: str, document: object, **headers: str) -> RawAnswer:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return ask(server.http, "POST", f"/v2/models/{model}/infer", body, **headers)


def _tensor(
    data: object, shape: object, datatype: object = "FP32", **more: object
) -> dict[str, Any]:
    return {"name": "INPUT0", "datatype": datatype, "shape": shape, "data": data, **more}


def _request(data: object, shape: object, datatype: object = "FP32", **more: object) -> object:
    return {"inputs": [_tensor(data, shape, datatype)], **more}


def _data(answer: RawAnswer) -> object:
    return answer.document["outputs"][0]["data"]


def test_an_answer_to_the_letter(server: ServerProcess) -> None:
    answer = _post(server, "row_sum", _request([1, 2], [1, 2], id="7"))
    assert answer.body == (
        b'{"id":"7","model_name":"row_sum","model_version":"1","outputs":'
        b'[{"name":"OUTPUT0","datatype":"FP32","shape":[1,1],"data":[3.0]}]}'
    )
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["inference-header-content-length"] is None
    assert answer.headers["content-encoding"] is None
    assert answer.headers["server-timing"].startswith("queue;dur=")


def test_what_is_not_there_is_left_out(server: ServerProcess) -> None:
    for more in ({}, {"id": ""}):
        document = _post(server, "row_sum", _request([1, 2], [1, 2], **more)).document
        assert list(document) == ["model_name", "model_version", "outputs"]


def test_null_stands_for_what_is_not_there(server: ServerProcess) -> None:
    nothing = {"id": None, "parameters": None, "outputs": None}
    tensor = _tensor([1], [1, 1]) | {"parameters": None}
    answer = _post(server, "identity_FP32", json.dumps({"inputs": [tensor]} | nothing).encode())
    assert _data(answer) == [1.0]
    assert "id" not in answer.document


def test_more_arrays_than_memory_should_bear(server: ServerProcess) -> None:
    body = b'{"x":[' + b"{}," * 4_000_000 + b"{}]}"
    answer = _post(server, "identity_FP32", body)
    assert answer.status == 400
    assert "at most 4000000 are allowed" in answer.error


def test_unknown_members_are_ignored(server: ServerProcess) -> None:
    document = {
        "inputs": [_tensor([1, 2], [1, 2], extra={"a": 1}, parameters={"unknown": [1]})],
        "outputs": [{"name": "OUTPUT0", "extra": 1, "parameters": {"unknown": {}}}],
        "extra": [None],
    }
    assert _data(_post(server, "row_sum", document)) == [3.0]


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4, 5, 6],
        [[1, 2, 3], [4, 5, 6]],
        [[[1], [2], [3]], [[4], [5], [6]]],
        [[1, 2], [3, 4], [5, 6]],  # not the nesting of the shape: only the elements count
    ],
)  # fmt: skip
def test_nesting_does_not_matter(server: ServerProcess, data: object) -> None:
    answer = _post(server, "identity_FP32", _request(data, [2, 3]))
    assert _data(answer) == [1, 2, 3, 4, 5, 6]  # flat whatever the rank


@pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity", b"Inf", b"-Inf"])
def test_numbers_that_json_does_not_have(server: ServerProcess, token: bytes) -> None:
    body = (
        b'{"id": "Inf or NaN", "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2],'
    )
    answer = _post(server, "identity_FP32", body + b' "data": [1.5, %s]}]}' % token)
    expected = token if token.endswith((b"y", b"N")) else token + b"inity"
    assert b'"data":[1.5,%s]' % expected in answer.body
    assert answer.document["id"] == "Inf or NaN"


@pytest.mark.parametrize(
    "text", ["0.1", "1", "1.0", "1e3", "-0.0", "16777216", "1e-45", "3.4028235e38"]
)
def test_fp32_numbers_come_back_as_short_as_possible(server: ServerProcess, text: str) -> None:
    answer = _post(server, "identity_FP32", _request([json.loads(text)], [1, 1]))
    assert _data(answer) == [float(text)]


def test_whole_numbers_beyond_a_double(server: ServerProcess) -> None:
    values = [2**63 - 1, -(2**63), 2**53 + 1]
    answer = _post(server, "identity_INT64", _request(values, [1, 3], "INT64"))
    assert _data(answer) == values
    answer = _post(server, "identity_UINT64", _request([2**64 - 1], [1, 1], "UINT64"))
    assert _data(answer) == [2**64 - 1]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b"[1,2]", b'"text"', b"null", b"1", b'{"inputs": []} x', b"\xff",
        b'{"inputs": [{"name": "\xff"}]}', b'{"inputs": NaN', b'{"a": Infx}', b"[" * 100_000,
        b'{"inputs":' + b"[" * 2000 + b"NaN" + b"]" * 2000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_object(server: ServerProcess, body: bytes) -> None:
    answer = _post(server, "row_sum", body)
    assert answer.status == 400
    assert answer.error


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "Unable to parse 'inputs': the request has no member 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs': expected an array, got an object"),
        ({"inputs": [1]}, "Unable to parse 'inputs': expected an object, got an integer"),
        ({"inputs": [{}]}, "Unable to parse 'name'"),
        ({"inputs": [_tensor([], [0, 0], 5)]}, "Unable to parse 'datatype': expected a string"),
        (_request([1], [1, 1], id=7), "Unable to parse 'id': expected a string, got an integer"),
        (_request([1], [1, 1], outputs={}), "Unable to parse 'outputs': expected an array"),
        (_request([1], [1, 1], outputs=["O"]), "Unable to parse 'outputs': expected an object"),
        (_request([1], [1, 1], parameters=[]), "Unable to parse 'parameters': expected an object"),
        (_request([1], 1), "Unable to parse 'shape'"),
        (_request([1], [-1, 1]), "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (_request([1], [1.0, 1]), "Unable to parse 'shape' of input 'INPUT0'"),
        (_request([1], [True, 1]), "Unable to parse 'shape' of input 'INPUT0'"),
        (_request([1], ["1", 1]), "Unable to parse 'shape' of input 'INPUT0'"),
        (_request([1], [2**62, 2]), "causes total element count to exceed maximum size of"),
        (_request([], [0, 2**62]), "byte size overflow for input 'INPUT0'"),
        (_request("1", [1, 1]), "Unable to parse 'data': expected an array, got a string"),
        (_request(1, [1, 1]), "Unable to parse 'data': expected an array"),
        (_request([1], [1, 2]), "Failed to parse 'data' field: shape does not match true shape"),
        (_request([1, 2, 3], [1, 2]),
         "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (_request([[1], 2], [1, 2]), "elements and arrays are mixed"),
        (_request(["1"], [1, 1]), "of datatype FP32 takes numbers, but its data holds a string"),
        (_request([True], [1, 1]), "of datatype FP32 takes numbers, but its data holds a boolean"),
        (_request([None], [1, 1]), "of datatype FP32 takes numbers, but its data holds null"),
        (_request([{}], [1, 1]), "of datatype FP32 takes numbers, but its data holds an object"),
        (_request([1e39], [1, 1]), "out of the range of FP32"),
        (_request([10**400], [1, 1]), ""),
        ({"inputs": [_tensor([1], [1, 1], data_=1) | {"parameters": {"binary_data_size": 4}}]},
         "Input must set only one of the following fields"),
        ({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}]},
         "Input must set only one of the following fields"),
        (_request([1], [1, 1], parameters={"x": [1]}), "parameter 'x' has invalid type"),
        (_request([1], [1, 1], parameters={"x": {}}), "parameter 'x' has invalid type"),
        (_request([1], [1, 1], parameters={"x": None}), "parameter 'x' has invalid type"),
        (_request([1], [1, 1], parameters={"binary_data_output": 1}),
         "'binary_data_output' must be a boolean"),
        (_request([1], [1, 1], outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]),
         "'binary_data' of output 'OUTPUT0' must be a boolean"),
    ],
)  # fmt: skip
def test_members_that_do_not_fit(server: ServerProcess, document: object, text: str) -> None:
    answer = _post(server, "identity_FP32", document)
    assert answer.status == 400
    assert text in answer.error


def _nested(depth: int) -> bytes:
    data = b"[" * depth + b"1" + b"]" * depth
    head = b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": '
    return head + data + b"}]}"


def test_depth_of_nesting(server: ServerProcess) -> None:
    assert _data(_post(server, "identity_FP32", _nested(99))) == [1.0]
    answer = _post(server, "identity_FP32", _nested(100))
    assert answer.status == 400
    assert "JSON nesting depth exceeds maximum allowed limit (100)" in answer.error


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT8", [128]), ("INT8", [-129]), ("UINT8", [256]), ("UINT8", [-1]), ("INT64", [2**63]),
        ("UINT64", [-1]), ("INT32", [1.0]), ("INT32", [1.5]), ("INT32", [True]), ("INT32", ["1"]),
        ("BOOL", [1]), ("BOOL", ["true"]), ("BYTES", [1]), ("BYTES", [None]), ("BYTES", [[1]]),
    ],
)  # fmt: skip
def test_elements_that_do_not_fit(server: ServerProcess, datatype: str, data: list[object]) -> None:
    answer = _post(server, f"identity_{datatype}", _request(data, [1, 1], datatype))
    assert answer.status == 400
    assert "'INPUT0'" in answer.error
    assert datatype in answer.error


def test_strings_that_are_no_text(server: ServerProcess) -> None:
    # Half of a surrogate pair: well-formed JSON, but no character and so no UTF-8.
    body = (
        b'{"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1],'
        b' "data": ["\\ud800"]}]}'
    )
    answer = _post(server, "identity_BYTES", body)
    assert answer.status == 400
    assert answer.error


@pytest.mark.parametrize("name", ["id", "input", "output", "parameter"])
def test_names_that_are_no_text(server: ServerProcess, name: str) -> None:
    """The slower parser, which reads NaN, takes half a surrogate pair; nothing may choke on it."""
    bad = "\\ud800"
    document = {
        "id": bad if name == "id" else "x",
        "parameters": {bad if name == "parameter" else "x": 1},
        "inputs": [
            _tensor([float("nan")], [1, 1]) | {"name": bad if name == "input" else "INPUT0"}
        ],
        "outputs": [{"name": bad if name == "output" else "OUTPUT0"}],
    }
    body = json.dumps(document).replace("\\\\ud800", "\\ud800").encode()
    answer = _post(server, "identity_FP32", body)
    assert answer.status in (200, 400)
    json.loads(answer.body)
    if answer.status == 400:
        assert answer.error != "internal error"


def test_content_type_of_the_request_does_not_matter(server: ServerProcess) -> None:
    for content_type in ("application/json", "text/plain", "application/octet-stream"):
        answer = _post(server, "row_sum", _request([1, 2], [1, 2]), Content_Type=content_type)
        assert _data(answer) == [3.0]


def test_sequence_parameters_are_accepted(server: ServerProcess) -> None:
    for sequence in (7, 2**64 - 1, "seven"):
        parameters = {"sequence_id": sequence, "sequence_start": True, "sequence_end": True}
        answer = _post(server, "row_sum", _request([1, 2], [1, 2], parameters=parameters))
        assert _data(answer) == [3.0]


def test_no_classes(server: ServerProcess) -> None:
    """Zero asks for the tensor itself."""
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": 0}}]
    assert _data(_post(server, "row_sum", _request([1, 2], [1, 2], outputs=outputs))) == [3.0]


@pytest.mark.parametrize(
    "shape", [["AAAAAAAA", 250_000_000], [[0], 250_000_000], [{}, 1], [None], [1] * 1000], ids=repr
)
@pytest.mark.parametrize("sized", [False, True], ids=["json", "binary"])
def test_a_shape_that_is_none(server: ServerProcess, shape: object, sized: bool) -> None:
    body = json.dumps(_request([1], shape)).encode()
    headers = {"inference-header-content-length": str(len(body))} if sized else {}
    answer = _post(server, "row_sum", body, **headers)
    assert answer.status == 400
    assert "'shape' of input 'INPUT0'" in answer.error or "dimensions" in answer.error
    assert len(answer.body) < 1000
