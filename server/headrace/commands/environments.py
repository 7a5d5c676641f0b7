"""`headrace environments`: build models' environments ahead, list them, remove old ones."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.backends.backend import load_backends
from headrace.core.errors import RepositoryError
from headrace.core.model_spec import EnvironmentOptions, LoadSpec
from headrace.engine.opening import LoadOptions, open_model
from headrace.execution.environments.cache import Entry
from headrace.execution.environments.resolve import cache_of, environment_of
from headrace.execution.local import core_limit
from headrace.observability.logs import LogSettings, configure_logging
from headrace.repository import completion, reading
from headrace.repository.layout import ModelSource, find_sources

_DAY = 24 * 60 * 60.0
_SHOWN = 60  # characters of what an environment was made of


def run_action(given: argparse.Namespace, options: EnvironmentOptions) -> int:
    """Do what the command line says; the exit status."""
    configure_logging(LogSettings())
    try:
        match given.action:
            case "build":
                return _build([Path(p) for p in given.paths], options)
            case "list":
                return _list(options)
            case _:
                return _prune(options, given.unused_days)
    except RepositoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # a build has been ended and removed
        return 130


def _build(paths: Sequence[Path], options: EnvironmentOptions) -> int:
    files = [path for path in paths if path.is_file()]
    repositories = [path for path in paths if not path.is_file()]
    sources, warnings = find_sources(repositories, files)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    failed = 0
    for source in sources:
        try:
            for spec in _specs(source, options):
                own = environment_of(spec).prefix
                print(f"{spec.model} version {spec.version}: {own or 'needs none'}", flush=True)
        except RepositoryError as error:
            failed += 1
            print(f"error: {source.name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _specs(source: ModelSource, options: EnvironmentOptions) -> Iterator[LoadSpec]:
    """One instance of each version that is served, if the model runs in processes of its own."""
    opened = open_model(
        source, load_backends(), LoadOptions(core_limit(), environments=options, elsewhere=True)
    )
    if not opened.backend.isolated:
        return
    config = completion.normalise(opened.config)
    placement = reading.placements(config)[0]
    for version in opened.versions:
        spec = reading.load_spec(config, source.path, version, placement, 1)
        yield replace(spec, path=source.file or spec.path, environments=options)


def _list(options: EnvironmentOptions) -> int:
    now = time.time()
    for entry in cache_of(options.cache).entries():
        print(_row(entry, now))
    return 0


def _prune(options: EnvironmentOptions, unused_days: float) -> int:
    now = time.time()
    removed, kept = cache_of(options.cache).prune(now - unused_days * _DAY)
    for word, entries in (("removed", removed), ("in use ", kept)):
        for entry in entries:
            print(f"{word}  {_row(entry, now)}")
    return 0


def _row(entry: Entry, now: float) -> str:
    wanted = ", ".join(entry.wanted)
    shown = wanted if len(wanted) <= _SHOWN else f"{wanted[:_SHOWN]}..."
    days = max(now - entry.used, 0) / _DAY
    return f"{entry.key}  used {days:.0f} days ago  {entry.python}  {shown or 'numpy'}"
