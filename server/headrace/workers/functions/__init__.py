"""Functions and classes as models: what `from headrace import model` and its kin give.

In reading order: `signature.py` reads what a function declares, `decorator.py` keeps it, `calls.py`
turns requests into calls and results into responses, and `adapter.py` makes of it what the worker
runs.
"""

from headrace.workers.functions.decorator import model
from headrace.workers.functions.names import (
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
from headrace.workers.functions.signature import Context, SignatureError
from headrace.workers.functions.values import InvalidInput, ResultError

__all__ = [
    "BFloat16",
    "Bool",
    "Bytes",
    "Context",
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
    "model",
]  # fmt: skip
