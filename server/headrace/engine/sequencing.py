"""Sequences of models of this server: what the part that has them offers to the engine.

A model on upstreams has its sequences there (`headrace.scheduling.sequences`). Any other is given
more than its clients send, and its calls pass a scheduler of sequences in front of its batcher.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.core.call import Call
from headrace.core.limits import ModelLoad
from headrace.core.model_spec import TensorInfo
from headrace.core.plugins import OptionalPart
from headrace.observability.statistics import SequenceSeries
from headrace.placement.backend import Backend
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import Clock
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.scheduler import InstanceScheduler


class SequenceStage(Protocol):
    """The last stage of the calls of a model with sequences; `waiting` of them are here."""

    waiting: int

    @property
    def series(self) -> SequenceSeries:
        """The numbers of sequences, for a scrape."""

    def submit(self, request: Call) -> None:
        """Queue a checked call; raises `ServerError`."""


class SequenceScheduler(SequenceStage, InstanceScheduler, Protocol):
    """The scheduler of a version's sequences, between its placements and its batcher."""

    def lose(self, holder: object) -> None:
        """End the sequences on an instance, by `Surroundings.lost`."""

    def drain(self) -> None:
        """Note that no request will come: those that wait need not wait for idle sequences."""

    def close(self) -> None:
        """Stop all timers."""


class SequencePlan(Protocol):
    """The sequences of a loaded version."""

    def scheduling(self, common: SchedulingPolicy) -> SchedulingPolicy:
        """The policies of the batcher, given those for models without sequences."""

    def start(
        self, batcher: Batcher, clock: Clock, load: ModelLoad, failed: Callable[[str, int], None]
    ) -> SequenceScheduler:
        """Make the scheduler, which counts its requests as the model's `load`: `batcher` does not.

        `failed` is `VersionStatistics.request_failed`.
        """


class Sequencing(Protocol):
    """The sequences of a configuration."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the model's tensors that are not in the configuration's `input`."""

    def given(self, inputs: Sequence[TensorInfo]) -> ModelConfig:
        """A copy of the configuration with all tensors that the model is given, and gives.

        `inputs` are the model's own, as far as it tells.
        """

    def plan(self, root: Path) -> SequencePlan:
        """The plan for a model directory; reads files, and raises `InvalidOption`."""


SEQUENCES: OptionalPart[Callable[[ModelConfig], Sequencing]] = OptionalPart("sequences")


def sequencing(config: ModelConfig, backend: Backend) -> Sequencing | None:
    """The sequences of a model of this server; None if it has none, or has them on upstreams.

    Raises `LoadFailed` if the server is without them.
    """
    if config.WhichOneof("scheduling_choice") != "sequence_batching":
        return None
    return SEQUENCES.load()(config) if backend.places_instances else None
