"""`headrace models`: models on disk (check, manifest) and those of a running server."""

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.api.operations import Document
from headrace.cli.command import (
    EXIT_FAILURE,
    EXIT_USAGE,
    Argument,
    Command,
    option,
    settings_as_options,
    shared_settings,
    take_sources,
)
from headrace.cli.commands.stores import STORE_COMMANDS, STORE_SETTINGS, list_store
from headrace.cli.remote import (
    CommandFailed,
    complain,
    content,
    explain,
    parse_json,
    parse_model,
    parse_version,
    print_json,
    remote_command,
)
from headrace.cli.text import duration, fitted_table, number, size, table
from headrace.client import ClientError, StatusError
from headrace.core.errors import InvalidConfig, LoadFailed
from headrace.core.plugins import OptionalPart
from headrace.options import SettingsError
from headrace.settings import ENVIRONMENT_OPTIONS, OPTIONS, SECTIONS

if TYPE_CHECKING:
    from headrace.client.blocking import Client

# Draws the graph of a configuration, in a form; raises `ValueError` for one without a graph.
GRAPHS: OptionalPart[Callable[[Any, str], str]] = OptionalPart("graphs")

_HEADS = ("VERSION", "STATE", "ROLE", "WEIGHT", "SHARE", "ROUTED", "FAILED", "LATENCY", "REASON")
_RIGHT = "WEIGHT SHARE ROUTED FAILED LATENCY"


def _traffic(options: argparse.Namespace, server: "Client") -> int:
    """Show the traffic, or change it and show the result."""
    model: str = options.model
    match options.action:
        case "set":
            found = server.document("SetModelTraffic", _rules(options.rules), name=model)
        case "reset":
            found = server.document("ResetModelTraffic", name=model)
        case "promote" | "rollback" as action:
            given = {"version": options.version, "reason": options.reason}
            document: Document = {name: value for name, value in given.items() if value}
            name = "PromoteModelVersion" if action == "promote" else "RollBackModelVersion"
            found = server.document(name, document, name=model)
        case _:
            found = server.document("ModelTraffic", name=model)
    if options.json:
        print_json(found)
    else:
        print(*_lines(found), sep="\n")
    return 0


def _rules(words: list[str]) -> Document:
    """Rules as JSON, from a file, or as VERSION=WEIGHT; raises `CommandFailed`."""
    if all("=" in word for word in words) and not words[0].lstrip().startswith("{"):
        pairs = [word.partition("=")[::2] for word in words]
        try:
            return {"split": {version: float(weight) for version, weight in pairs}}
        except ValueError:
            raise CommandFailed(f"expected VERSION=WEIGHT, got {' '.join(words)!r}") from None
    if len(words) > 1:
        raise CommandFailed(f"expected one document of rules, got {len(words)}")
    text, where = words[0], "the rules on the command line"
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except OSError as error:
            expected = "VERSION=WEIGHT, rules in JSON, or a file with them"
            raise CommandFailed(f"{where}: {error.strerror}; expected {expected}") from None
        except UnicodeDecodeError as error:
            raise CommandFailed(f"{where}: {error}") from None
    rules = parse_json(text, where)
    if not isinstance(rules, dict):
        raise CommandFailed(f"{where}: expected a JSON object")
    return rules


def _lines(found: Document) -> list[str]:
    source, since = found.get("source", "none"), found.get("since", "")
    lines = [f"{found.get('name', '')}: " + _origin(source, since)]
    if found.get("reason"):
        lines[0] += f" ({found['reason']})"
    rules = {name: value for name, value in (found.get("rules") or {}).items() if value}
    rules.pop("split", None)
    rules.pop("baseline", None)
    lines += [f"  {name:8}  {_flat(value)}" for name, value in rules.items()]
    rules_are = source != "none"
    rows = []
    for version in found.get("versions", ()):
        recent = version.get("recent") or {}
        seen = recent.get("requests", 0)
        rows.append((
            version["version"],
            version["state"] or "not loaded",
            version["role"] or "-",
            number(version["weight"] if rules_are else None),
            f"{version['share']:.1%}" if rules_are else "-",
            str(version["routed"]),
            f"{recent['error_rate']:.1%}" if seen else "-",
            f"{number(recent['latency_ms'])} ms" if seen else "-",
            version["reason"],
        ))  # fmt: skip
    lines += ["", *fitted_table(_HEADS, rows, _RIGHT)]
    for copies in found.get("shadows", ()):
        lines.append(
            f"copies to version {copies['version']}: {copies['success']} answered,"
            f" {copies['failure']} failed, {copies['dropped']} dropped;"
            f" p50 {number(copies['median_ms'])} ms, p95 {number(copies['p95_ms'])} ms"
        )
    return lines


