"""Opening: from a model directory to a checked configuration.

Everything that does not require loading the model; may be slow on a slow file system and runs on a
loading thread.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.core.errors import (
    Contradiction,
    InvalidConfig,
    InvalidOption,
    LoadFailed,
    RepositoryError,
)
from headrace.core.limits import ExecutionLimits
from headrace.core.model_spec import EnvironmentOptions, IsolationOptions, Used
from headrace.core.ragged import RaggedForm
from headrace.core.signature import Signature
from headrace.engine.caching import ResponseCache
from headrace.engine.chain import STAGES, StagePlugin
from headrace.engine.limiting import RateLimiter
from headrace.engine.sequencing import sequencing
from headrace.observability.machine import GrowthMeter
from headrace.observability.statistics import FIRST_RESPONSE
from headrace.placement.backend import Backend
from headrace.placement.local.gpus import Gpus
from headrace.placement.placement import ModelServices
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import completion, fail_over, reading, sequence_batching, validation
from headrace.repository.catalogue import DUPLICATE
from headrace.repository.completion import device_problems, may_use_gpus, on_devices
from headrace.repository.config import ConfigFile, Problem, read_config, refuse
from headrace.repository.layout import ModelSource, materialised
from headrace.repository.model_files import Digests, Origin, fingerprint, origins
from headrace.repository.validation import OWN_PARAMETERS, TRAFFIC, misspelt, without_effect

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Settings for loading; `threads` is the number of concurrent loads.

    A failed load is retried `retries` times; one that takes longer than `limit_secs` has failed; 0
    disables either. `meter` measures models loaded into this process, `gpus` are those available.
    `host` is the interface for models while they are started and warmed up, None for none. With
    `elsewhere`, models are checked for another machine, whatever GPUs this one has. `limits` are
    those on executions, `overload_delay_ms` is that on the delay in an overloaded queue, and
    `fair_share` shares queues between clients, unless a model's configuration has its own.
    `isolation` confines models' processes. `stages` are those of plugins, by name. `signed` raises
    `LoadFailed` for a directory without the signature that is required, None for none. `cache`
    keeps answers of models that are configured for it, `limiter` those that share resources.
    """

    cores: int
    auto_complete: bool = True
    default_max_batch_size: int = 64
    environments: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    in_process_python: bool = False
    isolation: IsolationOptions | None = None
    threads: int = 4
    retries: int = 0
    limit_secs: float = 0.0
    meter: GrowthMeter = field(default_factory=GrowthMeter)
    host: ModelServices | None = None
    elsewhere: bool = False
    gpus: Gpus = field(default_factory=Gpus)
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    overload_delay_ms: int = 0
    fair_share: bool = False
    stages: Mapping[str, StagePlugin] = field(default_factory=dict)
    signed: Callable[[Path], None] | None = None
    cache: ResponseCache | None = None
    limiter: RateLimiter | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose configuration has been read and checked, but which is not loaded.

    `origins` are the origins of its versions. `fail_over` has the same model for further backends,
    in order; each of them has a `label`. `uses` are the models that it runs, and `used` their
    signatures, once they are known.
    """

    source: ModelSource
    file: ConfigFile
    config: ModelConfig
    backend: Backend
    origins: Mapping[int, Origin]
    warnings: tuple[str, ...]
    fail_over: "tuple[Opened, ...]" = ()
    label: str = ""
    uses: tuple[Used, ...] = ()
    used: Mapping[Used, Signature] = field(default_factory=dict)

    @contextmanager
    def options_explained(self) -> Iterator[None]:
        """Raise `InvalidOption` and `Contradiction` as `InvalidConfig` with the file's lines."""
        try:
            yield
        except InvalidOption as error:
            raise InvalidConfig(self.file.explain(Problem(error.path, error.text))) from error
        except Contradiction as error:
            lines = [self.file.explain(Problem(path, text)) for path, text in error.problems]
            raise InvalidConfig("\n".join(lines)) from error

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions selected by the policy, ascending."""
        return tuple(self.origins)


def open_model(
    source: ModelSource,
    backends: Mapping[str, Backend],
    options: LoadOptions,
    digests: Digests | None = None,
) -> Opened:
    """Read and check the configuration of a model, which is first brought from its store.

    May block; raises `RepositoryError`. `digests` caches the content of files that were checked
    before.
    """
    if source.duplicate:
        raise LoadFailed(DUPLICATE)
    source = materialised(source)
    if source.problem:
        raise LoadFailed(source.problem)
    if options.signed is not None:
        if source.file is not None or source.uploaded or source.override is not None:
            raise LoadFailed("files and configurations of their own are not signed")
        options.signed(source.path)
    state = fingerprint(source)  # first, so that later changes are noticed
    file = source.override or read_config(source.config_path, source.name)
    refuse(file, validation.problems(file.config, source.written_name))
    refuse(file, _stage_problems(source.name, file.config, options))
    if not source.versions:
        named = completion.named_backend(file.config, backends) or Backend()
        number = named.version_without_files(reading.parameters(file.config))
        if number is None or fail_over.needs_files(file.config):
            raise InvalidConfig(_no_versions(source))
        source = replace(source, versions=(number,))
        state = replace(state, source=source, versions={number: {}})
        filenames: list[str] = []
    else:
        filenames = _filenames(source)
    config = completion.complete_backend(file, source.name, filenames, backends)
    backend = backends[config.backend]
    further = _further(file, config, backends, filenames)
    for name in (config.backend, *(entry.backend for entry, _ in further)):
        if source.data_only and backends[name].isolated:
            raise InvalidConfig(
                f"{file.name}: the files of a {name} model can run code, which a load request may"
                " not bring along; --load-overrides=code lets it"
            )
    versions = reading.chosen_versions(config, source.versions)
    if not versions:
        raise InvalidConfig(
            f"{file.name}: version_policy: at least one version must be available under the version"
            f" policy of model '{source.name}'; there are {', '.join(map(str, source.versions))}"
        )
    config = _placed(file, config, backend, options)
    own = config
    if not backend.places_instances and any(not entry.endpoints for entry, _ in further):
        own = fail_over.without_execution(config)
    refuse(file, _execution_problems(own, backend, options))
    if options.limiter is not None:
        refuse(file, options.limiter.problems(completion.normalise(own)))
    further = [
        (entry, _placed(file, other, backends[entry.backend], options)) for entry, other in further
    ]
    for entry, other in further:
        refuse(file, _execution_problems(other, backends[entry.backend], options))
    readers = list(dict.fromkeys([backend, *(backends[entry.backend] for entry, _ in further)]))
    warnings = (
        *_config_warnings(source, file, readers, versions, options.stages),
        *map(file.explain, _idle_fields(file.config, config, backend, options)),
    )
    sums: Mapping[str, str] = {}
    if source.file is None:
        # Uploaded directories are used once: nothing needs to be cached.
        known = Digests() if digests is None or source.uploaded else digests
        sums = known.verified(source.path, versions)
    made_of = origins(state, file, config, versions, sums)
    if not backend.places_instances:
        made_of = {n: replace(origin, resizable=False) for n, origin in made_of.items()}
    opened = Opened(source, file, config, backend, made_of, warnings)
    with opened.options_explained():
        opened = replace(opened, uses=tuple(dict.fromkeys(backend.uses(config))))
    if not further:
        return opened
    others = tuple(
        replace(opened, config=other, backend=backends[entry.backend], label=entry.name)
        for entry, other in further
    )
    return replace(opened, config=own, fail_over=others, label=config.backend)


def _further(
    file: ConfigFile,
    config: ModelConfig,
    backends: Mapping[str, Backend],
    filenames: Sequence[str],
) -> list[tuple[fail_over.FurtherBackend, ModelConfig]]:
    """The further backends, and the model's configuration for each."""
    remote = [name for name, known in backends.items() if not known.places_instances]
    try:
        entries = fail_over.read_order(config, backends, remote)
    except fail_over.InvalidOrder as error:
        problem = Problem(f"parameters['{fail_over.PARAMETER}']", str(error))
        raise InvalidConfig(file.explain(problem)) from None
    found = []
    for entry in entries:
        alone = ConfigFile(file.name, fail_over.entry_config(config, entry), file.lines)
        found.append((entry, completion.complete_backend(alone, config.name, filenames, backends)))
    return found


