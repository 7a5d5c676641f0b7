"""The rules of an access file, and the mistakes in one."""

import grp
import json
import os
import pwd
import random
import re
from math import inf
from pathlib import Path

import pytest

from headrace.core.identity import EVERYTHING, PeerFacts, Permission
from headrace.core.quotas import Quota, Quotas
from headrace.plugins.access.document import InvalidAccess
from headrace.plugins.access.keys import digest
from headrace.plugins.access.rules import AccessRules, parse_rules, read_rules
from tests.support.issuer import TokenIssuer, private_key, public

PAGE = Path(__file__).parents[3] / "docs" / "access.md"
HASH = f"sha256:{digest(b'k').hex()}"
ROLES = """
[roles.scorer]
may = ["infer", "read"]
models = ["digits", "text_*/2"]
[roles.ops]
may = "*"
"""


def rules_of(text: str, path: Path = Path("access.toml")) -> AccessRules:
    return parse_rules(path, ROLES + text)


def test_roles() -> None:
    rules = rules_of("")
    scorer, ops = rules.roles["scorer"], rules.roles["ops"]
    assert scorer.permissions == {Permission.OPEN, Permission.INFER, Permission.READ}
    assert scorer.covers("digits", "7")
    assert scorer.covers("text_a", "2")
    assert not scorer.covers("text_a", "3")
    assert ops.permissions == EVERYTHING
    assert ops.everywhere
    assert rules.lines == {"scorer": 2, "ops": 5}
    assert rules.anonymous is None


def test_keys() -> None:
    other = f"sha256:{digest(b'other').hex()}"
    rules = rules_of(f"""
        [keys.web]
        hash = "{HASH}"
        roles = ["scorer", "ops", "scorer"]
        expires = 2027-01-31
        note = "the site"
        [keys.web2]
        name = "web"
        prefix = "hrk_0"
        hash = "{other}"
        roles = "ops"
    """)
    first, second = rules.keys.values()
    assert (first.name, first.line, first.digest) == ("web", 8, digest(b"k"))
    assert [role.name for role in first.identity.roles] == ["scorer", "ops"]
    assert (first.identity.name, first.identity.kind) == ("web", "key")
    assert first.identity.expires == 1_801_353_600
    assert (second.name, second.identity.name, second.identity.expires) == ("web2", "web", inf)


def test_anonymous_and_quotas() -> None:
    rules = rules_of('[anonymous]\nroles = "scorer"\n[[quotas]]\nof = ["*"]\nrequests = 2')
    assert rules.anonymous is not None
    assert (rules.anonymous.name, rules.anonymous.kind) == ("anonymous", "anonymous")
    assert rules.quotas == Quotas((Quota("quota1", ("*",), requests=2),))


def test_peers_by_number_user_and_group() -> None:
    user = pwd.getpwuid(os.getuid())
    rules = rules_of(f"""
        [[peers]]
        user = 4000000
        roles = []
        [[peers]]
        user = {json.dumps(user.pw_name)}
        roles = "ops"
        name = "me"
        [[peers]]
        group = 4000001
        roles = "scorer"
    """)
    by_number = rules.peer(PeerFacts(uid=4_000_000, gid=1))
    by_name = rules.peer(PeerFacts(uid=user.pw_uid, gid=4_000_001))
    by_group = rules.peer(PeerFacts(uid=4_000_002, gid=4_000_001))
    found = [one for one in (by_number, by_name, by_group) if one is not None]
    assert [one.name for one in found] == [
        "unix:4000000", "me", "unix:4000002",
    ]  # fmt: skip
    assert {one.kind for one in found} == {"peer"}
    assert rules.peer(PeerFacts(uid=4_000_002, gid=1)) is None
    assert rules.peer(PeerFacts(uid=4_000_002)) is None
    assert rules.peer(PeerFacts("127.0.0.1")) is None  # not over a Unix socket


def test_members_of_a_group() -> None:
    """Sockets tell the first group of a process only, so others come from the system's table."""
    names = {user.pw_name: user for user in pwd.getpwall()}
    found = [
        (group, names[member])
        for group in grp.getgrall()
        for member in group.gr_mem
        if member in names and names[member].pw_gid != group.gr_gid
    ]
    for group, user in found[:1]:
        rules = rules_of(f'[[peers]]\ngroup = "{group.gr_name}"\nroles = "ops"')
        assert rules.peer(PeerFacts(uid=user.pw_uid, gid=user.pw_gid)) is not None
    group = grp.getgrgid(os.getgid())
    rules = rules_of(f'[[peers]]\ngroup = "{group.gr_name}"\nroles = "ops"')
    assert rules.peer(PeerFacts(uid=4_000_000, gid=group.gr_gid)) is not None


