"""What a request to load a model may bring along, in place of what lies in the repository."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.core.tensors import Buffer


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """`config` is a configuration as JSON text, None for that of the repository.

    `files` are the contents of a whole model directory, by their paths in it; if there are any, the
    repository's own directory is not used.
    """

    config: str | None = None
    files: Mapping[str, Buffer] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.config is not None or bool(self.files)
