"""What the operator decides about the environments that models are given."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Where environments lie, and what they are made from.

    `cache` is the directory where they lie, empty for the usual one. `wheelhouse` is a directory
    that packages come from and no other place, if it is not empty. Building one may take
    `build_secs`.
    """

    cache: str = ""
    wheelhouse: str = ""
    build_secs: int = 1800
