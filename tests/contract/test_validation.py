"""Requests that do not fit the protocol or the model: refused alike over every transport."""

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest
from headrace.protocol.pb.grpc_service_pb2 import ModelStatistics
from tests.support.client import Client, Input, Inputs, Parameter, strings

_ROW = np.zeros((1, 16), np.int32)
_SIMPLE = {"INPUT0": _ROW, "INPUT1": _ROW}


def _same(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Inputs:
    return {"INPUT0": array, "INPUT1": array}


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            "simple",
            {"INPUT0": _ROW},
            r"expected 2 inputs but got 1 inputs for model 'simple'\. Got input\(s\) \['INPUT0'\],"
            r" but missing required input\(s\) \['INPUT1'\]\. Please provide all required",
        ),
        (
            "simple",
            {},
            r"expected 2 inputs but got 0 inputs for model 'simple'\. Got input\(s\) \[\], but"
            r" missing required input\(s\) \['INPUT0','INPUT1'\]",
        ),
        ("simple", _SIMPLE | {"INPUT2": _ROW}, "expected 2 inputs but got 3 inputs for model"),
        (
            "simple",
            {"INPUT0": _ROW, "WRONG": _ROW},
            "unexpected inference input 'WRONG' for model 'simple'",
        ),
        (
            "optional_bias",
            {},
            "expected number of inputs between 1 and 2 but got 0 inputs for model 'optional_bias'",
        ),
        (
            "optional_bias",
            {"BIAS": np.zeros(1, np.float32)},
            r"missing required input\(s\) \['INPUT0'\]",
        ),
        (
            "simple",
            {"INPUT0": _ROW, "INPUT1": _ROW.astype(np.int64)},
            "inference input 'INPUT1' data-type is 'INT64', but model 'simple' expects 'INT32'",
        ),
        (
            "simple",
            _same(np.zeros((1, 8), np.int32)),
            r"unexpected shape for input 'INPUT0' for model 'simple'\. Expected \[-1,16\], got"
            r" \[1,8\]\. NOTE: Setting a non-zero max_batch_size",
        ),
        (
            "simple",
            _same(np.zeros(16, np.int32)),
            r"unexpected shape for input 'INPUT0' .* Expected \[-1,16\], got \[16\]\. NOTE",
        ),
        (
            "unbatched",
            _same(np.zeros((3, 3), np.float32)),
            r"unexpected shape for input 'INPUT0' .* Expected \[2,3\], got \[3,3\]\.$",
        ),
        (
            "simple",
            {"INPUT0": _ROW, "INPUT1": np.zeros((2, 16), np.int32)},
            "input 'INPUT1' batch size does not match other inputs for 'simple'",
        ),
        (
            "simple",
            _same(np.zeros((9, 16), np.int32)),
            "inference request batch-size must be <= 8 for 'simple'",
        ),
        (
            "simple",
            _same(np.zeros((), np.int32)),
            "input 'INPUT0' has no shape but model requires batch dimension for 'simple'",
        ),
        (
            "simple",
            [Input("INPUT0", _ROW), Input("INPUT1", _ROW), Input("INPUT0", _ROW)],
            "input 'INPUT0' already exists in request",
        ),
        (
            "simple",
            [Input("INPUT0", _ROW), Input("INPUT1", _ROW, datatype="INT33")],
            "input 'INPUT1' has the unknown datatype 'INT33', expected one of",
        ),
        (
            "simple",
            [Input("INPUT0", _ROW), Input("INPUT1", _ROW, shape=[-1, 16])],
            "'INPUT1': (every dimension must be given and not negative|expected non-negative)",
        ),
        (
            "simple",
            [Input("INPUT0", _ROW), Input("INPUT1", _ROW, shape=[2**40, 2**40])],
            r"input 'INPUT1' causes total element count to exceed maximum size of",
        ),
        (
            "simple",
            [Input("INPUT0", _ROW), Input("INPUT1", _ROW, shape=[2**31, 2**31])],
            "byte size overflow for input 'INPUT1'",
        ),
        (
            "simple",
            [Input("INPUT0", _ROW), Input("INPUT1", _ROW, shape=[1] * 33)],
            "input 'INPUT1' has 33 dimensions, at most 32 are allowed",
        ),
    ],
)
def test_inputs_that_do_not_fit(client: Client, model: str, inputs: Inputs, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client.infer(model, inputs)


def test_a_scalar_model_takes_no_vector(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"Expected \[\], got \[1\]"):
        client.infer("scalar", {"INPUT0": np.zeros(1)})


@pytest.mark.parametrize("count", [0, 15, 17])
def test_wrong_number_of_elements(client: Client, count: int) -> None:
    inputs = [Input("INPUT0", _ROW), Input("INPUT1", np.zeros(count, np.int32), shape=[1, 16])]
    with pytest.raises(InvalidRequest) as refused:
        client.infer("simple", inputs)
    text = str(refused.value)
    assert "'INPUT1'" in text
    assert "input byte size mismatch" in text or "does not match true shape" in text


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_strings(client: Client, count: int) -> None:
    inputs = [Input("INPUT0", strings([b"abcdefgh"] * count), shape=[1, 2])]
    with pytest.raises(InvalidRequest, match="'INPUT0'"):
        client.infer("identity_BYTES", inputs)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["WRONG"], "unexpected inference output 'WRONG' for model 'simple'"),
        (["OUTPUT0", "OUTPUT0"], "output 'OUTPUT0' already exists in request"),
    ],
)
def test_outputs_that_do_not_fit(client: Client, outputs: Sequence[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client.infer("simple", _SIMPLE, outputs=outputs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", True),
        ("priority", -1),
        ("priority", 1.5),
        ("timeout", "1"),
        ("timeout", -1),
        ("timeout", 0.5),
        ("sequence_id", 1.5),
        ("sequence_id", True),
        ("sequence_start", 1),
        ("sequence_end", "true"),
    ],
)
def test_reserved_parameters_have_types(client: Client, name: str, value: Parameter) -> None:
    with pytest.raises(
        InvalidRequest, match=f"invalid value type for '{name}' parameter, expected"
    ):
        client.infer("simple", _SIMPLE, parameters={name: value})


def test_reserved_prefix(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="parameter keys starting with 'triton_' are reserved"):
        client.infer("simple", _SIMPLE, parameters={"triton_anything": 1})


@pytest.mark.parametrize(("id", "shown"), [("", "<id_unknown>"), ("call 7", "call 7")])
def test_refusals_name_the_request(client: Client, id: str, shown: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^\[request id: {shown}\] expected 2 inputs"):
        client.infer("simple", {"INPUT0": _ROW}, id=id)


def test_strings_that_are_not_utf8(client: Client) -> None:
    raw = [Input("INPUT0", strings([b"\xff\xfe"], [1, 1]))]
    if not client.carries_bytes:
        return  # a JSON string is text; what JSON says about broken text is in test_http_json.py
    with pytest.raises(InvalidRequest, match="input 'INPUT0' holds an element that is not UTF-8"):
        client.infer("identity_BYTES", raw)


def test_refusals_are_not_counted(client: Client) -> None:
    """Validation comes before admission to the model's queue, and so before its statistics."""

    def counters() -> ModelStatistics:
        [model] = client.statistics("simple")
        return model

    before = counters()
    for inputs in ({}, {"INPUT0": _ROW, "WRONG": _ROW}, _same(np.zeros((9, 16), np.int32))):
        with pytest.raises(InvalidRequest):
            client.infer("simple", inputs)
    assert counters() == before
