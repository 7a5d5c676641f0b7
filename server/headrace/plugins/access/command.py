"""`headrace access`: makes API keys, and says who may do what by an access file."""

import argparse
import fcntl
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from math import inf
from pathlib import Path
from time import time
from typing import NamedTuple

from headrace.cli.command import EXIT_FAILURE, Command, option
from headrace.cli.files import replace_file
from headrace.cli.text import fitted_table
from headrace.core.identity import CHANGING, EVERYTHING, Permission, Role
from headrace.plugins.access.document import InvalidAccess, seconds
from headrace.plugins.access.keys import NewKey, new_key
from headrace.plugins.access.rules import ALL, MAY, AccessRules, parse_rules, read_rules

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_HEADS = ("IDENTITY", "KIND", "ROLES", "EXPIRES", "LINE")


class NamedIdentity(NamedTuple):
    """An identity that the file names, with the line of its rule."""

    name: str
    kind: str
    line: int
    roles: Sequence[Role]
    expires: float = inf


def _identities(rules: AccessRules) -> list[NamedIdentity]:
    found = [
        NamedIdentity(key.identity.name, "key", key.line, key.identity.roles, key.identity.expires)
        for key in rules.keys.values()
    ]
    found += [
        NamedIdentity(rule.name or f"{rule.kind}:*", "certificate", rule.line, rule.roles)
        for rule in rules.certificates
    ]
    found += [
        NamedIdentity(rule.name or "unix:*", "peer", rule.line, rule.roles) for rule in rules.peers
    ]
    found += [
        NamedIdentity(f"{rule.name}:*", "token", rule.line, rule.roles)
        for rule in rules.issuers.values()
    ]
    if rules.anonymous is not None:
        found.append(NamedIdentity("anonymous", "anonymous", 0, rules.anonymous.roles))
    return sorted(found, key=lambda one: one.line)


def _key(given: argparse.Namespace) -> int:
    """Add a key to the file, and print it."""
    path, real = Path(given.file), Path(os.path.realpath(given.file))
    made = new_key()
    with _locked(real.parent):
        # In bytes, so that its line breaks stay as they are.
        text = _decoded(path, real.read_bytes())
        before = parse_rules(path, text)
        if taken := [key for key in before.keys.values() if key.name == given.name]:
            raise InvalidAccess(f"{path}:{taken[0].line}: there is a key {given.name!r} already")
        if unknown := [name for name in given.role if name not in before.roles]:
            known = ", ".join(before.roles) or "there are none"
            raise InvalidAccess(f"{path}: unknown role {unknown[0]!r}, expected one of: {known}")
        if given.identity and not given.role:
            own = [key for key in before.keys.values() if key.identity.name == given.identity]
            given.role = list(dict.fromkeys(r.name for key in own for r in key.identity.roles))
            if not own:
                why = f"no key of {given.identity!r} has roles for this one: expected --role"
                raise InvalidAccess(f"{path}: {why}")
        text += ("" if not text or text.endswith("\n") else "\n") + _table(given, made)
        parse_rules(path, text)  # raises for names and the like
        replace_file(real, text.encode())
    print(f"{path}: added the key {given.name!r}, which begins with {made.prefix}")
    print(made.key)
    return 0


