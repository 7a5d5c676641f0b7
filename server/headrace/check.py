"""`headrace models check`: load repositories without serving them, and show what they mean here."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
from google.protobuf import text_format

from headrace.app import BACKENDS
from headrace.core.errors import RepositoryError
from headrace.engine.loading import LoadedInstance, LoadOptions, load_version, open_model
from headrace.execution.choice import AutoChoice
from headrace.execution.cores import core_limit
from headrace.observability.logs import LogSettings, configure_logging
from headrace.repository.layout import ModelSource, scan
from headrace.wire.documents import to_json
from headrace.wire.pb.model_config_pb2 import ModelConfig


def check_repositories(repositories: Sequence[Path], as_json: bool) -> int:
    """Print a report; 0 if every model can be served, else 1."""
    configure_logging(LogSettings(info=False))
    logging.captureWarnings(True)
    try:
        sources = scan(repositories)
    except RepositoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options = LoadOptions(core_limit())
    reports = [_check(source, options) for source in sources]
    if as_json:
        print(orjson.dumps(reports, option=orjson.OPT_INDENT_2).decode())
    else:
        for report in reports:
            _print(report)
        failed = sum(not report["ok"] for report in reports)
        print(f"{len(reports)} models, {failed} with errors")
    return 0 if all(report["ok"] for report in reports) else 1


def _check(source: ModelSource, options: LoadOptions) -> dict[str, object]:
    report: dict[str, object] = {"model": source.name, "ok": False, "versions": []}
    if source.duplicate:
        return report | {"error": "model appears in two or more repositories"}
    if source.problem:
        return report | {"error": source.problem}
    try:
        opened = open_model(source, BACKENDS, options)
        for version in opened.versions:
            loaded = load_version(opened, version, options)
            report["versions"] = [*report["versions"], version]  # type: ignore[misc]
            report["instances"] = [f"{i.name}: {_kind(i)}" for i in loaded.instances]
            report["config"] = to_json(loaded.config)
            report["config_pbtxt"] = _text(loaded.config)
            for instance in loaded.instances:
                instance.model.close()
    except RepositoryError as error:
        return report | {"error": str(error)}
    return report | {"ok": True}


def _kind(instance: LoadedInstance) -> str:
    kind = instance.kind
    return f"auto ({kind.kind})" if isinstance(kind, AutoChoice) else str(kind)


def _text(config: ModelConfig) -> str:
    return text_format.MessageToString(config)


def _print(report: dict[str, object]) -> None:
    mark = "ok   " if report["ok"] else "ERROR"
    versions = ", ".join(map(str, report["versions"]))  # type: ignore[call-overload]
    print(f"{mark} {report['model']}" + (f" (versions {versions})" if versions else ""))
    if not report["ok"]:
        for line in str(report["error"]).splitlines():
            print(f"      {line}")
        return
    for line in str(report["config_pbtxt"]).splitlines():
        print(f"      {line}")
