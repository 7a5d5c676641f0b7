"""What models import as `triton_python_backend_utils`, by itself."""

import json
import logging

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
    with pytest.raises(pb.TritonModelException, match="got list for 'x'"):
        pb.Tensor("x", [1])  # type: ignore[arg-type]


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
    with pytest.raises(pb.TritonModelException, match="got list for 'n'"):
        pb.InferenceResponse(parameters={"n": [1]})
    with pytest.raises(pb.TritonModelException, match="got ndarray"):
        pb.InferenceResponse([np.zeros(1)])  # type: ignore[list-item]


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
