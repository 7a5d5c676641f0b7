"""The interface of the rate limiter, an optional part, to versions with limited instances."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from headrace.observability.statistics import Sourced
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import Problem
from headrace.scheduling.gates import InstanceGate


class VersionGate(InstanceGate, Protocol):
    """The gate of one version."""

    def follow(self, config: ModelConfig) -> None:
        """Limit the instances of a changed configuration."""

    def close(self) -> None:
        """Limit nothing more: no batch is in progress."""


class RateLimiter(Protocol):
    """The limiter of an engine."""

    def problems(self, config: ModelConfig) -> Iterator[Problem]:
        """The instances of a configuration that could never run; on a loading thread."""

    def gate(self, config: ModelConfig, wake: Callable[[], object]) -> VersionGate | None:
        """The gate of a version, None if its instances need no resources.

        `wake` lets its scheduler try again; on the event loop, like all that follows.
        """

    def families(self) -> Iterable[Sourced]:
        """The metrics of the limiter."""