def _filenames(source: ModelSource) -> list[str]:
    """The names of the files in a version's directory."""
    if source.file is not None:
        return [source.file.name]
    version = source.versions[0]
    try:
        return [entry.name for entry in source.version_path(version).iterdir()]
    except OSError as error:
        raise LoadFailed(f"its version {version} cannot be read: {error.strerror}") from error


def _placed(
    file: ConfigFile, config: ModelConfig, backend: Backend, options: LoadOptions
) -> ModelConfig:
    """A copy of `config` with the device of each instance; raises `InvalidConfig`."""
    gpus = options.gpus
    if not backend.places_instances or options.elsewhere:
        return config  # the GPUs are those of upstreams, or of another machine
    preferred = backend.gpu_obstacle(0) == ""
    if not may_use_gpus(config, preferred):
        return on_devices(config, 0, preferred=False)
    obstacle = backend.gpu_obstacle(gpus.count) or ""
    placed = on_devices(config, gpus.count, preferred, obstacle)
    refuse(file, device_problems(placed, gpus.count, gpus.problem, obstacle))
    return placed


def _no_versions(source: ModelSource) -> str:
    ignored = (
        f"; {', '.join(source.ignored)}: a version has no leading zero" if source.ignored else ""
    )
    return (
        f"model '{source.name}' has no version directory; its files belong into one whose name is a"
        f" number, such as {source.name}/1/{ignored}"
    )


