"""What models import as `triton_python_backend_utils`, by itself."""

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.workers import triton_api as pb


def test_a_tensor() -> None:
    tensor = pb.Tensor("x", np.zeros((2, 3), np.float16))
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("x", [2, 3], 10)
    assert tensor.is_cpu()
    assert pb.Tensor("s", np.array([b"a"], object)).triton_dtype() == 13
    with pytest.raises(pb.TritonModelException, match="complex64"):
        pb.Tensor("x", np.zeros(1, np.complex64))
    with pytest.raises(TypeError, match="the array of tensor 'x' must be a numpy array, got list"):
        pb.Tensor("x", [1])  # type: ignore[arg-type]
    assert pb.Tensor(b"x", np.zeros(1)).name() == "x"  # type: ignore[arg-type]


def test_a_big_endian_array_keeps_its_values() -> None:
    tensor = pb.Tensor("x", np.array([1.5, 2], ">f4"))
    assert tensor.as_numpy().dtype == np.dtype("<f4")
    assert tensor.as_numpy().tolist() == [1.5, 2]


def test_dlpack() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.int32).tobytes(), np.int32)  # read-only
    tensor = pb.received("x", "INT32", array)
    assert np.from_dlpack(tensor).tolist() == [0, 1, 2, 3]
    assert pb.Tensor.from_dlpack("y", tensor.to_dlpack()).as_numpy().tolist() == [0, 1, 2, 3]
    assert pb.Tensor.from_dlpack("y", np.ones(2)).name() == "y"


def test_bfloat16_has_no_numpy_form() -> None:
    with pytest.raises(pb.TritonModelException, match="numpy has no BF16"):
        pb.received("x", "BF16", np.zeros(1, np.uint16)).as_numpy()


def test_a_response() -> None:
    good = pb.InferenceResponse([pb.Tensor("y", np.zeros(1))], parameters={"n": 1})
    assert not good.has_error()
    assert json.loads(good.parameters()) == {"n": 1}
    assert pb.get_output_tensor_by_name(good, "y") is good.output_tensors()[0]
    assert pb.get_output_tensor_by_name(good, "z") is None
    bad = pb.InferenceResponse(error=pb.TritonError("no", pb.TritonError.NOT_FOUND))
    error = bad.error()
    assert error is not None
    assert (error.message(), error.code()) == ("no", 2)
    with pytest.raises(TypeError, match="got ndarray"):
        pb.InferenceResponse([np.zeros(1)])  # type: ignore[list-item]


def request(**arguments: Any) -> pb.InferenceRequest:
    """A request for another model, in which some arguments are others."""
    given = {"model_name": "m", "inputs": [], "requested_output_names": []} | arguments
    return pb.InferenceRequest(**given)


