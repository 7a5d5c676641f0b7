"""Description of a server that the scorecard measures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.models import ALL_MODELS

JSON, BINARY, GRPC = "http-json", "http-binary", "grpc"


@dataclass(frozen=True, slots=True)
class Place:
    """The resources of a server: its interpreter, a private folder, its models and its ports."""

    python: Path
    home: Path
    models: Path
    http_port: int
    grpc_port: int


def write_onnx(names: frozenset[str], repository: Path) -> None:
    """The models as most servers take them: ONNX files in a model repository."""
    for name in sorted(names):
        ALL_MODELS[name].write(repository)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server.

    `requirements` has the packages of its virtual environment; without one it runs in the
    project's own. `fetch` puts more than packages into place and says where the interpreter is.
    `statistics` says that it answers `GET /v2/models/NAME/stats`. A `guest` takes part only in
    workloads that name it.
    """

    name: str
    title: str
    protocols: frozenset[str]
    models: frozenset[str]
    command: Callable[[Place], list[str]]
    requirements: Path | None = None
    fetch: Path | None = None
    statistics: bool = False
    write_models: Callable[[frozenset[str], Path], None] = write_onnx
    environment: Mapping[str, str] = field(default_factory=dict)
    guest: bool = False

    def serves(self, model: str, protocol: str) -> bool:
        """True if it can be asked for this model in this way."""
        return model in self.models and protocol in self.protocols
