"""Payload capture, as the engine sees it: which requests, and where they go.

A plugin (`headrace.plugins.capture`) makes the stage that copies the requests and responses of some
calls, and writes them. Versions of other models have no such stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # settings are read without numpy
    from headrace.core.call import Submit

KEYS = ("id", "header", "parameter")  # kinds of keys; the last two with a name


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options of the capture: its `file`, whose suffix is its format.

    One in `rate` requests to models that match one of `models` is captured: by chance, or, with a
    `key`, such as `header:x-user`, all or none of those with an equal value. Data of tensors
    and values of parameters that match `redact` are left out, and so are tensors beyond
    `payload_bytes` of a call. A file that would exceed `max_bytes` is replaced, 0 for never;
    `files` earlier ones are kept.
    """

    file: str
    rate: int = 1
    key: str = ""
    models: tuple[str, ...] = ("*",)
    redact: tuple[str, ...] = ()
    payload_bytes: int = 1 << 20
    max_bytes: int = 0
    files: int = 0


class Capture(Protocol):
    """Recorder of payloads. Owned by the event loop."""

    def recorded(self, model: str, version: str, submit: "Submit") -> "Submit":
        """The stage before `submit` of a version, whose inputs are all there and checked; `submit`
        itself if the model is not captured.
        """

    @property
    def headers(self) -> tuple[str, ...]:
        """The lower-case names of the headers that it reads."""

    @property
    def captured(self) -> int:
        """Requests that were captured since the start."""

    @property
    def lost(self) -> Mapping[str, int]:
        """Requests that should have been captured, and were not, by reason."""

    def close(self) -> None:
        """Write everything taken, for a bounded time; blocks."""
