"""`headrace models list|load|unload|stats`: the models of a running server."""

import argparse
import fnmatch
import time
from collections.abc import Mapping
from typing import Any

from headrace.client.address import ClientError, Refused
from headrace.client.server import Document, Server
from headrace.commands.parser import EXIT_FAILURE
from headrace.commands.remote import complain, content, explain, print_json
from headrace.commands.text import duration, number, size, table
from headrace.core.tensors import brackets


def list_models(options: argparse.Namespace, server: Server) -> int:
    """Print the index, each version on a line."""
    entries = [
        {"name": "", "version": "", "state": "", "reason": ""} | entry
        for entry in server.index(options.ready)
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
        print(*table(("MODEL", "VERSION", "STATE", "REASON"), rows), sep="\n")
    elif not missing:
        print("no models" + (f" called {' or '.join(options.pattern)}" if options.pattern else ""))
    return status


def _description(server: Server, entry: Document) -> Document:
    """What a version that serves takes and gives, and what runs it."""
    if entry["state"] != "READY":
        return {}
    try:
        metadata = server.metadata(entry["name"], entry["version"])
    except Refused:  # it has gone meanwhile
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
                    shape = brackets(tensor["shape"])
                    print(f"  {title:7}  {tensor['name']}  {tensor['datatype']} {shape}")
                    title = ""


def load(options: argparse.Namespace, server: Server) -> int:
    """Load models, one after the other."""
    overridden = options.config is not None or options.file
    if overridden and len(options.models) > 1:
        options.parser.error("--config and --file are for one model")
    config = "{}" if options.file else ""  # files need one, which the model may complete
    if options.config is not None:
        # Imported late: everything else needs no protobuf.
        from headrace.commands.remote_config import config_text

        config = config_text(options.config)
    files = {path: content(local) for path, local in options.file}
    known = not files  # else the name may be new
    return _each(options, server, "loaded", lambda name: server.load(name, config, files), known)


def unload(options: argparse.Namespace, server: Server) -> int:
    """Unload models, one after the other."""
    return _each(options, server, "unloaded", lambda name: server.unload(name, options.dependents))


def _each(
    options: argparse.Namespace, server: Server, done: str, act: Any, known: bool = True
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


def stats(options: argparse.Namespace, server: Server) -> int:
    """Print counters since the server's start: a line a version, or all about one model."""
    if options.version and not options.model:
        options.parser.error("--version is of a model: name one")
    document = server.statistics(options.model or "", options.version or "")
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
    return table(("MODEL", "VER", *counts), rows, right=" ".join(counts))


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
    """Seconds on average."""
    return counted["ns"] / counted["count"] / 1e9 if counted["count"] else None


def _ratio(whole: int, parts: int) -> float | None:
    return whole / parts if parts else None
