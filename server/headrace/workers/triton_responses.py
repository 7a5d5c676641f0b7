"""Responses and errors as Triton's Python models give them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.workers.triton_tensors import Tensor, TritonModelException


class TritonError:
    """An error that answers one request, with a code that becomes the status of the answer."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = int(code)

    def message(self) -> str:
        """What the client is told."""
        return self._message

    def code(self) -> int:
        """One of the constants of this class."""
        return self._code

    def __str__(self) -> str:
        return self._message


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: "Iterable[Tensor] | None" = (),
        error: "TritonError | str | Exception | None" = None,
        parameters: Mapping[Any, Any] | None = None,
    ) -> None:
        """Raises `TritonModelException` for outputs or parameters of a wrong type."""
        self._tensors = [] if output_tensors is None else list(output_tensors)
        check_tensors("output_tensors", self._tensors)
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._error = error
        self._parameters = checked(parameters, "response")

    def output_tensors(self) -> list[Tensor]:
        """Its tensors."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """Its parameters as JSON."""
        return json.dumps(self._parameters)

    def parameter_values(self) -> dict[str, Any]:
        """Its parameters."""
        return self._parameters


def check_tensors(what: str, tensors: Sequence[Any]) -> None:
    """Raise `TritonModelException` if there is anything else among `tensors`."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TritonModelException(f"{what} must be of Tensor, got {type(tensor).__name__}")


def checked(parameters: Mapping[Any, Any] | None, whose: str) -> dict[str, Any]:
    """Parameters as a dictionary; raises `TritonModelException` for what cannot be one."""
    result = dict(parameters or {})
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(
                f"{whose} parameters are str, int, float or bool by name, got"
                f" {type(value).__name__} for {name!r}"
            )
    return result
