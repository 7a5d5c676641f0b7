"""Which headers the engine wants to have with requests; front ends have them, and it has not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.engine.doors import CONTEXT_HEADERS


@dataclass(frozen=True, slots=True)
class WantedHeaders:
    """By model: the header that traffic rules need of requests that name no version, and whether
    those that say which trace a request is part of are wanted; "" stands for all other models.
    """

    routed: Mapping[str, str] = field(default_factory=dict)
    traced: Mapping[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.routed) or any(self.traced.values())

    def of(self, model: str, version: str) -> list[str]:
        """Those wanted of a request, in lower case."""
        names = [self.routed[model]] if not version and model in self.routed else []
        if self.traced.get(model, self.traced.get("", False)):
            names += CONTEXT_HEADERS
        return names

    def document(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return asdict(self)
