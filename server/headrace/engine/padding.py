"""The interface of padding to buckets, an optional part, to the versions whose requests it pads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.core.call import Submit
from headrace.core.plugins import OptionalPart
from headrace.core.signature import Signature
from headrace.engine.admission import Account
from headrace.engine.shared_memory import Expect
from headrace.engine.workbench import Workbench
from headrace.observability.statistics import PaddingCounts
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import Problem
from headrace.repository.validation import BUCKETS


@dataclass(frozen=True, slots=True)
class PaddingParts:
    """The parts of a running version that its padding uses.

    `expect` announces calls to its scheduler; `account` is charged for padded inputs.
    """

    expect: Expect
    account: Account
    bench: Workbench
    counts: PaddingCounts


class Padding(Protocol):
    """The padding of one version's requests."""

    def problems(self) -> Iterator[Problem]:
        """The problems of its parameter, for the complete configuration."""

    def shown(self, given: Signature) -> Signature:
        """The signature for clients, which may leave out inputs that are filled by padding."""

    def stage(self, parts: PaddingParts, submit: Submit) -> Submit:
        """The stage that pads checked calls, before `submit`, and cuts their responses."""


PADDING: OptionalPart[Callable[[ModelConfig], Padding]] = OptionalPart("padding")


def padding_of(config: ModelConfig) -> Padding | None:
    """The padding of a complete configuration; None without any.

    Raises `LoadFailed` if the server is without the part.
    """
    return PADDING.load()(config) if BUCKETS in config.parameters else None
