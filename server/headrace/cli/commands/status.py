"""`headrace status`: processes, limits and memory of a running server, and what is degraded."""

import argparse
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.api.operations import Document
from headrace.cli.command import EXIT_FAILURE, option
from headrace.cli.remote import print_json, remote_command
from headrace.cli.text import duration, fitted_table, number, printable, size

if TYPE_CHECKING:
    from headrace.client.blocking import Client

_PROCESSES = ("PROCESS", "PID", "MODEL", "MEMORY", "THREADS", "CPU")
_LIMITS = ("LIMIT", "USED", "OF", "REFUSED", "OPTION")
_DOWNLOADS = ("DOWNLOAD", "FETCHED", "OF", "STORE")
_MODELS = ("MODEL", "VERSION", "STATE", "MEMORY", "THREADS", "INSTANCES")
_MOST_MODELS = 10  # those with most memory; headrace models list has all
_BYTES = ("request bytes", "model memory")


def lines(found: Document) -> Iterator[str]:
    """The view as text."""
    server, cores, memory = found["server"], found["cores"], found["memory"]
    ready = "ready" if server["ready"] else "NOT READY"
    up = duration(max(found["time"] - server["started"], 0))
    yield printable(f"{server['name']} {server['version']}  {ready}  up {up}")
    addresses = server["addresses"].items()
    yield printable("  ".join(f"{door} {address}" for door, address in addresses))
    states = Counter(model["state"].lower() or "not loaded" for model in found["models"])
    told = ", ".join(f"{n} {state}" for state, n in states.items())
    yield printable(f"models: {told or 'none'}")
    yield (
        f"cores: {cores['available']}, for {cores['model_threads']} threads of models"
        f" and {cores['process_threads']} of processes"
    )
    budget = f" of {size(memory['budget_bytes'])}" if memory["budget_bytes"] else ""
    yield f"memory: {size(memory['resident_bytes'])}, models {size(memory['model_bytes'])}{budget}"
    for what, count in found["lost"].items():
        if count:
            yield printable(f"lost: {count} {what.replace('_', ' ')}")
    yield ""
    yield from _degraded(found["degraded"])
    yield ""
    rows = [
        (
            each["kind"] if each["kind"] == "server" else each["name"],
            str(each["pid"] or "ended"), _version(each["model"], each["version"]),
            size(each["resident_bytes"]), str(each["threads"]), duration(each["cpu_seconds"]),
        )
        for each in found["processes"]
    ]  # fmt: skip
    yield from fitted_table(_PROCESSES, rows, "PID MEMORY THREADS CPU")
    yield ""
    yield from fitted_table(_LIMITS, map(_limit, found["limits"]), "USED OF REFUSED")
    yield ""
    if found["downloads"]:
        bytes_of = (
            (each["model"], size(each["fetched_bytes"]), size(each["bytes"]), each["store"])
            for each in found["downloads"]
        )
        yield from fitted_table(_DOWNLOADS, bytes_of, "FETCHED OF")
        yield ""
    yield from _models(found["models"])
    if found["certificates"]:
        yield ""
        ends = map(_certificate, found["certificates"])
        yield from fitted_table(("CERTIFICATE", "DOOR", "EXPIRES"), ends)


def _models(found: list[Document]) -> Iterator[str]:
    """The models that take most memory."""
    largest = sorted(found, key=lambda each: -each["memory_bytes"])[:_MOST_MODELS]
    rows = [
        (
            each["name"], each["version"] or "-", each["state"].lower() or "not loaded",
            size(each["memory_bytes"] or None), str(each["threads"]),
            ", ".join(f"{n} {kind}" for kind, n in each["instances"].items()) or "-",
        )
        for each in largest
    ]  # fmt: skip
    if rows:
        yield from fitted_table(_MODELS, rows, "VERSION MEMORY THREADS")
    if len(found) > len(largest):
        yield f"and {len(found) - len(largest)} more"


def _limit(each: Document) -> tuple[str, ...]:
    text = size if each["name"] in _BYTES else number
    most = "no limit" if each["limit"] is None else text(each["limit"])
    return each["name"], text(each["used"]), most, str(each["refused"]), each["option"]


def _certificate(each: Document) -> tuple[str, ...]:
    expires = datetime.fromtimestamp(each["expires"], UTC)
    return each["file"], each["door"], f"{expires:%Y-%m-%d %H:%M} UTC"


def _version(model: str, version: str) -> str:
    return f"{model}/{version}" if version else model


def _degraded(found: list[Document]) -> Iterator[str]:
    if not found:
        yield "nothing is degraded"
        return
    yield "degraded:"
    for each in found:
        name = _version(each["name"], each["version"])
        yield printable(f"  {each['kind']}{' ' if name else ''}{name}: {each['reason']}")


def _status(options: argparse.Namespace, server: "Client") -> int:
    found = server.document("ServerStatus")
    if options.json:
        print_json(found)
    else:
        print(*lines(found), sep="\n")
    return EXIT_FAILURE if options.check and found["degraded"] else 0


STATUS = remote_command(
    "status", _status,
    option("--check", "exit with 1 if anything is degraded"),
    help="show processes, limits and memory of a running server",
    description="Show processes, threads, memory, limits and certificates of a running server, and"
    " what is degraded and why.",
)  # fmt: skip
