"""The scorecard's pure functions, and one short run; never its speed."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import ALL_MODELS, MLP
from benchmarks.peers import PEERS
from benchmarks.report import insert
from benchmarks.scorecard.claims import CLAIMS, Claim, Results, judge
from benchmarks.scorecard.generators import read_h2load, read_perf, read_wrk
from benchmarks.scorecard.plot import Bars, Lines, bar_chart, line_chart, write_plots
from benchmarks.scorecard.report import BEGIN, END
from benchmarks.scorecard.run import Outcome
from benchmarks.scorecard.sample import Metric, Sample, summary
from benchmarks.scorecard.workloads import ORT, WORKLOADS

ROOT = Path(__file__).parents[2]
RATE = Metric.THROUGHPUT


def rates(*values: float) -> list[Sample]:
    """Samples of `requests` per second."""
    return [Sample({RATE: value}) for value in values]


RESULTS: Results = {
    ("json-16", "headrace"): rates(20.0, 40.0, 30.0),
    ("json-16", "bare_asgi"): rates(10.0, 10.0, 10.0),
    ("json-16", "kserve"): [Sample({}, {"refused": 1})] * 3,
    ("json-64", "headrace"): [Sample({RATE: 50.0}, {"wrong": 2})],
    ("json-64", "bare_asgi"): rates(10.0),
}


@pytest.mark.parametrize(("claim", "measured", "holds"), [
    (Claim("", "json-16", RATE, 2.9, "bare_asgi"), 3.0, True),
    (Claim("", "json-16", RATE, 3.1, "bare_asgi"), 3.0, False),
    (Claim("", "json-16", RATE, 3.1, "bare_asgi", at_most=True), 3.0, True),
    (Claim("", "json-16", RATE, 0.5, "headrace", "json-64"), 0.4, False),
    (Claim("", "json-16", RATE, 30.0), 30.0, True),
    (Claim("", "json-16", RATE, 12.0, "kserve"), None, None),
    (Claim("", "json-16", RATE, 12.0, "mlserver"), None, None),
    (Claim("", "json-16", Metric.P50, 12.0), None, None),
    (Claim("", "json-64", RATE, 2.0, "bare_asgi"), 5.0, False),  # fast, but wrong
])  # fmt: skip
def test_judge(claim: Claim, measured: float | None, holds: bool | None) -> None:
    verdict = judge(claim, RESULTS)
    assert (verdict.measured, verdict.holds) == (measured, holds)


def test_the_range_of_a_ratio() -> None:
    verdict = judge(Claim("", "json-16", RATE, 1.0, "bare_asgi"), RESULTS)
    assert (verdict.least, verdict.largest) == (2.0, 4.0)


def test_every_claim_is_about_cells_that_are_measured() -> None:
    for claim in CLAIMS:
        for name, peer in ((claim.workload, claim.ours), claim.reference):
            workload = WORKLOADS[name]
            assert not workload.peers or not peer or peer in workload.peers, claim
            if peer and peer != ORT and workload.protocol:
                assert PEERS[peer].serves(workload.model, workload.protocol), claim


def test_summary_leaves_out_unknown_figures() -> None:
    found = summary([*rates(10.0, 30.0), Sample({Metric.P50: 1.0}, {"a": 2})])
    assert found.figures == {RATE: 20.0, Metric.P50: 1.0}
    assert found.errors == 2
    assert found.spread == 1.0


def test_read_wrk() -> None:
    line = (
        '{"answers": 300, "micros": 2000000, "p50": 100, "p99": 900, "p999": 950, "connect": 0,'
        ' "read": 0, "write": 0, "status": 100, "timeout": 0}'
    )
    sample = read_wrk(f"Running 2s test\nRequests/sec: 1\n\n{line}\n")
    assert sample.figures[RATE] == 100
    assert sample.figures[Metric.P999] == pytest.approx(0.00095)
    assert sample.errors == {"wrk: status": 100}


H2LOAD = """
requests: 4 total, 4 started, 4 done, 4 succeeded, 0 failed, 0 errored, 0 timeout
traffic: 1.00KB (1024) total, 100B (100) headers (space savings 90.00%), {data}B ({data}) data
"""
LOG = "1\t200\t100\n2\t200\t300\n3\t200\t200\n4\t200\t400\n"


def test_read_h2load() -> None:
    sample = read_h2load(H2LOAD.format(data=400), LOG, 2.0, 100)
    assert sample.figures[RATE] == 2
    assert sample.figures[Metric.P50] == pytest.approx(0.0002)
    assert not sample.errors
    sample = read_h2load(H2LOAD.format(data=0), LOG, 2.0, 100)  # answers without a message
    assert (sample.figures[RATE], sample.failures) == (0, 4)


def test_read_perf() -> None:
    table = "Concurrency,Inferences/Second,p50 latency,p99 latency\n16,6400,100,900\n"
    sample = read_perf(table, 64)
    assert sample.figures[RATE] == 100
    assert sample.figures[Metric.P50] == pytest.approx(0.0001)


def texts(svg: str) -> list[str]:
    """Texts of an SVG; fails if it is not well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter()]


