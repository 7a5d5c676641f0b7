"""The file that declares inboxes."""

from pathlib import Path

import pytest

from headrace.plugins.inboxes.broker import InvalidInbox
from headrace.plugins.inboxes.config import read_inboxes

WHOLE = {
    "from": '"redis://me:${INBOX_SECRET}@host:6379/in?group=g&db=1"',
    "model": '"m"',
    "to": '"kafka://a:1,b:2/out"',
    "failed": '"amqp://host/failed"',
}


def written(folder: Path, **changes: str | None) -> Path:
    members = {name: value for name, value in (WHOLE | changes).items() if value is not None}
    path = folder / "inboxes.toml"
    path.write_text("\n".join(["[[inbox]]", *(f"{n} = {v}" for n, v in members.items())]))
    return path


def test_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INBOX_SECRET", "s3cret")
    [inbox] = read_inboxes(written(tmp_path, tries="5", retry_secs="0.5", exactly_once="false"))
    assert inbox.source.server == "redis://me:s3cret@host:6379"
    assert (inbox.source.name, inbox.source.options) == ("in", {"group": "g", "db": "1"})
    assert str(inbox.source) == "redis://host:6379/in"  # which is shown
    assert (inbox.to.hosts, inbox.to.name) == ("a:1,b:2", "out")
    assert (inbox.tries, inbox.retry_secs, inbox.exactly_once, inbox.body) == (
        5,
        0.5,
        False,
        "auto",
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"to": None}, r"inbox 1: 'to' is missing"),
        ({"too": '"x"'}, r"inbox 1: unknown member 'too', expected one of from, to, failed"),
        ({"to": '"http://a/b"'}, r"'to': the scheme must be one of kafka, nats, .*'http://a/b'"),
        ({"to": '"kafka://a:1"'}, r"'to' must be kafka://HOST:PORT/NAME\?OPTIONS"),
        ({"to": "5"}, r"'to' must be a text, got 5"),
        ({"tries": "0"}, r"'tries' must be a whole number >= 1, got 0"),
        ({"tries": "1.5"}, r"'tries' must be a whole number"),
        ({"retry_secs": "true"}, r"'retry_secs' must be a number >= 0, got True"),
        ({"exactly_once": "1"}, r"'exactly_once' must be true or false, got 1"),
        ({"body": '"xml"'}, r"'body' must be one of auto, v2, flat, raw, arrow, got 'xml'"),
        ({"to": '"kafka://${NO_SUCH}/b"'}, r"the environment has no variable NO_SUCH"),
    ],
)
def test_mistakes_are_named(
    changes: dict[str, str | None], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INBOX_SECRET", "s3cret")
    with pytest.raises(InvalidInbox, match=problem):
        read_inboxes(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "declares no inbox: expected"),
        ("[inbox]\n", "declares no inbox"),
        ("[[inbox]]\n[other]\n", r"expected \[\[inbox\]\] tables alone, got 'other'"),
        ("[[inbox", "inboxes.toml: "),
    ],
)
def test_other_files(text: str, problem: str, tmp_path: Path) -> None:
    (path := tmp_path / "inboxes.toml").write_text(text)
    with pytest.raises(InvalidInbox, match=problem):
        read_inboxes(path)
