"""Further backends of a model that take over when its own is unavailable: `fail_over`.

The parameter is an ordered list, separated by semicolons. An entry is the name of a backend, which
runs the model's files here, or the endpoints of further upstreams. Each entry has a configuration
of its own, with the same inputs and outputs.
"""

from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass

from headrace.core.texts import whole_number
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.repository.config import Problem, parameter

PARAMETER = "fail_over"
QUEUE_SIZE = "fail_over_queue_size"
INSTANCES = "fail_over_instances"
PARAMETERS = frozenset({PARAMETER, QUEUE_SIZE, INSTANCES})
_MOST_BACKENDS = 8
_MOST_INSTANCES = 64
_MOST_WAITING = 1_000_000
_SEPARATOR = ";"
# Fields that differ between the entries of a model.
_OWN_FIELDS = ("backend", "platform", "default_model_filename", "instance_group", "parameters")


@dataclass(frozen=True, slots=True)
class FurtherBackend:
    """A further backend; `name` is its name in headers and metrics.

    `endpoints` has the format of `parameters['endpoints']`, "" for a backend here.
    """

    name: str
    backend: str
    endpoints: str = ""


class InvalidOrder(Exception):
    """An invalid list; the text states what was expected."""


def needs_files(config: ModelConfig) -> bool:
    """True if any entry runs the model here."""
    return any("://" not in entry for entry in _split(parameter(config, PARAMETER)))


def read_order(
    config: ModelConfig, backends: Collection[str], remote: Collection[str]
) -> list[FurtherBackend]:
    """The entries of a configuration with a known backend, none without the parameter.

    `backends` are the names of all backends, `remote` those of the ones for upstreams. Raises
    `InvalidOrder`.
    """
    if PARAMETER not in config.parameters:
        return []
    local = [name for name in backends if name not in remote]
    names = [config.backend]
    entries: list[FurtherBackend] = []
    for text in _split(parameter(config, PARAMETER)):
        if "://" in text:
            backend, endpoints = next(iter(remote)), text
        elif text in local:
            backend, endpoints = text, ""
            if text in names:
                raise InvalidOrder(f"'{text}' is there twice, if the model's own backend counts")
        else:
            known = ", ".join(f"'{name}'" for name in local)
            raise InvalidOrder(
                f"expected backends of this server ({known}), or endpoints such as"
                f" 'grpc://standby:8001', with ';' between them, got '{text[:80]}'"
            )
        count = sum(entry.backend == backend for entry in entries) + (config.backend == backend)
        name = f"{backend}-{count + 1}" if count else backend
        names.append(name)
        entries.append(FurtherBackend(name, backend, endpoints))
    if not 0 < len(entries) < _MOST_BACKENDS:
        raise InvalidOrder(f"expected between 1 and {_MOST_BACKENDS - 1} entries")
    return entries


def problems(config: ModelConfig) -> Iterator[Problem]:
    """Problems of a model with several backends."""
    if PARAMETER not in config.parameters:
        return
    path = f"parameters['{PARAMETER}']"
    if config.HasField("sequence_batching"):
        yield Problem(path, "is for models without state, and this one has sequences")
    for name, most in ((QUEUE_SIZE, _MOST_WAITING), (INSTANCES, _MOST_INSTANCES)):
        text = parameter(config, name)
        if name in config.parameters and whole_number(text, 1, most) is None:
            expected = f"expected a whole number from 1 to {most}, got '{text[:40]}'"
            yield Problem(f"parameters['{name}']", expected)


def queue_size(config: ModelConfig) -> int:
    """The number of queued requests at which the next backend helps out; 0: never."""
    return int(parameter(config, QUEUE_SIZE) or 0)


def without_execution(config: ModelConfig) -> ModelConfig:
    """A copy without instance settings, for a backend that has no instances here."""
    result = deepcopy(config)
    result.parameters.pop("execution", None)
    return result


def entry_config(config: ModelConfig, entry: FurtherBackend) -> ModelConfig:
    """The configuration of an entry, before completion by its backend."""
    result = deepcopy(config)
    result.backend = entry.backend
    for name in ("platform", "default_model_filename", "instance_group"):
        result.ClearField(name)
    if entry.endpoints:  # the upstreams have the instances
        result.parameters["endpoints"].string_value = entry.endpoints
        result.parameters.pop("execution", None)
        return result
    result.instance_group.append(_group(config, entry.name))
    return result


def groups_here(config: ModelConfig) -> list[ModelInstanceGroup]:
    """The instance groups of the further backends that run here."""
    entries = _split(parameter(config, PARAMETER))
    return [_group(config, entry) for entry in entries if "://" not in entry]


def _group(config: ModelConfig, name: str) -> ModelInstanceGroup:
    """The instances of a further backend here, which need the resources of the first group."""
    count = int(parameter(config, INSTANCES) or 1)
    kind = ModelInstanceGroup.KIND_CPU
    group = ModelInstanceGroup(name=f"{config.name}_{name}", kind=kind, count=count)
    for first in config.instance_group[:1]:
        if first.HasField("rate_limiter"):
            group.rate_limiter.CopyFrom(first.rate_limiter)
    return group


def with_own_fields(complete: ModelConfig, own: ModelConfig) -> ModelConfig:
    """A complete configuration with the backend-specific fields of another one."""
    result = deepcopy(complete)
    for name in _OWN_FIELDS:
        result.ClearField(name)  # type: ignore[arg-type]  # a name of a field
    result.backend, result.platform = own.backend, own.platform
    result.default_model_filename = own.default_model_filename
    result.instance_group.extend(own.instance_group)
    for name, value in own.parameters.items():
        result.parameters[name].CopyFrom(value)
    return result


def _split(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(_SEPARATOR) if entry.strip()]
