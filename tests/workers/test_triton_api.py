"""The module `triton_python_backend_utils` by itself."""

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
    swapped = pb.Tensor("x", np.array([1.5, 2], ">f4"))
    assert swapped.as_numpy().dtype == np.dtype("<f4")
    assert swapped.as_numpy().tolist() == [1.5, 2]
    with pytest.raises(pb.TritonModelException, match="numpy has no BF16"):
        pb.received("x", "BF16", np.zeros(1, np.uint16)).as_numpy()


def test_dlpack() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.int32).tobytes(), np.int32)  # read-only
    tensor = pb.received("x", "INT32", array)
    assert np.from_dlpack(tensor).tolist() == [0, 1, 2, 3]
    assert pb.Tensor.from_dlpack("y", tensor.to_dlpack()).as_numpy().tolist() == [0, 1, 2, 3]
    assert pb.Tensor.from_dlpack("y", np.ones(2)).name() == "y"


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
    """A request to another model, with some arguments changed."""
    given = {"model_name": "m", "inputs": [], "requested_output_names": []} | arguments
    return pb.InferenceRequest(**given)


TENSOR = pb.Tensor("x", np.zeros(1, np.int32))


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": None}, {"inputs": TENSOR}, {"inputs": [np.zeros(1)]}, {"model_name": None},
        {"model_name": 1}, {"requested_output_names": None}, {"requested_output_names": [None]},
        {"requested_output_names": "x"}, {"request_id": None}, {"request_id": 7},
        {"correlation_id": None}, {"correlation_id": 1.5}, {"correlation_id": -1},
        {"model_version": None}, {"model_version": "1"}, {"flags": None}, {"flags": -1},
        {"timeout": None}, {"timeout": 0.5}, {"preferred_memory": None}, {"preferred_memory": 0},
        {"trace": None}, {"unknown": 1},
    ],
)  # fmt: skip
def test_arguments_of_requests_of_wrong_types(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        request(**arguments)
    known: dict[str, Any] = {"model_name": "m", "inputs": [], "requested_output_names": []}
    for missing in known:
        with pytest.raises(TypeError):
            pb.InferenceRequest(**{name: known[name] for name in known if name != missing})


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (pb.InferenceRequest.set_flags, (request(), None)),
        (pb.InferenceRequest.set_release_flags, (request(), "all")),
        (pb.InferenceRequest.exec, (request(), None)),
        (pb.InferenceRequest.async_exec, (request(), "yes")),
        (pb.PreferredMemory, (None,)), (pb.PreferredMemory, (pb.TRITONSERVER_MEMORY_CPU, "0")),
        (pb.InferenceResponse, (None,)), (pb.InferenceResponse, (TENSOR,)),
        (pb.InferenceResponse, ("text",)), (pb.InferenceResponse, ([], "no")),
        (pb.InferenceResponse, ([], ValueError("no"))), (pb.TritonError, (None,)),
        (pb.TritonError, ("no", None)), (pb.TritonError, ("no", "INTERNAL")),
        (pb.TritonError, ("no", 99)), (pb.Tensor, (None, np.zeros(1))), (pb.Tensor, ("x", None)),
        (pb.Tensor, ("", None)), (pb.Tensor.from_dlpack, (None, np.zeros(1))),
        (pb.Logger.log, ("x", None)), (pb.Logger.log, ("x", 1)), (pb.Logger.log, (None,)),
        (pb.Logger.log_info, (None,)), (pb.Logger.log_warn, (1,)),
        (pb.Logger.log_error, (ValueError("no"),)), (pb.Logger.log_verbose, (None,)),
        (pb.load_model, (None,)), (pb.load_model, ("m", None)),
        (pb.load_model, ("m", "{}", {"file:1/a": "text"})), (pb.unload_model, (None,)),
        (pb.unload_model, ("m", None)), (pb.is_model_ready, (None,)), (pb.is_model_ready, ("m", 1)),
        (pb.MetricFamily, (None, "about", "COUNTER")), (pb.MetricFamily, ("m", None, "COUNTER")),
        (pb.MetricFamily, ("m", "about", None)), (pb.MetricFamily, ("m", "about", "SUMMARY")),
    ],
)  # fmt: skip
def test_arguments_of_wrong_types(call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        call(*arguments)


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
def test_invalid_argument_values(call: Callable[[], object], says: str) -> None:
    with pytest.raises(pb.TritonModelException, match=says):
        call()


@pytest.mark.parametrize("name", [
    "", "1x", "a-b", "nv_x", "headrace_x", "python_x", "process_x",
    "http_server_request_duration_seconds", "rpc_server_call_duration_seconds",
])  # fmt: skip
def test_names_that_models_may_not_give_to_metrics(name: str) -> None:
    with pytest.raises(pb.TritonModelException, match=f"'{name}' cannot be the name of a model's"):
        pb.MetricFamily(name, "about", "COUNTER")


def test_a_request_accepts_convertible_arguments() -> None:
    made = request(
        model_name=b"m", request_id=b"7", flags=np.int32(1), correlation_id="s",
        inputs=(TENSOR,), requested_output_names=iter(["y"]),
        parameters={"b": True, "i": 1, "s": "t"},
        preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_GPU, 1),
    )  # fmt: skip
    assert (made.request_id(), made.flags(), made.correlation_id()) == ("7", 1, "s")
    assert (made.inputs(), made.requested_output_names()) == ([TENSOR], ["y"])
    assert json.loads(made.parameters()) == {"b": True, "i": 1, "s": "t"}


def test_types_and_strings() -> None:
    assert pb.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb.triton_to_numpy_type(9) is np.int64
    assert pb.numpy_to_triton_type(np.int64) == 9
    with pytest.raises(pb.TritonModelException):
        pb.numpy_to_triton_type(np.complex64)
    array = np.array([b"a", "\u00e4".encode(), b""], object)
    encoded = pb.serialize_byte_tensor(array)
    assert encoded is not None
    assert pb.deserialize_bytes_tensor(encoded).tolist() == array.tolist()
    assert pb.serialize_byte_tensor(np.empty(0, object)) is None


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