def _decoded(path: Path, text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidAccess(f"{path}: it is no text in UTF-8 ({error.reason})") from None


def _table(given: argparse.Namespace, made: NewKey) -> str:
    """The table of a new key, after a blank line."""
    members = {
        "name": _quoted(given.identity) if given.identity else "",
        "prefix": _quoted(made.prefix),
        "hash": _quoted(made.hash),
        "roles": f"[{', '.join(map(_quoted, given.role))}]",
        "expires": given.expires.isoformat() if given.expires else "",
        "note": _quoted(given.note) if given.note else "",
    }
    lines = [f"{name} = {value}" for name, value in members.items() if value]
    name = given.name if _BARE.fullmatch(given.name) else _quoted(given.name)
    return "\n".join(["", f"[keys.{name}]", *lines, ""])


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep out other commands, so that several at a time lose no key."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _quoted(text: str) -> str:
    """A basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def _check(given: argparse.Namespace) -> int:
    """Say whether an identity or a role may do something; 1 if not."""
    rules = read_rules(Path(given.file))
    if given.role:
        if unknown := [name for name in given.role if name not in rules.roles]:
            raise InvalidAccess(f"{given.file}: unknown role {unknown[0]!r}")
        return _verdict(given, rules, [rules.roles[name] for name in given.role], "")
    if not given.identity:
        given.parser.error("expected --as NAME or --role ROLE")
    found = [one for one in _identities(rules) if one.name == given.identity]
    if not found:
        raise InvalidAccess(_unknown(given.file, given.identity, rules))
    valid = [one for one in found if one.expires > time()]
    since = "" if valid else " has expired, and"
    by_roles: dict[tuple[Role, ...], list[str]] = {}  # each proof has its own
    for one in valid or found:
        place = [f"{given.file}:{one.line}"] if one.line else []
        by_roles.setdefault(tuple(one.roles) if valid else (), []).extend(place)
    statuses = []
    for roles, lines in by_roles.items():
        places = f" ({', '.join(lines)})" if lines else ""
        statuses.append(_verdict(given, rules, roles, f"{given.identity!r}{places}{since}"))
    return max(statuses)


def _unknown(file: str, name: str, rules: AccessRules) -> str:
    issuer, colon, _ = name.partition(":")
    if colon and any(rule.name == issuer for rule in rules.issuers.values()):
        return f"{file}: the roles of {name!r} are in its tokens: give --role instead of --as"
    return f"{file}: no line gives the name {name!r}"


def _verdict(given: argparse.Namespace, rules: AccessRules, roles: Sequence[Role], who: str) -> int:
    permission = Permission(given.permission)
    model, _, version = (given.model or "").partition("/")
    what = f"{given.permission} {given.model}" if given.model else given.permission

    def place(role: Role) -> str:
        return f"role {role.name!r} ({given.file}:{rules.lines[role.name]})"

    for role in roles:
        # Without a model, a change is one for all of them.
        covers = role.covers(model, version) if model else role.everywhere
        if permission in role.permissions and (covers or not (model or permission in CHANGING)):
            print(f"yes: {what}: {f'{who} has ' if who else ''}{place(role)}")
            return 0
    print(f"no: {what}: {who or 'it'} has no role that permits this")
    for role in roles:
        missing = "is for other models" if permission in role.permissions else f"may {_may(role)}"
        print(f"  {place(role)} {missing}")
    return EXIT_FAILURE


def _may(role: Role) -> str:
    if role.permissions == EVERYTHING:
        return ALL
    return ", ".join(one for one in MAY if Permission(one) in role.permissions) or "nothing"


def _list(given: argparse.Namespace) -> int:
    """Print the identities that the file names."""
    now = time()
    rows = [
        (
            one.name,
            one.kind,
            ", ".join(role.name for role in one.roles) or "-",
            _date(one.expires) + (" (expired)" if one.expires <= now else ""),
            str(one.line or "-"),
        )
        for one in _identities(read_rules(Path(given.file)))
    ]
    print(*fitted_table(_HEADS, rows, "LINE"), sep="\n")
    return 0


def _date(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat(sep=" ", timespec="minutes")
    except (OverflowError, ValueError):  # never, or beyond the calendar
        return "-"


def _run(given: argparse.Namespace) -> int:
    actions = {"key": _key, "check": _check, "list": _list}
    try:
        return actions[given.action](given)
    except InvalidAccess as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or given.file}: {error.strerror}", file=sys.stderr)
    return EXIT_FAILURE


def _moment(text: str) -> date:
    try:
        found = date.fromisoformat(text) if len(text) <= 10 else datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a date such as 2027-01-31, got {text!r}"
        ) from None
    if seconds(found) <= time():
        raise argparse.ArgumentTypeError(f"{text} is over")
    return found


_FILE = option("--file FILE", "the access file (default: access.toml)", default="access.toml")

ACCESS = Command(
    name="access",
    help="make API keys, and say who may do what",
    actions=(
        Command(
            name="key",
            help="add an API key",
            description="Add an API key to an access file, of which the rest stays as it is, and"
            " print the key on the last line, once: the file has its hash alone.",
            options=(
                option("name NAME", "name of the key, and of the identity"),
                option("--role ROLE", "role of the file; may be repeated", many=True),
                option(
                    "--identity NAME",
                    "name of the identity, if the key is a further one of it, with the same roles"
                    " unless they are given",
                ),
                option("--expires DATE", "day from which it is not valid, in UTC", type=_moment),
                option("--note TEXT", "note for the readers of the file"),
                _FILE,
            ),
            run=_run,
        ),
        Command(
            name="check",
            help="say whether an identity may do something",
            description="Say whether an identity may do something to a model, and by which line of"
            " the access file. The exit status is 0 for yes and 1 for no.",
            options=(
                option("permission PERMISSION", "one of " + ", ".join(MAY), choices=MAY),
                option("model [MODEL]", "model, or MODEL/VERSION; by default any"),
                option("--as NAME", "identity", dest="identity"),
                option("--role ROLE", "role, instead of an identity; may be repeated", many=True),
                _FILE,
            ),
            run=_run,
        ),
        Command(
            name="list",
            help="list identities",
            description="List the identities that an access file names, with their roles.",
            options=(_FILE,),
            run=_run,
        ),
    ),
)
