"""Responses and errors as Triton's Python models give them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.workers.triton_arguments import elements, text, whole, wrong
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
        self._message = text("message", message)
        self._code = whole("code", code, (self.UNKNOWN, self.CANCELLED))

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
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `TypeError`, and `TritonModelException` for parameters that cannot be sent."""
        self._tensors = tensors("output_tensors", output_tensors)
        if error is not None and not isinstance(error, TritonError):
            raise wrong("error", "a TritonError or None", error)
        self._error = error
        self._parameters = checked(parameters) if parameters is not None else {}

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


def tensors(what: str, given: Any) -> list[Tensor]:
    """A list of tensors; raises `TypeError`, and `TritonModelException` for None in it."""
    found = given.copy() if type(given) is list else elements(what, given, "Tensor")
    for tensor in found:
        if not isinstance(tensor, Tensor):
            if tensor is None:
                raise TritonModelException(f"{what} must be of Tensor, got None")
            raise wrong(what, "of Tensor", tensor)
    return found


def checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as a dictionary; raises `TritonModelException` for what cannot be one.

    Triton refuses floating-point numbers, which its own protocol could carry.
    """
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect a dict of parameters, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(name)} for {name!r}"
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                "Expect parameters values to have type bool/int/str, found type"
                f" {type(value)} for {name!r}"
            )
    return dict(parameters)
