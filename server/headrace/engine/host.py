"""Facts about the host of an engine, for its status and metrics; owned by the event-loop thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import NamedTuple

from headrace.observability.machine import ProcessUses


class Certificate(NamedTuple):
    """A certificate of a door: its file, and when the first of those in it expires, since 1970."""

    door: str
    file: str
    expires: float


@dataclass(slots=True)
class HostFacts:
    """The facts about the host of an engine: when it started, its doors, processes, certificates.

    `addresses` of doors are by name. `front_ends` are process ids by name, 0 for one that does not
    run.
    """

    started: float = field(default_factory=time)  # since 1970
    addresses: dict[str, str] = field(default_factory=dict)
    front_ends: Callable[[], Mapping[str, int]] = dict
    certificates: Callable[[], Sequence[Certificate]] = tuple
    uses: ProcessUses = field(default_factory=ProcessUses)
