"""The access of a server: clients it knows, and how it follows its file."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.core.errors import Unauthenticated
from headrace.core.identity import Access, PeerFacts, Permission
from headrace.plugins.access.document import InvalidAccess
from headrace.plugins.access.file import open_access
from headrace.plugins.access.keys import NewKey, new_key
from tests.support.issuer import TokenIssuer, served
from tests.support.scrape import until

NOBODY = PeerFacts("127.0.0.1")
WEB, OPS = new_key(), new_key()
ROLES = """
[roles.scorer]
may = ["infer", "read"]
models = ["digits"]
[roles.ops]
may = "*"
"""


def key(name: str, made: NewKey, role: str, more: str = "") -> str:
    return f'[keys.{name}]\nhash = "{made.hash}"\nroles = ["{role}"]\n{more}\n'


BASE = ROLES + key("web", WEB, "scorer")


LINES = BASE.count("\n")


def bearer(credential: str | bytes) -> list[bytes]:
    return [b"Bearer " + (credential if isinstance(credential, bytes) else credential.encode())]


@asynccontextmanager
async def opened(folder: Path, text: str) -> AsyncIterator[tuple[Access, asyncio.Event, Path]]:
    """An access by a file of this text, with an event that `watch` sets."""
    path = folder / "access.toml"
    path.write_text(text)
    access, changed = open_access(str(path)), asyncio.Event()
    access.watch(changed.set)
    try:
        yield access, changed, path
    finally:
        await access.close()


async def told(changed: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        await changed.wait()
    changed.clear()


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await asyncio.to_thread(until, lambda: text in caplog.text, f"{text!r} in the log")


def known(access: Access, credential: str | bytes) -> str:
    """The name of a client; its problem if there is none."""
    try:
        return access.identify(bearer(credential), NOBODY).name
    except Unauthenticated as error:
        return str(error)


# --- clients


async def test_keys(tmp_path: Path) -> None:
    async with opened(tmp_path, BASE + key("ops", OPS, "ops")) as (access, _, _):
        web = access.identify(bearer(WEB.key), NOBODY)
        assert (web.name, web.kind) == ("web", "key")
        assert web.may(Permission.INFER, "digits")
        assert not web.may(Permission.INFER, "other")
        assert not web.may(Permission.CONTROL, "digits")
        assert access.identify([b"bearer   " + OPS.key.encode()], NOBODY).name == "ops"
        assert access.identify(bearer(WEB.key), NOBODY) is web
        assert access.challenge == 'Bearer realm="headrace"'


@pytest.mark.parametrize(("values", "problem"), [
    ([], "expected 'authorization: Bearer KEY'"),
    ([b""], "expected 'authorization: Bearer KEY'"),
    ([b"Bearer"], "expected 'authorization: Bearer KEY'"),
    ([b"Bearer  "], "expected 'authorization: Bearer KEY'"),
    ([b"Basic d2ViOng="], "expected 'authorization: Bearer KEY'"),
    ([WEB.key.encode()], "expected 'authorization: Bearer KEY'"),
    (bearer(WEB.prefix), "the API key is unknown"),
    (bearer(WEB.hash), "the API key is unknown"),
    (bearer(WEB.key[:-1]), "the API key is unknown"),
    (bearer(WEB.key + "x"), "the API key is unknown"),
    (bearer("a.b.c"), "the API key is unknown"),  # there are no issuers
    (bearer(b"\xff\x00"), "the API key is unknown"),
    ([*bearer(WEB.key), *bearer(WEB.key)], "expected one authorization, got 2"),
    (bearer("a" * 20_000), "the authorization has more than 16384 bytes"),
])  # fmt: skip
async def test_wrong_keys(values: list[bytes], problem: str, tmp_path: Path) -> None:
    async with opened(tmp_path, BASE) as (access, _, _):
        with pytest.raises(Unauthenticated) as raised:
            access.identify(values, NOBODY)
        assert str(raised.value) == problem


async def test_a_wrong_key_is_refused_even_where_none_is_needed(tmp_path: Path) -> None:
    async with opened(tmp_path, BASE + '[anonymous]\nroles = ["scorer"]') as (access, _, _):
        found = access.identify([], NOBODY)
        assert (found.name, found.kind) == ("anonymous", "anonymous")
        assert found.may(Permission.INFER, "digits")
        assert known(access, "wrong") == "the API key is unknown"


async def test_certificates_and_peers(tmp_path: Path) -> None:
    text = (
        BASE
        + """
        [[certificates]]
        uri = "spiffe://cluster/ns/*/sa/web"
        roles = "scorer"
        [[peers]]
        user = 1234567
        roles = "ops"
    """
    )
    subject = (("URI", "spiffe://cluster/ns/a/sa/web"),)
    lasting = {"notAfter": "Jan  1 00:00:00 2100 GMT"}
    with_certificate = PeerFacts("127.0.0.1", {"subjectAltName": subject, **lasting})
    async with opened(tmp_path, text) as (access, _, _):
        found = access.identify([], with_certificate)
        assert (found.name, found.kind) == ("uri:spiffe://cluster/ns/a/sa/web", "certificate")
        # A key says more than a certificate, which may be that of a proxy.
        assert access.identify(bearer(WEB.key), with_certificate).name == "web"
        assert access.identify([], PeerFacts("unix:1234567", None, 1, 1234567, 1)).kind == "peer"
        over = {"notAfter": "Jan  1 00:00:00 2001 GMT"}
        with pytest.raises(Unauthenticated, match="the certificate has expired"):
            access.identify([], PeerFacts("::1", {"subjectAltName": subject, **over}))
        with pytest.raises(Unauthenticated, match="expected 'authorization"):
            access.identify([], PeerFacts("::1", {"subjectAltName": (), **lasting}))


async def test_tokens_with_keys_of_a_file(tmp_path: Path) -> None:
    issuer = TokenIssuer()
    (tmp_path / "keys.json").write_text(json.dumps(issuer.document))
    text = (
        BASE
        + f"""
        [issuers.corp]
        issuer = "{issuer.name}"
        audience = "headrace"
        keys = "keys.json"
        roles_claim = "groups"
        claim_roles.ml = "scorer"
    """
    )
    async with opened(tmp_path, text) as (access, changed, _):
        token = issuer.token(groups=["ml"])
        found = access.identify(bearer(token), NOBODY)
        assert (found.name, found.kind) == ("corp:ann", "token")
        assert found.may(Permission.INFER, "digits")
        assert access.identify(bearer(token), NOBODY) is found
        # A token that gives no role is known, and may do nothing.
        assert not access.identify(bearer(issuer.token()), NOBODY).may(Permission.INFER, "digits")
        assert known(access, issuer.token(exp=1)) == "the token has expired"
        # Other keys in the file: what was signed with those of before counts no more.
        issuer.rotate("two")
        (tmp_path / "keys.json").write_text(json.dumps(issuer.document))
        await told(changed)
        assert "does not offer" in known(access, token)
        assert known(access, issuer.token()) == "corp:ann"


@pytest.mark.slow
async def test_tokens_of_an_issuer_that_is_asked(tmp_path: Path) -> None:
    issuer = TokenIssuer()
    with served(issuer) as url:
        table = f'[issuers.corp]\nissuer = "{url}"\naudience = "headrace"\nrefresh_secs = 1\n'
        async with opened(tmp_path, BASE + table) as (access, changed, path):
            await told(changed)
            token = issuer.token()
            assert known(access, token) == "corp:ann"
            issuer.rotate("two")
            await told(changed)
            assert "does not offer" in known(access, token)
            assert known(access, issuer.token()) == "corp:ann"
            # Keys outlive a change of the file, even if the issuer is down by then.
            issuer.status = 503
            path.write_text(BASE + table + key("ops", OPS, "ops"))
            await told(changed)
            assert known(access, OPS.key) == "ops"
            assert known(access, issuer.token()) == "corp:ann"
            # And one of the times at which they are fetched.
            path.write_text(BASE + table.replace("refresh_secs = 1", "refresh_secs = 2"))
            await told(changed)
            assert known(access, OPS.key) == "the API key is unknown"
            assert known(access, issuer.token()) == "corp:ann"
            path.write_text(BASE)
            await told(changed)
            assert known(access, issuer.token()) == "the API key is unknown"


@pytest.mark.parametrize("early", [None, "", '{"keys": ['])
async def test_a_file_of_keys_that_comes_after_the_one_that_names_it(
    early: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = TokenIssuer()
    keys = tmp_path / "keys.json"
    if early is not None:
        keys.write_text(early)
    text = f'[issuers.corp]\nissuer = "{issuer.name}"\naudience = "headrace"\nkeys = "keys.json"\n'
    async with opened(tmp_path, BASE) as (access, changed, path):
        path.write_text(BASE + text)
        await logged(caplog, f"'keys': {keys}: ")
        [record] = caplog.records
        assert record.getMessage().startswith("access stays as it was: ")
        keys.write_text(json.dumps(issuer.document))
        await told(changed)
        assert known(access, issuer.token()) == "corp:ann"


# --- expiry


@pytest.mark.slow
async def test_keys_expire(tmp_path: Path) -> None:
    soon = datetime.fromtimestamp(time.time() + 1, UTC).isoformat()
    text = BASE + key("ops", OPS, "ops", f"expires = {soon}")
    async with opened(tmp_path, text) as (access, changed, _):
        first = known(access, OPS.key)
        if first == "ops":  # unless the machine took a second for this
            await told(changed)
        assert known(access, OPS.key) == "the key has expired"
        assert known(access, WEB.key) == "web"


@pytest.mark.slow
async def test_tokens_expire(tmp_path: Path) -> None:
    issuer = TokenIssuer()
    (tmp_path / "keys.json").write_text(json.dumps(issuer.document))
    text = f'[issuers.corp]\nissuer = "{issuer.name}"\naudience = "headrace"\nkeys = "keys.json"\n'
    async with opened(tmp_path, BASE + text + "leeway_secs = 0") as (access, changed, _):
        lasting, soon = issuer.token(), issuer.token(exp=int(time.time()) + 2)
        assert known(access, lasting) == "corp:ann"
        if known(access, soon) == "corp:ann":
            await told(changed)
        assert known(access, soon) == "the token has expired"
        assert known(access, lasting) == "corp:ann"


# --- the file


async def test_a_changed_file_is_read(tmp_path: Path) -> None:
    async with opened(tmp_path, BASE) as (access, changed, path):
        path.write_text(ROLES + key("ops", OPS, "ops"))
        await told(changed)
        assert known(access, OPS.key) == "ops"
        assert known(access, WEB.key) == "the API key is unknown"


@pytest.mark.slow
async def test_a_broken_file_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path, BASE) as (access, changed, path):
        for text, problem in (
            (BASE + "[keys.x", f"{path}:{LINES + 1}: "),
            (BASE + '[keys.x]\nhash = "s3cret"', f"{path}:{LINES + 2}: 'hash' must be sha256:"),
            (BASE + "[rolls]", f"{path}:{LINES + 1}: unknown member 'rolls'"),
        ):
            caplog.clear()
            path.write_text(text)
            await logged(caplog, problem)
            [record] = caplog.records
            assert record.levelno == logging.ERROR
            assert record.getMessage().startswith("access stays as it was: ")
            assert "s3cret" not in caplog.text
            assert known(access, WEB.key) == "web"
        assert not changed.is_set()
        caplog.clear()
        path.unlink()
        await logged(caplog, f"{path}: No such file")
        path.write_text(ROLES + key("ops", OPS, "ops"))
        await told(changed)
        assert known(access, OPS.key) == "ops"


async def test_links_are_swapped(tmp_path: Path) -> None:
    """The way of Kubernetes: FILE leads to ..data/FILE, and ..data to a directory by version."""
    for name, text in (("first", BASE), ("second", ROLES + key("ops", OPS, "ops"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "access.toml").write_text(text)
    (tmp_path / "..data").symlink_to("first")
    path = tmp_path / "access.toml"
    path.symlink_to("..data/access.toml")
    access, changed = open_access(str(path)), asyncio.Event()
    access.watch(changed.set)
    try:
        assert known(access, WEB.key) == "web"
        (tmp_path / "..next").symlink_to("second")
        os.replace(tmp_path / "..next", tmp_path / "..data")
        await told(changed)
        assert known(access, OPS.key) == "ops"
    finally:
        await access.close()


async def test_both_outcomes_of_a_change_are_told(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(BASE)
    outcomes: asyncio.Queue[bool] = asyncio.Queue()
    access = open_access(str(path), outcomes.put_nowait)
    try:
        async with asyncio.timeout(60):
            path.write_text(BASE + "[rolls]")
            assert not await outcomes.get()
            path.write_text(BASE + key("ops", OPS, "ops"))
            assert await outcomes.get()
            assert known(access, OPS.key) == "ops"
    finally:
        await access.close()


async def test_a_broken_file_at_start(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    with pytest.raises(InvalidAccess, match=f"{path}: No such file"):
        open_access(str(path))
    path.write_text("[roles.x]\nmay = 5")
    with pytest.raises(InvalidAccess, match=f"{path}:2: 'may' must be a list of texts"):
        open_access(str(path))