def test_issuers(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps(TokenIssuer().document))
    rules = rules_of(
        """
        [issuers.corp]
        issuer = "https://corp.example"
        audience = "headrace"
        [issuers.local]
        issuer = "local"
        keys = "keys.json"
        audience = ["a", "b"]
        algorithms = "ES256"
        roles = "scorer"
        roles_claim = "groups"
        claim_roles = { admins = ["ops"], all = "scorer" }
        """,
        tmp_path / "access.toml",
    )
    corp, local = rules.issuers["https://corp.example"], rules.issuers["local"]
    assert (corp.source.url, corp.keys, corp.name_claim) == ("", None, "sub")
    assert corp.source.algorithms == ("RS256", "ES256")
    assert local.keys is not None
    assert local.keys.find("one", "ES256") is not None
    assert local.by_value == {"admins": (rules.roles["ops"],), "all": (rules.roles["scorer"],)}
    assert rules.files == (tmp_path / "keys.json",)


KEY = f'[keys.k]\nhash = "{HASH}"\n'
ISSUER = '[issuers.i]\nissuer = "https://i.example"\naudience = "a"\n'


@pytest.mark.parametrize(("text", "line", "problem"), [
    ("[rolls]\n", 7, "unknown member 'rolls', expected one of roles, issuers, keys, certif"),
    ("[roles.x]\nmay = 'infer'\nmodel = 'm'\n", 9, "unknown member 'model', expected one of may"),
    ("[roles.x]\n", 7, "'may' is missing"),
    ("[roles.x]\nmay = ['infer', 'rule']\n", 8, "'may' has 'rule', expected infer, read, obs"),
    ("[roles.x]\nmay = 'open'\n", 8, "'may' has 'open'"),
    ("[roles.x]\nmay = '*'\nmodels = 'm/one'\n", 9, "'models' has 'm/one', expected NAME or NA"),
    ("[roles.x]\nmay = '*'\nmodels = 'm/0'\n", 9, "'models' has 'm/0'"),
    ("[roles.'a b']\nmay = '*'\n", 7, "the name 'a b' must be of at most 128 letters"),
    ("[roles]\nx = 5\n", 8, "'x' must be a table"),
    (KEY, 7, "'roles' is missing"),
    (KEY + "roles = ['scorer', 'nobody']\n", 9, "unknown role 'nobody', expected one of: scor"),
    (KEY + "roles = []\nexpires = 'soon'\n", 10, "'expires' must be a date"),
    (KEY + "roles = []\nname = 'corp:x'\n", 10, "the name 'corp:x' must be"),
    (KEY + "roles = []\nkey = 's3cret'\n", 10, "unknown member 'key'"),
    ("[keys.k]\nroles = []\nhash = 's3cret'\n", 9, "'hash' must be sha256: and 64 hexadecimal"),
    (KEY + "roles = []\n" + KEY.replace(".k", ".l") + "roles = []\n", 11, "is that of line 7"),
    (KEY.replace(".k", ".anonymous") + "roles = []\n", 7, "is the name of clients that prove no"),
    (KEY + "roles = []\nname = 'anonymous'\n", 10, "is the name of clients that prove nothing"),
    ("[[keys]]\nx = 1\n", 7, "'keys' must be a table"),
    ("[anonymous]\n", 7, "'roles' is missing"),
    ("[anonymous]\nroles = []\nmay = 'infer'\n", 9, "unknown member 'may'"),
    ("[[certificates]]\nroles = []\n", 7, "expected one of dns, uri, email, subject"),
    ("[[certificates]]\nroles = []\ndns = 'a'\nuri = 'b'\n", 7, "expected one of dns"),
    ("[[certificates]]\nroles = []\nsubject = {}\n", 9, "'subject' must have one of CN, O,"),
    ("[[certificates]]\nroles = []\nsubject.XY = 'a'\n", 9, "unknown member 'XY'"),
    ("[certificates]\nroles = []\n", 7, "'certificates' must be tables"),
    ("[[peers]]\nroles = []\n", 7, "expected one of user, group"),
    ("[[peers]]\nroles = []\nuser = 1\ngroup = 1\n", 7, "expected one of user, group"),
    ("[[peers]]\nroles = []\nuser = 'no such'\n", 9, "this machine has no user 'no such'"),
    ("[[peers]]\nroles = []\ngroup = 'no such'\n", 9, "this machine has no group 'no such'"),
    ("[[peers]]\nroles = []\nuser = -1\n", 9, "'user' must be a number from 0"),
    ("[[peers]]\nroles = []\nuser = true\n", 9, "'user' must be a name or a number"),
    ("[issuers.i]\nissuer = 'https://i.example'\n", 7, "'audience' is missing"),
    (ISSUER + "algorithms = ['HS256']\n", 10, "'algorithms' has 'HS256', expected RS256,"),
    (ISSUER + "algorithms = ['none']\n", 10, "'algorithms' has 'none'"),
    (ISSUER + "keys = 'no.json'\n", 10, r"'keys': no\.json: No such file"),
    (ISSUER + "keys = 'http://i.example/k'\n", 10, "'keys' must be an https:// URL: who can"),
    (ISSUER + "keys = 'ftp://i.example/k'\n", 10, "'keys' must be an https:// URL"),
    (ISSUER + "keys = 'https://a:b@i.example/k'\n", 10, "'keys' must have no password"),
    (ISSUER + "keys = 'https://[/k'\n", 10, "'keys' is no URL"),
    (ISSUER.replace("https://", ""), 8, "'issuer' must be an https:// URL"),
    (ISSUER + "max_age_secs = 300\n", 10, "'max_age_secs' must be more than 'refresh_secs'"),
    (ISSUER + "roles_claim = 'groups'\n", 7, "expected both of roles_claim and"),
    (ISSUER + "roles_claim = 'g'\nclaim_roles.x = 'no'\n", 11, "unknown role 'no'"),
    (ISSUER + ISSUER.replace(".i]", ".j]"), 11, "its issuer is that of line 7"),
    (ISSUER.replace(".i]", ".dns]"), 7, "an issuer must not be called one of dns, uri"),
    ("[quotas]\nx = 5\n", 7, "'quotas' must be tables"),
])  # fmt: skip
def test_mistakes_are_named_with_their_line(text: str, line: int, problem: str) -> None:
    with pytest.raises(InvalidAccess, match=problem) as raised:
        rules_of(text)
    assert str(raised.value).startswith(f"access.toml:{line}: ")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(("content", "problem"), [
    ("{", "it is no JSON"), ("[]", "it is no JSON web key set"),
    ('{"keys": []}', "it has no key for RS256, ES256"),
    ('{"keys": [{"kty": "EC", "crv": "P-256", "x": "s3cret"}]}', "it has a broken key of the type"),
])  # fmt: skip
def test_files_of_keys_are_checked(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(content)
    with pytest.raises(InvalidAccess, match=problem) as raised:
        rules_of(ISSUER + "keys = 'keys.json'", tmp_path / "access.toml")
    assert str(raised.value).startswith(f"{tmp_path}/access.toml:10: 'keys': {tmp_path}/keys.json")
    assert "s3cret" not in str(raised.value)


def test_private_keys_are_refused(tmp_path: Path) -> None:
    """A reader of the file could sign tokens."""
    document = {"keys": [{**public(private_key("ES256"), "one", "ES256"), "d": "s3cret"}]}
    (tmp_path / "keys.json").write_text(json.dumps(document))
    with pytest.raises(InvalidAccess, match="it has a private key"):
        rules_of(ISSUER + "keys = 'keys.json'", tmp_path / "access.toml")


def test_the_documented_file() -> None:
    [block] = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    rules = parse_rules(Path("access.toml"), block)
    assert [rule.identity.name for rule in rules.keys.values()] == ["web"]
    assert [rule.name for rule in rules.issuers.values()] == ["corp"]
    assert len(rules.certificates) == len(rules.peers) == 1
    assert rules.anonymous is not None


def test_mutated_files_are_right_or_refused() -> None:
    source = random.Random(1)
    [block] = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    pieces = [*"[]{}.,=#'\"\\\n\r\t-0é\0", '"""', "'''", "[[", "]]", "*", "5", "true", "[1]", "{}"]
    outcomes = set()
    for _ in range(800):
        text = list(block)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(text))
            text[at : at + source.choice((0, 0, 1, 5, 20))] = source.choice(pieces)
        try:
            parse_rules(Path("access.toml"), "".join(text))
            outcomes.add("right")
        except InvalidAccess as error:
            outcomes.add("refused")
            found = re.match(r"access\.toml:(\d+): .", str(error))
            outcomes.add("with its line" if found else str(error))
    assert outcomes == {"right", "refused", "with its line"}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    with pytest.raises(InvalidAccess, match=rf"{path}: No such file or directory"):
        read_rules(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(InvalidAccess, match=rf"{path}: it is no text in UTF-8"):
        read_rules(path)
