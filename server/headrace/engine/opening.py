"""From a model directory to a configuration that has been read and checked.

As far as that goes without loading the model; it may take long on a slow file system and runs on a
loading thread.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace.core.errors import InvalidConfig, LoadFailed
from headrace.core.model_spec import EnvironmentOptions, LoadSpec
from headrace.execution.choice import InstanceKind
from headrace.execution.in_process import IN_PROCESS
from headrace.execution.model_calls import Host
from headrace.execution.python_backend import PARAMETERS, PythonBackend
from headrace.execution.remote.backend import RemoteBackend
from headrace.execution.remote.options import version_without_directory
from headrace.execution.runner import LoadedModel
from headrace.observability.memory import GrowthMeter
from headrace.observability.responses import FIRST_RESPONSE
from headrace.repository import completion, reading, validation
from headrace.repository.catalogue import DUPLICATE
from headrace.repository.config import ConfigFile, Problem, read_config, refuse
from headrace.repository.effects import misspelt, without_effect
from headrace.repository.fingerprint import fingerprint
from headrace.repository.layout import ModelSource
from headrace.repository.manifest import Digests
from headrace.repository.origin import Origin, origins
from headrace.wire.pb.model_config_pb2 import ModelConfig


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
    """What the operator decides about loading; `threads` is how many models load at once.

    One that fails is tried `retries` times more; one that takes longer than `limit_secs`, unless
    they are 0, has failed. `meter` measures those that are loaded into this process. `host` is whom
    a model may ask while it is warmed up, None for nobody.
    """

    cores: int
    auto_complete: bool = True
    default_max_batch_size: int = 64
    config_name: str = ""
    environments: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    in_process_python: bool = False
    threads: int = 4
    retries: int = 0
    limit_secs: float = 0.0
    meter: GrowthMeter = field(default_factory=GrowthMeter)
    host: Host | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose configuration has been read as far as that goes without loading it.

    `origins` are what its versions would be loaded from.
    """

    source: ModelSource
    file: ConfigFile
    config: ModelConfig
    backend: Backend
    origins: Mapping[int, Origin]
    warnings: tuple[str, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that the policy chooses, ascending."""
        return tuple(self.origins)


def open_model(
    source: ModelSource,
    backends: Mapping[str, Backend],
    options: LoadOptions,
    digests: Digests | None = None,
) -> Opened:
    """Read and check the configuration of a model; raises `RepositoryError`.

    `digests` know what files hold that were checked before.
    """
    if source.duplicate or source.problem:
        raise LoadFailed(DUPLICATE if source.duplicate else source.problem)
    state = fingerprint(source)  # first, so that what changes from here on is told
    file = source.override or read_config(source.config_path, source.name)
    refuse(file, validation.problems(file.config, source.written_name))
    if not source.versions:
        if not isinstance(backends.get(file.config.backend), RemoteBackend):
            raise InvalidConfig(_no_versions(source))
        number = version_without_directory(reading.parameters(file.config))
        source = replace(source, versions=(number,))
        state = replace(state, source=source, versions={number: {}})
        filenames = []
    else:
        filenames = _filenames(source)
    config = completion.complete_backend(file, source.name, filenames, backends)
    backend = backends[config.backend]
    if source.data_only and backend.isolated:
        raise InvalidConfig(
            f"{file.name}: the files of a {config.backend} model can run code, which a load request"
            " may not bring along; --load-overrides=code lets it"
        )
    versions = reading.chosen_versions(config, source.versions)
    if not versions:
        raise InvalidConfig(
            f"{file.name}: version_policy: at least one version must be available under the version"
            f" policy of model '{source.name}'; there are {', '.join(map(str, source.versions))}"
        )
    refuse(file, _execution_problems(config, backend, options))
    warnings = tuple(_config_warnings(source, file, backend, versions))
    named: Mapping[str, str] = {}
    if source.file is None:
        # Directories that come along with requests come once: there is nothing to remember.
        known = Digests() if digests is None or source.upload is not None else digests
        named = known.verified(source.path, versions)
    made_of = origins(state, file, config, versions, named)
    return Opened(source, file, config, backend, made_of, warnings)


def _filenames(source: ModelSource) -> list[str]:
    """What lies in the directory of a version."""
    if source.file is not None:
        return [source.file.name]
    version = source.versions[0]
    try:
        return [entry.name for entry in (source.path / str(version)).iterdir()]
    except OSError as error:
        raise LoadFailed(f"its version {version} cannot be read: {error.strerror}") from error


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
    if isinstance(backend, RemoteBackend):
        # A completed configuration has one plain group, and may come back from a client.
        if any(g.count > 1 or g.gpus or g.kind == g.KIND_GPU for g in config.instance_group):
            text = (
                "the model's servers have the instances; how many batches they are sent at a time"
                " is parameters['max_in_flight']"
            )
            yield Problem("instance_group", text)
        if wanted != "auto":
            yield Problem("parameters['execution']", "the model runs on other servers")
        return
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
    decoupled = file.config.model_transaction_policy.decoupled
    if decoupled and not backend.isolated and not isinstance(backend, RemoteBackend):
        text = (
            "requests are only taken over ModelStreamInfer and generate, and each gets one"
            " response; infer over HTTP and ModelInfer are refused"
        )
        yield file.explain(Problem("model_transaction_policy.decoupled", text))
    for index, control in enumerate(file.config.model_metrics.metric_control):
        if control.metric_identifier.family != FIRST_RESPONSE:
            path = f"model_metrics.metric_control[{index}].metric_identifier.family"
            text = f"has no effect: only '{FIRST_RESPONSE}' can have buckets of a model's own"
            yield file.explain(Problem(path, text))
    missing = set(file.config.version_policy.specific.versions) - set(versions)
    if missing:
        numbers = ", ".join(map(str, sorted(missing)))
        yield f"{file.name}: version_policy names versions that are not there: {numbers}"
