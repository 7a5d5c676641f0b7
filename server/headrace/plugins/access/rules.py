"""The rules of an access file: roles, and what makes a client one that has them."""

import grp
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.identity import EVERYTHING, Identity, PeerFacts, Permission, Role
from headrace.core.quotas import Quotas
from headrace.plugins.access.certificates import (
    ATTRIBUTES,
    NAMES,
    CertificateRule,
    name_pattern,
)
from headrace.plugins.access.document import InvalidAccess, Section
from headrace.plugins.access.keys import read_hash
from headrace.plugins.access.quotas import InvalidQuota, read_quotas

if TYPE_CHECKING:
    from headrace.plugins.access.tokens import IssuerRule

ALL = "*"
_ANONYMOUS = "anonymous"
MAY = tuple(one.value for one in Permission if one is not Permission.OPEN)
# Names of identities have no colon, so that none is that of a token or of a matched name.
_NAME = re.compile(r"[\w.@+-]{1,128}", re.ASCII)
_TAKEN = (*NAMES, "subject", "unix")  # before the colon in names that certificates and peers give
_MODEL = re.compile(r"[^/]+(/[1-9]\d*)?")


@dataclass(frozen=True, slots=True)
class KeyRule:
    """An API key: the name of its table, the SHA-256 digest, and whose it is."""

    name: str
    line: int
    digest: bytes
    identity: Identity


@dataclass(frozen=True, slots=True)
class PeerRule:
    """Processes on Unix sockets, of these users or with this group; `name` "" is `unix:UID`."""

    line: int
    users: frozenset[int]
    group: int | None
    roles: tuple[Role, ...]
    name: str


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Everything that an access file says, with the lines of roles.

    `keys` are by digest, `issuers` by the claim `iss`. `files` are others that it is made of.
    """

    roles: Mapping[str, Role]
    lines: Mapping[str, int]
    keys: Mapping[bytes, KeyRule]
    issuers: Mapping[str, "IssuerRule"] = field(default_factory=dict)
    certificates: tuple[CertificateRule, ...] = ()
    peers: tuple[PeerRule, ...] = ()
    anonymous: Identity | None = None
    quotas: Quotas | None = None
    files: tuple[Path, ...] = ()

    def peer(self, facts: PeerFacts) -> Identity | None:
        """The identity of a process at the other end of a Unix socket, by the first rule."""
        for rule in self.peers if facts.uid >= 0 else ():
            if facts.uid in rule.users or facts.gid == rule.group:
                return Identity(rule.name or f"unix:{facts.uid}", "peer", rule.roles)
        return None


def read_rules(path: Path) -> AccessRules:
    """The rules of a file; raises `InvalidAccess`."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InvalidAccess(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidAccess(f"{path}: it is no text in UTF-8 ({error.reason})") from None
    return parse_rules(path, text)


def parse_rules(path: Path, text: str) -> AccessRules:
    """The rules of a file with this text; raises `InvalidAccess`."""
    whole = Section.of(path, text)
    tables = list(whole.section("roles").named())
    reader = _RuleReader({table.name: _role(table) for table in tables})
    issuers: dict[str, IssuerRule] = {}
    files: list[Path] = []
    for table in whole.section("issuers").named():
        rule, file = reader.issuer(table)
        if issuers.setdefault(rule.source.issuer, rule) is not rule:
            other = issuers[rule.source.issuer].line
            raise table.error(f"its issuer is that of line {other}", "issuer")
        files += [file] if file is not None else []
    keys: dict[bytes, KeyRule] = {}
    for table in whole.section("keys").named():
        key = reader.key(table)
        if keys.setdefault(key.digest, key) is not key:
            raise table.error(f"its hash is that of line {keys[key.digest].line}", "hash")
    found = AccessRules(
        roles=reader.roles,
        lines={table.name: table.line for table in tables},
        keys=keys,
        issuers=issuers,
        certificates=tuple(reader.certificate(table) for table in whole.sections("certificates")),
        peers=tuple(reader.peer(table) for table in whole.sections("peers")),
        anonymous=reader.anonymous(whole.section("anonymous")) if whole.has("anonymous") else None,
        quotas=_quotas(list(whole.sections("quotas"))),
        files=tuple(files),
    )
    whole.end()
    return found


