"""Asking all servers of a model what they have of it, beside what was asked for.

For commands and programs that serve nothing.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.execution.remote.connection import CallFailed
from headrace.execution.remote.options import Endpoint, RemoteOptions
from headrace.execution.triton.drift import Difference, differences
from headrace.execution.triton.reconciler import Visits
from headrace.wire.pb.model_config_pb2 import ModelConfig

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One server; `versions` are those that it has. `problem` says why it could not be asked."""

    endpoint: str
    versions: Sequence[str] = ()
    differences: Sequence[Difference] = ()
    problem: str = ""


def survey(
    model: str, config: ModelConfig, root: Path, versions: Sequence[int], seconds: float
) -> list[Surveyed]:
    """What each server of a model says, in the order of its endpoints.

    `versions` are the model's version directories in `root`. Raises `InvalidOption`, and
    `LoadFailed` if no address is known.
    """
    parameters = {name: one.string_value for name, one in config.parameters.items()}
    options = [RemoteOptions.of(parameters, model, version, root) for version in (versions or [0])]
    endpoints = options[0].resolve()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(
            threads.map(lambda endpoint: _ask(model, config, options, endpoint, seconds), endpoints)
        )


def _ask(
    model: str,
    config: ModelConfig,
    options: Sequence[RemoteOptions],
    endpoint: Endpoint,
    seconds: float,
) -> Surveyed:
    found: dict[Difference, None] = {}
    versions: dict[str, None] = {}
    for one in options:
        try:
            with Visits(one, model).to(endpoint) as connection:
                said = connection.describe(seconds)
        except CallFailed as failed:
            return Surveyed(endpoint.name, (), (), failed.text or str(failed.failure.error))
        except LoadFailed as error:
            return Surveyed(endpoint.name, (), (), str(error))
        versions |= dict.fromkeys(said.metadata.versions)
        found |= dict.fromkeys(differences(config, said, one.version))
    return Surveyed(endpoint.name, tuple(versions), tuple(found))
