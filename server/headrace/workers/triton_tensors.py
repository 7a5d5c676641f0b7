"""Tensors for Triton's Python models, and checks of arguments of Triton's Python API.

Triton's classes use pybind11, which raises `TypeError` for an argument of a wrong type;
`TritonModelException` is for invalid values of the right type.
"""

from operator import index
from typing import Any

import numpy as np

from headrace.ipc.elements import DTYPES, NAMES, Array, datatype_of, decode_bytes, encode_bytes

INT64 = -(1 << 63), (1 << 63) - 1
UINT32 = 0, (1 << 32) - 1
UINT64 = 0, (1 << 64) - 1


def text(what: str, value: Any) -> str:
    """A `str`, or `bytes` of UTF-8; raises `TypeError`."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise wrong(what, "a str", value)


def whole(what: str, value: Any, limits: tuple[int, int]) -> int:
    """An integer within `limits`; raises `TypeError`."""
    least, most = limits
    try:
        number = index(value)
    except TypeError:
        raise wrong(what, "an integer", value) from None
    if not least <= number <= most:
        raise TypeError(f"{what} must be from {least} to {most}, got {number}")
    return number


def real(what: str, value: Any) -> float:
    """A number; raises `TypeError`."""
    if isinstance(value, (str, bytes)):
        raise wrong(what, "a number", value)
    try:
        return float(value)
    except TypeError:
        raise wrong(what, "a number", value) from None


def flag(what: str, value: Any) -> bool:
    """A `bool`, numpy's too, or an integer; raises `TypeError`."""
    if value is None or isinstance(value, (str, bytes)):
        raise wrong(what, "a bool", value)
    return bool(value)


def elements(what: str, value: Any, of: str) -> list[Any]:
    """The elements of a list, or another iterable except text; raises `TypeError`."""
    if not isinstance(value, (str, bytes)):
        try:
            return list(value)
        except TypeError:
            pass
    raise wrong(what, f"a list of {of}", value)


def wrong(what: str, expected: str, value: Any) -> TypeError:
    """The error for an argument of the wrong type."""
    return TypeError(f"{what} must be {expected}, got {type(value).__name__}")


_CONFIG_NAMES = ("INVALID", *DTYPES, "BF16")  # in the order of the configuration's enum


class TritonModelException(Exception):
    """An error in a call of this module."""


class Tensor:
    """A named array. BYTES tensors are object arrays of `bytes`."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str, array: Array) -> None:
        """Raises `TritonModelException` for an array type that the protocol lacks."""
        if not isinstance(array, np.ndarray):
            raise wrong(f"the array of tensor '{name}'", "a numpy array", array)
        if type(name) is not str:
            name = text("name", name)
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = NAMES.get(array.dtype)
        if datatype is None:
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
        """The name of the tensor."""
        return self._name

    def as_numpy(self) -> Array:
        """The array; an input's is read-only and not copied."""
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
        """The shape of the tensor."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Always True: there are only CPU tensors here."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of its memory; of a copy if that is read-only."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        # Most libraries cannot use read-only memory.
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor from another library's array, on the CPU.

        Raises `TritonModelException` for objects without DLPack support.
        """
        if not hasattr(tensor, "__dlpack__"):
            if type(tensor).__name__ != "PyCapsule":
                raise TritonModelException(
                    f"from_dlpack() needs a DLPack capsule, or what has __dlpack__, for '{name}';"
                    f" got {type(tensor).__name__}"
                )
            tensor = _Capsule(tensor)
        return Tensor(name, np.from_dlpack(tensor))


class _Capsule:
    """A bare DLPack capsule in the form that numpy accepts."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def received(name: str, datatype: str, array: Array) -> Tensor:
    """A received tensor; not for models."""
    tensor = Tensor.__new__(Tensor)
    tensor._name = name
    tensor._datatype = datatype
    tensor._array = array
    return tensor


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
    """The elements of an array of strings in the form of Triton's clients; None for no elements."""
    if array.size == 0:
        return None
    return np.frombuffer(encode_bytes(array), np.uint8)


def deserialize_bytes_tensor(encoded: Any) -> Array:
    """The elements encoded by `serialize_byte_tensor`."""
    data = bytes(encoded)
    elements = 0
    position = 0
    while position < len(data):
        position += 4 + int.from_bytes(data[position : position + 4], "little")
        elements += 1
    return decode_bytes(memoryview(data), (elements,))
