"""The backend of ensembles: models without files, whose steps run other models."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from headrace.core.errors import ServerError, Unavailable
from headrace.core.limits import ModelLoad
from headrace.core.model_spec import LoadSpec, Used
from headrace.core.signature import Signature
from headrace.observability.statistics import VersionStatistics
from headrace.placement.backend import Backend, BackendContext
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.placement.loaded import ModelTraits, Servable
from headrace.placement.placement import ModelServices, PlacedInstance, Placement, Surroundings
from headrace.placement.warming import Sample
from headrace.plugins.ensembles.graph import Graph, make_graph, use_problems, used_models
from headrace.plugins.ensembles.scheduler import EnsembleScheduler
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.reading import signature
from headrace.scheduling.scheduler import Scheduler

_MOST_AT_ONCE = 1 << 20


class EnsembleBackend(Backend):
    """Runs `ensemble_scheduling`: each step by the model that it names."""

    platform = "ensemble"
    places_instances = False
    decoupled = True

    def __init__(self, context: BackendContext) -> None:
        """Create the backend; the server has no options for ensembles."""

    def version_without_files(self, parameters: Mapping[str, str]) -> int:
        """Version 1: the directory of an ensemble needs none."""
        return 1

    def execution_problems(
        self, config: ModelConfig, wanted: str, in_process: bool
    ) -> Iterator[str]:
        if wanted != "auto":
            yield "an ensemble runs nothing itself"

    def uses(self, config: ModelConfig) -> Collection[Used]:
        """The models of the steps; raises `Contradiction` for a graph that cannot run."""
        return used_models(config)

    def use_problems(
        self, config: ModelConfig, used: Mapping[Used, Signature]
    ) -> Iterator[tuple[str, str]]:
        return use_problems(config, signature(config), used)

    def load(self, spec: LoadSpec) -> "EnsembleModel":
        """The ensemble itself has nothing to load: its models were loaded before."""
        return EnsembleModel(spec.used)


class EnsembleModel(Servable):
    """An ensemble, with the signatures of the models that it runs."""

    traits = ModelTraits(
        declared_by_code=True, reads_parameters=True, exact_shapes=True, row_limit=""
    )

    def __init__(self, used: Mapping[Used, Signature]) -> None:
        self._used = used
        self.graph: Graph  # set when it begins

    def completed(self, config: ModelConfig, auto_complete: bool = True) -> ModelConfig:
        """A copy that is decoupled if any of its models is."""
        result = ModelConfig()
        result.CopyFrom(config)
        if any(model.decoupled for model in self._used.values()):
            result.model_transaction_policy.decoupled = True
        return result

    def begin(
        self, config: ModelConfig, signature: Signature, batches: bool,
        host: ModelServices | None = None,
    ) -> None:  # fmt: skip
        """Make the graph."""
        self.graph = make_graph(config, replace(signature, any_rows=False), self._used)

    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """On the event loop, where its steps are submitted."""
        return InstanceKind.INLINE

    def warm_up(self, signature: Signature, version: int, samples: Sequence[Sample]) -> None:
        """Do nothing: its models have been warmed up."""

    def memory(self, growth: int | None) -> int:
        """None of its own."""
        return 0

    def placement(self, name: str, version: Surroundings) -> Placement:
        return EnsemblePlacement(name, self.graph, version)

    def close(self) -> None:
        """Do nothing: its models are unloaded by themselves."""


class EnsembleInstance:
    """The only instance of an ensemble; a `PlacedInstance`."""

    kind = InstanceKind.INLINE
    concurrency = _MOST_AT_ONCE  # requests wait for each other in the queues of the steps alone

    def __init__(self, name: str) -> None:
        self.name = name


class EnsemblePlacement(Placement):
    """An ensemble, whose steps run wherever their models do."""

    def __init__(self, name: str, graph: Graph, version: Surroundings) -> None:
        self._instances = [EnsembleInstance(name)]
        self._graph = graph
        self._version = version

    def __iter__(self) -> Iterator[PlacedInstance]:
        return iter(self._instances)

    def in_place_of(
        self, scheduler: Scheduler, version: str, statistics: VersionStatistics, load: ModelLoad
    ) -> Scheduler:
        """The scheduler of steps, in place of a queue for instances."""
        soon = self._version.loop.call_soon
        return EnsembleScheduler(self._graph, version, self._version.host, soon, statistics, load)

    def add(self, *instance: object, **more: object) -> None:
        """Do nothing: there is one instance."""

    def remove(self, name: str) -> None:
        """Do nothing: there is one instance."""

    @property
    def healthy(self) -> bool:
        """True: a step whose model runs nothing fails there."""
        return True

    @property
    def given_up(self) -> bool:
        return False

    def waiting_error(self) -> ServerError:
        return Unavailable("the ensemble has no steps")

    def leave(self, grace: float) -> None:
        """Do nothing: its models finish what they have begun."""

    def close(self) -> None:
        """Do nothing: nothing is watched."""

    async def closed(self) -> None:
        """Return at once: no process or thread belongs to an ensemble."""
