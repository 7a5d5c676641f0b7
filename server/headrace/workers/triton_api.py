"""What Triton's Python models import as `triton_python_backend_utils`, with nothing but numpy.

The names and their meaning are Triton's (its Python backend's documentation); the code is not.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.workers import triton_config
from headrace.workers.elements import DTYPES, Array, datatype_of, decode_bytes, encode_bytes

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

ModelConfig = triton_config.ModelConfig
get_input_config_by_name = triton_config.get_input_config_by_name
get_output_config_by_name = triton_config.get_output_config_by_name
using_decoupled_model_transaction_policy = triton_config.using_decoupled_model_transaction_policy

_CONFIG_NAMES = ("INVALID", *DTYPES, "BF16")  # in the order of the configuration's enum
_LEVELS = {"INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_log = logging.getLogger("triton")


class TritonModelException(Exception):
    """What goes wrong in a call of this module."""


class TritonError:
    """An error that answers one request, with a code that becomes the status of the answer."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = int(code)

    def message(self) -> str:
        """What the client is told."""
        return self._message

    def code(self) -> int:
        """One of the constants of this class."""
        return self._code

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named array. BYTES tensors are object arrays of `bytes`."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str, array: Array) -> None:
        """Raises `TritonModelException` for an array whose type is none of the protocol's."""
        if not isinstance(array, np.ndarray):
            raise TritonModelException(
                f"a tensor needs a numpy array, got {type(array).__name__} for '{name}'"
            )
        datatype = datatype_of(array.dtype)
        if datatype is None:
            raise TritonModelException(
                f"tensor '{name}' has the numpy type {array.dtype},"
                " which the protocol has no name for"
            )
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        self._name = name
        self._datatype = datatype
        self._array = array

    def name(self) -> str:
        """Its name."""
        return self._name

    def as_numpy(self) -> Array:
        """The array; that of an input is read-only and not copied."""
        if self._datatype == "BF16":
            raise TritonModelException("numpy has no BF16; use to_dlpack() or the DLPack protocol")
        return self._array

    def triton_dtype(self) -> int:
        """The number of its datatype in the configuration's enum."""
        return _CONFIG_NAMES.index(self._datatype)

    def datatype(self) -> str:
        """The protocol's name of its datatype."""
        return self._datatype

    def shape(self) -> list[int]:
        """Its shape."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Always: there are no others here."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of its memory; of a copy where that is read-only."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        # Most libraries cannot take what is read-only.
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor of what another library has made, on the CPU."""
        if not hasattr(tensor, "__dlpack__"):
            tensor = _Capsule(tensor)
        return Tensor(name, np.from_dlpack(tensor))


class _Capsule:
    """A bare DLPack capsule in the form that numpy takes."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def received(name: str, datatype: str, array: Array) -> Tensor:
    """A tensor as it came; not for models."""
    tensor = Tensor.__new__(Tensor)
    tensor._name = name
    tensor._datatype = datatype
    tensor._array = array
    return tensor


class InferenceRequest:
    """One client's request, with the batch dimension where the model batches."""

    __slots__ = ("_extras", "_id", "_inputs", "_outputs")

    def __init__(
        self,
        inputs: Sequence[Tensor],
        request_id: str,
        requested_output_names: Sequence[str],
        extras: Mapping[str, Any],
    ) -> None:
        self._inputs = inputs
        self._id = request_id
        self._outputs = requested_output_names
        self._extras = extras

    def inputs(self) -> list[Tensor]:
        """Its tensors."""
        return list(self._inputs)

    def request_id(self) -> str:
        """The client's own name for it, or ""."""
        return self._id

    def correlation_id(self) -> int | str:
        """The sequence that it belongs to; 0 for none."""
        found: int | str = self._extras.get("correlation_id", 0)
        return found

    def requested_output_names(self) -> list[str]:
        """The outputs that are wanted."""
        return list(self._extras.get("outputs", self._outputs))

    def flags(self) -> int:
        """Whether it begins or ends a sequence."""
        return int(self._extras.get("flags", 0))

    def timeout(self) -> int:
        """How long it may wait in the queue, in microseconds; 0 for any time."""
        return int(self._extras.get("timeout", 0))

    def priority(self) -> int:
        """Its priority level; 0 for the model's default."""
        return int(self._extras.get("priority", 0))

    def parameters(self) -> str:
        """Its parameters as JSON."""
        return json.dumps(self._extras.get("parameters", {}))

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more, as far as is known."""
        return False


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: "Iterable[Tensor] | None" = (),
        error: "TritonError | str | Exception | None" = None,
        parameters: Mapping[Any, Any] | None = None,
    ) -> None:
        """Raises `TritonModelException` for outputs or parameters of a wrong type."""
        self._tensors = [] if output_tensors is None else list(output_tensors)
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(
                    f"output_tensors must be of Tensor, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._error = error
        self._parameters = dict(parameters or {})
        for name, value in self._parameters.items():
            if not isinstance(name, str) or not isinstance(value, (bool, int, float, str)):
                raise TritonModelException(
                    "response parameters are str, int, float or bool by name, got"
                    f" {type(value).__name__} for {name!r}"
                )

    def output_tensors(self) -> list[Tensor]:
        """Its tensors."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """Its parameters as JSON."""
        return json.dumps(self._parameters)

    def parameter_values(self) -> dict[str, Any]:
        """Its parameters."""
        return self._parameters


class Logger:
    """Lines in the server's log, with the model's name."""

    INFO, WARNING, ERROR, VERBOSE = "INFO", "WARNING", "ERROR", "VERBOSE"

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        """Write a line."""
        _log.log(_LEVELS.get(level, logging.DEBUG), "%s", message)

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
    """An input of a request; None if it is not there."""
    for tensor in request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """An output of a response; None if it is not there."""
    for tensor in response._tensors:
        if tensor._name == name:
            return tensor
    return None


def triton_string_to_numpy(name: str) -> Any:
    """The numpy type of a name such as `TYPE_FP32`."""
    dtype = DTYPES.get("BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_"))
    return None if dtype is None else dtype.type


def triton_to_numpy_type(number: int) -> Any:
    """The numpy type of a datatype's number in the configuration's enum."""
    return triton_string_to_numpy(_CONFIG_NAMES[number])


def numpy_to_triton_type(dtype: Any) -> int:
    """The number of the datatype of a numpy type; raises `TritonModelException`."""
    name = datatype_of(np.dtype(dtype))
    if name is None:
        raise TritonModelException(f"the protocol has no datatype for {dtype}")
    return _CONFIG_NAMES.index(name)


def serialize_byte_tensor(array: Array) -> Array | None:
    """The elements of an array of strings as Triton's clients send them; None for no elements."""
    if array.size == 0:
        return None
    return np.frombuffer(encode_bytes(array), np.uint8)


def deserialize_bytes_tensor(encoded: Any) -> Array:
    """The elements of what `serialize_byte_tensor` has made."""
    data = bytes(encoded)
    elements = 0
    position = 0
    while position < len(data):
        position += 4 + int.from_bytes(data[position : position + 4], "little")
        elements += 1
    return decode_bytes(memoryview(data), (elements,))
