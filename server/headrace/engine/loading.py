"""Loading: from an opened model to loaded instances, ready for a scheduler.

Everything here may take seconds and runs on a loading thread, without touching the engine's state.
Steps, after `headrace.engine.opening`: the backend loads a first instance, the configuration is
completed from it, both are checked against each other, the instance is measured and warmed up, and
the other instances are loaded.

For a model with several backends (`fail_over`), the first that can be loaded completes the
configuration, and the others must agree with it. Only upstreams may be absent: the version then
serves without them, and is loaded again once they can be reached.

A serving version is updated with as little loading as possible (`update`): one with the same origin
stays; if only its instance groups have changed, instances are added or removed.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from pathlib import Path
from stat import S_ISREG
from time import monotonic

from headrace.core.errors import InvalidConfig, LoadFailed, RepositoryError
from headrace.core.limits import ExecutionLimits
from headrace.core.model_spec import LoadSpec, Used
from headrace.core.signature import Signature, difference
from headrace.core.tensors import Array
from headrace.engine.caching import OPT_OUT, VersionCache
from headrace.engine.chain import Compose, StageModel
from headrace.engine.limiting import RateLimiter
from headrace.engine.opening import LoadOptions, Opened, stage_explained
from headrace.engine.padding import Padding, padding_of
from headrace.engine.sequencing import SequencePlan, Sequencing, sequencing
from headrace.observability.machine import GrowthMeter
from headrace.placement.choice import IN_PROCESS, AutoChoice, InstanceKind
from headrace.placement.cores import threads_for
from headrace.placement.loaded import DEFAULT_ROWS, Servable
from headrace.placement.warming import Sample
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import completion, fail_over, reading, validation
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile, refuse
from headrace.repository.layout import ModelSource
from headrace.repository.model_files import Origin, content_of
from headrace.repository.reading import WantedInstance, read_labels, read_samples
from headrace.repository.store import Lease
from headrace.repository.validation import TRAFFIC
from headrace.scheduling.policy import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU's memory, 0 if unknown; `uuid` identifies the GPU."""

    device: int
    uuid: str
    nbytes: int


log = logging.getLogger(__name__)

# A model file of up to this size is first loaded with one thread and measured, since it may be fast
# enough to run inline.
_SMALL_FILE = 16 << 20
_GRACE_SECS = 0.5
_MOST_PARTS = 1024  # batches of one request, each of some 50 us for a light model


# The bytes that a loaded instance takes, in memory and on its GPU.
Taken = Callable[[Servable], tuple[int, GpuMemory | None]]


