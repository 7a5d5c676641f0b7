"""From a model directory to loaded instances, ready to be put behind a scheduler.

Everything here may take seconds and runs on a loading thread; it touches no state of the engine and
gives back values. Steps: read the configuration, let the backend load a first instance, complete
the configuration from it, check the two against one another, warm up and measure, load the other
instances.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Protocol

from headrace.core.errors import Contradiction, InvalidConfig, InvalidOption
from headrace.core.model_spec import EnvironmentOptions, LoadSpec
from headrace.core.signature import Signature
from headrace.engine.measuring import measure
from headrace.execution.choice import AutoChoice, InstanceKind
from headrace.execution.cores import threads_for
from headrace.execution.in_process import IN_PROCESS, LoadedInProcess
from headrace.execution.python_backend import PARAMETERS, LoadedWorker, PythonBackend
from headrace.execution.runner import LoadedModel
from headrace.repository import completion, reading, validation
from headrace.repository.config import ConfigFile, Problem, read_config
from headrace.repository.effects import misspelt, without_effect
from headrace.repository.layout import ModelSource
from headrace.scheduling.policy import SchedulingPolicy
from headrace.wire.pb.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)

LoadedPython = LoadedWorker | LoadedInProcess
# A model file of up to this size is first loaded with one thread and measured: it may be fit to run
# inline.
_SMALL_FILE = 16 << 20


class Backend(Protocol):
    """What turns a model's files into something that runs.

    Models of an `isolated` one run in processes of their own, unless their configuration says
    otherwise: what it loads is a `LoadedWorker`.
    """

    platform: str
    default_filename: str
    filenames: tuple[str, ...]
    suffixes: tuple[str, ...]
    isolated: bool

    def reads_parameter(self, name: str) -> bool:
        """Whether a parameter of the configuration has a meaning for this backend."""

    def load(self, spec: LoadSpec) -> LoadedModel:
        """Load one instance; raises `RepositoryError`, for a setting `InvalidOption`."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the operator decides about loading; `threads` is how many models load at once."""

    cores: int
    auto_complete: bool = True
    default_max_batch_size: int = 64
    config_name: str = ""
    environments: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    in_process_python: bool = False
    threads: int = 4


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose configuration has been read as far as that goes without loading it."""

    source: ModelSource
    file: ConfigFile
    config: ModelConfig
    backend: Backend
    versions: tuple[int, ...]
    warnings: tuple[str, ...]


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
    scheduling: SchedulingPolicy
    labels: Mapping[str, tuple[str, ...]]
    instances: list[LoadedInstance]
    warnings: tuple[str, ...]
    seconds: float


def open_model(
    source: ModelSource, backends: Mapping[str, Backend], options: LoadOptions
) -> Opened:
    """Read and check the configuration of a model; raises `InvalidConfig`."""
    file = read_config(source.config_path, source.name)
    _refuse(file, validation.problems(file.config, source.name))
    if not source.versions:
        raise InvalidConfig(_no_versions(source))
    directory = source.path / str(source.versions[0])
    filenames = (
        [entry.name for entry in directory.iterdir()] if source.file is None else [source.file.name]
    )
    config = completion.complete_backend(file, source.name, filenames, backends)
    backend = backends[config.backend]
    versions = reading.chosen_versions(config, source.versions)
    if not versions:
        raise InvalidConfig(
            f"{file.name}: version_policy: at least one version must be available under the version"
            f" policy of model '{source.name}'; there are {', '.join(map(str, source.versions))}"
        )
    _refuse(file, _execution_problems(config, backend, options))
    warnings = tuple(_config_warnings(source, file, backend, versions))
    return Opened(source, file, config, backend, versions, warnings)


def _no_versions(source: ModelSource) -> str:
    ignored = (
        f"; {', '.join(source.ignored)}: a version has no leading zero" if source.ignored else ""
    )
    return (
        f"model '{source.name}' has no version directory; its files belong into one whose name is a"
        f" number, such as {source.name}/1/{ignored}"
    )


def _execution_problems(
    config: ModelConfig, backend: Backend, options: LoadOptions
) -> Iterator[Problem]:
    """Where a model is to run, but cannot or must not."""
    wanted = reading.execution(config)
    if wanted == InstanceKind.PROCESS and not backend.isolated:
        text = f"'process' is for Python models; those of {config.backend} run inline or in threads"
        yield Problem("parameters['execution']", text)
    if wanted in IN_PROCESS and backend.isolated and not options.in_process_python:
        text = (
            f"'{wanted}' runs the model's code in the server's own process, which has to be allowed"
            " by --allow-in-process-python; without this parameter it runs in a worker process"
        )
        yield Problem("parameters['execution']", text)


def _config_warnings(
    source: ModelSource, file: ConfigFile, backend: Backend, versions: tuple[int, ...]
) -> Iterator[str]:
    """What in a configuration, or beside it, does not do what its author may expect."""
    for name in source.ignored:
        yield f"{source.name}: directory {name} is not a version: it has a leading zero"
    for path in without_effect(file.config, backend.reads_parameter):
        line = file.lines.get(path)
        where = f"{file.name}:{line}" if line else file.name
        yield f"{where}: {path} has no effect on this server"
    if type(backend) is PythonBackend:  # of others, what they do not know is in the list above
        for name, known in misspelt(file.config, PARAMETERS):
            text = f"only the model itself may read this; did you mean '{known}'?"
            yield file.explain(Problem(f"parameters['{name}']", text))
    if file.config.model_transaction_policy.decoupled and not backend.isolated:
        text = (
            "requests are only taken over ModelStreamInfer and generate, and each gets one"
            " response; infer over HTTP and ModelInfer are refused"
        )
        yield file.explain(Problem("model_transaction_policy.decoupled", text))
    missing = set(file.config.version_policy.specific.versions) - set(versions)
    if missing:
        numbers = ", ".join(map(str, sorted(missing)))
        yield f"{file.name}: version_policy names versions that are not there: {numbers}"


def _model_warnings(opened: Opened, model: LoadedModel, config: ModelConfig) -> Iterator[str]:
    """What of a loaded model is not served, or may be served otherwise than meant."""
    name = opened.source.name
    served = {tensor.name for tensor in config.input} | {tensor.name for tensor in config.output}
    for info in (*model.inputs, *model.outputs):
        if info.datatype is None and info.name not in served:
            yield (
                f"{name}: '{info.name}' is a {info.type_name}, which is no tensor of the protocol,"
                " and is left out (of a converter's zipmap option: switch it off)"
            )
        elif info.name in served and not info.shape and not opened.file.sets("input"):
            yield (
                f"{name}: the model gives no shape for '{info.name}', which is taken for a scalar;"
                " if it is none, declare its dims in config.pbtxt"
            )


def complete(opened: Opened, model: LoadedModel, options: LoadOptions) -> ModelConfig:
    """The model's whole configuration, completed from a loaded instance; raises `InvalidConfig`."""
    file, config = opened.file, opened.config
    inputs, outputs = model.inputs, model.outputs
    if isinstance(model, LoadedPython):
        config = model.completed(config)
        _refuse(file, _undeclared(config))
    elif options.auto_complete:
        config = completion.complete_tensors(
            file, config, inputs, outputs, options.default_max_batch_size
        )
    config = completion.normalise(config)
    if not config.output and outputs and all(info.datatype is None for info in outputs):
        types = ", ".join(f"'{info.name}' is a {info.type_name}" for info in outputs)
        raise InvalidConfig(f"{file.name}: no output is a tensor of the protocol: {types}")
    _refuse(file, validation.tensor_problems(config))
    if not isinstance(model, LoadedPython):
        _refuse(file, validation.model_problems(config, inputs, outputs))
    return config


