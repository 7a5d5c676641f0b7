"""The C library's allocator: what tensors have used is kept for the next ones.

Left to itself it gives freed memory back to the system again and again, and every page of it that
is then used anew is cleared and mapped first, which takes longer than to copy a tensor into it.
"""

import ctypes
import os
from contextlib import suppress

# Of glibc's malloc.h. Setting one of them also ends their change with what is allocated.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT = 128 << 20  # bytes of free memory at the end of the heap; more is given back
_MAPPED = 32 << 20  # bytes of one block from which on it is mapped by itself; the most there can be
_PAD = 1 << 20  # bytes by which the heap grows beyond what is asked for
# What an operator has said about it stands.
_SAID = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_memory() -> bool:
    """Have this process keep memory for large tensors; whether its C library can."""
    if any(name in os.environ for name in _SAID):
        return False
    with suppress(AttributeError, OSError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        return all(
            [
                mallopt(_M_MMAP_THRESHOLD, _MAPPED),
                mallopt(_M_TRIM_THRESHOLD, _KEPT),
                mallopt(_M_TOP_PAD, _PAD),
            ]
        )
    return False