@dataclass(frozen=True, slots=True)
class LoadedInstance:
    """One loaded instance with its place of execution and the memory that it takes.

    `gpu` is its GPU memory, if it is on one. `place` allocates memory for gathering batches, if it
    has a preferred kind. `rank` is that of its backend, for a model with several.
    """

    name: str
    model: Servable
    kind: InstanceKind | AutoChoice
    memory: int = 0
    gpu: GpuMemory | None = None
    place: Callable[[int], Array | None] | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends of a version that has several, by label, in order.

    With `queue_size` requests waiting the next one helps out; 0: never. `absent` are those that
    could not be loaded, with the reason; `look` returns one of them that is available now, "" for
    none, and may block.
    """

    labels: tuple[str, ...]
    queue_size: int
    absent: Mapping[str, str]
    look: Callable[[], str]


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """Everything that the engine needs to serve a version.

    `signature` is what clients see, `given` what the model is given: stages make calls for the one
    of calls for the other, such as batches of a call that has more rows than one. A model of this
    server that has sequences has a plan for them.
    """

    origin: Origin
    config: ModelConfig
    signature: Signature
    given: Signature
    scheduling: SchedulingPolicy
    labels: Mapping[str, tuple[str, ...]]
    instances: Sequence[LoadedInstance]
    warnings: tuple[str, ...]
    seconds: float
    lease: Lease | None = None
    backends: Backends | None = None
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    stages: tuple[Compose, ...] = ()
    sequences: SequencePlan | None = None
    cache: VersionCache | None = None
    limiter: RateLimiter | None = None
    uses: Collection[Used] = ()  # the models that it runs
    padding: Padding | None = None


def _model_warnings(opened: Opened, model: Servable, config: ModelConfig) -> Iterator[str]:
    """Warnings about tensors that are left out, or may be misinterpreted."""
    name = opened.source.name
    declared = opened.file.sets("input")
    served = {tensor.name for tensor in config.input} | {tensor.name for tensor in config.output}
    for info in (*model.inputs, *model.outputs):
        if info.datatype is None and info.name not in served:
            yield (
                f"{name}: '{info.name}' is a {info.type_name}, which is no tensor of the protocol,"
                " and is left out (of a converter's zipmap option: switch it off)"
            )
        elif info.name in served and not (info.shape or model.traits.exact_shapes or declared):
            yield (
                f"{name}: the model gives no shape for '{info.name}', which is taken for a scalar;"
                " if it is none, declare its dims in config.pbtxt"
            )


def complete(opened: Opened, model: Servable, options: LoadOptions) -> ModelConfig:
    """The complete configuration, from a loaded instance; raises `InvalidConfig`."""
    file = opened.file
    with opened.options_explained():
        config = model.completed(opened.config, options.auto_complete)
    sequences = sequencing(config, opened.backend)
    hidden = frozenset() if sequences is None else sequences.names
    inputs = [info for info in model.inputs if info.name not in hidden]
    outputs = [info for info in model.outputs if info.name not in hidden]
    if options.auto_complete and not model.traits.declared_by_code:
        most = model.traits.max_rows
        rows = options.default_max_batch_size if most is None else most
        config = completion.complete_tensors(file, config, inputs, outputs, rows)
    config = completion.normalise(config)
    if not config.output and outputs and all(info.datatype is None for info in outputs):
        types = ", ".join(f"'{info.name}' is a {info.type_name}" for info in outputs)
        raise InvalidConfig(f"{file.name}: no output is a tensor of the protocol: {types}")
    ragged = opened.backend.ragged
    refuse(file, validation.tensor_problems(config, inputs, outputs, ragged))
    if (padding := padding_of(config)) is not None:
        refuse(file, padding.problems())
    if not model.traits.declared_by_code:
        sequences = sequencing(config, opened.backend)  # of what is complete now
        given = _given_config(config, sequences, model)
        refuse(file, validation.model_problems(given, *model.reported(config), ragged))
    return config


def _given_config(
    config: ModelConfig, sequences: Sequencing | None, model: Servable
) -> ModelConfig:
    """The complete configuration with all tensors that the model is given, and gives."""
    return config if sequences is None else sequences.given(model.inputs)


def _given(
    opened: Opened, config: ModelConfig, sequences: Sequencing | None, model: Servable
) -> Signature:
    """The signature of what the model is given, and gives."""
    given = reading.signature(_given_config(config, sequences, model), opened.backend.ragged)
    return replace(given, stateful=sequences is not None)


def _divided(
    signature: Signature, opened: Opened, model: Servable, config: ModelConfig
) -> Signature:
    """The signature with the number of rows per request, and the name of its limit."""
    limit, completed = signature.limit, False
    named = model.traits.row_limit
    if named and not opened.file.sets("max_batch_size"):
        limit, completed = named, named == DEFAULT_ROWS
    parts = _MOST_PARTS if completion.divides(config, completed) else 1
    return replace(signature, parts=parts, limit=limit)


@contextmanager
def _closed_on_error(loaded: list[LoadedInstance]) -> Iterator[None]:
    """Close the instances loaded so far if an exception is raised."""
    try:
        yield
    except BaseException:
        for instance in loaded:
            instance.model.close()
        raise


def load_version(opened: Opened, version: int, options: LoadOptions) -> LoadedVersion:
    """Load every instance of a version; raises `RepositoryError`, with everything closed."""
    begun = monotonic()
    # For an upstream, everything left open is its own decision, above all instance groups.
    elsewhere = not opened.backend.places_instances
    early = opened.config if elsewhere else completion.normalise(opened.config)
    further = opened.label not in ("", early.backend)
    name = f"{early.name}_{opened.label}" if further else early.name
    placements = [WantedInstance(f"{name}_0", None)] if elsewhere else reading.placements(early)
    wanted = reading.execution(early)
    threads = threads_for(len(placements), options.cores)
    loaded: list[LoadedInstance] = []
    with _closed_on_error(loaded):
        open_rows = options.auto_complete and not opened.file.sets("max_batch_size")
        first_spec = replace(
            _spec(opened.source, early, version, placements[0], threads, options),
            auto_complete=options.auto_complete,
            default_max_batch_size=options.default_max_batch_size if open_rows else 0,
            used=opened.used,
        )
        inline = wanted == InstanceKind.INLINE
        here = not (opened.backend.isolated or elsewhere) and first_spec.device is None
        single = here and (inline or (wanted == "auto" and _is_small(first_spec.path)))
        first_threads = 1 if single else threads
        with _footprint(opened, first_spec, wanted, options) as taken:
            model = _load(opened, replace(first_spec, threads=first_threads))
            loaded.append(LoadedInstance(placements[0].name, model, InstanceKind.INLINE))
            config = complete(opened, model, options)
            if opened.backend.isolated and not opened.config.instance_group:
                placements = reading.placements(config)  # as its code says
                threads = threads_for(len(placements), options.cores)
                if threads != first_threads:
                    # The libraries of the first worker have started the threads of all cores.
                    loaded.pop().model.close()
                    model = _load(opened, replace(first_spec, threads=threads))
                    loaded.append(LoadedInstance(placements[0].name, model, InstanceKind.INLINE))
                    first_threads = threads
            sequences = sequencing(config, opened.backend)
            given = _given(opened, config, sequences, model)
            ragged = opened.backend.ragged
            shown = given if sequences is None else reading.signature(config, ragged)
            padding = padding_of(config)
            if padding is not None:
                shown = padding.shown(shown)
            signature = _divided(shown, opened, model, config)
            if not model.traits.reads_parameters:
                own = frozenset({OPT_OUT} if _is_cached(config, options) else ())
                signature = replace(signature, parameters=own)
            with opened.options_explained():
                scheduling = reading.scheduling_policy(
                    config, options.overload_delay_ms, options.fair_share
                )
                plan = None if sequences is None else sequences.plan(opened.source.path)
                if plan is not None:
                    scheduling = plan.scheduling(scheduling)
            limits = _limits(opened, config, options)
            stages = _stages(opened, config, signature, version, options)
            cache = _cache(opened, config, signature, version, options)
            labels, problems = read_labels(opened.source.path, config)
            refuse(opened.file, problems)
            samples = read_samples(opened.file, config, given, opened.source.path)
            warnings = tuple(_model_warnings(opened, model, config))
            _begin(opened, model, config, given, options)
            kind = model.kind(wanted, given, first_spec.device)
            if first_threads != threads and _kind_of(kind) is not InstanceKind.INLINE:
                # Too slow for the event loop after all: it gets all the cores that it may use.
                loaded.pop().model.close()
                model = _load(opened, first_spec)
                first_threads = threads
            loaded[:] = [LoadedInstance(placements[0].name, model, kind)]
            model.warm_up(given, version, samples)
            place = _place(model, config, first_spec.device, options)
            memory, on_gpu = taken(model)
            loaded[:] = [replace(loaded[0], memory=memory, gpu=on_gpu, place=place)]
        for placement in placements[1:]:
            spec = _spec(opened.source, config, version, placement, first_threads, options)
            copy, _ = _load_copy(opened, spec, config, placement, samples, options)
            loaded.append(copy)
    seconds = monotonic() - begun
    origin = opened.origins[version]
    lease = opened.source.lease
    return LoadedVersion(
        origin, config, signature, given, scheduling, labels, loaded, warnings, seconds, lease,
        limits=limits, stages=stages, sequences=plan, cache=cache,
        limiter=None if elsewhere else options.limiter, uses=opened.uses, padding=padding,
    )  # fmt: skip


def load_instances(
    opened: Opened,
    version: int,
    config: ModelConfig,
    placements: Sequence[reading.WantedInstance],
    inline: bool,
    options: LoadOptions,
) -> list[LoadedInstance]:
    """Load further instances of a serving version; raises as `load_version` does.

    `config` is complete, `inline` is true if the existing instances run on the event loop.
    """
    threads = 1 if inline else threads_for(len(reading.placements(config)), options.cores)
    loaded: list[LoadedInstance] = []
    samples: Sequence[Sample] | None = None
    with _closed_on_error(loaded):
        for placement in placements:
            spec = _spec(opened.source, config, version, placement, threads, options)
            copy, samples = _load_copy(opened, spec, config, placement, samples, options)
            loaded.append(copy)
    return loaded


def _load_copy(
    opened: Opened,
    spec: LoadSpec,
    config: ModelConfig,
    placement: reading.WantedInstance,
    samples: Sequence[Sample] | None,
    options: LoadOptions,
) -> tuple[LoadedInstance, Sequence[Sample]]:
    """Load an instance of a model whose configuration is complete.

    Returns its samples, too, which are read if `samples` is None: further copies have the same.
    """
    wanted = reading.execution(config)
    with _footprint(opened, spec, wanted, options) as taken:
        copy = _load(opened, spec)
        try:
            given = _given(opened, config, sequencing(config, opened.backend), copy)
            if samples is None:
                samples = read_samples(opened.file, config, given, opened.source.path)
            _begin(opened, copy, config, given, options)
            kind = copy.kind(wanted, given, spec.device)
            copy.warm_up(given, spec.version, samples)
        except BaseException:
            copy.close()
            raise
        place = _place(copy, config, spec.device, options)
        return LoadedInstance(placement.name, copy, kind, *taken(copy), place), samples


@contextmanager
def _footprint(
    opened: Opened, spec: LoadSpec, wanted: str, options: LoadOptions
) -> Iterator[Taken]:
    """Measure the memory that an instance takes while it is loaded.

    One in this process takes its growth, one on a GPU the growth of its memory in use, whoever took
    it.
    """
    backend, gpus, device = opened.backend, options.gpus, spec.device
    here = not backend.isolated or wanted in IN_PROCESS
    if here:
        backend.prepare()  # before the measurement, since it is not part of a model's memory
    on_gpu = None if device is None else gpus.meter(device)
    with _growth(options.meter if here else None) as grown, _growth(on_gpu) as gpu_grown:

        def taken(model: Servable) -> tuple[int, GpuMemory | None]:
            gpu = None
            if device is not None:
                gpu = GpuMemory(device, gpus.uuid(device), max(gpu_grown() or 0, 0))
            return model.memory(grown()), gpu

        yield taken


def _growth(meter: GrowthMeter | None) -> AbstractContextManager[Callable[[], int | None]]:
    return nullcontext(lambda: None) if meter is None else meter.measuring()


def _place(
    model: Servable, config: ModelConfig, device: int | None, options: LoadOptions
) -> Callable[[int], Array | None] | None:
    """The allocator for an instance's batches; None for ordinary memory."""
    pinned = device is not None and model.traits.pins_inputs and reading.pinned_inputs(config)
    return options.gpus.pinned if pinned else None


