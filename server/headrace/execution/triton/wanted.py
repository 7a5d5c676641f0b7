"""What is wanted of the servers of a model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from headrace.execution.remote.options import Endpoint
from headrace.execution.triton.keeping import Keeper
from headrace.execution.triton.options import ControlOptions
from headrace.wire.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup

Renumbered = Callable[[Endpoint, Sequence[ModelInstanceGroup]], Sequence[ModelInstanceGroup]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a configuration asks for, as it is written, and what has the servers do it.

    `keeper` is None where they have the model of themselves. `renumbered`, where it is there, says
    which GPUs of the configuration a server's are.
    """

    config: ModelConfig
    control: ControlOptions
    keeper: Keeper | None = None
    renumbered: Renumbered | None = None

    def groups(self, endpoint: Endpoint, reported: ModelConfig) -> Sequence[ModelInstanceGroup]:
        """The instance groups that a server reports, as a configuration would ask for them."""
        found = list(reported.instance_group)
        return found if self.renumbered is None else self.renumbered(endpoint, found)


def asked_of(config: str) -> ModelConfig:
    """The configuration that a `LoadSpec` carries as JSON."""
    result: ModelConfig = json_format.ParseDict(json.loads(config), ModelConfig())
    return result