def _stage_problems(model: str, config: ModelConfig, options: LoadOptions) -> Iterator[Problem]:
    """Problems that plugin stages find with their parameters; raises `LoadFailed`."""
    if TRAFFIC in config.parameters and TRAFFIC not in STAGES.own():
        text = f"this server was installed without its stage '{TRAFFIC}'"
        yield Problem(f"parameters['{TRAFFIC}']", text)
    for name, stage in options.stages.items():
        try:
            with stage_explained(name, model):
                stage.check(reading.parameters(config))
        except InvalidOption as error:
            yield Problem(error.path, error.text)


@contextmanager
def stage_explained(name: str, model: str) -> Iterator[None]:
    """Report a bug in a plugin's stage as a failure of the model, and of no other.

    Raises `LoadFailed`; the traceback goes to the log.
    """
    try:
        yield
    except RepositoryError:
        raise
    except Exception as error:
        log.error("plugin '%s' failed for model %s", name, model, exc_info=error)
        raise LoadFailed(f"its stage '{name}' failed: {type(error).__name__}") from error


def _execution_problems(
    config: ModelConfig, backend: Backend, options: LoadOptions
) -> Iterator[Problem]:
    """Problems with the model's place of execution."""
    if sequencing(config, backend) is not None:
        yield from sequence_batching.problems(config)
    wanted = reading.execution(config)
    for text in backend.execution_problems(config, wanted, options.in_process_python):
        yield Problem("parameters['execution']", text)


def _config_warnings(
    source: ModelSource,
    file: ConfigFile,
    readers: Sequence[Backend],
    versions: tuple[int, ...],
    stages: Mapping[str, StagePlugin],
) -> Iterator[str]:
    """Warnings about configuration fields and files without the effect that one may expect.

    `readers` are the model's backends.
    """
    for name in source.ignored:
        yield f"{source.name}: directory {name} is not a version: it has a leading zero"
    yield from _parameter_warnings(file, readers, stages)
    if file.config.model_transaction_policy.decoupled and not readers[0].decoupled:
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


def _idle_fields(
    given: ModelConfig, config: ModelConfig, backend: Backend, options: LoadOptions
) -> Iterator[Problem]:
    """Fields without effect for the backend, or on a server with these options.

    `given` is the configuration as its file has it.
    """
    if config.response_cache.enable and options.cache is None and not options.elsewhere:
        text = "has no effect: this server has no response cache (--cache-config)"
        yield Problem("response_cache.enable", text)
    yield from _idle_ragged(given, config.backend, backend.ragged)
    limited = any(group.HasField("rate_limiter") for group in config.instance_group)
    here = backend.places_instances or fail_over.needs_files(config)
    limits = options.limiter is not None and here
    if limited and not (limits or options.elsewhere):
        text = "has no effect without --rate-limit=execution_count, or on other servers"
        yield Problem("instance_group.rate_limiter", text)


def _idle_ragged(given: ModelConfig, backend: str, ragged: RaggedForm | None) -> Iterator[Problem]:
    if ragged is RaggedForm.FLAT:
        return
    for path in validation.ragged_fields(given):
        if ragged is None:
            text = f"has no effect for the backend '{backend}': shapes run apart"
            yield Problem(path, text)
        elif not path.endswith("allow_ragged_batch"):
            yield Problem(path, "has no effect: the model gets each request in its own shape")


def _parameter_warnings(
    file: ConfigFile, readers: Sequence[Backend], stages: Mapping[str, StagePlugin]
) -> Iterator[str]:
    """Warnings about fields and parameters that nothing reads, or only the model itself."""
    parameters = reading.parameters(file.config)
    of_stages = {name for stage in stages.values() for name in stage.parameters}
    unread = without_effect(
        file.config,
        lambda name: name in of_stages or any(one.reads_parameter(name) for one in readers),
    )
    known = OWN_PARAMETERS.union(of_stages, *(reader.parameters for reader in readers))
    meant = {f"parameters['{name}']": near for name, near in misspelt(file.config, known)}
    for reader in readers:
        for name, text in reader.idle_parameters(parameters):
            yield file.explain(Problem(f"parameters['{name}']", text))
    if any(reader.reads_everything(parameters) for reader in readers):
        unread = list(meant)
    for path in unread:
        line = file.lines.get(path)
        where = f"{file.name}:{line}" if line else file.name
        hint = f"; did you mean '{meant[path]}'?" if path in meant else ""
        yield f"{where}: {path} has no effect on this server{hint}"
    for path in meant:
        if path in unread:
            continue
        text = f"only the model itself may read this; did you mean '{meant[path]}'?"
        yield file.explain(Problem(path, text))