def _origin(source: str, since: str) -> str:
    texts = {
        "none": "no rules, the highest version answers",
        "config": "rules of its configuration",
        "call": "rules of a call",
        "promotion": "promoted",
        "rollback": "rolled back",
    }
    return texts.get(source, source) + (f", since {since}" if since else "")


def _flat(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {_flat(part)}" for name, part in value.items())


def _action(
    name: str, text: str, description: str, *options: Argument, epilog: str | None = None
) -> Command:
    return remote_command(
        name, _traffic, option("model MODEL", type=parse_model), *options, help=text,
        description=description, epilog=epilog,
    )  # fmt: skip


_DECISION = (
    option("version [VERSION]", "version; may be omitted if only one is possible"),
    option("--reason TEXT", "reason, for the log"),
)

TRAFFIC = Command(
    name="traffic",
    help="divide requests between versions",
    description="Show and change how requests that name no version are divided between versions.",
    actions=(
        _action(
            "show", "show rules and effect", "Print the rules, and each version's requests."
        ),
        _action(
            "set", "replace the rules", "Replace all rules until the server is restarted.",
            option(
                "rules RULES...", "JSON text, a JSON file, or weights as VERSION=WEIGHT"
            ),
            epilog="""\
  headrace models traffic set m 1=90 2=10
  headrace models traffic set m '{"split": {"1": 1, "2": 1}, "sticky": {"header": "x-user"}}'
  headrace models traffic set m rules.json
""",
        ),
        _action(
            "promote", "send all requests to a version",
            "Send all requests to a version; the others stay loaded.",
            *_DECISION,
        ),
        _action(
            "rollback", "send a version's requests to the baseline",
            "Send the requests of a version to the baseline, or undo a promotion.", *_DECISION,
        ),
        _action(
            "reset", "restore the configuration's rules", "Drop rules that were set at run time."
        ),
    ),
)  # fmt: skip


_CONTROL_SECS = 600.0  # models may take long to load, and to drain
_CHECK_SETTINGS = (
    *(
        one
        for one in OPTIONS
        if one.field in ("default_max_batch_size", "trust_model_code", "allow_in_process_python")
    ),
    *ENVIRONMENT_OPTIONS,
    *SECTIONS["Isolation of models"],
    *SECTIONS["Managed Triton processes"],
)


def _check(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        try:
            options.paths, written = take_sources(options, options.paths, stack)
        except SettingsError as error:
            options.parser.exit(EXIT_USAGE, f"headrace models check: {error}\n")
        options.paths += written
        settings = shared_settings(options, _CHECK_SETTINGS)
        # Imported late, so that `--help` and usage errors do not wait for ONNX Runtime.
        from headrace.cli.commands.check import check_models

        return check_models(options, settings)


def _manifest(options: argparse.Namespace) -> int:
    """Write or check the manifests of directories, and report; 0 if there are no problems."""
    # Imported late: commands for a running server need no protobuf.
    from headrace.repository.model_files import MANIFEST

    reports = [_report(Path(path), options.check) for path in options.paths]
    if options.json:
        print_json(reports)
    for report in reports:
        for problem in report["problems"]:
            print(f"error: {report['directory']}: {problem}", file=sys.stderr)
        if not (options.json or report["problems"]):
            done = f"as {MANIFEST} says" if options.check else f"{MANIFEST} written"
            print(f"{report['directory']}: {done}, files: {len(report['files'])}")
    return int(any(report["problems"] for report in reports))


def _report(directory: Path, check: bool) -> dict[str, Any]:
    from headrace.repository.model_files import MANIFEST, Digests, read_manifest, write_manifest

    report: dict[str, Any] = {"directory": str(directory), "files": {}, "problems": []}
    try:
        if not directory.is_dir():
            raise LoadFailed("it is no directory of a model or of a version")
        if check and not (directory / MANIFEST).is_file():
            raise LoadFailed(f"there is no {MANIFEST}")
        report["files"] = read_manifest(directory) if check else write_manifest(directory)
        report["problems"] = Digests().problems(directory) if check else []
    except LoadFailed as error:
        report["problems"] = [str(error)]
    except OSError as error:
        report["problems"] = [f"{error.filename}: {error.strerror}"]
    return report


def _list(options: argparse.Namespace, server: "Client") -> int:
    """Print the index, one version per line."""
    entries = [
        {"name": "", "version": "", "state": "", "reason": ""} | entry
        for entry in server.documents("RepositoryIndex", {"ready": options.ready})
    ]
    if options.pattern:
        entries = [
            entry
            for entry in entries
            if any(fnmatch.fnmatchcase(entry["name"], pattern) for pattern in options.pattern)
        ]
    names = {entry["name"] for entry in entries}
    missing = [p for p in options.pattern if p not in names and not set(p) & set("*?[")]
    for name in missing:
        complain(options, f"no model called {name}" + (" is ready" if options.ready else ""))
    status = EXIT_FAILURE if missing else 0
    if options.names:
        for name in dict.fromkeys(entry["name"] for entry in entries):
            print(name)
        return status
    if options.long:
        for entry in entries:
            entry |= _description(server, entry)
    if options.json:
        print_json({"models": entries})
    elif options.long:
        _print_long(entries)
    elif entries:
        rows = [
            (e["name"], e["version"] or "-", e["state"] or "not loaded", e["reason"])
            for e in entries
        ]
        print(*fitted_table(("MODEL", "VERSION", "STATE", "REASON"), rows), sep="\n")
    elif not missing:
        print("no models" + (f" called {' or '.join(options.pattern)}" if options.pattern else ""))
    return status


def _description(server: "Client", entry: Document) -> Document:
    """The inputs, outputs, backend and instances of a serving version."""
    if entry["state"] != "READY":
        return {}
    try:
        metadata = server.document("ModelMetadata", name=entry["name"], version=entry["version"])
    except StatusError:  # unloaded meanwhile
        return {}
    properties = metadata.get("properties", {})
    return {
        "platform": metadata.get("platform", ""),
        "backend": properties.get("backend", ""),
        "instances": int(properties.get("instances", 0)),
        "instance_kind": properties.get("instance_kind", ""),
        "inputs": metadata.get("inputs", []),
        "outputs": metadata.get("outputs", []),
    }


def _print_long(entries: list[Document]) -> None:
    for entry in entries:
        state = entry["state"] or "not loaded"
        name = f"{entry['name']} {entry['version']}".rstrip()
        print(f"{name}  {state}" + (f"  {entry['reason']}" if entry["reason"] else ""))
        if "backend" in entry:
            runs = entry["backend"] or entry["platform"]
            if entry["instances"]:
                runs += f", {entry['instances']} x {entry['instance_kind']}"
            print(f"  runs on  {runs}")
            for title, tensors in (("inputs", entry["inputs"]), ("outputs", entry["outputs"])):
                for tensor in tensors:
                    shape = ",".join(map(str, tensor["shape"]))
                    print(f"  {title:7}  {tensor['name']}  {tensor['datatype']} [{shape}]")
                    title = ""


def _load(options: argparse.Namespace, server: "Client") -> int:
    """Load models, one after the other."""
    overridden = options.config is not None or options.file
    if overridden and len(options.models) > 1:
        options.parser.error("--config and --file are for one model")
    # Files require a configuration, which the model may complete.
    config = "{}" if options.file else ""
    if options.config is not None:
        config = _config_text(options.config)
    files = {path: content(local) for path, local in options.file}
    known = not files  # with files, the name may be new
    return _each(options, server, "loaded", lambda name: server.load(name, config, files), known)


def _unload(options: argparse.Namespace, server: "Client") -> int:
    """Unload models, one after the other."""
    return _each(options, server, "unloaded", lambda name: server.unload(name, options.dependents))


def _each(
    options: argparse.Namespace, server: "Client", done: str, act: Any, known: bool = True
) -> int:
    reports: list[Document] = []
    for name in options.models:
        started = time.monotonic()
        try:
            act(name)
            problem = None
        except ClientError as error:
            problem = explain(error, server, name if known else "")
            complain(options, f"{name}: {problem}" if len(options.models) > 1 else problem)
        taken = time.monotonic() - started
        reports.append({"name": name, "ok": problem is None, "error": problem, "seconds": taken})
        if problem is None and not options.json:
            print(f"{done} {name} in {duration(taken)}")
    if options.json:
        print_json({"models": reports})
    return 0 if all(report["ok"] for report in reports) else EXIT_FAILURE


def _stats(options: argparse.Namespace, server: "Client") -> int:
    """Print counters since the server's start: a line per version, or one model in detail."""
    if options.version and not options.model:
        options.parser.error("--version is of a model: name one")
    document = server.document(
        "ModelStatistics", name=options.model or "", version=options.version or ""
    )
    versions = document.get("model_stats", [])
    if options.json:
        print_json(document)
    elif options.model:
        for index, version in enumerate(versions):
            print("\n" * bool(index) + "\n".join(_details(version)))
    elif versions:
        print(*_overview(versions), sep="\n")
    else:
        print("no models")
    return 0


def _overview(versions: list[Document]) -> list[str]:
    counts = ("OK", "FAILED", "ROWS", "BATCH", "QUEUE", "COMPUTE", "TOTAL")
    rows = []
    for version in versions:
        inference = version["inference_stats"]
        rows.append((
            version["name"],
            version["version"],
            str(inference["success"]["count"]),
            str(inference["fail"]["count"]),
            str(version["inference_count"]),
            number(_ratio(version["inference_count"], version["execution_count"])),
            *(duration(_mean(inference[k])) for k in ("queue", "compute_infer", "success")),
        ))  # fmt: skip
    return fitted_table(("MODEL", "VER", *counts), rows, right=" ".join(counts))


def _details(version: Document) -> list[str]:
    inference = version["inference_stats"]
    rows, batches = version["inference_count"], version["execution_count"]
    last = version["last_inference"]
    lines = [
        f"{version['name']} version {version['version']}",
        f"  requests  {inference['success']['count']} answered,"
        f" {inference['fail']['count']} failed"
        + (f", the last {duration(max(time.time() - last / 1e3, 0))} ago" if last else ""),
        f"  rows      {rows} in {batches} batches"
        + (f", {number(rows / batches)} in each" if batches else ""),
    ]
    parts = (
        ("success", "total"), ("queue", "queue"), ("compute_input", "input"),
        ("compute_infer", "infer"), ("compute_output", "output"),
    )  # fmt: skip
    means = [f"{word} {duration(_mean(inference[key]))}" for key, word in parts]
    lines += [f"  mean      {', '.join(means)}"]
    for usage in version.get("memory_usage", []):
        lines.append(f"  memory    {usage.get('type', '')} {size(float(usage['byte_size']))}")
    if version.get("batch_stats"):
        rows_of = [
            (
                str(batch["batch_size"]),
                str(batch["compute_infer"]["count"]),
                duration(_mean(batch["compute_infer"])),
            )
            for batch in version["batch_stats"]
        ]
        head = ("ROWS", "BATCHES", "INFER")
        lines += [f"  {line}" for line in table(head, rows_of, right=" ".join(head))]
    return lines


def _mean(counted: Mapping[str, int]) -> float | None:
    """The mean in seconds."""
    return counted["ns"] / counted["count"] / 1e9 if counted["count"] else None


def _ratio(whole: int, parts: int) -> float | None:
    return whole / parts if parts else None


def _config(options: argparse.Namespace, server: "Client") -> int:
    """Print a complete configuration as a `config.pbtxt`."""
    document = server.document("ModelConfig", name=options.model, version=options.version or "")
    if options.json:
        print_json(document)
    else:
        from google.protobuf import text_format

        print(text_format.MessageToString(_message(document)), end="")
    return 0


def _message(document: Document) -> Any:
    """A configuration in JSON as a `ModelConfig`."""
    # Imported late: the other commands need no protobuf.
    from google.protobuf import json_format

    from headrace.protocol.pb.model_config_pb2 import ModelConfig

    return json_format.ParseDict(document, ModelConfig(), ignore_unknown_fields=True)


def _graph(options: argparse.Namespace, server: "Client") -> int:
    """Print the graph of an ensemble."""
    document = server.document("ModelConfig", name=options.model, version=options.version or "")
    try:
        drawn = GRAPHS.load()(_message(document), options.format)
    except (LoadFailed, ValueError) as error:
        raise CommandFailed(str(error)) from None
    if options.json:
        print_json({"model": options.model, "format": options.format, "graph": drawn})
    else:
        print(drawn, end="")
    return 0


def _config_text(given: str) -> str:
    """A configuration as JSON: inline, or from a file in either form; raises `CommandFailed`."""
    from google.protobuf import json_format

    from headrace.protocol.pb.model_config_pb2 import ModelConfig
    from headrace.repository.config import parse_config

    if given.lstrip().startswith("{"):
        text, name = given, "--config"
    else:
        text, name = content(given).decode("utf-8", "replace"), given
    if not text.lstrip().startswith("{"):
        try:
            return str(json_format.MessageToJson(parse_config(text, name).config, indent=None))
        except InvalidConfig as error:
            raise CommandFailed(str(error)) from None
    try:
        json_format.Parse(text, ModelConfig())
    except json_format.ParseError as error:
        raise CommandFailed(f"{name}: {str(error).replace('inference.', '')}") from None
    return text


def _override(text: str) -> tuple[str, str]:
    path, equals, local = text.partition("=")
    if not (path and equals and local):
        raise argparse.ArgumentTypeError(f"expected PATH=LOCAL, got {text!r}")
    return path, local


def _listing(*given: Any, **texts: Any) -> Command:
    """The command `list`: of a running server, unless a store is given."""
    remote = remote_command(*given, **texts)
    ask = remote.run
    assert ask is not None, "a command that does nothing. This is a bug."

    def run(options: argparse.Namespace) -> int:
        return ask(options) if options.store is None else list_store(options)

    more = settings_as_options(STORE_SETTINGS)
    return replace(remote, run=run, options=[*remote.options, *more])


_VERSION = option("--version N", "version of the model", type=parse_version)

MODELS = Command(
    name="models",
    help="inspect, load and unload models",
    description="Inspect models on disk (check, manifest), copy them between stores (push, pull,"
    " promote, verify), or inspect and control those of a running server (all others).",
    actions=(
        Command(
            name="check",
            help="validate repositories without serving them",
            description="Load every model, report errors, and print the completed configurations."
            " For models on other servers, those servers are queried; models for managed Tritons"
            " are loaded in a Triton.",
            options=(
                option("paths PATH...", "repositories or model files"),
                option("--quiet", "do not print configurations"),
                option("--json", "print one JSON document"),
                *settings_as_options(_CHECK_SETTINGS),
            ),
            run=_check,
        ),
        Command(
            name="manifest",
            help="write or check digests of a model's files",
            description="Write the digests of all files in a model's or a version's directory to"
            " headrace-manifest.json there. A server loads such a model only when all files match,"
            " so it never loads one that is still being copied.",
            options=(
                option("paths DIR...", "directories of models or versions"),
                option("--check", "compare the files with the manifest, and write nothing"),
                option("--json", "print one JSON document"),
            ),
            run=_manifest,
        ),
        _listing(
            "list", _list,
            option("pattern [MODEL...]", "names of models to list, or patterns with * and ?"),
            option("--ready", "list only versions that are ready"),
            option("--long", "show also inputs, outputs, backend and instances"),
            option("--names", "print only names"),
            option("--store STORE", "list a store, such as s3://BUCKET/PREFIX, not a server"),
            help="list the models of a running server, or of a store",
            description="List the models of a running server: each version with its state, and the"
            " reason if it is not ready.",
        ),
        remote_command(
            "load", _load,
            option("models MODEL...", "names in the server's repositories", type=parse_model),
            option(
                "--config FILE",
                "configuration to use instead of the model's own: a config.pbtxt or JSON file, or"
                " JSON text",
            ),
            option(
                "--file PATH=LOCAL",
                "file to send in place of the model's directory, such as 1/model.onnx=new.onnx;"
                " may be repeated; requires --load-overrides=files on the server",
                many=True, type=_override,
            ),
            help="load or reload models",
            description="Load or reload models in a running server, and wait until they are ready."
            " Requires --model-control-mode=explicit on the server.",
            timeout=_CONTROL_SECS,
        ),
        remote_command(
            "unload", _unload,
            option("models MODEL...", type=parse_model),
            option("--dependents", "unload also models that were loaded only for them"),
            help="unload models",
            description="Unload models of a running server, after it has answered the requests that"
            " they have accepted.",
            timeout=_CONTROL_SECS,
        ),
        remote_command(
            "config", _config, option("model MODEL", type=parse_model), _VERSION,
            help="print a model's completed configuration",
            description="Print a model's configuration as a running server has completed it.",
        ),
        remote_command(
            "graph", _graph, option("model MODEL", type=parse_model), _VERSION,
            option("--format FORM", "mermaid or svg", choices=("mermaid", "svg"),
                   default="mermaid"),
            help="draw the graph of an ensemble",
            description="Print the graph of an ensemble that a running server has, as text for"
            " Mermaid or as an SVG picture.",
        ),
        remote_command(
            "stats", _stats, option("model [MODEL]", "model to print in detail"), _VERSION,
            help="print statistics of models",
            description="Print counts of requests, batch sizes and mean latencies since the server"
            " started: a line per version, or one model in detail.",
        ),
        *STORE_COMMANDS,
        TRAFFIC,
    ),
)  # fmt: skip
