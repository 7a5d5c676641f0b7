"""Which headers the engine wants to have with requests; front ends have them, and it has not."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.core.parameter_names import FORWARD_PARAMETER, HEADER_PARAMETER
from headrace.engine.doors import CONTEXT_HEADERS


@dataclass(frozen=True, slots=True)
class WantedHeaders:
    """By model: the header that traffic rules need of requests that name no version, whether those
    that say which trace a request is part of are wanted, where "" stands for all other models, and
    those that go on to the servers which run it.
    """

    routed: Mapping[str, str] = field(default_factory=dict)
    traced: Mapping[str, bool] = field(default_factory=dict)
    forwarded: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.routed or self.forwarded) or any(self.traced.values())

    def of(self, model: str, version: str) -> list[tuple[str, str]]:
        """Those wanted of a request, in lower case, and the parameters that their values become."""
        names = [self.routed[model]] if not version and model in self.routed else []
        if self.traced.get(model, self.traced.get("", False)):
            names += CONTEXT_HEADERS
        wanted = [(name, HEADER_PARAMETER + name) for name in names]
        wanted += [(name, FORWARD_PARAMETER + name) for name in self.forwarded.get(model, ())]
        return wanted

    def document(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return asdict(self)
