"""What the operator decides about the environments that models are given."""

import re
from dataclasses import dataclass

_VARIABLE = re.compile(r"[^\s=,]+")


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Where environments lie, and what they are made from.

    `cache` is the directory where they lie, empty for the usual one. `wheelhouse` is a directory
    that packages come from and no other place, if it is not empty. Building one may take
    `build_secs`. `variables` are the names, or patterns of names, of the server's environment
    variables that workers see besides the usual ones.
    """

    cache: str = ""
    wheelhouse: str = ""
    build_secs: int = 1800
    variables: tuple[str, ...] = ()


def variable_names(text: str) -> tuple[str, ...]:
    """Names of environment variables, or patterns of names, between commas.

    Raises `ValueError` that says what was expected.
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(map(_VARIABLE.fullmatch, found)):
        raise ValueError("names of environment variables, or patterns such as SHOP_*, and commas")
    return found
