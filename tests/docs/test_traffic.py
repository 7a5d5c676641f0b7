"""Examples of docs/traffic.md are accepted by the server."""

import json
import re
from pathlib import Path

from headrace.plugins.traffic.rules import parse_rules, read_rules
from headrace.repository.config import read_config
from headrace.repository.validation import problems

TEXT = (Path(__file__).parents[2] / "docs" / "traffic.md").read_text()


def test_the_configuration(tmp_path: Path) -> None:
    [block] = re.findall(r"```\n(version_policy.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "config.pbtxt"
    file.write_text(block)
    config = read_config(file, "m").config
    assert not list(problems(config, "m"))
    rules = parse_rules(config.parameters["traffic"].string_value)
    assert rules.split == {1: 90, 2: 10}
    assert rules.rollback is not None


def test_the_rules_that_are_sent() -> None:
    sent = re.findall(r"/traffic -d '(\{.*?\})' ", TEXT)
    assert sent
    for document in sent:
        assert read_rules(json.loads(document)).split
