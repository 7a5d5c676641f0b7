"""`headrace environments`: builds, lists and removes environments of models."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.cli.command import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    Argument,
    Command,
    option,
    settings_as_options,
    shared_settings,
)
from headrace.cli.text import size
from headrace.core.errors import RepositoryError
from headrace.observability.logs import Logs, LogSettings
from headrace.plugins.environments.cache import CachedEnvironment, EnvironmentCache, cache_of
from headrace.settings import ENVIRONMENT_OPTIONS

if TYPE_CHECKING:
    from headrace.core.model_spec import EnvironmentOptions, LoadSpec
    from headrace.repository.layout import ModelSource

_UNUSED_DAYS = 30
_DAY = 24 * 60 * 60.0
_SHOWN = 60  # characters shown of an environment's requirements


def _run(given: argparse.Namespace) -> int:
    settings = shared_settings(given, ENVIRONMENT_OPTIONS)
    Logs(LogSettings())
    try:
        match given.action:
            case "build":
                return _build(given.paths, settings.environments)
            case "list":
                return _list(cache_of(settings.environment_cache))
            case _:
                return _prune(cache_of(settings.environment_cache), given.unused_days)
    except RepositoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:  # an interrupted build has been removed
        return EXIT_INTERRUPTED


def _build(given: Sequence[str], options: "EnvironmentOptions") -> int:
    """Build the environments for models of repositories and files; raises `RepositoryError`."""
    # Imported late: the other actions need neither numpy nor ONNX Runtime.
    from headrace.placement.worker.environment import environment_of
    from headrace.repository.catalogue import Catalogue
    from headrace.repository.layout import materialised

    sources, warnings = Catalogue.of(given).sources()
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    failed = 0
    kept = []  # in use until all are built, whatever the cache's limit
    for source in sources:
        try:
            for spec in _specs(materialised(source), options):
                own = environment_of(spec)
                kept.append(own)
                text = own.prefix or "needs none"
                print(f"{spec.model} version {spec.version}: {text}", flush=True)
        except RepositoryError as error:
            failed += 1
            print(f"error: {source.name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _specs(source: "ModelSource", options: "EnvironmentOptions") -> "Iterator[LoadSpec]":
    """One instance of each served version, if the model runs in processes of its own."""
    from headrace.engine.opening import LoadOptions, open_model
    from headrace.placement.backend import load_backends
    from headrace.placement.cores import core_limit
    from headrace.repository import completion, reading

    opened = open_model(
        source, load_backends(), LoadOptions(core_limit(), environments=options, elsewhere=True)
    )
    if not opened.backend.isolated:
        return
    config = completion.normalise(opened.config)
    placement = reading.placements(config)[0]
    for version in opened.versions:
        spec = reading.load_spec(config, source.path, version, placement, 1)
        yield replace(
            spec,
            path=source.model_path(version, config.default_model_filename),
            single_file=source.file is not None,
            environments=options,
        )


def _list(cache: EnvironmentCache) -> int:
    now = time.time()
    for entry in cache.entries():
        print(_row(entry, now))
    return 0


def _prune(cache: EnvironmentCache, unused_days: float) -> int:
    now = time.time()
    removed, kept = cache.prune(now - unused_days * _DAY)
    for word, entries in (("removed", removed), ("in use ", kept)):
        for entry in entries:
            print(f"{word}  {_row(entry, now)}")
    return 0


def _row(entry: CachedEnvironment, now: float) -> str:
    wanted = ", ".join(entry.wanted)
    shown = wanted if len(wanted) <= _SHOWN else f"{wanted[:_SHOWN]}..."
    days = max(now - entry.used, 0) / _DAY
    used = f"used {days:.0f} days ago"
    return f"{entry.key}  {used}  {size(entry.nbytes)}  {entry.python}  {shown or 'numpy'}"


def _days(text: str) -> float:
    with suppress(ValueError):
        if (days := float(text)) >= 0:
            return days
    raise argparse.ArgumentTypeError(f"expected a number of days, got {text!r}")


def _action(name: str, text: str, *options: Argument, description: str | None = None) -> Command:
    return Command(
        name=name, help=text, description=description, run=_run,
        options=(*options, *settings_as_options(ENVIRONMENT_OPTIONS)),
    )  # fmt: skip


ENVIRONMENTS = Command(
    name="environments",
    help="build, list and remove environments of Python models",
    actions=(
        _action(
            "build", "build environments without serving",
            option("paths PATH...", "repositories or model files"),
            description="Build the environments of Python models ahead of serving.",
        ),
        _action("list", "list environments"),
        _action(
            "prune", "remove unused environments",
            option(
                "--unused-days N",
                f"days without use (default: {_UNUSED_DAYS}); 0 removes all",
                type=_days, default=_UNUSED_DAYS,
            ),
            description="Remove environments that were not used for some time and are not in use,"
            " and the remains of crashed builds.",
        ),
    ),
)  # fmt: skip
