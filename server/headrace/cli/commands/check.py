"""`headrace models check`: loads models without serving them, and reports on them."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import orjson
from google.protobuf import text_format

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.core.model_spec import Used
from headrace.core.signature import Signature
from headrace.engine.chain import load_stages
from headrace.engine.composition import lacks, with_signatures
from headrace.engine.loading import LoadedInstance, load
from headrace.engine.opening import LoadOptions, Opened, open_model
from headrace.observability.logs import Logs, LogSettings
from headrace.placement.backend import Backend, BackendContext, close_backends, load_backends
from headrace.placement.choice import AutoChoice
from headrace.placement.cores import core_limit
from headrace.protocol.documents import to_json
from headrace.repository.catalogue import Catalogue
from headrace.repository.layout import ModelSource
from headrace.settings import Settings

log = logging.getLogger(__name__)


def check_models(given: argparse.Namespace, settings: Settings) -> int:
    """Print a report on repositories and model files; 0 if there are models, all without errors."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe, as by `head`, is no error
    Logs(LogSettings(info=False))
    try:
        sources, warnings = Catalogue.of(given.paths).sources()
    except RepositoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options = LoadOptions(
        core_limit(),
        default_max_batch_size=settings.default_max_batch_size,
        environments=settings.environments,
        in_process_python=settings.allow_in_process_python,
        isolation=settings.isolation,
        stages=load_stages(),
    )
    context = BackendContext(trust_model_code=settings.trust_model_code, tritons=settings.tritons)
    with _running(load_backends(context)) as known:
        reports = _check_all(sources, known, options)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if given.json:
        print(orjson.dumps(reports, option=orjson.OPT_INDENT_2).decode())
    else:
        for report in reports:
            _print(report, given.quiet)
        failed = sum(not report["ok"] for report in reports)
        models = "1 model" if len(reports) == 1 else f"{len(reports)} models"
        print(f"{models}, {failed} with errors")
    return 0 if reports and all(report["ok"] for report in reports) else 1


@contextmanager
def _running(known: Mapping[str, Backend]) -> Iterator[Mapping[str, Backend]]:
    """Run what backends start for models, such as Tritons, within `with`."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="backends")
    thread.start()
    try:
        for backend in known.values():
            backend.attach(loop)
        yield known
    finally:
        asyncio.run_coroutine_threadsafe(close_backends(known), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _check_all(
    sources: Sequence[ModelSource], known: Mapping[str, Backend], options: LoadOptions
) -> list[dict[str, Any]]:
    """A report on each model, those that others run before these."""
    reports: dict[int, dict[str, Any]] = {}
    signatures: dict[Used, Signature] = {}
    names = {source.name: place for place, source in enumerate(sources)}

    def check(place: int, above: tuple[int, ...] = ()) -> None:
        def before(opened: Opened) -> Opened:
            for name, _ in opened.uses:
                if names.get(name, place) not in (*reports, *above, place):
                    check(names[name], (*above, place))
            if missing := [one for one in opened.uses if one not in signatures]:
                raise LoadFailed(lacks(opened.source.name, missing[0]))
            return with_signatures(opened, {one: signatures[one] for one in opened.uses})

        reports[place] = _check(sources[place], known, options, before, signatures)

    for place in range(len(sources)):
        if place not in reports:
            check(place)
    return [reports[place] for place in range(len(sources))]


def _check(
    source: ModelSource,
    known: Mapping[str, Backend],
    options: LoadOptions,
    before: Callable[[Opened], Opened],
    signatures: dict[Used, Signature],
) -> dict[str, Any]:
    """A report on one model; `before` is called for one that runs others, before it is loaded."""
    report: dict[str, Any] = {"model": source.name, "ok": False, "versions": [], "warnings": []}
    if source.duplicate:
        return report | {"error": "model appears in two or more repositories"}
    if source.problem:
        return report | {"error": source.problem}
    try:
        opened = open_model(source, known, options)
        report["warnings"] += opened.warnings
        if opened.uses:
            opened = before(opened)
        for version in opened.versions:
            loaded = load(opened, version, options)
            report["versions"].append(version)
            signatures[source.name, str(version)] = signatures[source.name, ""] = loaded.signature
            report["warnings"] += [w for w in loaded.warnings if w not in report["warnings"]]
            report["instances"] = [f"{i.name}: {_kind(i)}" for i in loaded.instances]
            report["config"] = to_json(loaded.config)
            report["config_pbtxt"] = text_format.MessageToString(loaded.config)
            for instance in loaded.instances:
                report["warnings"] += instance.model.warnings
                instance.model.close()
    except RepositoryError as error:
        return report | {"error": str(error)}
    except Exception as error:  # the other models are checked all the same
        log.error("bug while checking %s", source.name, exc_info=error)
        return report | {"error": f"internal error: {type(error).__name__}"}
    return report | {"ok": True}


def _kind(instance: LoadedInstance) -> str:
    kind = instance.kind
    return f"auto ({kind.kind})" if isinstance(kind, AutoChoice) else str(kind)


def _print(report: dict[str, Any], quiet: bool) -> None:
    versions = ", ".join(map(str, report["versions"]))
    mark = "ok   " if report["ok"] else "ERROR"
    print(f"{mark} {report['model']}" + (f" (versions {versions})" if versions else ""))
    for warning in report["warnings"]:
        print(f"      warning: {warning}")
    text = report["error"] if not report["ok"] else "" if quiet else report["config_pbtxt"]
    for line in text.splitlines():
        print(f"      {line}")
