"""From a model directory to loaded instances, ready to be put behind a scheduler.

Everything here may take seconds and runs on a loading thread; it touches no state of the engine and
gives back values. Steps: read the configuration, let the backend load a first instance, complete
the configuration from it, check the two against one another, warm up and measure, load the other
instances.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Protocol

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidConfig
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.execution.choice import BUDGET_NS, AutoChoice, InstanceKind
from headrace.execution.cores import threads_for
from headrace.execution.runner import LoadedModel
from headrace.repository import completion, reading, validation
from headrace.repository.config import ConfigFile, Problem, read_config
from headrace.repository.effects import without_effect
from headrace.repository.layout import ModelSource
from headrace.wire.pb.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)

# A model file of up to this size is first loaded with one thread and measured: it may be fit to run
# inline.
_SMALL_FILE = 16 << 20
_WARM_RUNS = 3


class Backend(Protocol):
    """What turns a model's files into something that runs."""

    platform: str
    default_filename: str

    def reads_parameter(self, name: str) -> bool:
        """Whether a parameter of the configuration has a meaning for this backend."""

    def load(self, spec: LoadSpec) -> LoadedModel:
        """Load one instance; raises `RepositoryError`."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the operator decides about loading."""

    cores: int
    auto_complete: bool = True
    default_max_batch_size: int = 4
    config_name: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose configuration has been read as far as that goes without loading it."""

    source: ModelSource
    file: ConfigFile
    config: ModelConfig
    backend: Backend
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedInstance:
    """One loaded copy and where it will run."""

    name: str
    model: LoadedModel
    kind: InstanceKind | AutoChoice


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """All that the engine needs to serve a version."""

    config: ModelConfig
    signature: Signature
    labels: Mapping[str, tuple[str, ...]]
    instances: list[LoadedInstance]
    seconds: float


def open_model(
    source: ModelSource, backends: Mapping[str, Backend], options: LoadOptions
) -> Opened:
    """Read and check the configuration of a model; raises `InvalidConfig`.

    Fields that have no effect on this server are logged, once.
    """
    file = read_config(source.config_path, source.name)
    _refuse(file, validation.problems(file.config, source.name))
    filenames: list[str] = []
    if source.file is not None:
        filenames = [source.file.name]
    elif source.versions:
        filenames = [entry.name for entry in (source.path / str(source.versions[0])).iterdir()]
    config = completion.complete_backend(file, source.name, filenames, backends)
    backend = backends[config.backend]
    for name in source.ignored:
        log.warning(
            "model %s: directory %s is not a version: it has a leading zero", source.name, name
        )
    for path in without_effect(file.config, backend.reads_parameter):
        line = file.lines.get(path)
        log.warning(
            "%s: %s has no effect on this server",
            f"{file.name}:{line}" if line else file.name,
            path,
        )
    versions = reading.chosen_versions(config, source.versions)
    if not versions:
        raise InvalidConfig(
            "at least one version must be available under the version policy of model"
            f" '{source.name}'"
        )
    return Opened(source, file, config, backend, versions)


def complete(opened: Opened, model: LoadedModel, options: LoadOptions) -> ModelConfig:
    """The model's whole configuration, completed from a loaded instance; raises `InvalidConfig`."""
    file, config = opened.file, opened.config
    inputs, outputs = model.inputs, model.outputs
    if options.auto_complete:
        config = completion.complete_tensors(
            file, config, inputs, outputs, options.default_max_batch_size
        )
    config = completion.normalise(config)
    _refuse(file, validation.tensor_problems(config))
    _refuse(file, validation.model_problems(config, inputs, outputs))
    return config


