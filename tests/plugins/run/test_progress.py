"""Progress of a run without a terminal: lines with rows/s and the time left."""

import itertools
import time

import pytest

from headrace.plugins.run.progress import RunProgress


def test_lines_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(100.0, 4.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = RunProgress(quiet=False)
    progress.begin()
    for step in range(1, 7):
        progress.tell(step * 1000, step // 6, step / 10)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "30%, 3,000 rows, 250 rows/s, 0:00:28 left",
        "60%, 6,000 rows, 250 rows/s, 1 failed, 0:00:16 left",
    ]


@pytest.mark.parametrize("quiet", [False, True])
def test_unknown_sizes_and_quiet(
    quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(100.0, 20.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = RunProgress(quiet)
    progress.begin()
    progress.tell(4000, 0, None)
    assert capsys.readouterr().err == ("" if quiet else "4,000 rows, 200 rows/s\n")
