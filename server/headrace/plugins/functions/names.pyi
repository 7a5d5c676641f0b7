# Names of annotations as type checkers see them: an array of the type, with any dimensions; and the
# data frames of pandas and pyarrow.
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import TypeAliasType, TypeVar, TypeVarTuple

_Dims = TypeVarTuple("_Dims")
_Schema = TypeVar("_Schema")

class N: ...

Bool = TypeAliasType("Bool", NDArray[np.bool_], type_params=(_Dims,))
UInt8 = TypeAliasType("UInt8", NDArray[np.uint8], type_params=(_Dims,))
UInt16 = TypeAliasType("UInt16", NDArray[np.uint16], type_params=(_Dims,))
UInt32 = TypeAliasType("UInt32", NDArray[np.uint32], type_params=(_Dims,))
UInt64 = TypeAliasType("UInt64", NDArray[np.uint64], type_params=(_Dims,))
Int8 = TypeAliasType("Int8", NDArray[np.int8], type_params=(_Dims,))
Int16 = TypeAliasType("Int16", NDArray[np.int16], type_params=(_Dims,))
Int32 = TypeAliasType("Int32", NDArray[np.int32], type_params=(_Dims,))
Int64 = TypeAliasType("Int64", NDArray[np.int64], type_params=(_Dims,))
Float16 = TypeAliasType("Float16", NDArray[np.float16], type_params=(_Dims,))
BFloat16 = TypeAliasType("BFloat16", NDArray[np.float32], type_params=(_Dims,))
Float32 = TypeAliasType("Float32", NDArray[np.float32], type_params=(_Dims,))
Float64 = TypeAliasType("Float64", NDArray[np.float64], type_params=(_Dims,))
# numpy has no single type for strings: arrays of `str` objects, of fixed width, of variable width.
Strings = TypeAliasType("Strings", NDArray[Any], type_params=(_Dims,))
Bytes = TypeAliasType("Bytes", NDArray[Any], type_params=(_Dims,))
Frame = TypeAliasType("Frame", pd.DataFrame, type_params=(_Schema,))
Table = TypeAliasType("Table", pa.Table, type_params=(_Schema,))
