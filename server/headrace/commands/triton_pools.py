"""`headrace triton`: write the repositories of pools, and look for drift."""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.commands.pool_writing import pools_of, write_pools
from headrace.commands.text import printable, table
from headrace.core.errors import RepositoryError
from headrace.execution.triton.options import is_managed
from headrace.repository import reading
from headrace.repository.config import read_config
from headrace.repository.layout import scan
from headrace.triton import Drift, drift_of
from headrace.wire.pb.model_config_pb2 import ModelConfig


def run_action(given: argparse.Namespace) -> int:
    """Do what the command line says; the exit status."""
    try:
        if given.action == "write":
            options = write_pools(Path(given.file), Path(given.directory))
            print(
                shlex.join(["headrace", "serve", "--model-repository", given.directory, *options])
            )
            return 0
        return _drift([Path(path) for path in given.paths], given.timeout, given.json)
    except (ValueError, OSError, RepositoryError) as error:
        print(f"headrace triton: {error}", file=sys.stderr)
        return 1


def _drift(paths: Sequence[Path], timeout: float, as_json: bool) -> int:
    found: list[Drift] = []
    asked = managed = 0
    for name, config, root, versions in _models(paths):
        if is_managed(reading.parameters(config)):
            managed += 1
        elif config.backend == "triton":
            asked += 1
            found += drift_of(name, config, root, versions, timeout)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
    elif found:
        head = ("model", "server", "what", "asked for", "there")
        rows = [
            (one.model, one.endpoint, one.field, one.asked, printable(one.reported))
            for one in found
        ]
        print("\n".join(table(head, rows)))
    else:
        print(f"{asked} model{'s' if asked != 1 else ''} as asked for")
        if managed:
            print(
                f"{managed} in Tritons that the server starts, which has them as they are asked for"
            )
    return 1 if found else 0


def _models(paths: Sequence[Path]) -> Iterator[tuple[str, ModelConfig, Path, tuple[int, ...]]]:
    """Name, configuration, directory and version directories of all models."""
    for path in paths:
        if path.is_file():
            for pool in pools_of(path).values():
                for model in pool.models:
                    yield model.name, pool.config(model.name), path.parent, ()
            continue
        for source in scan([path]):
            config = read_config(source.config_path, source.name).config
            yield source.name, config, source.path, reading.chosen_versions(config, source.versions)
