"""`headrace models traffic` on a server that allows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Headrace
from tests.support.server_process import EXAMPLES, ServerProcess, clean_server


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two versions of a model, whose traffic may be changed."""
    folder = tmp_path_factory.mktemp("divided")
    (folder / "digits").symlink_to(EXAMPLES / "digits", target_is_directory=True)
    with clean_server(folder, options=["--allow-traffic-control"]) as process:
        yield process


@pytest.fixture
def traffic(
    command: Headrace, divided: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Headrace]:
    """Runs the command with that server's address in the environment."""
    monkeypatch.setenv("HEADRACE_URL", divided.url)
    yield lambda action, *words: command("models", "traffic", action, "digits", *words)
    assert command("models", "traffic", "reset", "digits").status == 0


def rows(out: str) -> list[list[str]]:
    """Cells of each version, stripped."""
    return [line.split() for line in out.splitlines() if line[:1].isdigit()]


def test_without_rules(traffic: Headrace) -> None:
    ended = traffic("show")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("digits: no rules, the highest version answers")
    assert [row[:5] for row in rows(ended.out)] == [
        ["1", "READY", "-", "-", "-"],
        ["2", "READY", "-", "-", "-"],
    ]


def test_weights(traffic: Headrace, command: Headrace) -> None:
    ended = traffic("set", "1=90", "2=10")
    assert ended.out.startswith("digits: rules of a call, since 2")
    assert [row[:5] for row in rows(ended.out)] == [
        ["1", "READY", "baseline", "90", "90.0%"],
        ["2", "READY", "candidate", "10", "10.0%"],
    ]
    before = [int(row[5]) for row in rows(ended.out)]
    assert command("infer", "digits", "--random", "--repeat=50").status == 0
    after = [int(row[5]) for row in rows(traffic("show").out)]
    assert sum(after) - sum(before) == 50
    assert after[0] - before[0] > after[1] - before[1] > 0


@pytest.mark.parametrize("rules", [(), ("1=1", "2=1")])
def test_failures_and_latency_without_rules_for_rolling_back(
    traffic: Headrace, command: Headrace, rules: tuple[str, ...]
) -> None:
    if rules:
        traffic("set", *rules)
    for version in ("1", "2"):
        assert command("infer", "digits", "--random", f"--version={version}").status == 0
    for row in rows(traffic("show").out):
        failed, latency, unit = row[6:9]
        assert (failed, unit) == ("0.0%", "ms")
        assert float(latency) > 0


def test_rules_in_json(traffic: Headrace, tmp_path: Path) -> None:
    rules = '{"split": {"1": 1, "2": 1}, "sticky": {"header": "x-user"}}'
    file = tmp_path / "rules.json"
    file.write_text(rules)
    for word in (rules, str(file)):
        assert "  sticky    header x-user\n" in traffic("set", word).out
        document = traffic("show", "--json").document
        assert document["rules"]["split"] == {"1": 1, "2": 1}
        assert document["rules"]["sticky"] == {"header": "x-user"}


def test_promotion_and_roll_back(traffic: Headrace) -> None:
    traffic("set", "1=1", "2=1")
    ended = traffic("promote", "2", "--reason=it is better")
    assert ended.out.splitlines()[0].endswith("(it is better)")
    assert [row[4] for row in rows(ended.out)] == ["0.0%", "100.0%"]
    ended = traffic("rollback")
    assert ended.out.startswith("digits: rolled back, since ")
    assert [row[4] for row in rows(ended.out)] == ["100.0%", "0.0%"]


@pytest.mark.parametrize(("words", "text"), [
    (["set", "1=x"], "expected VERSION=WEIGHT, got '1=x'"),
    (["set", "none.json"], "none.json: No such file or directory; expected VERSION=WEIGHT, "),
    (["set", "{"], "the rules on the command line: not JSON"),
    (["set", "{}", "{}"], "expected one document of rules, got 2"),
    (["set", '{"split": 3}'], "split: must be an object of weights by version, got 3"),
    (["rollback"], "has nothing to roll back"),
])  # fmt: skip
def test_failures(traffic: Headrace, words: list[str], text: str) -> None:
    ended = traffic(*words)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith(f"headrace models traffic {words[0]}: ")
    assert text in ended.err
