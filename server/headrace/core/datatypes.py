"""Tensor datatypes and their names in the protocol, in numpy and in model configurations."""

from enum import Enum, StrEnum

import ml_dtypes
import numpy as np

from headrace.ipc.elements import DTYPES


class Datatype(StrEnum):
    """A datatype under its protocol name, in the order of the configuration's enum."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"


FLOATS = frozenset({Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16})

# Datatypes of tensors whose data is in a client's shared memory. They have the same names but are
# equal to no `Datatype`, so that caches keyed by datatype and shape never confuse the two.
Elsewhere = Enum("Elsewhere", [(d.name, d.value) for d in Datatype])  # type: ignore[misc]

# In the configuration's `DataType` enum.
CONFIG_NUMBERS: dict[Datatype, int] = {datatype: n for n, datatype in enumerate(Datatype, start=1)}
BY_CONFIG_NUMBER: dict[int, Datatype] = {n: datatype for datatype, n in CONFIG_NUMBERS.items()}
BY_NAME: dict[str, Datatype] = {str(datatype): datatype for datatype in Datatype}

# BYTES elements are `bytes` objects in a numpy array, since their lengths differ.
NUMPY: dict[Datatype, np.dtype] = {Datatype(name): dtype for name, dtype in DTYPES.items()} | {
    Datatype.BF16: np.dtype(ml_dtypes.bfloat16)
}
BY_NUMPY: dict[np.dtype, Datatype] = {dtype: datatype for datatype, dtype in NUMPY.items()}
ITEM_SIZES: dict[Datatype, int] = {
    datatype: dtype.itemsize for datatype, dtype in NUMPY.items() if datatype is not Datatype.BYTES
}