def load_version(opened: Opened, version: int, options: LoadOptions) -> LoadedVersion:
    """Load every instance of a version; raises `RepositoryError`, with everything closed again."""
    begun = monotonic()
    early = completion.normalise(opened.config)
    placements = reading.placements(early)
    wanted = reading.execution(early)
    threads = threads_for(len(placements), options.cores)
    loaded: list[LoadedInstance] = []
    try:
        first_spec = _spec(opened.source, early, version, placements[0], threads)
        single = wanted == InstanceKind.INLINE or (wanted == "auto" and _is_small(first_spec.path))
        first_threads = 1 if single else threads
        model = opened.backend.load(replace(first_spec, threads=first_threads))
        loaded.append(LoadedInstance(placements[0].name, model, InstanceKind.INLINE))
        config = complete(opened, model, options)
        signature = reading.signature(config)
        labels = _labels(opened, config)
        kind = _choose(wanted, model, signature)
        if first_threads != threads and _kind_of(kind) is not InstanceKind.INLINE:
            # Too heavy for the event loop after all: it gets all the cores that it may use.
            loaded.pop().model.close()
            model = opened.backend.load(first_spec)
            first_threads = threads
        loaded[:] = [LoadedInstance(placements[0].name, model, kind)]
        for placement in placements[1:]:
            spec = _spec(opened.source, config, version, placement, first_threads)
            copy = opened.backend.load(spec)
            own = AutoChoice(_measure(copy, signature)) if isinstance(kind, AutoChoice) else kind
            loaded.append(LoadedInstance(placement.name, copy, own))
    except BaseException:
        for instance in loaded:
            instance.model.close()
        raise
    return LoadedVersion(config, signature, labels, loaded, monotonic() - begun)


def _spec(
    source: ModelSource,
    config: ModelConfig,
    version: int,
    placement: reading.Placement,
    threads: int,
) -> LoadSpec:
    spec = reading.load_spec(config, source.path, version, placement, threads)
    return spec if source.file is None else replace(spec, path=source.file)


def _labels(opened: Opened, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The class labels of each output that names a file with them; raises `InvalidConfig`."""
    root = opened.source.path.resolve()
    labels: dict[str, tuple[str, ...]] = {}
    found: list[Problem] = []
    for index, output in enumerate(config.output):
        if not output.label_filename:
            continue
        path = (root / output.label_filename).resolve()
        try:
            if not path.is_relative_to(root):
                raise OSError("it lies outside of the model's directory")
            labels[output.name] = tuple(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            text = f"'{output.label_filename}' cannot be read: {error}"
            found.append(Problem(f"output[{index}].label_filename", text))
    _refuse(opened.file, found)
    return labels


def _refuse(file: ConfigFile, found: Iterable[Problem]) -> None:
    if lines := [file.explain(problem) for problem in found]:
        raise InvalidConfig("\n".join(lines))


def _is_small(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _SMALL_FILE
    except OSError:
        return False


def _kind_of(kind: InstanceKind | AutoChoice) -> InstanceKind:
    return kind.kind if isinstance(kind, AutoChoice) else kind


def _choose(wanted: str, model: LoadedModel, signature: Signature) -> InstanceKind | AutoChoice:
    return AutoChoice(_measure(model, signature)) if wanted == "auto" else InstanceKind(wanted)


def _measure(model: LoadedModel, signature: Signature) -> float:
    """Nanoseconds of one run at the largest batch, after warm-up, with zeros for input.

    A model that fails on zeros is none that can be measured; it counts as too heavy for the event
    loop.
    """
    cost = float("inf")
    names = [spec.name for spec in signature.outputs]
    for rows in sorted({1, max(signature.max_batch_size, 1)}):
        inputs = {spec.name: _zeros(spec, signature, rows) for spec in signature.inputs}
        cost = float("inf")
        for _ in range(_WARM_RUNS):
            begun = perf_counter_ns()
            try:
                model.infer(inputs, names)
            except Exception as error:  # any: the model says nothing about what it takes
                log.debug("model %s cannot be measured with zeros: %s", signature.model, error)
                return float("inf")
            cost = min(cost, perf_counter_ns() - begun)
            if cost > 100 * BUDGET_NS:
                return cost  # as heavy as this, it needs no more runs to be known
    return cost


def _zeros(spec: TensorSpec, signature: Signature, rows: int) -> Array:
    dims = spec.dims if spec.reshape is None else spec.reshape
    shape = [*([rows] if signature.batches else []), *(1 if d == -1 else d for d in dims)]
    if spec.datatype is Datatype.BYTES:
        array = np.empty(shape, object)
        array.fill(b"0")  # text that is a number too, for graphs that cast it
        return array
    return np.zeros(shape, NUMPY[spec.datatype])