def _load(opened: Opened, spec: LoadSpec) -> Servable:
    """Load one instance; backend options that fail are reported as configuration errors."""
    with opened.options_explained():
        return opened.backend.load(spec)


def _limits(opened: Opened, config: ModelConfig, options: LoadOptions) -> ExecutionLimits:
    """The execution limits of the model; raises `InvalidConfig`."""
    with opened.options_explained():
        return options.limits.of(reading.parameters(config))


def _stages(
    opened: Opened, config: ModelConfig, signature: Signature, version: int, options: LoadOptions
) -> tuple[Compose, ...]:
    """The plugin stages of the version; raises `RepositoryError`."""
    model = StageModel(signature.model, version, reading.parameters(config), signature)
    found = []
    for name, plugin in options.stages.items():
        with stage_explained(name, model.name), opened.options_explained():
            found.append(plugin.compose(model))
    return tuple(stage for stage in found if stage is not None)


def _is_cached(config: ModelConfig, options: LoadOptions) -> bool:
    return options.cache is not None and config.response_cache.enable


def _cache(
    opened: Opened, config: ModelConfig, signature: Signature, version: int, options: LoadOptions
) -> VersionCache | None:
    """The response cache of the version, if it has one."""
    if options.cache is None or not _is_cached(config, options):
        return None
    model = StageModel(signature.model, version, reading.parameters(config), signature)
    composed = config.WhichOneof("scheduling_choice") == "ensemble_scheduling"
    return options.cache.version(model, opened.origins[version].content, composed)


