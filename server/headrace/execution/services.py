"""The server, as models see it that ask something of it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.core.call import Call
from headrace.core.errors import ServerError, Unavailable


class ModelServices(Protocol):
    """The server, as far as models may ask something of it."""

    def submit(self, call: Call, inside: bool) -> None:
        """Have a model run; raises `ServerError`.

        `inside` means that the model that asks does nothing else until it is answered.
        """

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Do something else, and answer once, with what comes of it or with the error."""

    def metric(self, document: Mapping[str, Any]) -> None:
        """Change one of the model's own metrics; raises what nonsense raises."""


class NoServices:
    """Nobody to ask: every question is answered with `text`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def submit(self, call: Call, inside: bool) -> None:
        """Raise `Unavailable`."""
        raise Unavailable(self._text)

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """Answer with the error."""
        answer(None, Unavailable(self._text))

    def metric(self, document: Mapping[str, Any]) -> None:
        """What a model tells of its metrics is kept until it serves."""
