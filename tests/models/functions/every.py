"""Every datatype there and back."""

from headrace import (
    BFloat16,
    Bool,
    Bytes,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    N,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    model,
)


@model(
    max_batch_size=8,
    outputs=[
        "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
        "FP32", "FP64", "BYTES", "BF16",
    ],
)  # fmt: skip
def every(
    BOOL: Bool[N],
    UINT8: UInt8[N],
    UINT16: UInt16[N],
    UINT32: UInt32[N],
    UINT64: UInt64[N],
    INT8: Int8[N],
    INT16: Int16[N],
    INT32: Int32[N],
    INT64: Int64[N],
    FP16: Float16[N],
    FP32: Float32[N],
    FP64: Float64[N],
    BYTES: Bytes[N],
    BF16: BFloat16[N] | None = None,
) -> tuple[
    Bool[N], UInt8[N], UInt16[N], UInt32[N], UInt64[N], Int8[N], Int16[N], Int32[N], Int64[N],
    Float16[N], Float32[N], Float64[N], Bytes[N], BFloat16[N],
]:  # fmt: skip
    return (
        BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES,
        FP32 if BF16 is None else BF16,
    )  # fmt: skip
