"""Shapes as messages show them."""

from collections.abc import Sequence

_SHOWN = 32  # dimensions: no model has as many, but a request may


def brackets(shape: Sequence[int]) -> str:
    """A shape in the form `[-1,16]`, of one with very many dimensions the first ones."""
    more = ",…" if len(shape) > _SHOWN else ""
    return "[" + ",".join(map(str, shape[:_SHOWN])) + more + "]"
