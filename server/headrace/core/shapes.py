"""Shapes as messages show them."""

from collections.abc import Sequence


def brackets(shape: Sequence[int]) -> str:
    """A shape in the form `[-1,16]`."""
    return "[" + ",".join(map(str, shape)) + "]"
