"""What a function may know of a request beside its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Context:
    """The request that a call, or a row, is for: the client's own name for it, and its parameters.

    `parameters` are those that the protocol does not reserve.
    """

    request_id: str = ""
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