def _begin(
    opened: Opened, model: Servable, config: ModelConfig, given: Signature, options: LoadOptions
) -> None:
    """Start a loaded model with its complete configuration; raises `RepositoryError`."""
    batches = completion.batches(config) or (given.stateful and given.batches)
    with opened.options_explained():
        model.begin(config, given, batches, options.host)


def _spec(
    source: ModelSource,
    config: ModelConfig,
    version: int,
    placement: reading.WantedInstance,
    threads: int,
    options: LoadOptions,
) -> LoadSpec:
    spec = reading.load_spec(config, source.path, version, placement, threads)
    # The deadline for a worker's start is slightly later than any waiting load's.
    limit = options.limit_secs
    return replace(
        spec,
        path=source.model_path(version, config.default_model_filename),
        single_file=source.file is not None,
        environments=options.environments,
        isolation=options.isolation,
        deadline=monotonic() + limit + _GRACE_SECS if limit else inf,
        limits=options.limits,
    )


def _is_small(path: Path) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return S_ISREG(found.st_mode) and found.st_size <= _SMALL_FILE


def _kind_of(kind: InstanceKind | AutoChoice) -> InstanceKind:
    return kind.kind if isinstance(kind, AutoChoice) else kind


_COMPLETED = ("max_batch_size", "input", "output")


