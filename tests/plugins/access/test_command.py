"""The command line of `headrace access`."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.plugins.access.keys import digest
from headrace.plugins.access.rules import read_rules
from tests.support import command

TEXT = """\
# Who may do what.
[roles.scorer]   # clients of the site
may = ["infer", "read"]
models = ["digits", "text_*/2"]

[roles.ops]
may = "*"

[anonymous]
roles = []

[[certificates]]
dns = "*.example.com"
name = "site"
roles = "ops"

[[peers]]
user = 0
roles = ["ops"]
"""  # fmt: skip


def run(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["access", *words])
    return ended.value.code


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file `access.toml` of the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "access.toml").write_text(TEXT)
    return tmp_path / "access.toml"


def test_a_key_is_added_and_printed_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.chmod(0o640)
    words = ("--role=scorer", "--role=ops", "--expires=2100-01-01", '--note=a "b"\n\\')
    assert run("key", "web", *words, f"--file={file}") == 0
    first, key = capsys.readouterr().out.splitlines()
    text = file.read_text()
    assert text.startswith(TEXT)
    assert key not in text
    assert first == f"{file}: added the key 'web', which begins with {key[:12]}"
    [rule] = read_rules(file).keys.values()
    assert rule.digest == digest(key.encode())
    assert (rule.name, rule.identity.name, rule.line) == ("web", "web", 21)
    assert [role.name for role in rule.identity.roles] == ["scorer", "ops"]
    assert rule.identity.expires == 4_102_444_800
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(file.parent) == [file.name]


def test_a_further_key_of_an_identity(file: Path) -> None:
    file.write_bytes(b'[roles.scorer]\r\nmay = "*"')  # without a line break at its end
    assert run("key", "web", "--role=scorer") == 0
    assert run("key", "web-2", "--identity=web") == 0
    assert file.read_bytes().startswith(b'[roles.scorer]\r\nmay = "*"\n\n[keys.web]\n')
    found = read_rules(file).keys.values()
    assert [(key.name, key.identity.name) for key in found] == [("web", "web"), ("web-2", "web")]
    assert {tuple(role.name for role in key.identity.roles) for key in found} == {("scorer",)}


def test_the_target_of_a_link_is_replaced(file: Path) -> None:
    file.rename(file.with_name("target"))
    file.symlink_to("target")
    assert run("key", "web", "--role=ops") == 0
    assert file.is_symlink()
    assert "[keys.web]" in file.with_name("target").read_text()


@pytest.mark.slow
def test_commands_at_a_time_lose_no_key(file: Path) -> None:
    def add(number: int) -> int:
        words = ("access", "key", f"k{number}", "--role=ops", f"--file={file}")
        return command.run(*words).returncode

    with ThreadPoolExecutor() as threads:
        assert set(threads.map(add, range(8))) == {0}
    assert {key.name for key in read_rules(file).keys.values()} == {f"k{n}" for n in range(8)}


@pytest.mark.parametrize(("words", "problem"), [
    (("web", "--role=no"), "access.toml: unknown role 'no', expected one of: scorer, ops"),
    (("web", "--identity=ann"), "no key of 'ann' has roles for this one: expected --role"),
    (("a:b", "--role=ops"), "access.toml:21: the name 'a:b' must be of at most 128 letters"),
    (("web", "--role=ops", "--file=no.toml"), "no.toml: No such file or directory"),
])  # fmt: skip
def test_nothing_is_added_by_mistake(
    words: tuple[str, ...], problem: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("key", *words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert problem in err
    assert file.read_text() == TEXT


def test_a_key_that_is_there_stays(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("key", "web", "--role=ops")
    before = file.read_text()
    assert run("key", "web", "--role=ops") == 1
    assert "access.toml:21: there is a key 'web' already" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(("words", "says"), [
    (("key", "web", "--expires=soon"), "expected a date such as 2027-01-31, got 'soon'"),
    (("key", "web", "--expires=2001-01-01"), "2001-01-01 is over"),
    (("check", "--as=web", "rule"), "invalid choice: 'rule'"),
    (("check", "infer", "digits"), "expected --as NAME or --role ROLE"),
])  # fmt: skip
def test_wrong_usage(
    words: tuple[str, ...], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert says in capsys.readouterr().err
    assert file.read_text() == TEXT


SCORER, OPS = "role 'scorer' (access.toml:2)", "role 'ops' (access.toml:6)"


@pytest.mark.parametrize(("words", "status", "out"), [
    (("--as=web", "infer", "digits"), 0, f"yes: infer digits: 'web' (access.toml:21) has {SCORER}"),
    (("--as", "web", "read", "text_a/2"), 0, f"(access.toml:21) has {SCORER}"),
    (("--as=web", "infer", "text_a/3"), 1, f"{SCORER} is for other models"),
    (("--as=web", "infer", "other"), 1, f"{SCORER} is for other models"),
    (("--as=web", "control", "digits"), 1, f"{SCORER} may infer, read"),
    (("--as=web", "infer"), 0, "yes: infer: 'web'"),
    (("--as=site", "admin"), 0, f"yes: admin: 'site' (access.toml:12) has {OPS}"),
    (("--as=anonymous", "infer", "x"), 1, "no: infer x: 'anonymous' has no role that permits this"),
    (("--as=old", "infer", "x"), 1, "no: infer x: 'old' (access.toml:26) has expired, and has no"),
    (("--role=ops", "control", "x"), 0, f"yes: control x: {OPS}"),
    (("--role=scorer", "control", "x"), 1, "no: control x: it has no role that permits this"),
])  # fmt: skip
def test_check(
    words: tuple[str, ...], status: int, out: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("key", "web", "--role=scorer")
    old = f"sha256:{digest(b'old').hex()}"
    with file.open("a") as opened:
        opened.write(f'\n[keys.old]\nhash = "{old}"\nroles = ["ops"]\nexpires = 2001-01-01\n')
    capsys.readouterr()
    assert run("check", *words) == status
    assert out in capsys.readouterr().out


def test_check_says_so_for_each_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("key", "web", "--role=ops")
    run("key", "web-2", "--role=scorer", "--identity=web")
    capsys.readouterr()
    assert run("check", "--as=web", "infer", "other") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"yes: infer other: 'web' (access.toml:21) has {OPS}",
        "no: infer other: 'web' (access.toml:26) has no role that permits this",
        f"  {SCORER} is for other models",
    ]


def test_check_of_changes_to_all_models(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file.open("a") as opened:
        opened.write('\n[roles.some]\nmay = "*"\nmodels = ["digits"]\n')
    for words, status in ((("control", "digits"), 0), (("control",), 1), (("read",), 0)):
        assert run("check", "--role=some", *words) == status


@pytest.mark.parametrize(("words", "problem"), [
    (("--as=nobody", "infer"), "access.toml: no line gives the name 'nobody'"),
    (("--as=corp:ann", "infer"), "the roles of 'corp:ann' are in its tokens: give --role"),
    (("--role=no", "infer"), "access.toml: unknown role 'no'"),
    (("--as=x", "infer", "--file=no.toml"), "no.toml: No such file or directory"),
])  # fmt: skip
def test_check_needs_a_name_that_is_known(
    words: tuple[str, ...], problem: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("a") as opened:
        opened.write('\n[issuers.corp]\nissuer = "https://corp.example"\naudience = "a"\n')
    assert run("check", *words) == 1
    assert problem in capsys.readouterr().err


def test_a_key_without_an_end_in_the_calendar(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last moment of a western time zone is in the year 10000 of UTC."""
    run("key", "web", "--role=scorer", "--expires=9999-12-31T23:59:59-05:00")
    capsys.readouterr()
    assert run("list") == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["web", "key", "scorer", "-", "21"]


def test_list(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("key", "web", "--role=scorer", "--expires=2100-01-01")
    capsys.readouterr()
    assert run("list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "IDENTITY   KIND         ROLES   EXPIRES                 LINE",
        "anonymous  anonymous    -       -                          -",
        "site       certificate  ops     -                         12",
        "unix:*     peer         ops     -                         17",
        "web        key          scorer  2100-01-01 00:00+00:00    21",
    ]
