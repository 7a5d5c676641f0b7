"""The table of parameters in docs/remote.md is complete and unique."""

import re

from headrace.placement.upstream.options import remote_parameters
from headrace.placement.upstream.triton_options import TRITON_PARAMETERS
from headrace.placement.upstream.upstream import RULES, Health
from headrace.repository.fail_over import PARAMETERS as FAIL_OVER
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "remote.md").read_text(encoding="utf-8")


def test_the_table_of_parameters() -> None:
    section = PAGE.partition("\n## Parameters\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == len(set(named))
    assert set(named) == remote_parameters() | TRITON_PARAMETERS | FAIL_OVER


def test_the_table_of_failures() -> None:
    """Its rows are the rules, in their order, and one more for cancelled calls."""
    section = PAGE.partition("\n## When a call fails\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[2:]
    rows = [row.split(" | ") for row in table]
    assert len(rows) == len(RULES) + 1
    for rule, (_, request, server, _) in zip(RULES.values(), rows[:-1], strict=True):
        assert rule.retry is ("another server" in request)
        assert (rule.health is Health.GONE) is ("until a health check" in server)
        assert (rule.health is Health.FAILED) is server.startswith("a failure")