TENSOR = pb.Tensor("x", np.zeros(1, np.int32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: pb.InferenceRequest(inputs=[], requested_output_names=[]),
        lambda: pb.InferenceRequest(model_name="m", requested_output_names=[]),
        lambda: pb.InferenceRequest(model_name="m", inputs=[]),
        lambda: request(inputs=None),
        lambda: request(inputs=TENSOR),
        lambda: request(inputs=[np.zeros(1)]),
        lambda: request(model_name=None),
        lambda: request(model_name=1),
        lambda: request(requested_output_names=None),
        lambda: request(requested_output_names=[None]),
        lambda: request(requested_output_names="x"),
        lambda: request(request_id=None),
        lambda: request(request_id=7),
        lambda: request(correlation_id=None),
        lambda: request(correlation_id=1.5),
        lambda: request(correlation_id=-1),
        lambda: request(model_version=None),
        lambda: request(model_version="1"),
        lambda: request(flags=None),
        lambda: request(flags=-1),
        lambda: request(timeout=None),
        lambda: request(timeout=0.5),
        lambda: request(preferred_memory=None),
        lambda: request(preferred_memory=0),
        lambda: request(trace=None),
        lambda: request(unknown=1),
        lambda: request().set_flags(None),  # type: ignore[arg-type]
        lambda: request().set_release_flags("all"),  # type: ignore[arg-type]
        lambda: request().exec(decoupled=None),  # type: ignore[arg-type]
        lambda: request().async_exec(decoupled="yes"),  # type: ignore[arg-type]
        lambda: pb.PreferredMemory(None),  # type: ignore[arg-type]
        lambda: pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU, "0"),  # type: ignore[arg-type]
        lambda: pb.InferenceResponse(None),  # type: ignore[arg-type]
        lambda: pb.InferenceResponse(TENSOR),  # type: ignore[arg-type]
        lambda: pb.InferenceResponse("text"),  # type: ignore[arg-type]
        lambda: pb.InferenceResponse(error="no"),  # type: ignore[arg-type]
        lambda: pb.InferenceResponse(error=ValueError("no")),  # type: ignore[arg-type]
        lambda: pb.TritonError(None),  # type: ignore[arg-type]
        lambda: pb.TritonError("no", None),  # type: ignore[arg-type]
        lambda: pb.TritonError("no", "INTERNAL"),  # type: ignore[arg-type]
        lambda: pb.TritonError("no", 99),
        lambda: pb.Tensor(None, np.zeros(1)),  # type: ignore[arg-type]
        lambda: pb.Tensor("x", None),  # type: ignore[arg-type]
        lambda: pb.Tensor("", None),  # type: ignore[arg-type]
        lambda: pb.Tensor.from_dlpack(None, np.zeros(1)),  # type: ignore[arg-type]
        lambda: pb.Logger.log("x", None),  # type: ignore[arg-type]
        lambda: pb.Logger.log("x", 1),  # type: ignore[arg-type]
        lambda: pb.Logger.log(None),  # type: ignore[arg-type]
        lambda: pb.Logger.log_info(None),  # type: ignore[arg-type]
        lambda: pb.Logger.log_warn(1),  # type: ignore[arg-type]
        lambda: pb.Logger.log_error(ValueError("no")),  # type: ignore[arg-type]
        lambda: pb.Logger.log_verbose(None),  # type: ignore[arg-type]
        lambda: pb.load_model(None),  # type: ignore[arg-type]
        lambda: pb.load_model("m", None),  # type: ignore[arg-type]
        lambda: pb.load_model("m", "{}", {"file:1/a": "text"}),  # type: ignore[dict-item]
        lambda: pb.unload_model(None),  # type: ignore[arg-type]
        lambda: pb.unload_model("m", None),  # type: ignore[arg-type]
        lambda: pb.is_model_ready(None),  # type: ignore[arg-type]
        lambda: pb.is_model_ready("m", 1),  # type: ignore[arg-type]
        lambda: pb.MetricFamily(None, "about", "COUNTER"),  # type: ignore[arg-type]
        lambda: pb.MetricFamily("m", None, "COUNTER"),  # type: ignore[arg-type]
        lambda: pb.MetricFamily("m", "about", None),  # type: ignore[arg-type]
        lambda: pb.MetricFamily("m", "about", "SUMMARY"),
    ],
)
def test_arguments_of_wrong_types(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: request(inputs=[None]), "got None"),
        (lambda: request(model_name=""), "needs the name of a model"),
        (lambda: request(parameters=[]), ", got <class 'list'>"),
        (lambda: request(parameters={"f": 0.5}), "found type <class 'float'>"),
        (lambda: pb.InferenceResponse([None]), "got None"),  # type: ignore[list-item]
        (lambda: pb.InferenceResponse(parameters=[]), ", got <class 'list'>"),  # type: ignore[arg-type]
        (
            lambda: pb.InferenceResponse(parameters={1: "one"}),  # type: ignore[dict-item]
            "Expect parameters keys to have type str, found type <class 'int'>",
        ),
        (
            lambda: pb.InferenceResponse(parameters={"int": 2, "float": 0.5}),
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        (lambda: pb.InferenceResponse(parameters={"n": None}), "found type <class 'NoneType'>"),
        (lambda: pb.InferenceResponse(parameters={"n": [1]}), "found type <class 'list'> for 'n'"),
        (lambda: pb.Tensor("", np.zeros(1)), "name cannot be an empty string"),
        (lambda: pb.Tensor.from_dlpack("x", None), "got NoneType"),
        (lambda: pb.Tensor.from_dlpack("", None), "got NoneType"),
        (lambda: pb.load_model("m", "{}", []), "must be a dict"),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_be(call: Callable[[], object], says: str) -> None:
    with pytest.raises(pb.TritonModelException, match=says):
        call()


def test_a_request_takes_what_converts_to_its_types() -> None:
    made = request(
        model_name=b"m", request_id=b"7", flags=np.int32(1), correlation_id="s",
        inputs=(TENSOR,), requested_output_names=iter(["y"]),
        parameters={"b": True, "i": 1, "s": "t"},
        preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_GPU, 1),
    )  # fmt: skip
    assert (made.request_id(), made.flags(), made.correlation_id()) == ("7", 1, "s")
    assert (made.inputs(), made.requested_output_names()) == ([TENSOR], ["y"])
    assert json.loads(made.parameters()) == {"b": True, "i": 1, "s": "t"}


def test_strings_there_and_back() -> None:
    array = np.array([b"a", "\u00e4".encode(), b""], object)
    encoded = pb.serialize_byte_tensor(array)
    assert encoded is not None
    assert pb.deserialize_bytes_tensor(encoded).tolist() == array.tolist()
    assert pb.serialize_byte_tensor(np.empty(0, object)) is None


def test_types() -> None:
    assert pb.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb.triton_to_numpy_type(9) is np.int64
    assert pb.numpy_to_triton_type(np.int64) == 9
    with pytest.raises(pb.TritonModelException):
        pb.numpy_to_triton_type(np.complex64)


def test_a_configuration_is_filled_in() -> None:
    config = pb.ModelConfig({"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": []}]})
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": False})
    assert pb.get_input_config_by_name(config.as_dict(), "x") == {
        "name": "x", "data_type": "TYPE_FP32", "dims": [2],
    }  # fmt: skip
    assert pb.get_output_config_by_name(config.as_dict(), "y") is None
    assert not pb.using_decoupled_model_transaction_policy(config.as_dict())
    for wrong, says in (
        ({"name": "x", "data_type": "TYPE_INT8", "dims": [2]}, "expects data_type TYPE_FP32"),
        ({"name": "z", "data_type": "TYPE_INT8"}, "no 'dims' property"),
        ({"name": "z", "data_type": "TYPE_INT8", "dims": [1], "more": 1}, "property other than"),
    ):
        with pytest.raises(ValueError, match=says):
            config.add_input(wrong)
    with pytest.raises(ValueError, match="specified max_batch_size 4"):
        config.set_max_batch_size(2)


def test_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    pb.Logger.log("plain")
    pb.Logger.log_warn("careful")
    pb.Logger.log_error("wrong")
    pb.Logger.log_verbose("much")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "ERROR", "DEBUG"]