def _undeclared(config: ModelConfig) -> Iterator[Problem]:
    """What a model that nobody can look into has to say of itself."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            yield Problem(kind, "declare them here, or in the model's auto_complete_config")
    if config.model_transaction_policy.decoupled and config.dynamic_batching.preserve_ordering:
        yield Problem(
            "dynamic_batching.preserve_ordering",
            "cannot be combined with a decoupled model, which answers when it likes",
        )


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
        open_rows = options.auto_complete and not opened.file.sets("max_batch_size")
        first_spec = replace(
            first_spec,
            auto_complete=options.auto_complete,
            environments=options.environments,
            default_max_batch_size=options.default_max_batch_size if open_rows else 0,
        )
        single = not opened.backend.isolated and (
            wanted == InstanceKind.INLINE or (wanted == "auto" and _is_small(first_spec.path))
        )
        first_threads = 1 if single else threads
        model = _load(opened, replace(first_spec, threads=first_threads))
        loaded.append(LoadedInstance(placements[0].name, model, InstanceKind.INLINE))
        config = complete(opened, model, options)
        signature = reading.signature(config)
        scheduling = reading.scheduling_policy(config)
        labels = _labels(opened, config)
        warnings = tuple(_model_warnings(opened, model, config))
        _begin(opened, model, config)
        kind = _choose(wanted, model, signature)
        if first_threads != threads and _kind_of(kind) is not InstanceKind.INLINE:
            # Too heavy for the event loop after all: it gets all the cores that it may use.
            loaded.pop().model.close()
            model = _load(opened, first_spec)
            first_threads = threads
        loaded[:] = [LoadedInstance(placements[0].name, model, kind)]
        for placement in placements[1:]:
            spec = _spec(opened.source, config, version, placement, first_threads)
            copy = _load(opened, replace(spec, environments=options.environments))
            _begin(opened, copy, config)
            own = AutoChoice(measure(copy, signature)) if isinstance(kind, AutoChoice) else kind
            loaded.append(LoadedInstance(placement.name, copy, own))
    except BaseException:
        for instance in loaded:
            instance.model.close()
        raise
    seconds = monotonic() - begun
    return LoadedVersion(config, signature, scheduling, labels, loaded, warnings, seconds)


def _load(opened: Opened, spec: LoadSpec) -> LoadedModel:
    """Load one instance; a setting that the backend cannot follow is told like any other."""
    backend = opened.backend
    try:
        if isinstance(backend, PythonBackend) and spec.parameters.get("execution") in IN_PROCESS:
            return backend.load_here(spec)
        return backend.load(spec)
    except InvalidOption as error:
        problem = Problem(error.path, error.text)
        raise InvalidConfig(opened.file.explain(problem)) from error
    except Contradiction as error:
        raise _explained(opened, error) from error


def _begin(opened: Opened, model: LoadedModel, config: ModelConfig) -> None:
    """Start what has to know its whole configuration before it runs; raises `RepositoryError`."""
    try:
        if isinstance(model, LoadedPython):
            model.begin(config)
    except Contradiction as error:
        raise _explained(opened, error) from error


def _explained(opened: Opened, error: Contradiction) -> InvalidConfig:
    lines = [opened.file.explain(Problem(path, text)) for path, text in error.problems]
    return InvalidConfig("\n".join(lines))


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
        try:
            labels[output.name] = _read_labels(root, output.label_filename)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error  # not the path, which clients see
            text = f"'{output.label_filename}' cannot be read: {reason}"
            found.append(Problem(f"output[{index}].label_filename", text))
    _refuse(opened.file, found)
    return labels


def _read_labels(root: Path, name: str) -> tuple[str, ...]:
    """The lines of a file within `root`; raises `OSError` or `ValueError`."""
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ValueError("it lies outside of the model's directory")
    # Not by splitlines, which also ends lines at characters that may be part of a label.
    lines = path.read_bytes().decode("utf-8-sig").split("\n")
    if not lines[-1]:
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)


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
    if isinstance(model, LoadedWorker):
        return InstanceKind.PROCESS
    return AutoChoice(measure(model, signature)) if wanted == "auto" else InstanceKind(wanted)
