"""Triton's Python API, imported as `triton_python_backend_utils`, with nothing but numpy.

The names and their meaning are Triton's (its Python backend's documentation); the code is not.
"""

import logging

from headrace.workers import triton_config
from headrace.workers.triton_calls import (
    Metric,
    MetricFamily,
    ResponseIterator,
    is_model_ready,
    load_model,
    unload_model,
)
from headrace.workers.triton_requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    PreferredMemory,
    TritonError,
)
from headrace.workers.triton_tensors import (
    Tensor,
    TritonModelException,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    received,
    serialize_byte_tensor,
    text,
    triton_string_to_numpy,
    triton_to_numpy_type,
    wrong,
)

__all__ = [
    "COUNTER", "GAUGE", "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU", "TRITONSERVER_MEMORY_GPU", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE", "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceRequest", "InferenceResponse", "InferenceResponseSender", "InferenceTrace", "Logger",
    "Metric", "MetricFamily", "ModelConfig", "PreferredMemory", "ResponseIterator", "Tensor",
    "TritonError", "TritonModelException", "deserialize_bytes_tensor", "get_input_config_by_name",
    "get_input_tensor_by_name", "get_output_config_by_name", "get_output_tensor_by_name",
    "is_model_ready", "load_model", "numpy_to_triton_type", "received", "serialize_byte_tensor",
    "triton_string_to_numpy", "triton_to_numpy_type", "unload_model",
    "using_decoupled_model_transaction_policy",
]  # fmt: skip

COUNTER, GAUGE, HISTOGRAM = MetricFamily.COUNTER, MetricFamily.GAUGE, MetricFamily.HISTOGRAM
ModelConfig = triton_config.ModelConfig
get_input_config_by_name = triton_config.get_input_config_by_name
get_output_config_by_name = triton_config.get_output_config_by_name
using_decoupled_model_transaction_policy = triton_config.using_decoupled_model_transaction_policy

_LEVELS = {
    "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR,
    "VERBOSE": logging.DEBUG,
}  # fmt: skip
_log = logging.getLogger("triton")


class Logger:
    """Writes lines to the server's log, with the model's name."""

    INFO, WARNING, ERROR, VERBOSE = "INFO", "WARNING", "ERROR", "VERBOSE"

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        """Write a line; raises `TypeError`."""
        number = _LEVELS.get(level)
        if number is None:
            raise wrong("level", "one of the levels of Logger", level)
        _log.log(number, "%s", text("message", message))

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line."""
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a line."""
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write a line."""
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line."""
        Logger.log(message, Logger.VERBOSE)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """An input of a request; None if missing."""
    for tensor in request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """An output of a response; None if missing."""
    for tensor in response._tensors:
        if tensor._name == name:
            return tensor
    return None
