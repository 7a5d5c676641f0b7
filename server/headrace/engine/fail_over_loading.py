"""Loading a model that has several backends.

The first backend that can be loaded completes the configuration, and the others have to agree with
it. Only servers may be absent: then the version serves without them, and is loaded again once they
can be reached. Runs on a loading thread.
"""

from contextlib import suppress
from dataclasses import replace
from time import monotonic

from headrace.core.errors import InvalidConfig, LoadFailed, RepositoryError
from headrace.core.signature import Signature, difference
from headrace.engine.loading import (
    Backends,
    LoadedInstance,
    LoadedVersion,
    load_version,
)
from headrace.engine.opening import LoadOptions, Opened
from headrace.repository import fail_over, reading
from headrace.repository.completion import normalise
from headrace.repository.config import ConfigFile, refuse
from headrace.wire.pb.model_config_pb2 import ModelConfig

_COMPLETED = ("max_batch_size", "input", "output")


def load(opened: Opened, version: int, options: LoadOptions) -> LoadedVersion:
    """Load a version by all its backends; raises as `load_version` does."""
    if not opened.fail_over:
        return load_version(opened, version, options)
    return _Loading(opened, version, options).result()


class _Loading:
    """What has been loaded of one version."""

    def __init__(self, opened: Opened, version: int, options: LoadOptions) -> None:
        self._tiers = [replace(opened, fail_over=()), *opened.fail_over]
        self._version = version
        self._options = options
        self._loaded: list[LoadedVersion] = []
        self._instances: list[LoadedInstance] = []
        self._absent: dict[str, tuple[Opened, LoadFailed]] = {}

    def result(self) -> LoadedVersion:
        """All of it; raises `RepositoryError`, with everything closed again."""
        begun = monotonic()
        try:
            for rank, tier in enumerate(self._tiers):
                self._add(rank, tier)
            if not self._loaded:
                text = "; ".join(f"{n}: {error}" for n, (_, error) in self._absent.items())
                public = "; ".join(f"{n}: {e.public}" for n, (_, e) in self._absent.items())
                raise LoadFailed(text, public)
        except BaseException:
            for instance in self._instances:
                instance.model.close()
            raise
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
            # Any of them may answer, and what others run may read any.
            signature=replace(first.signature, parameters=None),
            config=fail_over.with_own_fields(first.config, normalise(own.config)),
            instances=self._instances,
            warnings=tuple(dict.fromkeys(warnings)),
            seconds=monotonic() - begun,
            backends=Backends(
                tuple(tier.label for tier in self._tiers),
                frozenset(t.label for t in self._tiers if t.backend.places_instances),
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
        if not self._loaded:  # servers may have said what the file leaves open
            refuse(tier.file, fail_over.problems(found.config))
        elif why := _differs(self._loaded[0].signature, found.signature):
            raise InvalidConfig(_prefixed(tier, self._agreed, f"{tier.file.name}: {why}"))
        self._loaded.append(found)

    @property
    def _agreed(self) -> str:
        """What the first backend that was loaded is called."""
        return next(t.label for t in self._tiers if t.label not in self._absent)

    def _look(self) -> str:
        """What of that which is absent can be loaded now; "" if nothing can."""
        for label, (tier, _) in self._absent.items():
            placement = reading.Placement(tier.source.name, None)
            spec = reading.load_spec(tier.config, tier.source.path, self._version, placement, 1)
            with suppress(RepositoryError):
                tier.backend.load(spec).close()
                return label
        return ""


def _completed(tier: Opened, config: ModelConfig) -> Opened:
    """The model with the configuration that another of its backends has completed."""
    own = fail_over.with_own_fields(config, tier.config)
    lines = {**dict.fromkeys(_COMPLETED, 0), **tier.file.lines}
    return replace(tier, config=own, file=ConfigFile(tier.file.name, own, lines))


def _differs(agreed: Signature, found: Signature) -> str:
    """Why requests for one signature are none for the other; "" if they are."""
    return difference(agreed, found) if agreed != found else ""


def _prefixed(tier: Opened, agreed: str, text: str) -> str:
    """Lines about a backend that does not fit to another."""
    lead = f"{tier.label} does not go with {agreed}"
    return "\n".join(f"{lead}: {line}" for line in text.splitlines())
