"""`headrace models traffic`: how requests are divided between the versions of a model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.api.operations import Document
from headrace.cli.command import Argument, Command, option
from headrace.cli.remote import CommandFailed, parse_json, parse_model, print_json, remote_command
from headrace.cli.text import fitted_table, number

if TYPE_CHECKING:
    from headrace.client.blocking import Client

_HEADS = ("VERSION", "STATE", "ROLE", "WEIGHT", "SHARE", "ROUTED", "FAILED", "LATENCY", "REASON")
_RIGHT = "WEIGHT SHARE ROUTED FAILED LATENCY"


def _traffic(options: argparse.Namespace, server: "Client") -> int:
    """Show it, or change it and show what has become of it."""
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
    """Rules as JSON, from a file, or a split as VERSION=WEIGHT; raises `CommandFailed`."""
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
