"""The file and the commands of docs/inboxes.md, with each broker."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.brokers import BROKERS, FAILED, FROM, TO, KilledBroker, Sent, started
from tests.support.scrape import until
from tests.support.server_process import EXAMPLES

PAGE = (ROOT / "docs" / "inboxes.md").read_text(encoding="utf-8")
[DECLARED] = blocks(PAGE, "toml")
START, TRY = blocks(PAGE, "sh")
INSTALL, CONSUME = START.splitlines()
[SERVE] = re.findall(r"`(headrace serve --inboxes [^`]+)`", PAGE)
BODY = b'{"INPUT0": [%b], "INPUT1": [%b]}' % (2 * (b"1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16",))
OUTPUT = b'"OUTPUT0":[' + b",".join(b"%d" % (2 * each) for each in range(1, 17)) + b"]"
REDIS = "redis://127.0.0.1:6379"
_SECS = 60


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KilledBroker]:
    with started(request.param, tmp_path) as found:
        yield found


def run(command: str, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a command of the page beside its file, with the models that it needs, on any ports."""
    (folder / "model_repository").mkdir(exist_ok=True)
    if not (folder / "model_repository" / "simple").exists():
        (folder / "model_repository" / "simple").symlink_to(EXAMPLES / "simple")
    ports = {f"HEADRACE_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *shlex.split(command)], cwd=folder, env=os.environ | ports,
            stdout=output, stderr=output,
        )  # fmt: skip


def end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(_SECS) == 0, (folder / "output").read_text()


def test_the_commands_with_each_broker(broker: KilledBroker, tmp_path: Path) -> None:
    text = DECLARED
    for place, name, group in (
        ("images?group=digits", FROM, "digits"), ("labels.failed", FAILED, ""), ("labels", TO, ""),
    ):  # fmt: skip
        text = text.replace(f'"{REDIS}/{place}"', f'"{broker.address(name, group)}"')
    assert REDIS not in text
    (tmp_path / "inboxes.toml").write_text(text)
    commands = (CONSUME, f"{SERVE} --model-repository model_repository")
    for count, command in enumerate(commands, 1):
        broker.fill([Sent(None, {}, BODY)])
        process = run(command, tmp_path)
        try:
            until(lambda count=count: len(broker.read(TO)) >= count, command, _SECS)  # type: ignore[misc]
        finally:
            end(process, tmp_path)
    assert all(OUTPUT in sent.body for sent in broker.read(TO))
    assert broker.count(FAILED) == 0


def test_the_commands_of_redis(tmp_path: Path) -> None:
    with started("redis", tmp_path) as broker:
        place = broker.address("").rstrip("/")
        (tmp_path / "inboxes.toml").write_text(DECLARED.replace(REDIS, place))
        process = run(CONSUME, tmp_path)
        try:
            port = place.rpartition(":")[2]
            script = TRY.replace("redis-cli", f"redis-cli -p {port}")
            asked = subprocess.run(
                ["sh", "-euc", script], capture_output=True, check=True, timeout=_SECS
            )
        finally:
            end(process, tmp_path)
    assert OUTPUT in asked.stdout.replace(b"\\", b"")


def test_the_command_that_installs_names_extras() -> None:
    """Each library that the page names is an extra."""
    [extra, *more] = re.findall(r"headrace\[(\w+)\]|or (\w+), (\w+), (\w+)", INSTALL)
    named = {name for name in (*extra, *(each for found in more for each in found)) if name}
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert named == set(BROKERS)
    assert all(re.search(rf"^{name} = \[", declared, re.MULTILINE) for name in named)


def test_mistakes_are_told_in_the_name_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "inboxes.toml").write_text(DECLARED.replace("redis://", "carrier-pigeon://"))
    process = run(CONSUME, tmp_path)
    assert process.wait(_SECS) == 1
    said = (tmp_path / "output").read_text()
    assert "headrace consume: " in said
    assert "headrace serve: " not in said