def load(opened: Opened, version: int, options: LoadOptions) -> LoadedVersion:
    """Load a version by all its backends; raises as `load_version` does."""
    if not opened.fail_over:
        return load_version(opened, version, options)
    return _Loading(opened, version, options).result()


class _Loading:
    """The loading of one version with several backends: loaded instances, absent backends."""

    def __init__(self, opened: Opened, version: int, options: LoadOptions) -> None:
        self._tiers = [replace(opened, fail_over=()), *opened.fail_over]
        self._version = version
        self._options = options
        self._loaded: list[LoadedVersion] = []
        self._instances: list[LoadedInstance] = []
        self._absent: dict[str, tuple[Opened, LoadFailed]] = {}

    def result(self) -> LoadedVersion:
        """Everything loaded; raises `RepositoryError`, with everything closed."""
        begun = monotonic()
        with _closed_on_error(self._instances):
            for rank, tier in enumerate(self._tiers):
                self._add(rank, tier)
            if not self._loaded:
                text = "; ".join(f"{n}: {error}" for n, (_, error) in self._absent.items())
                public = "; ".join(f"{n}: {e.public}" for n, (_, e) in self._absent.items())
                raise LoadFailed(text, public)
        first = self._loaded[0]
        own = self._tiers[0]
        warnings = [warning for loaded in self._loaded for warning in loaded.warnings]
        warnings += [
            f"{own.source.name}: {label} cannot be used yet, and is tried again; until then what"
            f" config.pbtxt leaves open is completed from {self._agreed}: {error}"
            for label, (_, error) in self._absent.items()
        ]
        return replace(
            first,
            # Any of them may answer, and models on upstreams may read any parameter.
            signature=replace(first.signature, parameters=None),
            config=fail_over.with_own_fields(first.config, normalise(own.config)),
            instances=self._instances,
            warnings=tuple(dict.fromkeys(warnings)),
            seconds=monotonic() - begun,
            limiter=next((one.limiter for one in self._loaded if one.limiter is not None), None),
            backends=Backends(
                tuple(tier.label for tier in self._tiers),
                fail_over.queue_size(own.config),
                {label: error.public for label, (_, error) in self._absent.items()},
                self._look,
            ),
        )

    def _add(self, rank: int, tier: Opened) -> None:
        if self._loaded:
            tier = _completed(tier, self._loaded[0].config)
        try:
            found = load_version(tier, self._version, self._options)
        except InvalidConfig as error:
            if not self._loaded:
                raise
            raise InvalidConfig(_prefixed(tier, self._agreed, str(error))) from error
        except LoadFailed as error:
            if tier.backend.places_instances:
                raise
            self._absent[tier.label] = tier, error
            return
        self._instances += [replace(instance, rank=rank) for instance in found.instances]
        if not self._loaded:  # upstreams may have completed the configuration
            refuse(tier.file, fail_over.problems(found.config))
        elif why := _differs(self._loaded[0].signature, found.signature):
            raise InvalidConfig(_prefixed(tier, self._agreed, f"{tier.file.name}: {why}"))
        self._loaded.append(found)

    @property
    def _agreed(self) -> str:
        """The label of the first loaded backend."""
        return next(t.label for t in self._tiers if t.label not in self._absent)

    def _look(self) -> str:
        """The label of an absent backend that can be loaded now; "" for none."""
        for label, (tier, _) in self._absent.items():
            placement = reading.WantedInstance(tier.source.name, None)
            spec = reading.load_spec(tier.config, tier.source.path, self._version, placement, 1)
            with suppress(RepositoryError):
                tier.backend.load(spec).close()
                return label
        return ""