def test_charts(tmp_path: Path) -> None:
    svg = bar_chart([Bars("a < b & c", {"headrace": 1234.5, "other": 10.0}), Bars("none", {})])
    assert {"a < b & c", "headrace", "other", "1 234"} <= set(texts(svg))
    lines = {"headrace": [(1000.0, 0.5), (10_000.0, 90.0)], "triton": [(1000.0, 2.0)]}
    svg = line_chart([Lines("both", "x", lines), Lines("empty", "x", {})])
    found = texts(svg)
    assert {"both", "headrace", PEERS["triton"].title, "0.1", "100", "10000"} <= set(found)
    write_plots(Outcome(), tmp_path)  # plots of nothing are plots
    assert len([texts(path.read_text()) for path in tmp_path.iterdir()]) == 2


def test_requirements_of_peers_are_pinned() -> None:
    for peer in PEERS.values():
        if peer.requirements is not None:
            lines = peer.requirements.read_text().splitlines()
            assert all(re.fullmatch(r"#.*|[\w.\[\]-]+==[\w.+!-]+( ;.*)?", line) for line in lines)


def test_cases_of_many_rows() -> None:
    model = ALL_MODELS[MLP]
    singles, wide = model.cases(), model.widened(3).cases()
    assert len(wide) == len(singles)
    for first, case in enumerate(wide):
        rows = [singles[(first + row) % len(singles)].outputs["output"] for row in range(3)]
        assert np.array_equal(case.outputs["output"], np.concatenate(rows))


def test_the_page_has_a_place_for_the_scorecard() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    insert(page, "", BEGIN, END)


@pytest.mark.slow
def test_a_short_run_beside_the_bare_application(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "bench"), "--scorecard", "--quick",
            "--seconds=1", "--peers=headrace,bare_asgi", "--groups=open,idle",
            "--workloads=open-json-1000,start", f"--output={tmp_path}",
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "scorecard.json").read_text())
    cells = {(cell["workload"]["name"], cell["server"]): cell for cell in document["cells"]}
    assert set(cells) == {
        (name, server)
        for name in ("open-json-1000", "start")
        for server in ("headrace", "bare_asgi")
    }
    for (name, _), cell in cells.items():
        figures = cell["figures"]["figures"]
        assert cell["figures"]["errors"] == 0
        assert figures["RSS"] > 0
        assert figures["requests/s" if name.startswith("open") else "ready after"] > 0
        if name.startswith("open"):
            assert 0 <= figures["user CPU s per 1 000"] <= figures["CPU s per 1 000"]
    assert done.stdout.strip() == (tmp_path / "scorecard.md").read_text().strip()
    assert (tmp_path / "scorecard-latency.svg").exists()
