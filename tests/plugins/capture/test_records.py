"""Documents of captured calls, and what is read back from them."""

from typing import Any

import numpy as np
import orjson
import pytest

from headrace.core.bytes_array import bytes_array
from headrace.core.datatypes import NUMPY, Datatype
from headrace.plugins.capture.records import (
    OMITTED,
    REDACTED,
    CapturedCall,
    CapturedTensor,
    document_of,
    json_of,
    request_of,
)


def call(*tensors: CapturedTensor, **more: Any) -> CapturedCall:
    began = 1_764_300_000_125_000_000
    return CapturedCall("m", "2", "an id", "http", began, "0a", {"user": 7}, [*tensors], **more)


def tensor(name: str, datatype: Datatype, array: Any) -> CapturedTensor:
    return CapturedTensor(name, datatype, array.shape, array)


def document(captured: CapturedCall) -> dict[str, Any]:
    found = orjson.loads(json_of(document_of(captured)))
    assert isinstance(found, dict)
    return found


def test_a_call_takes_more_memory_than_its_payloads() -> None:
    outputs = [tensor("y", Datatype.FP32, np.zeros(1, np.float32))]
    stream = call(responses=[outputs] * 1000, nbytes=4000)
    assert stream.size() > 300_000
    told = CapturedCall("m", "2", "", "http", 0, "", {str(n): "x" * 8192 for n in range(1000)}, [])
    assert told.size() > 8_000_000
    assert call().size() < 1000


def test_a_document() -> None:
    floats = np.array([[1.5, 0.1]], np.float32)
    captured = call(
        tensor("x", Datatype.FP32, floats),
        CapturedTensor("secret", Datatype.INT8, (3,), REDACTED),
        CapturedTensor("large", Datatype.INT8, (9, 9), OMITTED),
        duration_ns=1_234_567,
        responses=[[tensor("y", Datatype.BOOL, np.array([True, False]))]],
    )
    assert document(captured) == {
        "time": "2025-11-28T03:20:00.125000Z", "model": "m", "version": "2", "id": "an id",
        "door": "http", "key": "0a", "duration_ms": 1.235, "status": 200,
        "parameters": {"user": 7},
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 0.1]},
            {"name": "secret", "datatype": "INT8", "shape": [3], "redacted": True},
            {"name": "large", "datatype": "INT8", "shape": [9, 9], "omitted": True},
        ],
        "responses": [[{"name": "y", "datatype": "BOOL", "shape": [2], "data": [True, False]}]],
    }  # fmt: skip
    read = request_of(document(captured))
    assert read.at == pytest.approx(1_764_300_000.125)
    assert read.missing == "tensor secret is redacted"
    assert read.outputs[0]["y"].array.tolist() == [True, False]
    assert (read.model, read.version, read.id, read.status) == ("m", "2", "an id", 200)


def test_an_error_has_its_status() -> None:
    found = document(call(error="no such input", status=400))
    assert (found["error"], found["status"]) == ("no such input", 400)
    assert "responses" not in found


@pytest.mark.parametrize("datatype", [one for one in Datatype if one is not Datatype.BYTES])
def test_values_of_every_datatype_come_back_exactly(datatype: Datatype) -> None:
    dtype = NUMPY[datatype]
    raw = np.random.default_rng(7).integers(0, 256, 24 * dtype.itemsize, np.uint8).tobytes()
    array = np.frombuffer(raw, dtype).reshape(2, 3, 4)
    if datatype is Datatype.BOOL:
        array = np.frombuffer(raw, np.uint8).reshape(2, 3, 4) % 2 == 1
    finite = np.where(np.isfinite(array.astype(np.float64)), array, array.dtype.type(0))
    for values in (array, finite, array[:, :, ::2], array[:0]):
        found = document(call(tensor("x", datatype, values)))
        read = request_of(found).inputs["x"].array
        assert read.shape == values.shape
        assert np.asarray(read).tobytes() == np.ascontiguousarray(values).tobytes()
    assert "data" in document(call(tensor("x", datatype, finite)))["inputs"][0]


@pytest.mark.parametrize("strings", [[b"a", "é".encode(), b""], [b"\xff\x00", b"b", b"c" * 300]])
def test_strings_come_back_exactly(strings: list[bytes]) -> None:
    objects = np.array(strings, object).reshape(1, 3)
    for array in (objects, bytes_array(strings, (1, 3))):
        found = document(call(tensor("x", Datatype.BYTES, array)))
        read = request_of(found).inputs["x"].array
        assert read.shape == (1, 3)
        assert np.asarray(read).ravel().tolist() == strings
    assert ("data" in found["inputs"][0]) == (strings[0] == b"a")


def test_redacted_parameters_are_not_sent() -> None:
    found = document(call())
    found["parameters"] = {"user": "<redacted>"}
    assert request_of(found).missing == "parameter user is redacted"


@pytest.mark.parametrize("broken", [
    {}, [], {"time": "x", "model": "m"}, {"time": "2026-01-01T00:00:00Z"},
    {"time": "2026-01-01T00:00:00Z", "model": "m", "inputs": [{"name": "x"}]},
    {"time": "2026-01-01T00:00:00Z", "model": "m", "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]},
    {"time": "2026-01-01T00:00:00Z", "model": "m", "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [2], "raw": "AAAA"}]},
])  # fmt: skip
def test_other_documents_are_refused(broken: Any) -> None:
    with pytest.raises(ValueError, match="not a captured request"):
        request_of(broken)