def _completed(tier: Opened, config: ModelConfig) -> Opened:
    """The model with the configuration completed from another of its backends."""
    own = fail_over.with_own_fields(config, tier.config)
    lines = {**dict.fromkeys(_COMPLETED, 0), **tier.file.lines}
    return replace(tier, config=own, file=ConfigFile(tier.file.name, own, lines))


def _differs(agreed: Signature, found: Signature) -> str:
    """The reason why requests for one signature do not fit the other; "" if they do."""
    return difference(agreed, found) if agreed != found else ""


def _prefixed(tier: Opened, agreed: str, text: str) -> str:
    """Prefix each line about a backend that does not match another."""
    lead = f"{tier.label} does not go with {agreed}"
    return "\n".join(f"{lead}: {line}" for line in text.splitlines())


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a serving version in place.

    `config` has the new version policy, instance groups and traffic rules. `instances` are to be
    added, `removed` are the names of those to be removed.
    """

    origin: Origin
    config: ModelConfig
    instances: Sequence[LoadedInstance] = ()
    removed: Sequence[str] = ()


class Step(Enum):
    """The ways to bring a version to a new origin: keep, resize, or load."""

    KEEP = "keep"
    RESIZE = "resize"
    LOAD = "load"


def step(before: Origin | None, after: Origin) -> Step:
    """The step from the origin `before`, None if no healthy version serves, to `after`."""
    if before is None or before.content != after.content:
        return Step.LOAD
    if before.groups == after.groups:
        return Step.KEEP
    return Step.RESIZE if before.resizable and after.resizable else Step.LOAD


def update(
    serving: LoadedVersion | None, opened: Opened, version: int, options: LoadOptions
) -> LoadedVersion | Change:
    """Load what a version lacks; raises as `load` does, with everything closed.

    May take seconds: for a loading thread. `serving` is None if no healthy version serves.
    """
    origin = opened.origins[version]
    before = serving.origin if serving is not None else None
    if serving is not None and _completes(serving, opened, origin):
        before = replace(serving.origin, content=origin.content)
    kind = step(before, origin)
    if kind is Step.RESIZE and serving is not None:  # all instances are of one directory
        here = opened.source.lease
        if serving.backends or (here and serving.lease and here.path != serving.lease.path):
            kind = Step.LOAD
    if serving is None or kind is Step.LOAD:
        return load(opened, version, options)
    config = adjusted(serving.config, normalise(opened.config))
    if kind is Step.KEEP:  # with the completed instance groups
        config.ClearField("instance_group")
        config.instance_group.extend(serving.config.instance_group)
        return Change(origin, config)
    names = [instance.name for instance in serving.instances]
    inline = all(_kind_of(one.kind) is InstanceKind.INLINE for one in serving.instances)
    removed, missing = resize(names, reading.placements(config))
    added = load_instances(opened, version, config, missing, inline, options)
    return Change(origin, config, added, removed)


def _completes(serving: LoadedVersion, opened: Opened, origin: Origin) -> bool:
    """True if a configuration equals the completed one of a serving version.

    Clients receive it in that form and send it back with other instance groups.
    """
    there, wanted = serving.origin.content, origin.content
    return (
        (there.directory, there.files) == (wanted.directory, wanted.files)
        and not opened.fail_over
        and content_of(serving.config) == content_of(normalise(opened.config))
    )


def resize(
    names: Sequence[str], placements: Sequence[WantedInstance]
) -> tuple[list[str], list[WantedInstance]]:
    """The names of surplus instances, and the missing placements; all are on the CPU.

    Instances with wanted names stay, then as many others as are wanted in total.
    """
    there = Counter(names)
    missing: list[WantedInstance] = []
    for placement in placements:
        if there[placement.name]:
            there[placement.name] -= 1
        else:
            missing.append(placement)
    others = list(there.elements())
    stay = min(len(others), len(missing))
    return others[stay:], missing[stay:]


def adjusted(config: ModelConfig, wanted: ModelConfig) -> ModelConfig:
    """A copy of a complete configuration with the in-place changes of another one."""
    result = ModelConfig()
    result.CopyFrom(config)
    result.version_policy.CopyFrom(wanted.version_policy)
    result.ClearField("instance_group")
    result.instance_group.extend(wanted.instance_group)
    result.parameters.pop(TRAFFIC, None)
    if TRAFFIC in wanted.parameters:
        result.parameters[TRAFFIC].CopyFrom(wanted.parameters[TRAFFIC])
    return result
