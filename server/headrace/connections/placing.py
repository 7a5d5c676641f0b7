"""Places of tensors that share a region of memory."""

from collections.abc import Mapping

from headrace.core.call import RegionSlice

_ALIGNMENT = 64


def laid_out(sizes: Mapping[str, int], region: str) -> dict[str, RegionSlice]:
    """The places of tensors laid out one after the other."""
    places: dict[str, RegionSlice] = {}
    position = 0
    for name, size in sizes.items():
        places[name] = RegionSlice(region, position, size)
        position = _aligned(position + size)
    return places


def needed(sizes: Mapping[str, int]) -> int:
    """The total bytes of these tensors."""
    *others, last = sizes.values()
    return sum(map(_aligned, others)) + last


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
