"""The names that `from headrace import model` and its kin give."""

from headrace.plugins.functions.decorator import model
from headrace.plugins.functions.ensembles import Ensemble, ensemble, step
from headrace.plugins.functions.names import (
    BFloat16,
    Bool,
    Bytes,
    Float16,
    Float32,
    Float64,
    Frame,
    Int8,
    Int16,
    Int32,
    Int64,
    N,
    Strings,
    Table,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
)
from headrace.plugins.functions.signature import Context, SignatureError
from headrace.plugins.functions.values import InvalidInput, ResultError

__all__ = [
    "BFloat16",
    "Bool",
    "Bytes",
    "Context",
    "Ensemble",
    "Float16",
    "Float32",
    "Float64",
    "Frame",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "InvalidInput",
    "N",
    "ResultError",
    "SignatureError",
    "Strings",
    "Table",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "ensemble",
    "model",
    "step",
]  # fmt: skip
