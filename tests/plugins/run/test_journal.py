"""The log of a run: what is read again after any end of the process that wrote it."""

from pathlib import Path

import pytest

from headrace.plugins.run.journal import Finished, Journal, ResumeRefused
from headrace.plugins.run.rows import Position

IDENTITY = {"model": "digits", "inputs": [["in.csv", 10, "1"]]}
DONE = [Finished(Position(0, n, n, n), n, n % 2, b"t" * n * 7, b"b" * (n % 2)) for n in range(1, 6)]


def write(path: Path, *blocks: Finished) -> None:
    journal = Journal(str(path), IDENTITY, False)
    assert [*journal.replayed()] == []
    for block in blocks:
        journal.append(block)
    journal.close(remove=False)


def read(path: Path, resume: bool = True) -> list[Finished]:
    journal = Journal(str(path), IDENTITY, resume)
    try:
        return [*journal.replayed()]
    finally:
        journal.close(remove=False)


def test_a_log_cut_anywhere_has_its_whole_entries_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    write(path, *DONE)
    whole = path.read_bytes()
    assert read(path) == DONE
    counts = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = read(path)
        assert found == DONE[: len(found)]
        counts.add(len(found))
        journal = Journal(str(path), IDENTITY, True)
        assert [*journal.replayed()] == found
        for block in DONE[len(found) :]:
            journal.append(block)
        journal.close(remove=False)
        assert path.read_bytes() == whole
    assert counts == {*range(len(DONE))}


def test_a_damaged_entry_ends_the_log(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    write(path, *DONE)
    whole = path.read_bytes()
    for place in range(len(whole) // 2, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = read(path)
        assert found == DONE[: len(found)]
        assert len(found) < len(DONE)


@pytest.mark.parametrize(("name", "value", "says"), [
    ("model", "iris", r"its model was 'digits', not 'iris'"),
    ("inputs", [["in.csv", 11, "1"]], r"its inputs was \[\['in.csv', 10"),
    ("columns", ["a"], "its columns was None"),
])  # fmt: skip
def test_another_run_is_refused(name: str, value: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    write(path, *DONE)
    with pytest.raises(ResumeRefused, match=says):
        Journal(str(path), {**IDENTITY, name: value}, True)
    assert read(path) == DONE


def test_an_unfinished_run_is_never_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    write(path, *DONE)
    with pytest.raises(ResumeRefused, match="--resume continues it"):
        Journal(str(path), IDENTITY, False)
    assert read(path) == DONE


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    first = Journal(str(path), IDENTITY, False)
    with pytest.raises(ResumeRefused, match="another process"):
        Journal(str(path), IDENTITY, True)
    first.close(remove=True)
    assert not path.exists()
