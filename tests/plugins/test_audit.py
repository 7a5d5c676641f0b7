"""The audit log: its lines, its files, and what it leaves out."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.identity import ANYONE, Identity, Permission, Role
from headrace.observability.audit import AuditEntry, AuditOptions, AuditOutcome
from headrace.observability.rotating_file import RotatingFile
from headrace.plugins.audit import AuditLog, audit_log, fields_of

LINE = b'{"a": "' + b"x" * 90 + b'"}\n'
ENTRY = AuditEntry("LogSettings", AuditOutcome.OK)
REFUSED = AuditEntry("LogSettings", AuditOutcome.REFUSED, "403")
LIMIT = 5 * len(LINE)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


# --- lines


def test_members_of_an_entry() -> None:
    role = Role("operators", frozenset({Permission.CONTROL}))
    found = fields_of(
        AuditEntry(
            "RepositoryModelLoad", AuditOutcome.FAILED, "400",
            Identity("ann", "token", [role]), "http", "10.0.0.7", "digits", "", "r-1",
            {"config": {"bytes": 7}},
        )
    )  # fmt: skip
    time = str(found.pop("time"))
    assert time.endswith("Z")
    assert found == {
        "operation": "RepositoryModelLoad", "outcome": "failed", "status": "400",
        "identity": "ann", "kind": "token", "roles": ["operators"], "door": "http",
        "address": "10.0.0.7", "model": "digits", "request_id": "r-1",
        "detail": {"config": {"bytes": 7}},
    }  # fmt: skip


def test_clients_cannot_forge_or_flood_lines(path: Path) -> None:
    log = audit_log(AuditOptions(str(path)))
    log.record(ENTRY._replace(model='a\n{"x": 1}\udcff\u2028', request_id="i" * 10_000))
    log.record(ENTRY._replace(detail={"rules": "y" * 10_000}))
    log.close()
    first, second = lines(path)
    assert first["model"] == 'a\n{"x": 1}\udcff\u2028'
    assert first["request_id"] == "i" * 200 + "..."
    assert second["detail"].keys() == {"bytes", "sha256"}
    assert path.stat().st_size < 2_000


def test_refusals_cannot_push_out_other_entries(path: Path) -> None:
    now = [0.0]
    log = AuditLog(RotatingFile(str(path), 0, 0).write, now=lambda: now[0])
    for _ in range(1_000):
        log.record(REFUSED)
    log.record(ENTRY)
    now[0] = 1.0
    for _ in range(100):
        log.record(REFUSED)
    log.close()
    found = lines(path)
    assert [line["outcome"] for line in found[:-1]] == [*["refused"] * 200, "ok", *["refused"] * 20]
    assert found[200]["omitted_refusals"] == 800
    assert found[-1].keys() == {"time", "omitted_refusals"}
    assert log.lost == {"unwritten": 0, "refusals": 880}


def test_a_full_disk_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = audit_log(AuditOptions("/dev/full"))
    log.record(ENTRY)
    log.record(ENTRY)
    log.close()
    assert log.lost["unwritten"] == 2
    [record] = caplog.records
    assert "cannot write the audit log /dev/full: No space left on device" in record.getMessage()


def test_anyone_is_named() -> None:
    assert fields_of(ENTRY)["identity"] == ANYONE.name


# --- files


def test_the_file_is_private_and_continued(path: Path) -> None:
    before = os.umask(0)
    try:
        RotatingFile(str(path), 0, 0).write(LINE)
        RotatingFile(str(path), 0, 0).write(LINE)
    finally:
        os.umask(before)
    assert path.read_bytes() == LINE * 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_rotation_by_size(path: Path) -> None:
    file = RotatingFile(str(path), LIMIT, 2)
    for _ in range(5 * 4 + 1):
        file.write(LINE)
    assert names(path) == ["audit.log", "audit.log.1", "audit.log.2"]
    sizes = [(path.parent / name).stat().st_size for name in names(path)]
    assert sizes == [len(LINE), LIMIT, LIMIT]
    assert all((path.parent / name).stat().st_mode & 0o077 == 0 for name in names(path))


def test_rotation_without_old_files(path: Path) -> None:
    file = RotatingFile(str(path), LIMIT, 0)
    for _ in range(6):
        file.write(LINE)
    assert names(path) == ["audit.log"]
    assert path.read_bytes() == LINE


@pytest.mark.parametrize("remove", [
    lambda path: path.unlink(), lambda path: path.rename(path.with_name("moved")),
    lambda path: path.with_name("new").rename(path),
])  # fmt: skip
def test_a_file_that_is_moved_away_is_opened_anew(
    path: Path, remove: Callable[[Path], object]
) -> None:
    path.with_name("new").touch()
    file = RotatingFile(str(path), LIMIT, 2)
    file.write(LINE)
    remove(path)
    file.write(LINE)
    assert path.read_bytes() == LINE


def test_a_failed_rotation_loses_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.with_name("audit.log.1").mkdir()
    (path.with_name("audit.log.1") / "full").touch()
    file = RotatingFile(str(path), LIMIT, 1, "the audit log")
    for _ in range(7):
        file.write(LINE)
    assert path.read_bytes() == LINE * 7
    [record] = caplog.records
    assert "cannot rotate the audit log" in record.getMessage()


def test_a_missing_folder_is_an_error_at_start(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        audit_log(AuditOptions(str(path / "no" / "folder")))