def _quotas(tables: Sequence[Section]) -> Quotas | None:
    try:
        return read_quotas([table.members() for table in tables]) if tables else None
    except InvalidQuota as error:
        named = f"'{error.key}': {error.text}" if error.key else error.text
        key = error.key if tables[error.position].has(error.key) else ""
        raise tables[error.position].error(named, key) from None


def _role(table: Section) -> Role:
    _check_name(table, table.name)
    may, models = table.texts("may"), table.texts("models", (ALL,))
    table.end()
    if wrong := [one for one in may if one not in (*MAY, ALL)]:
        raise table.error(f"'may' has {wrong[0]!r}, expected {', '.join(MAY)} or {ALL}", "may")
    if wrong := [one for one in models if not _MODEL.fullmatch(one)]:
        raise table.error(f"'models' has {wrong[0]!r}, expected NAME or NAME/VERSION", "models")
    return Role(table.name, EVERYTHING if ALL in may else frozenset(map(Permission, may)), models)


def _check_name(table: Section, name: str, member: str = "") -> None:
    if not _NAME.fullmatch(name):
        raise table.error(
            f"the name {name!r} must be of at most 128 letters, digits and . _ @ + -", member
        )


class _RuleReader:
    """Reads tables that name roles."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self.roles = roles

    def _roles(self, table: Section, default: Sequence[str] | None = None) -> tuple[Role, ...]:
        return self._named(table, "roles", default)

    def _named(
        self, table: Section, member: str, default: Sequence[str] | None = None
    ) -> tuple[Role, ...]:
        names = table.texts(member, default)
        if wrong := [name for name in names if name not in self.roles]:
            known = ", ".join(self.roles) or "there are none"
            raise table.error(f"unknown role {wrong[0]!r}, expected one of: {known}", member)
        return tuple(self.roles[name] for name in dict.fromkeys(names))

    def _identity_name(self, table: Section, default: str = "") -> str:
        name = table.text("name", default)
        if name:
            member = "name" if table.has("name") else ""
            _check_name(table, name, member)
            if name == _ANONYMOUS:
                raise table.error(f"{name!r} is the name of clients that prove nothing", member)
        return name

    def key(self, table: Section) -> KeyRule:
        """The key of a table in `[keys]`."""
        name = self._identity_name(table, table.name)
        digest = read_hash(table.text("hash"))
        if digest is None:
            raise table.error("'hash' must be sha256: and 64 hexadecimal digits", "hash")
        identity = Identity(name, "key", self._roles(table), table.moment("expires", inf))
        table.text("prefix", "")  # for people, who look for a key that has leaked
        table.text("note", "")
        table.end()
        return KeyRule(table.name, table.line, digest, identity)

    def anonymous(self, table: Section) -> Identity:
        """Clients that prove nothing."""
        roles = self._roles(table)
        table.end()
        return Identity(_ANONYMOUS, _ANONYMOUS, roles)

    def certificate(self, table: Section) -> CertificateRule:
        """A rule for certificates."""
        kinds = [kind for kind in (*NAMES, "subject") if table.has(kind)]
        name, roles = self._identity_name(table), self._roles(table)
        if len(kinds) != 1:
            raise table.error(f"expected one of {', '.join((*NAMES, 'subject'))}")
        [kind] = kinds
        pattern, subject = None, list[tuple[str, re.Pattern[str]]]()
        if kind == "subject":
            attributes = table.section(kind)
            known = [short for short in ATTRIBUTES if attributes.has(short)]
            subject = [(short, name_pattern(attributes.text(short))) for short in known]
            attributes.end()
            if not subject:
                raise table.error(f"'subject' must have one of {', '.join(ATTRIBUTES)}", kind)
        else:
            pattern = name_pattern(table.text(kind), NAMES[kind][1])
        table.end()
        return CertificateRule(table.line, kind, roles, name, pattern, tuple(subject))

    def peer(self, table: Section) -> PeerRule:
        """A rule for processes on Unix sockets."""
        given = [kind for kind in ("user", "group") if table.has(kind)]
        name, roles = self._identity_name(table), self._roles(table)
        if len(given) != 1:
            raise table.error("expected one of user, group")
        number = table.numbered(given[0])
        table.end()
        if given == ["user"]:
            users = frozenset([_user(table, number)])
            return PeerRule(table.line, users, None, roles, name)
        group, members = _group(table, number)
        return PeerRule(table.line, members, group, roles, name)

    def issuer(self, table: Section) -> tuple["IssuerRule", Path | None]:
        """A rule for tokens, and the file of its keys."""
        try:
            # Imported late: tokens need the extra `access`, and 50 ms.
            from headrace.plugins.access.issuers import ALGORITHMS, KeySource, problem_of
            from headrace.plugins.access.tokens import IssuerRule
        except ImportError:
            raise table.error("tokens need PyJWT: pip install 'headrace[access]'") from None
        _check_name(table, table.name)
        if table.name in _TAKEN:
            raise table.error(f"an issuer must not be called one of {', '.join(_TAKEN)}")
        algorithms = table.texts("algorithms", ("RS256", "ES256"))
        if wrong := [one for one in algorithms if one not in ALGORITHMS]:
            raise table.error(
                f"'algorithms' has {wrong[0]!r}, expected {', '.join(ALGORITHMS)}", "algorithms"
            )
        place = table.text("keys", "")
        remote = not place or "://" in place
        source = KeySource(
            issuer=table.text("issuer"),
            algorithms=algorithms,
            url=place if remote else "",
            roots=_beside(table, "roots"),
            refresh_secs=table.number("refresh_secs", 300, 1),
            max_age_secs=table.number("max_age_secs", 86_400, 1),
        )
        if remote and (problem := problem_of(source.url or source.issuer)):
            member = "keys" if place else "issuer"
            raise table.error(f"'{member}' {problem}", member)
        if source.max_age_secs <= source.refresh_secs:
            raise table.error("'max_age_secs' must be more than 'refresh_secs'", "max_age_secs")
        file = None if remote else Path(_beside(table, "keys"))
        rule = IssuerRule(
            name=table.name,
            line=table.line,
            source=source,
            audience=table.texts("audience"),
            name_claim=table.text("name_claim", "sub"),
            roles=self._roles(table, ()),
            roles_claim=table.text("roles_claim", ""),
            by_value=self._by_value(table.section("claim_roles")),
            leeway_secs=table.number("leeway_secs", 60),
            keys=_keys(table, file, algorithms) if file is not None else None,
        )
        table.end()
        if bool(rule.roles_claim) != bool(rule.by_value):
            raise table.error("expected both of roles_claim and [claim_roles], or neither")
        return rule, file

    def _by_value(self, table: Section) -> dict[str, tuple[Role, ...]]:
        return {value: self._named(table, value) for value in table.members()}


def _keys(table: Section, file: Path, algorithms: Sequence[str]) -> Any:
    from headrace.plugins.access.issuers import InvalidKeys, read_keys

    try:
        return read_keys(file.read_bytes(), algorithms)
    except (OSError, InvalidKeys) as error:
        why = error.strerror if isinstance(error, OSError) else error
        wrong = table.error(f"'keys': {file}: {why}", "keys")
        wrong.needed = file
        raise wrong from None


def _beside(table: Section, member: str) -> str:
    """The path of a file, which is relative to that of the access file; "" without one."""
    given = table.text(member, "")
    return str(table.path.parent / given) if given else ""


def _user(table: Section, given: str | int) -> int:
    if isinstance(given, int):
        return given
    try:
        return pwd.getpwnam(given).pw_uid
    except (KeyError, ValueError):
        raise table.error(f"this machine has no user {given!r}", "user") from None


def _group(table: Section, given: str | int) -> tuple[int, frozenset[int]]:
    """A group's number, and its further members: sockets tell only a process's first group."""
    try:
        found = grp.getgrgid(given) if isinstance(given, int) else grp.getgrnam(given)
    except (KeyError, ValueError):
        if isinstance(given, int):
            return given, frozenset()
        raise table.error(f"this machine has no group {given!r}", "group") from None
    members = set()
    for name in found.gr_mem:
        try:
            members.add(pwd.getpwnam(name).pw_uid)
        except KeyError:  # a member that is no user any more
            continue
    return found.gr_gid, frozenset(members)
